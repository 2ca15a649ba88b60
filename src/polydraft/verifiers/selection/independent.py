"""Independent drafts over tokens in an order, after tokens that are drafted for certain."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.theory.rows import prefix_sums
from polydraft.verifiers.selection.ordered import (
    Flags,
    Numbers,
    Places,
    counted,
    entry,
    integers,
    lowest,
    numbers,
    within,
)


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

    def rows(self) -> "IndependentRows":
        """Return the rows on the host."""
        inside = numbers(self.containment)
        return IndependentRows(inside, np.diff(inside), numbers(self.below), integers(self.certain))


@dataclass(frozen=True, eq=False)
class IndependentRows:
    """Rows of independent drafts; the tokens drafted for certain are one token, at the last of their places.

    The simple rule chooses uniformly among the draws in the block. Draws are exchangeable, so it takes every token in
    proportion to its draft probability. In a block with the certain token it takes that.

    Args:
        inside: Q of every prefix.
        priority: its differences.
        below: the draft mass of every prefix.
        certain: how many tokens are drafted for certain.
    """

    inside: Numbers
    priority: Numbers
    below: Numbers
    certain: Places

    def kept(self, rows: Flags | Places) -> "IndependentRows":
        """Return some of the rows."""
        return IndependentRows(self.inside[rows], self.priority[rows], self.below[rows], self.certain[rows])

    def taken(self, low: Places, high: Places) -> Numbers:
        """Return a straight line over the draft mass; with the certain token, a step."""
        start, end = entry(self.inside, low), entry(self.inside, high)
        first = entry(self.below, low)
        mass = entry(self.below, high) - first
        slope = np.where(mass > 0, (end - start) / mass, 0)
        line = start[:, None] + (self.below - first[:, None]) * slope[:, None]
        fixed = low < self.certain
        if fixed.any():
            step = np.where(counted(line.shape[1]) > low[:, None], end[:, None], 0)
            line = np.where(fixed[:, None], step, line)
        return line

    def picked(self, low: Places, high: Places, places: Places) -> Flags:
        """Return the draws in the block, a token as often as it was drawn; or the certain token."""
        fixed = low < self.certain
        chosen = within(low, high, places)
        return np.where(fixed[:, None], lowest(low, high, places), chosen) if fixed.any() else chosen
