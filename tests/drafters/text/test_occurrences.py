"""Occurrences and trees of continuations against searches that are written the slow and plain way."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scanning import scanned

from polydraft.drafters.text.guess import Bounds
from polydraft.drafters.text.index import SENTINEL, Occurrences, Ranged, as_tokens
from polydraft.drafters.text.stores.segment import backward_order, joined, joined_orders
from polydraft.drafters.text.suffix import Continuing, grow_by_counts, longest_of, tree_of

texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=6)
contexts = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def plainly(every: Sequence[Sequence[int]], context: Sequence[int], match: int, depth: int) -> list[tuple[int, ...]]:
    """Return what followed each place where the last `match` tokens occurred."""
    wanted, found = list(context[len(context) - match :]), []
    for text in every:
        for end in range(match, len(text) + 1):
            if list(text[end - match : end]) == wanted:
                after = [*text[end : end + depth], *[SENTINEL] * depth]
                found.append(tuple(after[:depth]))
    return found


def grown_plainly(rows: Sequence[Sequence[int]], nodes: int, children: int, least: float) -> list[tuple]:
    """Take the likeliest path again and again; return the paths with their chances."""
    taken, waiting = [], list[tuple[float, tuple[int, ...]]]()
    path, chance = tuple[int, ...](), 1.0
    while len(taken) < nodes:
        own = [row for row in rows if tuple(row[: len(path)]) == path]
        if len(path) < len(rows[0]):
            counts = Counter(row[len(path)] for row in own)  # in the order of the rows
            ranked = sorted((one for one in counts if one != SENTINEL), key=lambda one: -counts[one])
            likely = [(chance * counts[one] / len(own), (*path, one)) for one in ranked]
            waiting += [one for one in likely if one[0] >= least][:children]
        if not waiting:
            break
        best = max(range(len(waiting)), key=lambda place: (waiting[place][0], -place))
        chance, path = waiting.pop(best)
        taken.append((path, chance))
    return taken


def paths_of(tokens: np.ndarray, parents: np.ndarray, chances: np.ndarray) -> list[tuple]:
    paths: list[tuple[int, ...]] = []
    for token, above in zip(tokens.tolist(), parents.tolist(), strict=True):
        paths.append((*(paths[above] if above >= 0 else ()), token))
    return list(zip(paths, chances.tolist(), strict=True))


def both(every: Sequence[Sequence[int]], context: Sequence[int], longest: int) -> list[Occurrences]:
    """Return the occurrences by a scan and by an order."""
    tokens, own = as_tokens(joined([np.array(one) for one in every])), as_tokens(np.array(context))
    order = as_tokens(backward_order(tokens))
    return [scanned(tokens, len(tokens), own, longest), Ranged.of(tokens, order, own, longest)]


@given(every=texts, context=contexts, longest=st.integers(1, 14), depth=st.integers(1, 4))
def test_every_place_is_found(every: list[list[int]], context: list[int], longest: int, depth: int) -> None:
    for found in both(every, context, longest):
        for match in range(1, min(longest, len(context)) + 1):
            slow = plainly(every, context, match, depth)
            assert (found.counts[match] if match < len(found.counts) else 0) == len(slow)
            if slow:
                rows = found.followed(match, len(slow) + 3, depth)
                assert sorted(map(tuple, rows.tolist())) == sorted(slow)
        assert longest_of([found]) == len(found.counts) - 1 <= min(longest, len(context))


@given(every=texts, context=contexts, most=st.integers(1, 3))
def test_of_many_places_some_are_taken(every: list[list[int]], context: list[int], most: int) -> None:
    scanned, ranged = both(every, context, 1)
    slow = plainly(every, context, 1, 2)
    if slow:
        latest = slow[::-1][:most]
        assert list(map(tuple, scanned.followed(1, most, 2).tolist())) == latest
        taken = Counter(map(tuple, ranged.followed(1, most, 2).tolist()))
        assert not taken - Counter(slow) and taken.total() == min(most, len(slow))


@pytest.mark.parametrize("kind", ["few tokens", "one token", "many tokens"])
def test_the_order_holds_for_sixty_four_tokens(kind: str) -> None:
    noise, high = np.random.default_rng(0), {"few tokens": 2, "one token": 1, "many tokens": 70_000}[kind]
    every = [noise.integers(0, high, size) for size in (1, 300, 200, 2)]
    every.append(every[1][50:250])
    tokens = joined(every)
    order = backward_order(tokens)
    assert sorted(order.tolist()) == [*range(len(tokens))]

    def before(place: int) -> list[int]:
        own = tokens[max(0, place - 63) : place + 1][::-1].tolist()
        return own[: own.index(SENTINEL)] if SENTINEL in own else own

    known = [before(place) for place in order.tolist()]
    for one, other in pairwise(known):
        shared = min(len(one), len(other))
        assert one[:shared] <= other[:shared]


@given(every=texts, context=contexts, parts=st.integers(1, 5))
def test_orders_of_parts_are_joined(every: list[list[int]], context: list[int], parts: int) -> None:
    tokens, orders, start = as_tokens(joined([np.array(one) for one in every])), [], 0
    cuts = np.array_split(np.arange(len(every)), min(parts, len(every)))
    for number, cut in enumerate(cuts):
        own = joined([np.array(every[one]) for one in cut])
        order = backward_order(own)
        orders.append(as_tokens(order[order > 0] + np.uint32(start)) if number else as_tokens(order))
        start += len(own) - 1
    whole = joined_orders(tokens, orders)
    assert sorted(whole.tolist()) == [*range(len(tokens))]
    found, slow = Ranged.of(tokens, as_tokens(whole), as_tokens(np.array(context)), 64), both(every, context, 64)[0]
    assert found.counts == slow.counts


rows_of_tokens = st.integers(1, 4).flatmap(
    lambda depth: st.lists(st.lists(st.integers(0, 3), min_size=depth, max_size=depth), min_size=1, max_size=12)
)


@given(
    rows=rows_of_tokens, nodes=st.integers(1, 8), children=st.integers(1, 3), least=st.sampled_from([0.0, 0.1, 0.3, 1])
)
def test_trees_take_the_likeliest_paths(rows: list[list[int]], nodes: int, children: int, least: float) -> None:
    ended = [[SENTINEL if 3 in row[: place + 1] else one for place, one in enumerate(row)] for row in rows]
    found = paths_of(*grow_by_counts(as_tokens(np.array(ended)), nodes, children, least))
    slow = grown_plainly(ended, nodes, children, least)
    assert [path for path, _ in found] == [path for path, _ in slow]
    assert [chance for _, chance in found] == pytest.approx([chance for _, chance in slow])


@given(
    every=texts,
    more=texts,
    context=contexts,
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    offset=st.sampled_from([-1.0, 0.0, 1.0]),
    least=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_the_best_of_all_lengths_and_sources_wins(
    every: list[list[int]], more: list[list[int]], context: list[int], factor: float, offset: float, least: float
) -> None:
    way, bounds = Continuing(factor, offset, least), Bounds(6, 5, 2)
    sources = [both(every, context, 64)[:1], both(more, context, 64)[1:]]
    found, match = way.best(sources, bounds)
    tried = [
        (tree_of(source, size, way.occurrences, Bounds(way.guesses(size, bounds), 5, 2), least), size)
        for source in sources
        for size in range(longest_of(source), 0, -1)
    ]
    promise = max((tree.promise for tree, _ in tried), default=0.0)
    assert found.promise == pytest.approx(promise) and len(found) <= max(0, int(match * factor + offset))
    if promise:
        assert match == max(size for tree, size in tried if tree.promise == pytest.approx(promise))


def test_damaged_orders_and_contexts_beyond_all_texts_do_no_harm(tmp_path: Path) -> None:
    tokens = as_tokens(joined([np.arange(20)]))
    wild = as_tokens(np.full(len(tokens), 4_000_000_000, np.uint32))
    assert longest_of([Ranged.of(tokens, wild, as_tokens(np.array([0])), 4)]) >= 0
    found = Ranged.of(tokens, wild, as_tokens(np.array([0, 0, 0])), 4)
    assert found.followed(len(found.counts) - 1, 5, 4).shape[1] == 4
    assert longest_of(both([[1, 2, 3]], [9], 4)) == 0 and longest_of([]) == 0
    assert not len(tree_of([], 3, 5, Bounds(4, 4, 4), 0.0))
