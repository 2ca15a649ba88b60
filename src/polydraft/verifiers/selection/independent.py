"""Independent drafts over tokens in an order, after tokens that are drafted for certain."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.theory.rows import prefix_sums
from polydraft.verifiers.selection.ordered import Numbers, numbers


@dataclass(frozen=True, eq=False)
class Independent:
    """Tokens drafted for certain, at the first places of the order, and independent draws from the others.

    Args:
        certain: the number of certain tokens.
        below: the draft mass of the first j places, the certain tokens without any.
        containment: 1[certain tokens below j] below_j^draws.
    """

    certain: Int[Tensor, " n"]
    below: Float[Tensor, "n C"]
    containment: Float[Tensor, "n C"]

    @classmethod
    def of(
        cls, weights: Float[Tensor, "n A"], certain: Bool[Tensor, "n A"], counts: Int[Tensor, " n"]
    ) -> "Independent":
        """Prepare rows in the order; `weights` are zero at the certain tokens and sum to one, or are all zero."""
        fixed = certain.sum(dim=-1)
        below = prefix_sums(weights)
        mass = below[..., -1:]
        draws = (counts - fixed).where(mass.squeeze(-1) > 0, 0).clamp_min(0).unsqueeze(-1)
        below = below / mass.where(mass > 0, 1.0)
        holds = torch.arange(below.shape[-1], device=below.device) >= fixed.unsqueeze(-1)
        return cls(fixed, below, below.pow(draws) * holds)

    def row(self, index: int) -> "IndependentRow":
        """Return a row on the host, whose certain tokens are one token, at place 0."""
        inside, below, certain = self._host
        first = max(0, int(certain[index]) - 1)
        return IndependentRow(inside[index, first:], below[index, first:], bool(certain[index] > 0))

    @cached_property
    def _host(self) -> tuple[Numbers, Numbers, Numbers]:
        return numbers(self.containment), numbers(self.below), numbers(self.certain)


@dataclass(frozen=True, eq=False)
class IndependentRow:
    """One row of independent drafts.

    The simple rule chooses uniformly among the draws in the block. Draws are exchangeable, so it takes every token in
    proportion to its draft probability. In a block with the certain token it takes that.

    Args:
        inside: Q of every prefix.
        below: the draft mass of every prefix.
        certain: whether the token at place 0 is drafted for certain.
    """

    inside: Numbers
    below: Numbers
    certain: bool

    def taken(self, low: int, high: int) -> Numbers:
        """Return a straight line over the draft mass; with the certain token, a step."""
        start, end = self.inside[low], self.inside[high]
        if self.certain and low == 0:
            line = self.inside[: high + 1] * 0 + end
            line[0] = 0
            return line
        mass = self.below[low : high + 1] - self.below[low]
        return start + mass * ((end - start) / mass[-1] if mass[-1] > 0 else 0.0)

    def pick(self, low: int, high: int, places: list[int]) -> list[int]:
        """Return the draws in the block, a token as often as it was drawn; or the certain token."""
        if self.certain and low == 0 and 0 in places:
            return [places.index(0)]
        return [draft for draft, place in enumerate(places) if low <= place < high]
