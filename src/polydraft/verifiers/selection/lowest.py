"""The lowest of successive drafts in a block: how often it is at each place, by an integral over time."""

from dataclasses import dataclass

import numpy as np
import torch

from polydraft.theory import SuccessiveLaw
from polydraft.theory.quadrature import BOUNDS, LATEST, LEAST, overdue, row_nodes
from polydraft.theory.ringing import MOST_LINEAR
from polydraft.theory.successive import SCALE, SURE
from polydraft.verifiers.selection.compiled import compiled
from polydraft.verifiers.selection.ordered import Numbers, counted, numbers, tensor

MOST = float(np.finfo(np.float64).max)
POWERS, FACTORS = (np.array(table) for table in zip(*BOUNDS, strict=True))


@dataclass(frozen=True, eq=False)
class LowestFirst:
    """A row of successive drafts and the rule that takes a block's lowest draft.

    With X_j = (places below low and places j..high - 1), the chance that all drafts lie in X_j falls as j grows by the
    chance that the rule takes the token at j. By `SuccessiveLaw`,

        1 - Q(X_j) = s (1 + sum_{i in X_j} q_i / (1 - q_i)
                        + integral e^{-t} sum_{2 <= a + b < k} e_a(w_i: i < low) e_b(w_i: j <= i < high) dt)

    with s = 1 - q(X_j) and w_i = e^{q_i t} - 1. As j falls, e_b grows by w_j e_{b-1}(w_i: j < i < high). So the
    integral is a running sum of products: positive terms, no cancellation.

    Those products leave the range of float64 for very many drafts. Then X_j is a prefix of an order of its own. Where a
    token off X_j has long rung before some in X_j do, odds were cut (`SuccessiveLaw.rung`): the sum exceeds the true
    chance, which is one to rounding.

    Args:
        weights: the draft row, summing to one or all zero.
        count: the number of drafts, at most the size of the support.
        lone: q_i / (1 - q_i) over `SCALE`, zero where there is one draft.
        odds: w_i at every node, a line for each token; nothing for fewer than three drafts.
        start: e^{-t} at every node, times the node's weight over `SCALE`, for integration over time in units of the
            mean time of the first ring.
    """

    weights: Numbers
    count: int
    lone: Numbers
    odds: Numbers
    start: Numbers

    @classmethod
    def of(cls, weights: Numbers, count: int) -> "LowestFirst":
        """Prepare a row for `count` drafts, or for its whole support if that is smaller."""
        count = min(count, int(np.count_nonzero(weights)))
        time, share = nodes_at(weights * SCALE, count if count <= MOST_LINEAR else 0)
        lone, odds, start = _prepared(weights, time, share, count)
        np.expm1(odds, out=odds)
        return cls(weights, count, lone, odds, start)

    def missed_by_prefixes(self) -> Numbers:
        """Return 1 - Q of every prefix: of blocks that end before the first place."""
        if self.count > MOST_LINEAR:
            return numbers(self._law.missed_chain())[0]
        return _missed_by_prefixes(self.weights, self.lone, self.odds, self.start, self.count)

    @property
    def _law(self) -> SuccessiveLaw:
        return SuccessiveLaw.of(tensor(self.weights[None]), torch.tensor([self.count]))

    def missed(self, low: int, high: int, above: float) -> Numbers:
        """Return 1 - Q(X_j) for j = low..high; `above` is the draft mass from `high` on."""
        if self.count > MOST_LINEAR:
            return self._missed_in_order(low, high)
        return _missed(self.weights, self.lone, self.odds, self.start, self.count, low, high, above)

    def _missed_in_order(self, low: int, high: int) -> Numbers:
        """Return 1 - Q(X_j) from the containment of the prefixes of (places below low, high - 1, ..., low, others)."""
        place = counted(len(self.weights))
        order = np.concatenate([place[:low], place[low:high][::-1], place[high:]])
        chain = numbers(self._law.missed_chain(torch.tensor(order[None])))[0]
        chain[low : high + 1] = chain[low : high + 1][::-1].copy()
        return chain


def nodes_at(rates: Numbers, count: int) -> tuple[Numbers, Numbers]:
    """Return the times and weights of `time_nodes` for one row on the host; none for fewer than three drafts."""
    if count < 3:
        return np.zeros(0), np.zeros(0)
    scale, length = _span(rates, count, overdue(len(rates), count), POWERS, FACTORS)
    return _in_time(*row_nodes(length, count), scale, length)


@compiled
def _span(rates: Numbers, count: int, late: float, powers: Numbers, factors: Numbers) -> tuple[float, float]:
    """Return the scale of time and the length of the transformed one."""
    ascending, sums, scale = np.sort(rates), np.empty(3), 0.0
    for fewer in range(3):  # the sum without the fastest two, without the fastest, and of all
        sums[fewer] = max(ascending[: len(rates) - 2 + fewer].sum(), LEAST)
    slowest = max(ascending[: len(rates) - count + 1].sum(), LEAST)
    for bound in range(len(factors)):
        scale = max(scale, factors[bound] * np.exp(-(np.log(sums) * powers[bound]).sum()))
    stretch = np.log(late) - np.log(slowest) - np.log(scale)
    return scale, np.log1p(np.exp(stretch)) if stretch < LATEST else stretch


@compiled
def _in_time(places: Numbers, shares: Numbers, scale: float, length: float) -> tuple[Numbers, Numbers]:
    times, weights = np.empty(len(places)), np.empty(len(places))
    for node in range(len(places)):
        half = np.expm1(length * places[node] / 2)  # in two factors, which stay in range where e^x does not
        times[node] = min(scale * half * (half + 2), MOST)
        weights[node] = (1 + scale / times[node]) * shares[node] * length
    return times, weights


@compiled
def _prepared(weights: Numbers, time: Numbers, share: Numbers, count: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return `lone`, the logarithms of 1 + odds, and `start`, for nodes at `time` with the weights `share`."""
    size, nodes = len(weights), len(time)
    lone, ripe, start = np.zeros(size), np.empty((size, nodes)), np.zeros(nodes)
    above, below, total = np.zeros(size + 1), 0.0, weights.sum()
    for i in range(size - 1, -1, -1):
        above[i] = above[i + 1] + weights[i]
    cut = SURE / max(count, 1)
    for i in range(size):
        others = below + above[i + 1]
        if count > 1 and others > 0:
            lone[i] = weights[i] / (others * SCALE)
        below += weights[i]
        for node in range(nodes):
            ripe[i, node] = min(weights[i] * SCALE * time[node], cut)
            start[node] -= ripe[i, node]
    for node in range(nodes):
        start[node] = np.exp(start[node]) * time[node] * share[node] * total
    return lone, ripe, start


@compiled
def _missed_by_prefixes(weights: Numbers, lone: Numbers, odds: Numbers, start: Numbers, count: int) -> Numbers:
    """Return 1 - Q of every prefix: the integral is over Pr[2 to count - 1 clocks have rung, all in the prefix]."""
    exactly, result = np.zeros((max(count, 1), len(start))), np.zeros(len(weights) + 1)
    exactly[0] = start
    for j in range(len(weights) - 1, -1, -1):
        result[j] = result[j + 1] + weights[j]
    summed, there = 0.0, 0
    for j in range(len(weights) + 1 if count > 0 else 0):
        rung = 0.0
        for a in range(2, count):
            rung += exactly[a].sum()
        missed = min(result[j] + result[j] * SCALE * (summed + rung), 1.0)  # in this order: lone may be huge
        result[j] = missed if there >= count or result[j] <= 0 else 1.0  # so many drafts cannot lie inside
        if j < len(weights):
            summed += lone[j]
            there += weights[j] > 0
            for a in range(count - 1, 0, -1) if count > 2 else range(0, 0, -1):
                for node in range(len(start)):
                    exactly[a, node] += odds[j, node] * exactly[a - 1, node]
    return result if count > 0 else np.zeros(len(weights) + 1)


@compiled
def _missed(
    weights: Numbers, lone: Numbers, odds: Numbers, start: Numbers, count: int, low: int, high: int, above: float
) -> Numbers:
    """Return 1 - Q(X_j) for j = low..high."""
    size, nodes = len(weights), len(start)
    degrees = max(count, 1)
    below, factor, inside = np.zeros((degrees, nodes)), np.zeros((degrees, nodes)), np.zeros((degrees, nodes))
    below[0], inside[0] = start, 1.0
    summed = lone[:low].sum()
    if count > 2:
        for j in range(low):
            for a in range(count - 1, 0, -1):
                for node in range(nodes):
                    below[a, node] += odds[j, node] * below[a - 1, node]
        for b in range(count):
            for a in range(max(2 - b, 0), count - b):
                factor[b] += below[a]
        summed += factor[0].sum()
    result = np.zeros(size + 1)
    result[low] = above
    for j in range(low, high):
        result[j + 1] = result[j] + weights[j]  # what is off X_j, before it is multiplied
    result[high] = min(result[high] + result[high] * SCALE * summed, 1.0)
    for j in range(high - 1, low - 1, -1):
        summed += lone[j]
        if count > 2:
            for b in range(count - 1, 0, -1):
                for node in range(nodes):
                    grown = odds[j, node] * inside[b - 1, node]
                    summed += factor[b, node] * grown
                    inside[b, node] += grown
        result[j] = min(result[j] + result[j] * SCALE * summed, 1.0)
    return result
