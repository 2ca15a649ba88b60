"""A running batch that is open: texts come and go at any time, and it has as many rows as there are texts."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polydraft.engine.block import Block, Emission
from polydraft.engine.calls.past import Past
from polydraft.engine.decode import Method, Prompts, Rows, joined, opened, read_on, room_for, step
from polydraft.engine.many.kept import KeptTexts, copied, known_of
from polydraft.engine.many.pace import Pace, clock_of
from polydraft.engine.many.slots import Request
from polydraft.engine.part import Part
from polydraft.errors import ContextOverflow
from polydraft.models import can_branch, does_remember
from polydraft.probs import Noise
from polydraft.reading import Reader, Text, reader_of


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
class _Guest:
    """A text, whether what is known of it may be used for others, and with whom it shares its prompt in any case."""

    request: Request
    shares: bool
    kin: Hashable = None


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A text whose prompt is being read, and its rows; None of one that waits for another to read the same prompt."""

    guest: _Guest
    alone: Rows | None


class OpenBatch:
    """Rows for texts that come and go: nobody's time is spent on an empty row.

    A text is the text that it would be alone with the same noise, as in `Slots`: rows do not see each other, and a row
    that moves to another place takes its keys, its noise and its count of steps along. Drafters name their rows
    themselves, so that their states stay where they are. Where the model cannot branch, its states or slots cannot be
    moved: then rows keep their places until all texts have ended.

    Prompts are read in passes of their own, in every step as many tokens as a chunk has, so that no text waits for
    another's long prompt: chunks are as large as their time allows (`Pace`). Texts of one kin with the same prompt have
    it read once: those that come later wait for the first, or go on from its row.

    The last texts are kept with what target and drafter made of them: prompts when they were read, and the whole when
    a text ends. What a new prompt begins with is then not read again, but copied (`Past`). That is exact, since keys
    follow from the tokens up to them and their places, which are the same, nothing is written where a kept text lies,
    and of a drafter's state what follows from the text alone is kept (`rows.reuse`); what is left is rounding, by
    passes of other widths.

    Args:
        method: the target, and what is told of every step. Requests name what drafts for them and verifies.
        size: the most texts at a time.
        capacity: key slots for each, for the longest text and one tree.
        chunk: read so many tokens of prompts in a step at most; None to read them whole.
        keeps: how many texts are kept.
        pace: how many tokens are read beside texts in progress; None to learn it by the clock.
    """

    def __init__(
        self,
        method: Method,
        size: int,
        capacity: int,
        chunk: int | None = None,
        keeps: int = 0,
        pace: Pace | None = None,
    ) -> None:
        self.method = method
        self.size = size
        self.capacity = capacity
        self._moves = can_branch(method.target)
        self._whole = reader_of(method.target, size, capacity) if self._moves else None
        device = method.target.device
        self._pace = pace or Pace(chunk, clock_of(device))
        self._tokens: Tensor = torch.zeros(size if self._moves else 0, capacity, dtype=torch.int64, device=device)
        self._rows: Rows | None = None
        self._guests: tuple[_Guest | None, ...] = ()
        self._reading: dict[Hashable, _Waiting] = {}
        self._kept = KeptTexts(keeps)

    @property
    def running(self) -> tuple[Request, ...]:
        """The texts whose prompts are read."""
        return tuple(one.request for one in self._guests if one is not None)

    @property
    def reading(self) -> tuple[Request, ...]:
        """The texts whose prompts are being read."""
        return tuple(one.guest.request for one in self._reading.values())

    @property
    def free(self) -> int:
        """How many texts could join."""
        return self.size - len(self.running) - len(self._reading)

    @property
    def rows(self) -> Rows | None:
        """The batch; None as long as there is no text."""
        return self._rows

    @torch.inference_mode()
    def join(self, request: Request, *, shares: bool = True, kin: Hashable = None) -> int:
        """Take a text in; its prompt is read in the next steps. Return how many of its tokens were known.

        Args:
            request: the text.
            shares: whether what is known of other texts is used, and this one is kept; else nobody learns from the time
                that a prompt takes whether it begins like this one.
            kin: what it has in common with other texts of the same prompt, which is then read once for all of them;
                None for nothing.

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
        guest = _Guest(request, shares, kin)
        if self._leads(guest):
            self._reading[request.name] = _Waiting(guest, None)
            return len(request.tokens) - 1 - bool(method.drafter.reads)
        alone = self._opened(guest, self._past_of(guest))
        self._reading[request.name] = _Waiting(guest, alone)
        return alone.reader.read[0]

    @torch.inference_mode()
    def leave(self, name: Hashable, *, keeps: bool = True) -> None:
        """End a text before its time; nothing if it is not there.

        Args:
            name: of the text.
            keeps: whether it is kept as texts are that end; False for one that is lost by an error.
        """
        self._reading.pop(name, None)
        for row, guest in enumerate(self._guests):
            if guest is not None and guest.request.name == name and self._rows is not None:
                shares = guest.shares and keeps
                self._guests = (*self._guests[:row], replace(guest, shares=shares), *self._guests[row + 1 :])
                self._rows = replace(self._rows, going=self._rows.going - {row})
                self._swept()

    @torch.inference_mode()
    def read(self) -> None:
        """Read on in prompts by a chunk; texts whose prompts are then read take part in the next step."""
        self._pace.begins(reads=bool(self._reading))
        self._pace.has_read(self._read_chunk(self._pace.size(delays=self._rows is not None)))

    @torch.inference_mode()
    def step(self, *, reads: bool = True) -> OpenStep | None:
        """Read on in prompts, and take a step with all texts; None if no prompt was read to its end yet.

        Texts that end leave.

        Args:
            reads: whether prompts are read; False for who has done so (`read`).
        """
        if reads:
            self.read()
        if self._rows is None:
            return None
        names = tuple(None if one is None else one.request.name for one in self._guests)
        self._rows, block = step(self.method, self._rows)
        self._pace.has_stepped()
        return OpenStep(block, names)

    @torch.inference_mode()
    def sweep(self) -> None:
        """Take the texts out that ended with the last step."""
        if self._rows is not None and len(self._rows.going) < len(self.running):
            self._swept()

    def _opened(self, guest: _Guest, past: Past | None) -> Rows:
        """Return the rows of a text of whose prompt as much is read as a past knows."""
        request = guest.request
        prompts = Prompts(_prompt(request), (request.law,), (request.ending,), request.noise)
        method, room = request.method or self.method, len(request.tokens) + 1
        return opened(method, prompts, self.capacity, past, room=room)

    def _past_of(self, guest: _Guest) -> Past | None:
        """Return what is known of a prompt: from a text in progress of its kin, or from one that is kept."""
        rows, method = self._rows, guest.request.method or self.method
        for row, one in enumerate(self._guests):
            if rows is not None and one is not None and _akin(one, guest) and not does_remember(self.method.target):
                past, part = known_of(rows, row)
                return past if part.drafter is method.drafter else replace(past, drafts=None)
        return self._kept.like(_prompt(guest.request), method.drafter) if guest.shares else None

    def _leads(self, guest: _Guest) -> bool:
        """Tell whether the prompt of a text is being read for another, from which this one can go on.

        A drafter that reads hidden states goes on from its own state alone, since they are not kept.
        """
        method = guest.request.method or self.method
        reading = [one.guest for one in self._reading.values() if one.alone is not None and _akin(one.guest, guest)]
        return any((one.request.method or self.method) is method or not method.drafter.reads for one in reading)

    def _read_chunk(self, left: int | None) -> int:
        """Read on in prompts, those first that have waited longest, by so many tokens; return how many were read.

        A prompt that was read to its end joins, and so do others of its kin; one that was not waits behind the others.
        """
        before = left
        for name in sorted(self._reading, key=lambda own: self._reading[own].alone is None):
            one = self._reading[name]  # and stays there if an error comes, so that somebody is told of it
            if one.alone is None and self._leads(one.guest):
                continue
            alone = one.alone or self._opened(one.guest, self._past_of(one.guest))  # whoever read for it has left
            unread = alone.unread
            if unread and left is not None and left <= 0:
                continue
            alone = read_on(alone, left, self.method.clock)
            left = None if left is None else left - max(1, unread - alone.unread)
            self._reading[name] = one = replace(one, alone=alone)
            if alone.unread:
                self._reading[name] = self._reading.pop(name)
                continue
            self._forked(one.guest, alone)
            if one.guest.shares and self._kept.size:
                self._keep_prompt(alone)
            self._placed(one.guest, alone)
            del self._reading[name]
        return 0 if before is None or left is None else before - left

    def _forked(self, guest: _Guest, alone: Rows) -> None:
        """Let texts that waited for this prompt go on from it."""
        for name, one in self._reading.items():
            if one.alone is None and _akin(one.guest, guest):
                past, part = known_of(alone, 0)
                drafter = (one.guest.request.method or self.method).drafter
                past = past if part.drafter is drafter else replace(past, drafts=None)
                self._reading[name] = replace(one, alone=self._opened(one.guest, past))

    def _keep_prompt(self, alone: Rows) -> None:
        """Keep a prompt that was read, in the memory that it was read into."""
        past, part = known_of(alone, 0)
        # a row that stays in its place is written over by the next text there, also in the drafter's state
        stays = not self._moves or part.drafter.shares
        self._kept.add(replace(past, drafts=None) if stays else past, part.drafter)

    def _placed(self, guest: _Guest, alone: Rows) -> None:
        """Give a text whose prompt was read a row."""
        rows = self._rows
        if rows is None:
            self._rows, self._guests = self._first(alone), (guest,)
            return
        free = next((row for row, one in enumerate(self._guests) if one is None), len(self._guests))
        if free == len(self._guests) and self._moves:
            rows = self._longer(rows)
        self._rows = joined(rows, free, alone, self.method.clock)
        self._guests = (*self._guests[:free], guest, *self._guests[free + 1 :])

    def _first(self, alone: Rows) -> Rows:
        """Return the batch that a text begins."""
        count = alone.text.counts[0]
        if self._whole is None:
            tokens = torch.nn.functional.pad(alone.text.tokens, (0, self.capacity - alone.text.tokens.shape[1]))
            whole = reader_of(self.method.target, 1, self.capacity, alone.reader.layers)
            reader = whole.put(0, alone.reader)
        else:
            tokens = self._tokens[:1]
            tokens[0, :count] = alone.text.tokens[0, :count]
            reader = self._view(1, (0,), alone.reader).put(0, alone.reader)
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
        rows, before = self._rows, self._guests
        assert rows is not None
        for row, one in enumerate(before):
            if one is not None and one.shares and row not in rows.going:
                self._keep(rows, row)
        self._guests = tuple(one if row in rows.going else None for row, one in enumerate(before))
        if not rows.going:
            self._rows, self._guests = None, ()
        elif self._moves and not any(part.drafter.shares for part in rows.parts):
            self._rows, self._guests = self._closed_up(rows)

    def _keep(self, rows: Rows, row: int) -> None:
        """Keep the text of a row that is over, in memory of its own, since the row's is another text's soon.

        Of models that remember in states rows cannot be read apart: only prompts are kept.
        """
        if self._kept.size and not does_remember(self.method.target):
            past, part = known_of(rows, row)
            self._kept.add(copied(past, part), part.drafter)

    def _closed_up(self, rows: Rows) -> tuple[Rows, tuple[_Guest | None, ...]]:
        """Return the rows that go on, side by side: those behind move into the places of those that are over."""
        count = len(rows.going)
        holes = [row for row in range(count) if row not in rows.going]
        places = {row: row for row in rows.going if row < count}
        places |= dict(zip([row for row in sorted(rows.going) if row >= count], holes, strict=True))
        reader, tokens, counts = rows.reader, rows.text.tokens, rows.text.counts
        for row, place in places.items():
            if row != place:
                reader = reader.put(place, reader.select([row]))
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
        return closed, _picked(self._guests, order)


def _prompt(request: Request) -> Text:
    prompt = request.tokens.unsqueeze(0)
    return Text(prompt, torch.tensor([prompt.shape[1]], device=prompt.device))


def _akin(one: _Guest, other: _Guest) -> bool:
    """Tell whether two texts have the same prompt, and are of one kin."""
    return one.kin is not None and one.kin == other.kin and torch.equal(one.request.tokens, other.request.tokens)


def _picked(values: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values[place] for place in order)


def _moved(parts: Sequence[Part], places: Mapping[int, int], rows: int) -> tuple[Part, ...]:
    """Return the parts with their rows in other places; those without rows are gone."""
    kept = [part for part in parts if any(row in places for row in part.rows)]
    return tuple(part.moved(places, rows) for part in kept)
