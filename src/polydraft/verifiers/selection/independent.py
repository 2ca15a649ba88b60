"""Independent drafts over tokens in an order, after tokens that are drafted for certain."""

from dataclasses import dataclass

import numpy as np

from polydraft.verifiers.selection.ordered import Flags, Numbers, Places, counted, entry, lowest, prefix_sums, within


@dataclass(frozen=True, eq=False)
class Independent:
    """Tokens drafted for certain, at the first places of the order, and independent draws from the others.

    Args:
        certain: the number of certain tokens.
        below: the draft mass of the first j places, the certain tokens without any.
        containment: 1[certain tokens below j] below_j^draws.
    """

    certain: Places
    below: Numbers
    containment: Numbers

    @classmethod
    def of(cls, weights: Numbers, certain: Flags | None, counts: Places) -> "Independent":
        """Prepare rows in the order; `weights` are zero at the certain tokens and sum to one, or are all zero."""
        fixed = np.zeros_like(counts) if certain is None else certain.sum(axis=1)
        below = prefix_sums(weights)
        mass = below[:, -1:]
        draws = np.maximum(np.where(mass[:, 0] > 0, counts - fixed, 0), 0)[:, None]
        below = below / np.where(mass > 0, mass, 1.0)
        return cls(fixed, below, below**draws * (counted(below.shape[1]) >= fixed[:, None]))

    def rows(self) -> "IndependentRows":
        """Return the rows with what their simple rules need."""
        return IndependentRows(self.containment, np.diff(self.containment), self.below, self.certain)


@dataclass(frozen=True, eq=False)
class IndependentRows:
    """Rows of independent drafts; the tokens drafted for certain are one token, at the last of their places.

    The simple rule chooses uniformly among the draws in the block. Draws are exchangeable, so it takes every token in
    proportion to its draft probability. In a block with the certain token it takes that.

    Args:
        inside: Q of every prefix.
        priority: its differences.
        below: the draft mass of every prefix.
        certain: how many tokens are drafted for certain.
    """

    inside: Numbers
    priority: Numbers
    below: Numbers
    certain: Places

    def kept(self, rows: Places) -> "IndependentRows":
        """Return some of the rows."""
        return IndependentRows(
            self.inside.take(rows, axis=0),
            self.priority.take(rows, axis=0),
            self.below.take(rows, axis=0),
            self.certain.take(rows, axis=0),
        )

    def taken(self, low: Places, high: Places) -> Numbers:
        """Return a straight line over the draft mass; with the certain token, a step."""
        start, end = entry(self.inside, low), entry(self.inside, high)
        first = entry(self.below, low)
        mass = entry(self.below, high) - first
        slope = np.where(mass > 0, (end - start) / mass, 0)
        line = start[:, None] + (self.below - first[:, None]) * slope[:, None]
        fixed = low < self.certain
        if fixed.any():
            step = np.where(counted(line.shape[1]) > low[:, None], end[:, None], 0)
            line = np.where(fixed[:, None], step, line)
        return line

    def picked(self, low: Places, high: Places, places: Places) -> Flags:
        """Return the draws in the block, a token as often as it was drawn; or the certain token."""
        fixed = low < self.certain
        chosen = within(low, high, places)
        return np.where(fixed[:, None], lowest(low, high, places), chosen) if fixed.any() else chosen
