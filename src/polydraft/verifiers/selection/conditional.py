"""Independent drafts conditioned on being distinct, over tokens in an order."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.theory.conditional import conditional_chain
from polydraft.theory.rows import support_size
from polydraft.verifiers.selection.ordered import Flags, Numbers, Places, counted, entry, integers, lowest, numbers


@dataclass(frozen=True, eq=False)
class Conditional:
    """Conditional Poisson drafts from rows in the order.

    Args:
        weights: the draft rows.
        counts: the number of drafts asked for.
    """

    weights: Float[Tensor, "n A"]
    counts: Int[Tensor, " n"]

    @property
    def containment(self) -> Float[Tensor, "n C"]:
        """Q of every prefix of the order."""
        return self._chain

    @cached_property
    def _chain(self) -> Float[Tensor, "n C"]:
        order = torch.arange(self.weights.shape[-1], device=self.weights.device)
        return conditional_chain(self.weights, order.expand(self.weights.shape), self.counts)

    def rows(self) -> "ConditionalRows":
        """Return the rows on the host."""
        inside = numbers(self.containment)
        counts = integers(torch.minimum(self.counts, support_size(self.weights)))
        logs = numbers(self.weights.log())
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

    def kept(self, rows: Flags | Places) -> "ConditionalRows":
        """Return some of the rows."""
        return ConditionalRows(
            self.inside[rows], self.priority[rows], self.logs[rows], self.counts[rows], self.before[rows]
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
