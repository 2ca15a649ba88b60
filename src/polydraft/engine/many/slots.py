"""A running batch with a fixed number of slots: texts join when a slot is free, and leave when they end."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.engine.block import Block
from polydraft.engine.clock import Clock
from polydraft.engine.decode import Method, Prompts, Rows, begin, joined, opened, read_on, room_for, step
from polydraft.engine.stopping import Ending
from polydraft.engine.target_law import TargetLaw
from polydraft.errors import ContextOverflow
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
        method: what drafts and verifies, with the batch's target; None for what the batch has.
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
class BatchStep:
    """A step of a running batch.

    Args:
        number: how many steps that makes.
        block: what it brought; its rows are slots.
        requests: whose the slots were.
        steps: how many steps the text of each slot has taken.
    """

    number: int
    block: Block
    requests: Mapping[int, Request]
    steps: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Standing:
    """All that changes in a running batch: what comes next takes its place at once, or not at all.

    Args:
        rows: the batch.
        requests: whose the slots are.
        joined: how many texts have joined.
        last: the last step; None before the first.
        reading: the rows of texts whose prompts are being read, by the slot that waits for them.
    """

    rows: Rows
    requests: dict[int, Request]
    joined: int = 0
    last: BatchStep | None = None
    reading: Mapping[int, tuple[Request, Rows]] = field(default_factory=dict)


class Slots:
    """A batch of constant shape in which every row is another text's, from its prompt to its end.

    A text in a slot is the text that it would be alone with the same noise: rows do not see each other. An empty slot
    is scored too, and what comes out is dropped: shapes stay what they are. A `step` or `join` that was interrupted has
    happened or not, which `last` and `joined` tell, and may be called again.

    Args:
        method: target, drafter, verifier and tree policy.
        size: the number of slots.
        capacity: key slots per row, for the longest text and one tree (`capacity_for`).
        params: the sampling settings of most texts. Texts with other settings are drafted for by themselves, since a
            drafter drafts for the settings that it began with.
        chunk: read prompts by so many tokens at a time, one prompt in each step, so that no text waits for another's
            long prompt; None to read them whole as they join.
    """

    def __init__(
        self, method: Method, size: int, capacity: int, params: SamplingParams, chunk: int | None = None
    ) -> None:
        self.method = method
        self.capacity = capacity
        self.chunk = chunk
        nothing = torch.zeros(size, 1, dtype=torch.int64, device=method.target.device)
        idle = Text(nothing, torch.ones(size, dtype=torch.int64, device=nothing.device))
        laws, endings = (TargetLaw(params),) * size, (Ending(max_length=capacity),) * size
        rows = begin(method, Prompts(idle, laws, endings, Noise.from_seed(0, size)), capacity)
        self._standing = _Standing(replace(rows, going=frozenset()), {})

    @property
    def rows(self) -> Rows:
        """The batch."""
        return self._standing.rows

    @property
    def requests(self) -> Mapping[int, Request]:
        """The texts in progress, by slot."""
        return self._standing.requests

    @property
    def joined(self) -> int:
        """How many texts have joined so far."""
        return self._standing.joined

    @property
    def last(self) -> BatchStep | None:
        """The last step; None before the first."""
        return self._standing.last

    @property
    def free(self) -> tuple[int, ...]:
        """The slots without a text."""
        taken = {*self.requests, *self._standing.reading}
        return tuple(slot for slot in range(len(self.rows.steps)) if slot not in taken)

    @property
    def reading(self) -> tuple[int, ...]:
        """The slots whose prompts are being read."""
        return tuple(self._standing.reading)

    def join(self, request: Request) -> int:
        """Put a text into a free slot; return the slot.

        Its prompt is read at once, or in the next steps if prompts are read in chunks.

        Raises:
            ContextOverflow: the prompt is empty, leaves no room for a token, or the text or one beside it could outgrow
                the slots.
            IndexError: no slot is free.
        """
        method = request.method or self.method
        methods = (self.method, method, *self._methods())
        needed = self._longest(request) + room_for([(one.drafter, one.policy) for one in methods])
        if needed > self.capacity:
            raise ContextOverflow(f"The text needs {needed} key slots, but this batch has {self.capacity} for each.")
        slot, prompt = self.free[0], request.tokens.unsqueeze(0)
        text = Text(prompt, torch.tensor([prompt.shape[1]], device=prompt.device))
        sources = None if request.source is None else [request.source]
        prompts = Prompts(text, (request.law,), (request.ending,), request.noise, sources)
        alone = opened(method, prompts, self.capacity, room=prompt.shape[1] + 1)
        standing, waits = self._standing, self.chunk is not None and alone.unread > self.chunk
        if waits:
            reading = {**standing.reading, slot: (request, alone)}
            self._standing = replace(standing, reading=reading, joined=standing.joined + 1)
        else:
            self._standing = replace(
                _with(standing, slot, request, read_on(alone, clock=method.clock), self.method.clock),
                joined=standing.joined + 1,
            )
        return slot

    def _methods(self) -> list[Method]:
        """Return the methods of the texts in progress that have one of their own."""
        requests = (*self.requests.values(), *(request for request, _ in self._standing.reading.values()))
        return [request.method for request in requests if request.method is not None]

    def _longest(self, newcomer: Request) -> int:
        """Return the length of the longest text that there may be beside a newcomer, itself included."""
        read = {slot: request for slot, (request, _) in self._standing.reading.items()}
        endings = [one.ending.max_length for one in (newcomer, *self.requests.values(), *read.values())]
        over = [count for slot, count in enumerate(self.rows.text.counts) if slot not in self.requests]
        return max(*endings, *over)  # what is over is scored until another text takes its place

    def step(self) -> Block:
        """Take one step with all texts; those that end leave their slots. The block's rows are slots.

        If a prompt is being read, its next chunk is read first.
        """
        self._read_chunk()
        standing = self._standing
        rows, block = step(self.method, standing.rows)
        number = 1 + (standing.last.number if standing.last else 0)
        going = {slot: request for slot, request in standing.requests.items() if slot in rows.going}
        last = BatchStep(number, block, standing.requests, rows.steps)
        self._standing = replace(standing, rows=rows, requests=going, last=last)
        return block

    def _read_chunk(self) -> None:
        """Read on in the prompt that has waited longest, which may then join."""
        standing = self._standing
        slot = next(iter(standing.reading), None)
        if slot is None:
            return
        request, alone = standing.reading[slot]
        alone = read_on(alone, self.chunk, self.method.clock)
        others = {place: one for place, one in standing.reading.items() if place != slot}
        if alone.unread:
            self._standing = replace(standing, reading={slot: (request, alone), **others})
        else:
            self._standing = replace(_with(standing, slot, request, alone, self.method.clock), reading=others)

    def leave(self, slot: int) -> None:
        """End a text before its time."""
        standing = self._standing
        requests = {place: request for place, request in standing.requests.items() if place != slot}
        reading = {place: one for place, one in standing.reading.items() if place != slot}
        rows = replace(standing.rows, going=standing.rows.going - {slot})
        self._standing = replace(standing, rows=rows, requests=requests, reading=reading)


def _with(standing: _Standing, slot: int, request: Request, alone: Rows, clock: Clock) -> _Standing:
    """Return a running batch with a text in a slot."""
    return replace(
        standing, rows=joined(standing.rows, slot, alone, clock), requests={**standing.requests, slot: request}
    )
