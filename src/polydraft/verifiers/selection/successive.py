"""Successive drafts without replacement over tokens in an order."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.theory import SuccessiveLaw
from polydraft.theory.successive import SCALE
from polydraft.verifiers.selection.ordered import (
    Flags,
    Numbers,
    Places,
    counted,
    integers,
    lowest,
    numbers,
    running,
    within,
)

SURE = 600.0
"""Clocks are certain to have rung once the odds of all drafts together would leave the range of float64."""


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
        order = torch.arange(self.weights.shape[-1], device=self.weights.device)
        return self.law.chain(order.expand(self.weights.shape))

    def rows(self) -> "SuccessiveRows":
        """Return the rows on the host; rates are the weights times a constant, by which nodes' times are multiplied."""
        nodes, total = self.law.nodes, self.law.rates.sum(dim=-1, keepdim=True)
        tables = (self.containment, self.weights, nodes.time * total, nodes.weight)
        inside, weights, time, share = (numbers(table) for table in tables)
        counts = integers(self.law.counts)
        each = [SuccessiveRow(*row) for row in zip(inside, weights, counts.tolist(), time, share, strict=True)]
        end = weights.shape[1] - (weights[:, ::-1] > 0).argmax(axis=1)
        return SuccessiveRows(inside, np.diff(inside), end, each)


@dataclass(frozen=True, eq=False)
class SuccessiveRows:
    """Rows of successive drafts.

    Args:
        inside: Q of every prefix.
        priority: its differences.
        end: the first place after which no token can be drafted.
        each: the rows.
    """

    inside: Numbers
    priority: Numbers
    end: Places
    each: "list[SuccessiveRow]"

    def kept(self, rows: Flags | Places) -> "SuccessiveRows":
        """Return some of the rows."""
        numbered = counted(len(self.each))[rows].tolist()
        return SuccessiveRows(
            self.inside[rows], self.priority[rows], self.end[rows], [self.each[row] for row in numbered]
        )

    def taken(self, low: Places, high: Places) -> Numbers:
        """Return what `SuccessiveRow.taken` does, for every row."""
        lines = np.zeros_like(self.inside)
        for line, row, start, stop in zip(lines, self.each, low.tolist(), high.tolist(), strict=True):
            line[start : stop + 1] = row.taken(start, stop)
        return lines

    def picked(self, low: Places, high: Places, places: Places) -> Flags:
        """Return the first draft in blocks at the end and the lowest in others."""
        first = counted(places.shape[1]) == within(low, high, places).argmax(axis=1)[:, None]
        return np.where((high >= self.end)[:, None], first, lowest(low, high, places))


@dataclass(eq=False)
class SuccessiveRow:
    """One row of successive drafts.

    The simple rule of a block at the end of the order takes the first draft in it, in drafting order: a draw from the
    draft row restricted to the block. In any other block it takes the lowest draft. With X_j = (places below low and
    places j..high - 1), the chance that all drafts lie in X_j falls as j grows by the chance that the rule takes the
    token at j. By `SuccessiveLaw`,

        1 - Q(X_j) = s (1 + sum_{i in X_j} q_i / (1 - q_i)
                        + integral e^{-t} sum_{2 <= a + b < k} e_a(w_i: i < low) e_b(w_i: j <= i < high) dt)

    with s = 1 - q(X_j) and w_i = e^{q_i t} - 1: a product of tables for the places below low and for those from j on.
    The second table changes with `high` only and is kept.

    Args:
        inside: Q of every prefix.
        weights: the draft row.
        count: the number of drafts.
        time: the nodes of the quadrature, in units of the mean time of the first ring.
        share: their weights for integration over the logarithm of time.
    """

    inside: Numbers
    weights: Numbers
    count: int
    time: Numbers
    share: Numbers

    def __post_init__(self) -> None:
        self._high, self._low, self._after = -1, -1, self.weights
        self._above = running(self.weights[::-1])[::-1]

    def taken(self, low: int, high: int) -> Numbers:
        """Return a straight line over the draft mass for blocks at the end, and 1 - Q(X_j) plus a constant else."""
        start = self.inside[low]
        if high - low == 1:
            return self.inside[low : high + 1]
        if self._above[high] == 0 and self._above[low] > 0:
            return 1 - (1 - start) * (self._above[low : high + 1] / self._above[low])
        outside = running(self.weights[low:high]) + self._above[high]
        lone = running(self._lone[low:high][::-1])[::-1] + self._lone_below[low]
        missed = outside if self.count < 2 else outside + outside * SCALE * lone
        if self.count > 2:
            missed = missed + outside * self._later(low, high)
        return self.inside[high] + start - 1 + missed

    @cached_property
    def _lone(self) -> Numbers:
        """q_i / (1 - q_i) over `SCALE`."""
        others = running(self.weights)[:-1] + self._above[1:]
        return np.divide(self.weights, others * SCALE, out=np.zeros_like(others), where=others > 0)

    @cached_property
    def _lone_below(self) -> Numbers:
        return running(self._lone)

    def _later(self, low: int, high: int) -> Numbers:
        """Return the integral for every j from low to high."""
        if high != self._high or low < self._low:
            self._after = _sums(self._odds[:, low:high][:, ::-1], np.ones(len(self.time)), self.count)
            self._low, self._high = low, high
        before = self._before[:, :, low] if low else self._silence[:, None] * self._none
        factor = before @ self._wanted * self._measure
        return (factor.reshape(-1) @ self._after.reshape(factor.size, -1))[: high - low + 1][::-1]

    @cached_property
    def _wanted(self) -> Numbers:
        """Which pairs of degrees add up to 2..count - 1."""
        number = counted(self.count)
        both = number[:, None] + number
        return ((both >= 2) & (both < self.count)).astype(np.float64)

    @cached_property
    def _none(self) -> Numbers:
        return (counted(self.count) == 0).astype(np.float64)

    @cached_property
    def _silence(self) -> Numbers:
        return np.exp(-self._ripe.sum(axis=-1))

    @cached_property
    def _measure(self) -> Numbers:
        return (self.time * self.share)[:, None]

    @cached_property
    def _ripe(self) -> Numbers:
        return np.minimum(self.time[:, None] * self.weights, SURE / self.count)

    @cached_property
    def _odds(self) -> Numbers:
        return np.expm1(self._ripe)

    @cached_property
    def _before(self) -> Numbers:
        return _sums(self._odds, self._silence, self.count)


def _sums(odds: Numbers, start: Numbers, count: int) -> Numbers:
    """Return start e_j(the first i odds) for every node, j < count and i: positive terms, no cancellation."""
    table = np.empty((len(odds), count, odds.shape[-1] + 1))
    table[:, 0], table[:, 1:, 0] = start[:, None], 0
    for j in range(1, count):
        np.cumsum(odds * table[:, j - 1, :-1], axis=-1, out=table[:, j, 1:])
    return table
