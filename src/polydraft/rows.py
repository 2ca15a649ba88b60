"""The algebra of batch rows: what is known of several texts is a value whose fields say how they go with rows.

A state is a frozen dataclass. Each field is marked: `per_row` has an entry for each row, `counts` a number of tokens,
`slots` memory with rows and places, `parts` other such values; `shared` is the same for all rows, and `scratch` holds
within a step only. `learnt` says that a field follows from steps, not from the text alone. From the marks follow four
verbs: `select`, `put`, `cut` and `reuse`. Whoever has verbs of its own is asked instead (`RowWise`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor

from polydraft.errors import InvalidParameter

MARK, PART = "rows", "parts"
WITHOUT_ROWS = (type(None), int, float, str, bytes)
"""The states that are no dataclasses: nothing is known of any row."""
State = TypeVar("State")
Value = TypeVar("Value")


class RowWise(Protocol):
    """A value of several rows with verbs of its own, such as a reader or a cache."""

    def select(self, rows: Sequence[int]) -> Self:
        """Return a view of a run of rows: what is written there is written here."""
        ...

    def put(self, row: int, other: Self) -> Self:
        """Return the value with the only row of another in place of a row, or behind the last."""
        ...

    def cut(self, row: int, length: int) -> Self:
        """Return the value without what a row holds beyond its first `length` tokens."""
        ...


@dataclass(frozen=True)
class Mark:
    """How a field goes with rows: what becomes of its value under each verb."""

    select: Callable[[Any, Sequence[int]], Any]
    put: Callable[[Any, int, Any], Any]
    cut: Callable[[Any, int, int], Any]
    reuse: Callable[[Any, Any, int], Any]


def select(state: State, rows: Sequence[int]) -> State:
    """Return the state of a run of rows, over the same memory."""
    if _has_verbs(type(state)):
        return cast(Any, state).select(rows)
    return _with(state, lambda mark, value, _: mark.select(value, rows))


def put(state: State, row: int, other: State) -> State:
    """Return a state with the only row of another in place of a row, or behind the last."""
    if _has_verbs(type(state)):
        return cast(Any, state).put(row, other)
    return _with(state, lambda mark, value, name: mark.put(value, row, getattr(other, name)))


def cut(state: State, row: int, length: int) -> State:
    """Return a state without what it holds of a row's text beyond its first `length` tokens."""
    if _has_verbs(type(state)):
        return cast(Any, state).cut(row, length)
    return _with(state, lambda mark, value, _: mark.cut(value, row, length))


def reuse(state: State, fresh: State, length: int) -> State:
    """Return what a new text of one row may keep of the state of another.

    Fields that are `learnt` are as in a fresh state, the others are cut. So what is drafted from it is what would be
    drafted from the fresh state, though less is to be read.
    """
    if _has_verbs(type(state)):
        own = cast(Any, state)
        return own.reuse(fresh, length) if callable(getattr(own, "reuse", None)) else own.cut(0, length)
    return _with(state, lambda mark, value, name: mark.reuse(value, getattr(fresh, name), length))


def inside(state: Any) -> list[Any]:
    """Return the states that stand in fields marked `parts`."""
    if _has_verbs(type(state)) or not is_dataclass(state):
        return []
    found = [getattr(state, one.name) for one in fields(state) if one.metadata.get(PART)]
    return [one for value in found for one in (value if isinstance(value, tuple) else (value,)) if one is not None]


def within(state: Any) -> list[Any]:
    """Return a state, and all that stand in it, such as those of a route's members."""
    return [] if state is None else [state, *(one for own in inside(state) for one in within(own))]


def carried(states: Sequence[Any], fresh: State, length: int) -> State:
    """Return what a new text can go on from, of all states of a text that begins like it; the fresh state if of none.

    A state takes the place of a fresh one of its class if it says that it `resumes` it: that both are of the same
    model, and that it follows from the text alone but for its `learnt` fields. What steps taught is left behind
    (`reuse`): so a text is that of a call which begins anew, and a seed that wrote both does not verify what its own
    numbers led to. In a state that does not say so, those that stand in it are carried one by one.

    Args:
        states: the states: of a drafter, of those that it had inside, or of one that had this one inside.
        fresh: the state of the new text, of one row, of which nothing was read.
        length: how many tokens both begin with.
    """
    if not is_dataclass(fresh) or isinstance(fresh, type) or _has_verbs(type(fresh)):
        return fresh
    resumes: Callable[[Any, State], bool] | None = getattr(type(fresh), "resumes", None)
    if resumes is not None:
        own = next((one for one in states if type(one) is type(fresh) and resumes(one, fresh)), None)
        return fresh if own is None else reuse(own, fresh, length)
    parts = {one.name: getattr(fresh, one.name) for one in fields(fresh) if one.metadata.get(PART)}
    found = {name: _each(lambda own: carried(states, own, length), value) for name, value in parts.items()}
    return replace(fresh, **found)


def per_row(cut: Callable[[Any, int], Any] | None = None, *, learnt: bool = False) -> Any:
    """Mark a tuple or tensor with an entry for each row.

    Args:
        cut: returns an entry when a text is known up to a length only; None for the entry as it is.
        learnt: whether it follows from steps, so that no other text may keep it.
    """

    def shortened(values: Any, row: int, length: int) -> Any:
        if cut is None:
            return values
        entry = cut(values[row], length)
        return _with_entry(values, row, entry.unsqueeze(0) if isinstance(values, Tensor) else (entry,))

    return _marked(_taken, lambda values, row, other: _with_entry(values, row, other[:1]), shortened, learnt)


def counts(lag: int = 0, *, learnt: bool = False) -> Any:
    """Mark a number of tokens for each row, or one that stays `lag` behind the text's length."""
    return per_row(lambda known, length: min(known, max(length - lag, 0)), learnt=learnt)


def slots() -> Any:
    """Mark memory whose axes are rows and places, with one place more for what belongs nowhere.

    It is written in place. Of a newcomer as many places are taken as there are.
    """

    def joined(memory: Tensor, row: int, other: Tensor) -> Tensor:
        if row == len(memory):
            memory = torch.cat([memory, torch.zeros_like(memory[:1])])
        shared = min(memory.shape[1], other.shape[1]) - 1
        memory[row, :shared] = other[0, :shared]
        return memory

    return _marked(lambda memory, rows: memory[run(rows)], joined, lambda memory, row, length: memory)


def parts() -> Any:
    """Mark another state, a `RowWise` value, several of them in a tuple, or None."""
    mark = Mark(
        lambda value, rows: _each(lambda own: select(own, rows), value),
        lambda value, row, other: _each(lambda own, theirs: put(own, row, theirs), value, other),
        lambda value, row, length: _each(lambda own: cut(own, row, length), value),
        lambda value, fresh, length: _each(lambda own, new: reuse(own, new, length), value, fresh),
    )
    return field(metadata={MARK: mark, PART: True})


def shared() -> Any:
    """Mark what is the same for all rows."""
    return _marked(lambda value, rows: value, lambda value, row, other: value, lambda value, row, length: value)


def scratch(empty: Any) -> Any:
    """Mark what holds within a step only; between steps it is `empty`."""
    none = (lambda *_: empty,) * 4
    return field(default=empty, metadata={MARK: Mark(*none)})


def run(rows: Sequence[int]) -> slice:
    """Return a run of rows as a slice.

    Raises:
        InvalidParameter: they do not follow each other, so that no view has them.
    """
    first = rows[0]
    if list(rows) != list(range(first, first + len(rows))):
        raise InvalidParameter(f"A view has rows that follow each other, not {list(rows)}.")
    return slice(first, first + len(rows))


def placed(values: tuple[Value, ...], place: int, value: Value) -> tuple[Value, ...]:
    """Return values with another in one place, or behind the last."""
    return (*values[:place], value, *values[place + 1 :])


def _marked(select: Callable[..., Any], put: Callable[..., Any], cut: Callable[..., Any], learnt: bool = False) -> Any:
    reuse = (lambda value, fresh, length: fresh) if learnt else (lambda value, fresh, length: cut(value, 0, length))
    return field(metadata={MARK: Mark(select, put, cut, reuse)})


def _with(state: Any, verb: Callable[[Mark, Any, str], Any]) -> Any:
    """Return a state whose fields are what a verb makes of them; one without fields is the same for all rows."""
    if isinstance(state, WITHOUT_ROWS):
        return state
    return replace(state, **{name: verb(mark, getattr(state, name), name) for name, mark in _marks(type(state))})


def _each(verb: Callable[..., Any], value: Any, *others: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_each(verb, *own) for own in zip(value, *others, strict=True))
    return None if value is None else verb(value, *others)


@cache
def _has_verbs(kind: type) -> bool:
    return all(callable(getattr(kind, verb, None)) for verb in ("select", "put", "cut"))


@cache
def _marks(kind: type) -> tuple[tuple[str, Mark], ...]:
    bare = [f"its field {one.name!r}" for one in fields(kind) if MARK not in one.metadata] if is_dataclass(kind) else []
    if bare or not is_dataclass(kind):
        raise InvalidParameter(
            f"A drafter's state of the type {kind.__name__} does not say how it goes with the rows of a batch: "
            f"{', '.join(bare) or 'make it a frozen dataclass, and its fields'} must be marked by polydraft.rows, as "
            "per_row, counts, slots, parts, shared or scratch (docs/own_rule_and_drafter.md)."
        )
    return tuple((one.name, one.metadata[MARK]) for one in fields(kind))


def _taken(values: Any, rows: Sequence[int]) -> Any:
    return values[run(rows)] if isinstance(values, Tensor) else tuple(values[row] for row in rows)


def _with_entry(values: Any, row: int, entry: Any) -> Any:
    """Return values with an entry, which is one by itself, in one place or behind the last."""
    if isinstance(values, Tensor):
        return torch.cat([values[:row], entry.to(values), values[row + 1 :]])
    return (*values[:row], *entry, *values[row + 1 :])
