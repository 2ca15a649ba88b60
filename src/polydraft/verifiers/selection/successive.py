"""Successive drafts without replacement over tokens in an order, and the lowest of them in a block, by an integral."""

from dataclasses import dataclass

import numpy as np
import torch

from polydraft.machine_code import compiled
from polydraft.theory import SuccessiveLaw
from polydraft.theory.successive_law import MOST_LINEAR, SCALE, SURE
from polydraft.verifiers.selection.ordered import FIRST, LOWEST
from polydraft.verifiers.selection.rule import Numbers, counted, numbers, tensor


@dataclass(frozen=True, eq=False)
class Successive:
    """Successive drafts.

    The simple rule of a block at the end of the order takes the first draft in it, in drafting order: a draw from the
    draft row restricted to the block. In any other block it takes the lowest draft.

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
        law: the same as tensors.
        inside: Q of every prefix.
        above: the draft mass of all but the first j places.
        end: the first place after which no token can be drafted.
    """

    weights: Numbers
    count: int
    lone: Numbers
    odds: Numbers
    start: Numbers
    law: SuccessiveLaw
    inside: Numbers
    above: Numbers
    end: int

    @classmethod
    def of(cls, weights: Numbers, count: int) -> "Successive":
        """Prepare a row in the order for `count` drafts, or for its whole support if that is smaller."""
        count = min(count, int(np.count_nonzero(weights)))
        law = SuccessiveLaw.of(tensor(weights[None]), torch.tensor([count]))
        time, share = (numbers(table)[0] for table in (law.nodes.time, law.nodes.weight))
        if count > MOST_LINEAR:  # then `law` is asked
            time, share = time[:0], share[:0]
        lone, odds, start = _prepared(weights, time, share, count)
        np.expm1(odds, out=odds)
        inside, above = 1 - numbers(law.missed_chain())[0], np.zeros(len(weights) + 1)
        weights[::-1].cumsum(out=above[-2::-1])  # added up from the end: small tails stay exact
        end = len(weights) - int((weights[::-1] > 0).argmax())
        return cls(weights, count, lone, odds, start, law, inside, above, end)

    def taken(self, low: int, high: int) -> Numbers:
        """Return a straight line over the draft mass for blocks at the end, and 1 - Q(X_j) plus a constant else."""
        first = self.above[low]
        if self.above[high] > 0:
            return self.missed(low, high) + (self.inside[low] + self.inside[high] - 1)
        return 1 - (1 - self.inside[low]) * (self.above / first) if first > 0 else self.inside

    def choice(self, low: int, high: int) -> int:
        """Return `FIRST` in blocks at the end and `LOWEST` in others."""
        return FIRST if high >= self.end else LOWEST

    def missed(self, low: int, high: int) -> Numbers:
        """Return 1 - Q(X_j) for j = low..high."""
        if self.count > MOST_LINEAR:
            return self._missed_in_order(low, high)
        above = float(self.above[high])
        return _missed(self.weights, self.lone, self.odds, self.start, self.count, low, high, above)

    def _missed_in_order(self, low: int, high: int) -> Numbers:
        """Return 1 - Q(X_j) from the containment of the prefixes of (places below low, high - 1, ..., low, others)."""
        place = counted(len(self.weights))
        order = np.concatenate([place[:low], place[low:high][::-1], place[high:]])
        chain = numbers(self.law.missed_chain(torch.tensor(order[None])))[0]
        chain[low : high + 1] = chain[low : high + 1][::-1].copy()
        return chain


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
def _missed(
    weights: Numbers, lone: Numbers, odds: Numbers, start: Numbers, count: int, low: int, high: int, above: float
) -> Numbers:
    """Return 1 - Q(X_j) for j = low..high."""
    size, nodes = len(weights), len(start)
    degrees = max(count, 1)
    below, factor, inside = np.zeros((degrees, nodes)), np.zeros((degrees, nodes)), np.zeros((degrees, nodes))
    summed = 0.0
    for node in range(nodes):  # in loops: what NumPy says of whole rows takes seconds to compile
        below[0, node], inside[0, node] = start[node], 1.0
    for j in range(low):
        summed += lone[j]
    if count > 2:
        for j in range(low):
            for a in range(count - 1, 0, -1):
                for node in range(nodes):
                    below[a, node] += odds[j, node] * below[a - 1, node]
        for b in range(count):
            for a in range(max(2 - b, 0), count - b):
                for node in range(nodes):
                    factor[b, node] += below[a, node]
        whole = 0.0
        for node in range(nodes):
            whole += factor[0, node]
        summed += whole
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
