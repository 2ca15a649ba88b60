"""Independent drafts conditioned on being distinct, over tokens in an order."""

from dataclasses import dataclass

import numpy as np

from polydraft.machine_code import compiled
from polydraft.verifiers.selection.ordered import LOWEST, Numbers


@dataclass(frozen=True, eq=False)
class Conditional:
    """Conditional Poisson drafts.

    The simple rule takes the lowest draft in the block. With X_j = (places below low and places j..high - 1), the
    chance that all drafts lie in X_j is sum_a e_a(places below low) e_{k-a}(places j..high - 1) / e_k(all), with e the
    elementary symmetric polynomials of the draft probabilities; as j grows it falls by the chance that the rule takes
    the token at j. In logarithms.

    Args:
        inside: Q of every prefix, e_k of it over e_k of all.
        logs: the logarithms of the draft probabilities.
        before: log e_a of every prefix, for every a up to the number of drafts.
    """

    inside: Numbers
    logs: Numbers
    before: Numbers

    @classmethod
    def of(cls, weights: Numbers, count: int) -> "Conditional":
        """Prepare a row in the order; at most its whole support is drafted."""
        logs = np.log(weights)
        before = _log_sums(logs, min(count, int((weights > 0).sum())))
        return cls(np.exp(before[-1] - before[-1, -1]), logs, before)

    def taken(self, low: int, high: int) -> Numbers:
        """Return 1 - Q(X_j) plus a constant."""
        return self.inside[high] + self.inside[low] - _joint(self.logs, self.before, low, high)

    def choice(self, low: int, high: int) -> int:
        """Return `LOWEST`."""
        return LOWEST


@compiled
def _log_sums(logs: Numbers, count: int) -> Numbers:
    """Return log e_j of the first i weights for j <= count and i = 0..A."""
    table = np.full((count + 1, len(logs) + 1), -np.inf)
    table[0] = 0
    for j in range(1, count + 1):
        for i in range(len(logs)):
            table[j, i + 1] = np.logaddexp(table[j, i], logs[i] + table[j - 1, i])
    return table


@compiled
def _joint(logs: Numbers, before: Numbers, low: int, high: int) -> Numbers:
    """Return the chance that all drafts lie below `low` or at j..high - 1, for j = low..high."""
    count = len(before) - 1
    after, result = np.full(count + 1, -np.inf), np.empty(len(logs) + 1)
    after[0] = 0
    for j in range(high, low - 1, -1):
        if j < high:
            for b in range(count, 0, -1):
                after[b] = np.logaddexp(after[b], logs[j] + after[b - 1])
        total = 0.0
        for b in range(count + 1):
            total += np.exp(before[count - b, low] + after[b] - before[count, -1])
        result[j] = total
    return result
