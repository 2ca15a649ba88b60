"""Successive drafts without replacement over tokens in an order."""

from dataclasses import dataclass

from polydraft.verifiers.selection.lowest import LowestFirst
from polydraft.verifiers.selection.ordered import FIRST, LOWEST, Numbers, suffix_sums


@dataclass(frozen=True, eq=False)
class Successive:
    """Successive drafts.

    The simple rule of a block at the end of the order takes the first draft in it, in drafting order: a draw from the
    draft row restricted to the block. In any other block it takes the lowest draft.

    Args:
        inside: Q of every prefix.
        above: the draft mass of all but the first j places.
        end: the first place after which no token can be drafted.
        blocks: how often the lowest draft of a block is at each place.
    """

    inside: Numbers
    above: Numbers
    end: int
    blocks: LowestFirst

    @classmethod
    def of(cls, weights: Numbers, count: int) -> "Successive":
        """Prepare a row in the order; `weights` sum to one, or are all zero."""
        blocks = LowestFirst.of(weights, count)
        end = len(weights) - int((weights[::-1] > 0).argmax())
        return cls(1 - blocks.missed_by_prefixes(), suffix_sums(weights), end, blocks)

    def taken(self, low: int, high: int) -> Numbers:
        """Return a straight line over the draft mass for blocks at the end, and 1 - Q(X_j) plus a constant else."""
        above, first = float(self.above[high]), self.above[low]
        if above > 0:
            return self.blocks.missed(low, high, above) + (self.inside[low] + self.inside[high] - 1)
        return 1 - (1 - self.inside[low]) * (self.above / first) if first > 0 else self.inside

    def choice(self, low: int, high: int) -> int:
        """Return `FIRST` in blocks at the end and `LOWEST` in others."""
        return FIRST if high >= self.end else LOWEST
