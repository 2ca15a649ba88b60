"""Successive drafts without replacement over tokens in an order."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polydraft.theory import SuccessiveLaw
from polydraft.verifiers.selection.lowest import LowestFirst
from polydraft.verifiers.selection.ordered import (
    Flags,
    Numbers,
    Places,
    counted,
    entry,
    lowest,
    suffix_sums,
    tensor,
    within,
)


@dataclass(frozen=True, eq=False)
class Successive:
    """Successive drafts from rows in the order.

    Args:
        weights: the draft rows, summing to one or all zero.
        blocks: how often the lowest draft of a block is at each place.
    """

    weights: Numbers
    blocks: LowestFirst

    @classmethod
    def of(cls, weights: Numbers, counts: Places) -> "Successive":
        """Prepare rows in the order."""
        law = SuccessiveLaw.of(tensor(weights), tensor(counts))
        return cls(weights, LowestFirst.of(law, weights))

    @property
    def containment(self) -> Numbers:
        """Q of every prefix of the order."""
        return self._chain

    @cached_property
    def _chain(self) -> Numbers:
        return 1 - self.blocks.missed_by_prefixes()

    def rows(self) -> "SuccessiveRows":
        """Return the rows with what their simple rules need."""
        inside, above = self.containment, suffix_sums(self.weights)
        end = self.weights.shape[1] - (self.weights[:, ::-1] > 0).argmax(axis=1)
        return SuccessiveRows(inside, np.diff(inside), above, end, counted(len(end)), self.blocks)


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

    def kept(self, rows: Places) -> "SuccessiveRows":
        """Return some of the rows."""
        return SuccessiveRows(
            self.inside.take(rows, axis=0),
            self.priority.take(rows, axis=0),
            self.above.take(rows, axis=0),
            self.end.take(rows, axis=0),
            self.row.take(rows, axis=0),
            self.blocks,
        )

    def taken(self, low: Places, high: Places) -> Numbers:
        """Return a straight line over the draft mass for blocks at the end, and 1 - Q(X_j) plus a constant else."""
        last = entry(self.above, high)
        inner = np.flatnonzero(last > 0)
        if len(inner) == len(last):
            return self._inner(low, high, last)
        start, first = entry(self.inside, low)[:, None], entry(self.above, low)[:, None]
        straight = 1 - (1 - start) * (self.above / first)
        line = np.where(first > 0, straight, self.inside)
        if len(inner):
            line[inner] = self.kept(inner)._inner(low[inner], high[inner], last[inner])
        return line

    def _inner(self, low: Places, high: Places, last: Numbers) -> Numbers:
        """Return the same for blocks that are not at the end; `last` is the draft mass from `high` on."""
        missed = self.blocks.missed(self.row, low, high, last)
        missed += (entry(self.inside, low) + entry(self.inside, high) - 1)[:, None]
        return missed

    def picked(self, low: Places, high: Places, places: Places) -> Flags:
        """Return the first draft in blocks at the end and the lowest in others."""
        at_end = high >= self.end
        if not at_end.any():
            return lowest(low, high, places)
        first = counted(places.shape[1]) == within(low, high, places).argmax(axis=1)[:, None]
        return first if at_end.all() else np.where(at_end[:, None], first, lowest(low, high, places))
