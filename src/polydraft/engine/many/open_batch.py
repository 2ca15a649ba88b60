"""A running batch that is open: texts come and go at any time, and it has as many rows as there are texts."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polydraft.drafters import Drafter
from polydraft.engine.block import Block, Emission
from polydraft.engine.calls.past import Past, committed
from polydraft.engine.decode import Method, Prompts, Rows, joined, opened, read_on, room_for, step
from polydraft.engine.part import Part
from polydraft.engine.slots import Request
from polydraft.errors import ContextOverflow
from polydraft.models import can_branch
from polydraft.probs import Noise
from polydraft.reading import Reader, Text, reader_of

LEAST = 8
"""Fewer tokens than these are read sooner than copied."""


@dataclass(frozen=True, eq=False)
class OpenStep:
    """A step of an open batch.

    Args:
        block: what it brought; its rows are numbers.
        names: whose text each row is.
    """

    block: Block
    names: tuple[Hashable, ...]

    def gains(self) -> dict[Hashable, Emission]:
        """Return what every text gained."""
        return {self.names[row]: gained for row, gained in self.block.rows.items()}


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A text whose prompt is being read, its rows, and whether its prompt may be kept."""

    request: Request
    alone: Rows
    shares: bool = True


class OpenBatch:
    """Rows for texts that come and go: nobody's time is spent on an empty row.

    A text is the text that it would be alone with the same noise, as in `Slots`: rows do not see each other, and a row
    that moves to another place takes its keys, its noise and its count of steps along. Drafters name their rows
    themselves, so that their states stay where they are. Where the model cannot branch, its states or slots cannot be
    moved: then rows keep their places until all texts have ended.

    Prompts are read in passes of their own, in every step as many tokens as a chunk has, so that no text waits for
    another's long prompt.

    The last prompts are kept with what target and drafter made of them. What a new prompt begins with is then not read
    again, but copied (`Past`). That is exact, since keys follow from the tokens up to them and their places, which are
    the same, and nothing is written where a prompt lies; what is left is rounding, by passes of other widths.

    Args:
        method: the target, and what is told of every step. Requests name what drafts for them and verifies.
        size: the most texts at a time.
        capacity: key slots for each, for the longest text and one tree.
        chunk: read so many tokens of prompts in a step; None to read them whole.
        keeps: how many prompts are kept.
    """

    def __init__(self, method: Method, size: int, capacity: int, chunk: int | None = None, keeps: int = 0) -> None:
        self.method = method
        self.size = size
        self.capacity = capacity
        self.chunk = chunk
        self._moves = can_branch(method.target)
        self._whole = reader_of(method.target, size, capacity) if self._moves else None
        device = method.target.device
        self._tokens: Tensor = torch.zeros(size if self._moves else 0, capacity, dtype=torch.int64, device=device)
        self._rows: Rows | None = None
        self._requests: tuple[Request | None, ...] = ()
        self._reading: dict[Hashable, _Waiting] = {}
        self._kept = KeptPrompts(keeps)

    @property
    def running(self) -> tuple[Request, ...]:
        """The texts whose prompts are read."""
        return tuple(one for one in self._requests if one is not None)

    @property
    def reading(self) -> tuple[Request, ...]:
        """The texts whose prompts are being read."""
        return tuple(one.request for one in self._reading.values())

    @property
    def free(self) -> int:
        """How many texts could join."""
        return self.size - len(self.running) - len(self._reading)

    @property
    def rows(self) -> Rows | None:
        """The batch; None as long as there is no text."""
        return self._rows

    @torch.inference_mode()
    def join(self, request: Request, *, shares: bool = True) -> int:
        """Take a text in; its prompt is read in the next steps. Return how many of its tokens were known.

        Args:
            request: the text.
            shares: whether what is known of other prompts is used, and this one is kept; else nobody learns from the
                time that a prompt takes whether it begins like this one.

        Raises:
            ContextOverflow: the prompt is empty, leaves no room for a token, or could outgrow its slots.
            IndexError: as many texts are there as there may be.
        """
        if not self.free:
            raise IndexError(f"The batch has {self.size} texts already.")
        method = request.method or self.method
        needed = request.ending.max_length + room_for([(method.drafter, method.policy)])
        if needed > self.capacity:
            raise ContextOverflow(f"The text needs {needed} key slots, but this batch has {self.capacity} for each.")
        prompt = request.tokens.unsqueeze(0)
        text = Text(prompt, torch.tensor([prompt.shape[1]], device=prompt.device))
        prompts = Prompts(text, (request.law,), (request.ending,), request.noise)
        past = self._kept.like(text, method.drafter) if shares else None
        alone = opened(method, prompts, self.capacity, past, room=prompt.shape[1] + 1)
        self._reading[request.name] = _Waiting(request, alone, shares)
        return alone.reader.read[0]

    @torch.inference_mode()
    def leave(self, name: Hashable) -> None:
        """End a text before its time; nothing if it is not there."""
        self._reading.pop(name, None)
        for row, request in enumerate(self._requests):
            if request is not None and request.name == name and self._rows is not None:
                self._rows = replace(self._rows, going=self._rows.going - {row})
                self._swept()

    @torch.inference_mode()
    def read(self) -> None:
        """Read on in prompts by a chunk; texts whose prompts are then read take part in the next step."""
        self._read_chunk()

    @torch.inference_mode()
    def step(self, *, reads: bool = True) -> OpenStep | None:
        """Read on in prompts, and take a step with all texts; None if no prompt was read to its end yet.

        Texts that end leave.

        Args:
            reads: whether prompts are read; False for who has done so (`read`).
        """
        if reads:
            self._read_chunk()
        if self._rows is None:
            return None
        names = tuple(None if one is None else one.name for one in self._requests)
        self._rows, block = step(self.method, self._rows)
        return OpenStep(block, names)

    @torch.inference_mode()
    def sweep(self) -> None:
        """Take the texts out that ended with the last step."""
        if self._rows is not None and len(self._rows.going) < len(self.running):
            self._swept()

    def _read_chunk(self) -> None:
        """Read on in prompts, those first that have waited longest, by as many tokens as a chunk has.

        A prompt that was read to its end joins; one that was not waits behind the others.
        """
        left = self.chunk
        for name in [*self._reading]:
            if left is not None and left <= 0:
                return
            one = self._reading[name]  # and stays there if an error comes, so that somebody is told of it
            unread = one.alone.unread
            alone = read_on(one.alone, left)
            left = None if left is None else left - max(1, unread - alone.unread)
            if alone.unread:
                del self._reading[name]
                self._reading[name] = replace(one, alone=alone)
                continue
            part = alone.parts[0]
            if one.shares:
                # a row that stays in its place is written over by the next text there, also in the drafter's state
                drafts = part.state if self._moves else None
                past = Past(self.method.target, committed(alone.text), alone.reader, drafts, None)
                self._kept.add(past, part.drafter)
            self._placed(one.request, alone)
            del self._reading[name]

    def _placed(self, request: Request, alone: Rows) -> None:
        """Give a text whose prompt was read a row."""
        rows = self._rows
        if rows is None:
            self._rows, self._requests = self._first(alone), (request,)
            return
        free = next((row for row, one in enumerate(self._requests) if one is None), len(self._requests))
        if free == len(self._requests) and self._moves:
            rows = self._longer(rows)
        self._rows = joined(rows, free, alone)
        self._requests = (*self._requests[:free], request, *self._requests[free + 1 :])

    def _first(self, alone: Rows) -> Rows:
        """Return the batch that a text begins."""
        count = alone.text.counts[0]
        if self._whole is None:
            tokens = torch.nn.functional.pad(alone.text.tokens, (0, self.capacity - alone.text.tokens.shape[1]))
            whole = reader_of(self.method.target, 1, self.capacity, alone.reader.layers)
            reader = whole.join(0, alone.reader)
        else:
            tokens = self._tokens[:1]
            tokens[0, :count] = alone.text.tokens[0, :count]
            reader = self._view(1, (0,), alone.reader).join(0, alone.reader)
        return replace(alone, text=Text(tokens, alone.text.lengths.clone()), reader=reader)

    def _view(self, rows: int, read: Sequence[int], like: Reader) -> Reader:
        """Return a reader over the first rows of all that there is memory for."""
        whole = self._whole
        assert whole is not None
        return replace(whole, cache=whole.cache.of_first(rows), read=tuple(read), layers=like.layers)

    def _longer(self, rows: Rows) -> Rows:
        """Return the rows with an empty one behind the last, which is to be joined: of one that ended before."""
        count = len(rows.steps) + 1
        text = Text(self._tokens[:count], torch.nn.functional.pad(rows.text.lengths, (0, 1), value=1))
        reader = self._view(count, (*rows.reader.read, 0), rows.reader)
        return replace(
            rows,
            text=text,
            laws=(*rows.laws, rows.laws[-1]),
            endings=(*rows.endings, rows.endings[-1]),
            noise=Noise((*rows.noise.generators, rows.noise.generators[-1])),
            steps=(*rows.steps, 0),
            reader=reader,
        )

    def _swept(self) -> None:
        rows = self._rows
        assert rows is not None
        self._requests = tuple(one if row in rows.going else None for row, one in enumerate(self._requests))
        if not rows.going:
            self._rows, self._requests = None, ()
        elif self._moves and not any(part.drafter.shares for part in rows.parts):
            self._rows, self._requests = self._closed_up(rows)

    def _closed_up(self, rows: Rows) -> tuple[Rows, tuple[Request | None, ...]]:
        """Return the rows that go on, side by side: those behind move into the places of those that are over."""
        count = len(rows.going)
        holes = [row for row in range(count) if row not in rows.going]
        places = {row: row for row in rows.going if row < count}
        places |= dict(zip([row for row in sorted(rows.going) if row >= count], holes, strict=True))
        reader, tokens, counts = rows.reader, rows.text.tokens, rows.text.counts
        for row, place in places.items():
            if row != place:
                reader = reader.join(place, reader.of_row(row))
                tokens[place, : counts[row]] = tokens[row, : counts[row]]
        order = [row for row, _ in sorted(places.items(), key=lambda pair: pair[1])]
        lengths = torch.tensor([counts[row] for row in order], device=tokens.device)
        closed = Rows(
            text=Text(tokens[:count], lengths),
            laws=_picked(rows.laws, order),
            endings=_picked(rows.endings, order),
            noise=Noise(_picked(rows.noise.generators, order)),
            steps=_picked(rows.steps, order),
            going=frozenset(range(count)),
            reader=self._view(count, reader.read[:count], reader),
            parts=_moved(rows.parts, places, count),
        )
        return closed, _picked(self._requests, order)


class KeptPrompts:
    """The last prompts that were read, with what is known of them, each with the drafter whose state it has.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._pasts: list[tuple[Past, Drafter]] = []

    def like(self, text: Text, drafter: Drafter) -> Past | None:
        """Return what is known of the prompt that begins like a text, if that is worth a copy.

        To another drafter the state is not shown: it could take it for its own.
        """
        own = [one if whose is drafter else replace(one, drafts=None) for one, whose in self._pasts]
        known = [past.known(text, drafter) for past in own]
        best = max(range(len(known)), key=known.__getitem__, default=None)
        if best is None or known[best] < LEAST:
            return None
        self._pasts.append(self._pasts.pop(best))
        return own[best]

    def add(self, past: Past, drafter: Drafter) -> None:
        """Keep a prompt, and forget those that it begins with, or the one that was wanted least lately."""
        if self.size:
            tokens = past.text.tokens[0]
            left = [one for one in self._pasts if one[1] is not drafter or not _begins(tokens, one[0].text.tokens[0])]
            self._pasts = [*left, (past, drafter)][-self.size :]


def _begins(text: Tensor, other: Tensor) -> bool:
    """Tell whether a text begins with another."""
    return len(text) >= len(other) and torch.equal(text[: len(other)], other)


def _picked(values: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values[place] for place in order)


def _moved(parts: Sequence[Part], places: Mapping[int, int], rows: int) -> tuple[Part, ...]:
    """Return the parts with their rows in other places; those without rows are gone."""
    kept = [part for part in parts if any(row in places for row in part.rows)]
    return tuple(part.moved(places, rows) for part in kept)
