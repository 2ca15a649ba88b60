"""Successive drafts without replacement over tokens in an order."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float
from torch import Tensor

from polydraft.theory import SuccessiveLaw
from polydraft.verifiers.selection.lowest import LowestFirst
from polydraft.verifiers.selection.ordered import Flags, Numbers, Places, counted, entry, lowest, numbers, within


@dataclass(frozen=True, eq=False)
class Successive:
    """Successive drafts from rows in the order.

    Args:
        weights: the draft rows, summing to one or all zero.
        law: their law.
    """

    weights: Float[Tensor, "n A"]
    law: SuccessiveLaw

    @property
    def containment(self) -> Float[Tensor, "n C"]:
        """Q of every prefix of the order."""
        return self._chain

    @cached_property
    def _chain(self) -> Float[Tensor, "n C"]:
        return self.law.chain()

    def rows(self) -> "SuccessiveRows":
        """Return the rows on the host."""
        inside, weights = numbers(self.containment), numbers(self.weights)
        above = np.zeros_like(inside)
        above[:, :-1] = weights[:, ::-1].cumsum(axis=1)[:, ::-1]
        end = weights.shape[1] - (weights[:, ::-1] > 0).argmax(axis=1)
        blocks = LowestFirst.of(self.law, weights)
        return SuccessiveRows(inside, np.diff(inside), above, end, counted(len(end)), blocks)


@dataclass(frozen=True, eq=False)
class SuccessiveRows:
    """Rows of successive drafts.

    The simple rule of a block at the end of the order takes the first draft in it, in drafting order: a draw from the
    draft row restricted to the block. In any other block it takes the lowest draft.

    Args:
        inside: Q of every prefix.
        priority: its differences.
        above: the draft mass of all but the first j places.
        end: the first place after which no token can be drafted.
        row: the numbers of the rows in `blocks`.
        blocks: how often the lowest draft of a block is at each place.
    """

    inside: Numbers
    priority: Numbers
    above: Numbers
    end: Places
    row: Places
    blocks: LowestFirst

    def kept(self, rows: Flags | Places) -> "SuccessiveRows":
        """Return some of the rows."""
        return SuccessiveRows(
            self.inside[rows], self.priority[rows], self.above[rows], self.end[rows], self.row[rows], self.blocks
        )

    def taken(self, low: Places, high: Places) -> Numbers:
        """Return a straight line over the draft mass for blocks at the end, and 1 - Q(X_j) plus a constant else."""
        start, first, last = entry(self.inside, low), entry(self.above, low), entry(self.above, high)
        at_end = (last == 0) & (first > 0)
        straight = 1 - (1 - start)[:, None] * (self.above / first[:, None])
        if at_end.all():
            return straight
        line = np.where(at_end[:, None], straight, self.inside)
        inner = np.flatnonzero(~at_end & (high - low > 1))
        if len(inner):
            constant = start[inner] + self.inside[inner, high[inner]] - 1
            missed = self.blocks.missed(self.row[inner], low[inner], high[inner], last[inner])
            line[inner] = constant[:, None] + missed
        return line

    def picked(self, low: Places, high: Places, places: Places) -> Flags:
        """Return the first draft in blocks at the end and the lowest in others."""
        at_end = high >= self.end
        if not at_end.any():
            return lowest(low, high, places)
        first = counted(places.shape[1]) == within(low, high, places).argmax(axis=1)[:, None]
        return first if at_end.all() else np.where(at_end[:, None], first, lowest(low, high, places))
