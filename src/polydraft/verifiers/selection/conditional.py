"""Independent drafts conditioned on being distinct, over tokens in an order."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.theory.conditional import conditional_chain
from polydraft.theory.rows import support_size
from polydraft.verifiers.selection.ordered import Numbers, numbers


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

    def row(self, index: int) -> "ConditionalRow":
        """Return a row on the host."""
        inside, logs, counts = self._host
        return ConditionalRow(inside[index], logs[index], int(counts[index]))

    @cached_property
    def _host(self) -> tuple[Numbers, Numbers, Numbers]:
        counts = torch.minimum(self.counts, support_size(self.weights))
        return numbers(self.containment), numbers(self.weights.log()), numbers(counts)


@dataclass(eq=False)
class ConditionalRow:
    """One row of conditional Poisson drafts.

    The simple rule takes the lowest draft in the block. With X_j = (places below low and places j..high - 1), the
    chance that all drafts lie in X_j is sum_a e_a(places below low) e_{k-a}(places j..high - 1) / e_k(all), with e the
    elementary symmetric polynomials of the draft probabilities; as j grows it falls by the chance that the rule takes
    the token at j. In logarithms.

    Args:
        inside: Q of every prefix.
        logs: the logarithms of the draft row.
        count: the number of drafts.
    """

    inside: Numbers
    logs: Numbers
    count: int

    def __post_init__(self) -> None:
        self._high, self._low, self._after = -1, -1, self.logs

    def taken(self, low: int, high: int) -> Numbers:
        """Return 1 - Q(X_j) plus a constant."""
        if high != self._high or low < self._low:
            self._after = _log_sums(self.logs[low:high][::-1], self.count)[::-1, ::-1]
            self._low, self._high = low, high
        both = self._before[:, low, None] + self._after[:, low - self._low :]
        joint = np.exp(np.logaddexp.reduce(both, axis=0) - self._before[-1, -1])
        return self.inside[high] + self.inside[low] - joint

    def pick(self, low: int, high: int, places: list[int]) -> list[int]:
        """Return the lowest draft."""
        drafts = [draft for draft, place in enumerate(places) if low <= place < high]
        return [min(drafts, key=places.__getitem__)]

    @cached_property
    def _before(self) -> Numbers:
        return _log_sums(self.logs, self.count)


def _log_sums(logs: Numbers, count: int) -> Numbers:
    """Return log e_j of the first i weights for j <= count and i = 0..A."""
    table = np.full((count + 1, len(logs) + 1), -np.inf)
    table[0] = 0
    for j in range(1, count + 1):
        np.logaddexp.accumulate(logs + table[j - 1, :-1], out=table[j, 1:])
    return table
