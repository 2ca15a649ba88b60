"""The algebra of batch rows: what follows from the marks of a state's fields."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polydraft import rows
from polydraft.errors import InvalidParameter

ROOM = 6


@dataclass(frozen=True, eq=False)
class Held:
    """A value with verbs of its own: what each row holds."""

    held: tuple[str, ...]

    def select(self, own: Sequence[int]) -> "Held":
        return Held(tuple(self.held[row] for row in own))

    def put(self, row: int, other: "Held") -> "Held":
        return Held((*self.held[:row], *other.held, *self.held[row + 1 :]))

    def cut(self, row: int, length: int) -> "Held":
        return self.put(row, Held((self.held[row][:length],)))


@dataclass(frozen=True, eq=False)
class Inner:
    words: tuple[str, ...] = rows.per_row(lambda word, length: word[:length])
    seen: tuple[int, ...] = rows.per_row(learnt=True)


@dataclass(frozen=True, eq=False)
class State:
    names: tuple[str, ...] = rows.per_row()
    read: tuple[int, ...] = rows.counts()
    pairs: tuple[int, ...] = rows.counts(lag=1)
    last: Tensor = rows.per_row(lambda last, length: last.clamp_max(length))
    memory: Tensor = rows.slots()
    held: Held = rows.parts()
    members: tuple[Any, ...] = rows.parts()
    size: int = rows.shared()
    step: tuple[int, ...] = rows.scratch(())


def state(*names: str, room: int = ROOM) -> State:
    """Return the state of rows whose names say everything: a row has read as many tokens as its name has letters."""
    lengths = tuple(map(len, names))
    memory = torch.zeros(len(names), room + 1)
    for row, name in enumerate(names):
        memory[row, : len(name)] = torch.tensor([float(ord(letter)) for letter in name])
    return State(
        names,
        lengths,
        tuple(max(length - 1, 0) for length in lengths),
        torch.tensor(lengths),
        memory,
        Held(names),
        (Inner(names, lengths), None, Held(names)),
        7,
    )


def told(one: State) -> tuple[Any, ...]:
    """Return what a state knows of each row."""
    written = ["".join(chr(int(letter)) for letter in row[:-1] if letter) for row in one.memory]
    inner, none, held = one.members
    return (
        [*one.names],
        [*one.read],
        [*one.pairs],
        one.last.tolist(),
        written,
        [*one.held.held],
        [*inner.words],
        [*inner.seen],
        none,
        [*held.held],
        one.size,
        one.step,
    )


@pytest.mark.parametrize("row", range(3))
def test_a_selected_row_is_the_state_of_its_text_alone(row: int) -> None:
    names = ("ab", "c", "defg")
    assert told(rows.select(state(*names), [row])) == told(state(names[row]))


def test_a_run_of_rows_is_a_view_and_others_are_refused() -> None:
    whole = state("ab", "c", "defg")
    run = rows.select(whole, [1, 2])
    assert told(run) == told(state("c", "defg"))
    run.memory[0, 0] = ord("x")
    assert told(whole)[4] == ["ab", "x", "defg"]
    with pytest.raises(InvalidParameter, match=r"rows that follow each other, not \[0, 2\]"):
        rows.select(whole, [0, 2])


@pytest.mark.parametrize("row", range(4))
def test_a_text_that_is_put_into_a_row_is_what_it_is_alone_and_disturbs_nobody(row: int) -> None:
    names = ["ab", "c", "defg"]
    found = rows.put(replace(state(*names), step=(1, 2, 3)), row, state("hijkl"))
    names[row : row + 1] = ["hijkl"]
    written = told(found)
    assert (*written[:4], *written[5:]) == (*told(state(*names))[:4], *told(state(*names))[5:])
    assert [text[: len(name)] for text, name in zip(written[4], names, strict=True)] == names


def test_of_a_newcomer_with_more_room_as_much_is_taken_as_there_is() -> None:
    found = rows.put(state("ab", room=4), 0, rows.cut(state("hijklm", room=9), 0, 3))
    assert found.memory.shape == (1, 5) and told(found)[4][0].startswith("hij")


@pytest.mark.parametrize("length", range(6))
def test_a_row_that_is_cut_knows_no_more_than_so_many_tokens(length: int) -> None:
    found, names = rows.cut(state("ab", "defg"), 1, length), ("ab", "defg"[:length])
    kept = min(length, 4)
    assert found.read == (2, kept) and found.pairs == (1, max(kept - 1, 0)) and found.last.tolist() == [2, kept]
    assert found.held.held == found.members[0].words == found.members[2].held == names
    assert found.names == ("ab", "defg") and found.size == 7


def test_a_new_text_keeps_what_follows_from_the_text_and_nothing_that_steps_taught() -> None:
    old, fresh = state("defg"), state("")
    found = rows.reuse(old, fresh, 2)
    assert found.read == (2,) and found.held.held == ("de",)
    assert found.members[0].words == ("de",) and found.members[0].seen == (0,)
    assert told(rows.put(fresh, 0, found))[1] == [2] and fresh.names == ("",)


@pytest.mark.parametrize("nothing", [None, 50, "text"])
def test_a_state_without_rows_is_the_same_for_all(nothing: object) -> None:
    assert rows.select(nothing, [1]) is nothing and rows.put(nothing, 3, 51) is nothing
    assert rows.cut(nothing, 0, 1) is nothing and rows.inside(nothing) == []


@dataclass(frozen=True)
class Bare:
    marked: int = rows.shared()
    bare: int = 0


@pytest.mark.parametrize(
    ("wrong", "says"), [(Bare(1), "Bare .* its field 'bare'"), ([1], "list .* a frozen dataclass")]
)
def test_a_state_that_does_not_say_how_it_goes_with_rows_is_refused(wrong: object, says: str) -> None:
    for verb in (lambda: rows.select(wrong, [0]), lambda: rows.put(wrong, 0, wrong), lambda: rows.cut(wrong, 0, 0)):
        with pytest.raises(InvalidParameter, match=f"{says}.*own_rule_and_drafter.md"):
            verb()
