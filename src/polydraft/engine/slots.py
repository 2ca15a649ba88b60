"""A running batch with a fixed number of slots: texts join when a slot is free, and leave when they end."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.drafters import Text
from polydraft.engine.block import Block
from polydraft.engine.decode import Method, Rows, begin, step
from polydraft.engine.stopping import Limits
from polydraft.engine.target_law import TargetLaw
from polydraft.errors import ContextOverflow
from polydraft.probs import Noise, SamplingParams
from polydraft.trees import largest_shape, policy_joined

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Request:
    """A text to continue.

    Args:
        name: what the caller knows it by.
        tokens: the prompt.
        law: how the target's logits become distributions.
        limits: when it ends.
        noise: one stream of random numbers, which fixes the text whatever runs beside it.
    """

    name: Hashable
    tokens: Int[Tensor, " t"]
    law: TargetLaw
    limits: Limits
    noise: Noise


@dataclass(frozen=True, eq=False)
class Round:
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
    """

    rows: Rows
    requests: dict[int, Request]
    joined: int = 0
    last: Round | None = None


class Slots:
    """A batch of constant shape in which every row is another text's, from its prompt to its end.

    A text in a slot is the text that it would be alone with the same noise: rows do not see each other. An empty slot
    is scored too, and what comes out is dropped: shapes stay what they are. A `step` or `join` that was interrupted has
    happened or not, which `last` and `joined` tell, and may be called again.

    Args:
        method: target, drafter, verifier and tree policy.
        size: the number of slots.
        capacity: key slots per row, for the longest text and one tree (`capacity_for`).
        params: the sampling settings for which the drafter drafts; the texts' own may differ at the cost of acceptance.
    """

    def __init__(self, method: Method, size: int, capacity: int, params: SamplingParams) -> None:
        self.method = method
        self.capacity = capacity
        nothing = torch.zeros(size, 1, dtype=torch.int64, device=method.target.device)
        idle = Text(nothing, torch.ones(size, dtype=torch.int64, device=nothing.device))
        limits = (Limits(max_length=capacity),) * size
        rows = begin(method, idle, (TargetLaw(params),) * size, limits, Noise.from_seed(0, size), capacity)
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
    def last(self) -> Round | None:
        """The last step; None before the first."""
        return self._standing.last

    @property
    def free(self) -> tuple[int, ...]:
        """The slots without a text."""
        return tuple(slot for slot in range(len(self.rows.steps)) if slot not in self.requests)

    def join(self, request: Request) -> int:
        """Score a prompt and put it into a free slot; return the slot.

        Raises:
            ContextOverflow: the prompt is empty, leaves no room for a token, or the text could outgrow the slots.
            IndexError: no slot is free.
        """
        needed = request.limits.max_length + largest_shape(self.method.policy).size + 1
        if needed > self.capacity:
            raise ContextOverflow(f"The text needs {needed} key slots, but this batch has {self.capacity} for each.")
        slot, prompt = self.free[0], request.tokens.unsqueeze(0)
        text = Text(prompt, torch.tensor([prompt.shape[1]], device=prompt.device))
        alone = begin(self.method, text, (request.law,), (request.limits,), request.noise, prompt.shape[1] + 1)
        standing = self._standing
        rows, requests = joined(self.method, standing.rows, slot, alone), {**standing.requests, slot: request}
        self._standing = replace(standing, rows=rows, requests=requests, joined=standing.joined + 1)
        return slot

    def step(self) -> Block:
        """Take one step with all texts; those that end leave their slots. The block's rows are slots."""
        standing = self._standing
        rows, block = step(self.method, standing.rows)
        number = 1 + (standing.last.number if standing.last else 0)
        going = {slot: request for slot, request in standing.requests.items() if slot in rows.going}
        last = Round(number, block, standing.requests, rows.steps)
        self._standing = replace(standing, rows=rows, requests=going, last=last)
        return block

    def leave(self, slot: int) -> None:
        """End a text before its time."""
        standing = self._standing
        requests = {place: request for place, request in standing.requests.items() if place != slot}
        self._standing = replace(
            standing, rows=replace(standing.rows, going=standing.rows.going - {slot}), requests=requests
        )


@torch.inference_mode()
def joined(method: Method, rows: Rows, row: int, alone: Rows) -> Rows:
    """Return a batch in which the only row of another takes the place of a row."""
    length = int(alone.text.lengths[0])
    tokens, lengths = rows.text.tokens, rows.text.lengths.clone()
    tokens[row, :length] = alone.text.tokens[0, :length]
    lengths[row] = length
    rows.cache.join(row, alone.cache)
    return Rows(
        text=Text(tokens, lengths),
        laws=_replaced(rows.laws, row, alone.laws[0]),
        limits=_replaced(rows.limits, row, alone.limits[0]),
        noise=rows.noise.joined(row, alone.noise),
        steps=_replaced(rows.steps, row, 0),
        going=rows.going | {row},
        cache=rows.cache,
        drafts=method.drafter.join(rows.drafts, row, alone.drafts),
        policy=policy_joined(rows.policy, row),
    )


def _replaced(values: tuple[Value, ...], place: int, value: Value) -> tuple[Value, ...]:
    return (*values[:place], value, *values[place + 1 :])
