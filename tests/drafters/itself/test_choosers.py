"""Which keys are chosen: each rule counted out by hand, and the words that name them."""

from collections.abc import Callable
from math import exp

import pytest
import torch
from torch import Tensor

from polydraft.drafters import Chunks, Keys, Mass, Recent, Snap
from polydraft.drafters.itself.keys import keys_of
from polydraft.errors import InvalidParameter

HEADS, GROUP, WIDTH = 2, 3, 4
NOTHING = torch.zeros(1, 0, 1), torch.zeros(1, 1, 0, 1)


def drawn(known: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return keys "k m e" and queries "k g q e"."""
    stream = torch.Generator().manual_seed(seed)
    keys = torch.randn(HEADS, known, WIDTH, generator=stream, dtype=torch.float64)
    return keys, torch.randn(HEADS, GROUP, count, WIDTH, generator=stream, dtype=torch.float64)


def looked_at(budget: int, window: int, neighbours: int, keys: Tensor, queries: Tensor) -> list[list[int]]:
    """Return the slots of each head, one number after another."""
    known, found = keys.shape[1], list[list[int]]()
    before, count = known - window, min(queries.shape[2], window)
    for head in range(HEADS):
        score = [0.0] * before
        for query in (queries[head, one, -place] for one in range(GROUP) for place in range(1, count + 1)):
            place = next(p for p in range(1, count + 1) if any(query.equal(one) for one in queries[head, :, -p]))
            seen = [exp(float(query @ keys[head, slot])) for slot in range(known - place + 1)]
            for slot in range(before):
                near = [slot + shift - neighbours // 2 for shift in range(neighbours)]
                score[slot] += sum(seen[one] for one in near if 0 <= one < before) / neighbours / sum(seen)
        best = sorted(sorted(range(before), key=lambda slot: -score[slot])[: budget - window])
        found.append([*best, *range(before, known)])
    return found


def test_sinks_and_newest_tokens_are_chosen_in_order() -> None:
    assert Recent(2, 3).slots(9, *NOTHING).tolist() == [[0, 1, 6, 7, 8]]
    assert Recent(0, 1).slots(4, *NOTHING).tolist() == [[3]] and Recent(2, 3).budget == 5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("known", "budget", "count"), [(30, 10, 32), (30, 9, 2), (80, 70, 40), (7, 6, 3), (3, 1, 3)])
def test_snap_and_mass_keep_what_the_newest_look_at(known: int, budget: int, count: int, seed: int) -> None:
    keys, queries = drawn(known, min(count, known), seed)
    window = min(32, (budget + 1) // 2)
    assert Snap(budget).slots(known, keys, queries).tolist() == looked_at(budget, window, 5, keys, queries)
    assert Mass(budget).slots(known, keys, queries).tolist() == looked_at(budget, window, 1, keys, queries)


def test_heads_choose_by_themselves_and_a_group_together() -> None:
    keys, queries = drawn(40, 8)
    slots = Snap(12).slots(40, keys, queries)
    assert slots[0].tolist() != slots[1].tolist()
    alone = Snap(12).slots(40, keys[1:], queries[1:])
    assert torch.equal(slots[1:], alone)
    others = torch.stack([Snap(12).slots(40, keys, queries[:, [one]]) for one in range(GROUP)])
    assert not all(torch.equal(own, slots) for own in others)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("known", "budget", "size"), [(40, 16, 4), (43, 16, 4), (25, 9, 3), (9, 4, 2), (7, 2, 1)])
def test_chunks_are_chosen_by_their_mean_and_the_first_always(known: int, budget: int, size: int, seed: int) -> None:
    keys, queries = drawn(known, 3, seed)
    whole = known // size
    slots = Chunks(budget, size).slots(known, keys, queries)
    assert slots.shape[1] <= budget
    for head in range(HEADS):
        means = [keys[head, size * one : size * one + size].mean(0) for one in range(whole)]
        score = [sum(float(queries[head, one, -1] @ mean) for one in range(GROUP)) for mean in means]
        count = (budget - known % size) // size - 1
        best = {0, *sorted(range(1, whole), key=lambda one: -score[one])[:count]}
        expected = [slot for slot in range(known) if slot // size in best or slot >= whole * size]
        assert slots[head].tolist() == expected


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("keys=recent:16+240", Recent(16, 240)),
        ("keys=recent:4", Recent(4)),
        ("keys=recent", Recent()),
        ("keys=snap:512", Snap(512)),
        ("keys=snap", Snap()),
        ("keys=chunks:512/8", Chunks(512, 8)),
        ("keys=chunks:64/16", Chunks(64, 16)),
        ("keys=mass:128", Mass(128)),
    ],
)
def test_words_name_them(word: str, keys: Keys) -> None:
    assert keys_of(word) == keys


@pytest.mark.parametrize(
    "word",
    [
        "keys=",
        "snap:512",
        "keys=snap:",
        "keys=snap:5+6",
        "keys=snap:-1",
        "keys=all",
        "keys=chunks:8/8/8",
        "keys=snap:x",
    ],
)
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(InvalidParameter, match=r"are not known; there are keys=recent:16\+240, keys=snap:512, "):
        keys_of(word)


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("make", "name", "least"),
    [
        (lambda: Recent(-1, 3), "sinks", 0),
        (lambda: Recent(0, 0), "window", 1),
        (lambda: Recent(1.5, 3), "sinks", 0),
        (lambda: Snap(0), "budget", 1),
        (lambda: Snap(8, 0), "room", 1),
        (lambda: Mass(True), "budget", 1),
        (lambda: Chunks(15, 8), "budget", 16),
        (lambda: Chunks(16, 0), "size", 1),
    ],
)
def test_senseless_numbers_are_refused(make: Callable[[], Keys], name: str, least: int) -> None:
    with pytest.raises(InvalidParameter, match=f"{name} must be a whole number of at least {least}, but is"):
        make()
