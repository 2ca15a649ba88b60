"""Independent drafts conditioned on being distinct, over tokens in an order."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from polydraft.theory.conditional import conditional_chain
from polydraft.verifiers.selection.ordered import Flags, Numbers, Places, counted, entry, lowest, numbers, tensor


@dataclass(frozen=True, eq=False)
class Conditional:
    """Conditional Poisson drafts from rows in the order.

    Args:
        weights: the draft rows.
        counts: the number of drafts asked for.
    """

    weights: Numbers
    counts: Places

    @property
    def containment(self) -> Numbers:
        """Q of every prefix of the order."""
        return self._chain

    @cached_property
    def _chain(self) -> Numbers:
        weights = tensor(self.weights)
        order = torch.arange(weights.shape[-1]).expand(weights.shape)
        return numbers(conditional_chain(weights, order, tensor(self.counts)))

    def rows(self) -> "ConditionalRows":
        """Return the rows with what their simple rules need."""
        inside, logs = self.containment, np.log(self.weights)
        counts = np.minimum(self.counts, (self.weights > 0).sum(axis=1))
        return ConditionalRows(inside, np.diff(inside), logs, counts, _log_sums(logs, int(counts.max())))


@dataclass(frozen=True, eq=False)
class ConditionalRows:
    """Rows of conditional Poisson drafts.

    The simple rule takes the lowest draft in the block. With X_j = (places below low and places j..high - 1), the
    chance that all drafts lie in X_j is sum_a e_a(places below low) e_{k-a}(places j..high - 1) / e_k(all), with e the
    elementary symmetric polynomials of the draft probabilities; as j grows it falls by the chance that the rule takes
    the token at j. In logarithms.

    Args:
        inside: Q of every prefix.
        priority: its differences.
        logs: the logarithms of the draft rows.
        counts: the numbers of drafts.
        before: log e_a of every prefix, for every a up to the largest count.
    """

    inside: Numbers
    priority: Numbers
    logs: Numbers
    counts: Places
    before: Numbers

    def kept(self, rows: Places) -> "ConditionalRows":
        """Return some of the rows."""
        return ConditionalRows(
            self.inside.take(rows, axis=0),
            self.priority.take(rows, axis=0),
            self.logs.take(rows, axis=0),
            self.counts.take(rows, axis=0),
            self.before.take(rows, axis=0),
        )

    def taken(self, low: Places, high: Places) -> Numbers:
        """Return 1 - Q(X_j) plus a constant."""
        row, most = counted(len(low)), self.before.shape[1] - 1
        place = counted(self.logs.shape[1])
        logs = np.where(place < high[:, None], self.logs, -np.inf)
        after = _log_sums(logs[:, ::-1], most)[:, :, ::-1]
        other = self.counts[:, None] - counted(most + 1)
        both = self.before[row, :, low][:, :, None] + after[row[:, None], other]
        both[other < 0] = -np.inf
        joint = np.exp(np.logaddexp.reduce(both, axis=1) - self.before[row, self.counts, -1][:, None])
        return (entry(self.inside, high) + entry(self.inside, low))[:, None] - joint

    def picked(self, low: Places, high: Places, places: Places) -> Flags:
        """Return the lowest draft."""
        return lowest(low, high, places)


def _log_sums(logs: Numbers, count: int) -> Numbers:
    """Return log e_j of the first i weights for j <= count and i = 0..A."""
    table = np.full((len(logs), count + 1, logs.shape[1] + 1), -np.inf)
    table[:, 0] = 0
    for j in range(1, count + 1):
        np.logaddexp.accumulate(logs + table[:, j - 1, :-1], axis=1, out=table[:, j, 1:])
    return table
