"""A running batch: texts join, are read, step and leave, each the text that it would be alone."""

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.engine.emission import Block, Emission
from polydraft.engine.loop.batch import Batch, Method, empty, placed
from polydraft.engine.loop.step import Prompts, begin, opened, read_on, room_for, step
from polydraft.engine.many.prompt_reading import KeptTexts, PromptChunkSize, clock_of, copied, known_of
from polydraft.engine.output import Past
from polydraft.engine.run import Observer
from polydraft.engine.target_law import Ending, TargetLaw
from polydraft.errors import ContextOverflow
from polydraft.models import LanguageModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text


@dataclass(frozen=True, eq=False)
class Request:
    """A text to continue.

    Args:
        name: what the caller knows it by.
        tokens: the prompt.
        law: how the target's logits become distributions.
        ending: where it ends.
        noise: one stream of random numbers, which fixes the text whatever runs beside it.
        method: what drafts and verifies; None for what the batch has.
        source: what the target reads beside the text; None for nothing.
    """

    name: Hashable
    tokens: Int[Tensor, " t"]
    law: TargetLaw
    ending: Ending
    noise: Noise
    method: Method | None = None
    source: Any = None


@dataclass(frozen=True, eq=False)
class RunningStep:
    """A step of a running batch.

    Args:
        number: how many steps that makes.
        block: what it brought.
        texts: whose the rows were; None for nobody's.
        steps: how many steps the text of each row has taken.
    """

    number: int
    block: Block
    texts: tuple[Request | None, ...]
    steps: tuple[int, ...]

    def gains(self) -> dict[Hashable, Emission]:
        """Return what every text gained, by its name."""
        pairs = ((self.texts[row], gained) for row, gained in self.block.rows.items())
        return {text.name: gained for text, gained in pairs if text is not None}


@dataclass(frozen=True, eq=False)
class _Guest:
    """A text, whether what is known of it may be used for others, and with whom it shares its prompt in any case."""

    request: Request
    shares: bool
    kin: Hashable = None


@dataclass(frozen=True, eq=False)
class _Reading:
    """A text whose prompt is being read, by itself; `alone` is None while another text reads the same prompt for it."""

    guest: _Guest
    alone: Batch | None


@dataclass(frozen=True, eq=False)
class _Standing:
    """All that changes in a running batch: what comes next takes its place at once, or not at all.

    Args:
        batch: the rows.
        texts: whose they are; None for nobody's.
        reading: the texts whose prompts are being read, those first that have waited longest.
        joined: how many texts have joined.
        last: the last step; None before the first.
    """

    batch: Batch
    texts: tuple[_Guest | None, ...] = ()
    reading: tuple[_Reading, ...] = ()
    joined: int = 0
    last: RunningStep | None = None


class RunningBatch:
    """Rows for texts that come and go.

    A text is the text that it would be alone with the same noise: rows do not see each other, and a row that moves to
    another place takes its keys, its noise and its count of steps along. Nobody's time is spent on an empty row, but
    where rows are `fixed`: then an empty row is scored too, what comes out is dropped, and shapes stay what they are.
    Where the target's layers remember, or a drafter looks at the target's keys, rows keep their places until all texts
    have ended. Whatever was interrupted has happened or not, which `last` and `joined` tell, and may be done again.

    Prompts are read as they join, or in chunks: in passes of their own, in every step as many tokens as a chunk has, so
    that no text waits for another's long prompt. Chunks are as large as their time allows (`PromptChunkSize`). Texts of
    one kin with the same prompt have it read once: those that come later wait for the first, or go on from its row.

    The last texts are kept with what target and drafter made of them: prompts when they were read, and the whole when
    a text ends. What a new prompt begins with is then not read again, but copied (`Past`). That is exact, since keys
    follow from the tokens up to them and their places, which are the same, nothing is written where a kept text lies,
    and of a drafter's state what follows from the text alone is kept (`rows.reuse`); what is left is rounding, by
    passes of other widths. A text with a source shares nothing: the same tokens have other keys there.

    Args:
        target: the model.
        method: what drafts and verifies for requests that name no method.
        size: the most texts at a time.
        capacity: key slots for each, for the longest text and one step (`capacity_for`).
        fixed: the sampling settings of most texts, for as many rows from the beginning as there may be; None for as
            many rows as there are texts. A drafter drafts for the settings that it began with, so texts with other ones
            are drafted for by themselves.
        chunk: read so many tokens of prompts in a step at most; None to read them whole as they join.
        keeps: how many texts are kept.
        pace: how many tokens are read beside texts in progress; None to learn it by the clock.
        observer: who watches.
    """

    def __init__(
        self,
        target: LanguageModel,
        method: Method,
        size: int,
        capacity: int,
        *,
        fixed: SamplingParams | None = None,
        chunk: int | None = None,
        keeps: int = 0,
        pace: PromptChunkSize | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.target, self.method, self.size, self.capacity = target, method, size, capacity
        self.observer = observer or Observer(target)
        self._fixed, self._chunk, self._kept = fixed, chunk, KeptTexts(keeps)
        self._pace = pace or PromptChunkSize(chunk, clock_of(target.facts.device))
        batch = empty(target, size, capacity) if fixed is None else self._idle(fixed)
        self._standing = _Standing(batch, texts=() if fixed is None else (None,) * size)

    @property
    def batch(self) -> Batch:
        """The rows."""
        return self._standing.batch

    @property
    def texts(self) -> tuple[Request | None, ...]:
        """Whose the rows are."""
        return tuple(None if one is None else one.request for one in self._standing.texts)

    @property
    def running(self) -> tuple[Request, ...]:
        """The texts whose prompts are read."""
        return tuple(one for one in self.texts if one is not None)

    @property
    def reading(self) -> tuple[Request, ...]:
        """The texts whose prompts are being read."""
        return tuple(one.guest.request for one in self._standing.reading)

    @property
    def free(self) -> int:
        """How many texts could join."""
        return self.size - len(self.running) - len(self.reading)

    @property
    def joined(self) -> int:
        """How many texts have joined so far."""
        return self._standing.joined

    @property
    def last(self) -> RunningStep | None:
        """The last step; None before the first."""
        return self._standing.last

    @torch.inference_mode()
    def join(self, request: Request, *, shares: bool = True, kin: Hashable = None) -> int:
        """Take a text in; return how many of its tokens were known.

        Args:
            request: the text.
            shares: whether what is known of other texts is used, and this one is kept; else nobody learns from the time
                that a prompt takes whether it begins like this one.
            kin: what it has in common with other texts of the same prompt, which is then read once for all of them;
                None for nothing.

        Raises:
            ContextOverflow: the prompt is empty, leaves no room for a token, or the text or one beside it could outgrow
                its slots.
            IndexError: as many texts are there as there may be.
        """
        self.sweep()
        if not self.free:
            raise IndexError(f"The batch has {self.size} texts already.")
        self._check_room(request)
        plain = request.source is None
        guest, standing = _Guest(request, shares and plain, kin if plain else None), self._standing
        standing = replace(standing, joined=standing.joined + 1)
        if self._leads(standing, guest):
            self._standing = replace(standing, reading=(*standing.reading, _Reading(guest, None)))
            return len(request.tokens) - 1 - bool(self._method_of(guest).drafter.needs.layers)
        alone = self._opened(standing, guest)
        if self._chunk is None:
            read = read_on(alone, clock=self.observer.clock)
            self._standing = self._with(standing, guest, read)
        else:
            self._standing = replace(standing, reading=(*standing.reading, _Reading(guest, alone)))
        return alone.reader.read[0]

    @torch.inference_mode()
    def read(self) -> None:
        """Read on in prompts by a chunk; texts whose prompts are then read take part in the next step."""
        self._pace.begins(reads=bool(self.reading))
        left = before = self._pace.size(delays=bool(self.running))
        for guest in [one.guest for one in sorted(self._standing.reading, key=lambda one: one.alone is None)]:
            left = self._read(guest, left)
        self._pace.has_read(0 if before is None or left is None else before - left)

    @torch.inference_mode()
    def step(self, *, reads: bool = True) -> RunningStep | None:
        """Read on in prompts, and take a step with all texts; None if no prompt was read to its end yet.

        Texts that end leave when the next one joins or steps, or with `sweep`.

        Args:
            reads: whether prompts are read; False for who has done so (`read`).
        """
        self.sweep()
        if reads:
            self.read()
        standing = self._standing
        if not standing.batch.going:
            return None
        batch, block, taken = step(standing.batch, self.observer.clock)
        number = 1 + (standing.last.number if standing.last else 0)
        last = RunningStep(number, self.observer.told(block, taken), self.texts, batch.steps)
        self._standing = replace(standing, batch=batch, last=last)
        self._pace.has_stepped()
        return last

    @torch.inference_mode()
    def leave(self, name: Hashable, *, keeps: bool = True) -> None:
        """End a text before its time; nothing if it is not there.

        Args:
            name: of the text.
            keeps: whether it is kept as texts are that end; False for one that is lost by an error.
        """
        standing = self._standing
        texts, batch = standing.texts, standing.batch
        for row, guest in enumerate(texts):
            if guest is not None and guest.request.name == name:
                texts = placed(texts, row, replace(guest, shares=guest.shares and keeps))
                batch = replace(batch, going=batch.going - {row})
        reading = tuple(one for one in standing.reading if one.guest.request.name != name)
        self._standing = replace(standing, batch=batch, texts=texts, reading=reading)
        self.sweep()

    @torch.inference_mode()
    def sweep(self) -> None:
        """Take the texts out that have ended."""
        standing = self._standing
        batch, texts = standing.batch, standing.texts
        over = [row for row, guest in enumerate(texts) if guest is not None and row not in batch.going]
        if not over:
            return
        for row in over:
            self._keep(batch, row, texts[row])
        # what moves writes over rows that are over: if this is done again, they must not be kept again
        kept = (guest and replace(guest, shares=guest.shares and row not in over) for row, guest in enumerate(texts))
        self._standing = standing = replace(standing, texts=tuple(kept))
        if self._fixed is None and not batch.going:
            self._standing = replace(standing, batch=self._emptied(batch), texts=())
        elif self._fixed is None and batch.movable:
            for row in reversed(over):
                texts = placed(standing.texts, row, standing.texts[-1])[:-1]
                self._standing = standing = replace(standing, batch=standing.batch.drop(row), texts=texts)
        else:
            left = tuple(None if row in over else guest for row, guest in enumerate(standing.texts))
            self._standing = replace(standing, texts=left)

    @torch.inference_mode()
    def _idle(self, params: SamplingParams) -> Batch:
        tokens = torch.zeros(self.size, 1, dtype=torch.int64, device=self.target.facts.device)
        laws, endings = (TargetLaw(params),) * self.size, (Ending(max_length=self.capacity),) * self.size
        prompts = Prompts(Text(tokens, torch.ones_like(tokens[:, 0])), laws, endings, Noise.from_seed(0, self.size))
        rows = begin(self.target, self.method, prompts, capacity=self.capacity, clock=self.observer.clock)
        return replace(rows, going=frozenset())

    def _emptied(self, batch: Batch) -> Batch:
        """Return a batch without rows, over the same memory if rows can change places there."""
        if batch.spare is None:
            return empty(self.target, self.size, self.capacity)
        whole, tokens = batch.spare.reader, batch.spare.tokens
        reader, none = replace(whole, cache=whole.cache.select(()), read=()), Text(tokens[:0], tokens[:0, 0])
        return Batch(none, (), (), Noise(()), (), frozenset(), reader, (), spare=batch.spare)

    def _method_of(self, guest: _Guest) -> Method:
        return guest.request.method or self.method

    def _check_room(self, request: Request) -> None:
        """Check that a newcomer and those beside it have room; what is over is scored until its row is another's."""
        guests = [one for one in self._standing.texts if one is not None]
        guests += [one.guest for one in self._standing.reading]
        own = [self.method] if self._fixed is not None else []
        methods = [request.method or self.method, *own, *(self._method_of(guest) for guest in guests)]
        idle = [count for one, count in zip(self._standing.texts, self.batch.text.counts, strict=True) if one is None]
        longest = max(request.ending.max_length, *idle, *(one.request.ending.max_length for one in guests), 0)
        needed = longest + room_for(methods)
        if needed > self.capacity:
            raise ContextOverflow(f"The text needs {needed} key slots, but this batch has {self.capacity} for each.")

    def _opened(self, standing: _Standing, guest: _Guest, known: Past | None = None) -> Batch:
        """Return a text by itself, of whose prompt as much is read as is known of it."""
        request = guest.request
        sources = None if request.source is None else [request.source]
        prompts = Prompts(_prompt(request), (request.law,), (request.ending,), request.noise, sources)
        return opened(
            self.target,
            self._method_of(guest),
            prompts,
            self.capacity,
            past=known or self._past_of(standing, guest),
            room=len(request.tokens) + 1,
            clock=self.observer.clock,
        )

    def _past_of(self, standing: _Standing, guest: _Guest) -> Past | None:
        """Return what is known of a prompt: from a text in progress of its kin, or from one that is kept."""
        for row, one in enumerate(standing.texts):
            if one is not None and _akin(one, guest) and not self.target.facts.remembers:
                return self._for(guest, *known_of(standing.batch, row))
        return self._kept.like(_prompt(guest.request), self._method_of(guest).drafter) if guest.shares else None

    def _for(self, guest: _Guest, past: Past, part: Any) -> Past:
        """Return what is known of a text for another, whose drafter may be another one."""
        return past if part.drafter is self._method_of(guest).drafter else replace(past, drafts=None)

    def _leads(self, standing: _Standing, guest: _Guest) -> bool:
        """Tell whether the prompt of a text is being read for another, from which this one can go on.

        A drafter that reads hidden states goes on from its own state alone, since they are not kept.
        """
        method = self._method_of(guest)
        reading = [one.guest for one in standing.reading if one.alone is not None and _akin(one.guest, guest)]
        return any(self._method_of(one) is method or not method.drafter.needs.layers for one in reading)

    def _read(self, guest: _Guest, left: int | None) -> int | None:
        """Read on in one prompt by so many tokens; return how many are left.

        A prompt that was read to its end joins, and so do others of its kin; one that was not waits behind the others.
        If an error comes the text stays where it is, so that somebody is told of it.
        """
        standing = self._standing
        one = next(two for two in standing.reading if two.guest is guest)
        if one.alone is None and self._leads(standing, guest):
            return left
        alone = one.alone or self._opened(standing, guest)  # whoever read for it has left
        unread = alone.unread
        if unread and left is not None and left <= 0:
            return left
        alone = read_on(alone, left, self.observer.clock)
        left = None if left is None else left - max(1, unread - alone.unread)
        others = tuple(two for two in standing.reading if two is not one)
        if alone.unread:
            self._standing = replace(standing, reading=(*others, _Reading(guest, alone)))
        else:
            self._standing = self._with(
                replace(standing, reading=self._forked(standing, others, guest, alone)), guest, alone
            )
        return left

    def _forked(
        self, standing: _Standing, others: Sequence[_Reading], guest: _Guest, alone: Batch
    ) -> tuple[_Reading, ...]:
        """Let texts that waited for a prompt go on from it."""
        found = list[_Reading]()
        for one in others:
            waited = one.alone is None and _akin(one.guest, guest)
            past = self._for(one.guest, *known_of(alone, 0)) if waited else None
            found.append(replace(one, alone=self._opened(standing, one.guest, past)) if waited else one)
        return tuple(found)

    def _with(self, standing: _Standing, guest: _Guest, alone: Batch) -> _Standing:
        """Return what there is when a text whose prompt was read has a row."""
        if guest.shares and self._kept.size:
            past, part = known_of(alone, 0)
            # a row that stays in its place is written over by the next text there, also in the drafter's state
            stays = standing.batch.spare is None or part.drafter.needs.target
            self._kept.add(replace(past, drafts=None) if stays else past, part.drafter)
        texts = standing.texts
        row = next((row for row, one in enumerate(texts) if one is None), len(texts))
        with self.observer.clock.charge("prefill"):
            batch = standing.batch.put(row, alone)
        return replace(standing, batch=batch, texts=placed(texts, row, guest))

    def _keep(self, batch: Batch, row: int, guest: _Guest | None) -> None:
        """Keep the text of a row that is over, in memory of its own, since the row's is another text's soon.

        Of models that remember in states rows cannot be read apart: only prompts are kept. If it cannot be kept, the
        next text like it is read.
        """
        if guest is not None and guest.shares and self._kept.size and not self.target.facts.remembers:
            with suppress(Exception):
                past, part = known_of(batch, row)
                self._kept.add(copied(past, part), part.drafter)


def _prompt(request: Request) -> Text:
    prompt = request.tokens.unsqueeze(0)
    return Text(prompt, torch.tensor([prompt.shape[1]], device=prompt.device))


def _akin(one: _Guest, other: _Guest) -> bool:
    """Tell whether two texts have the same prompt, and are of one kin."""
    return one.kin is not None and one.kin == other.kin and torch.equal(one.request.tokens, other.request.tokens)
