"""Independent drafts over tokens in an order, after tokens that are drafted for certain."""

from dataclasses import dataclass

import numpy as np

from polydraft.machine_code import compiled
from polydraft.schemes import Scheme, set_law_of
from polydraft.verifiers.selection.ordered import EVERY, LOWEST, Flags, Numbers


@dataclass(frozen=True, eq=False)
class Independent:
    """Tokens drafted for certain, at the first places of the order, and independent draws from the others.

    On the walk, the tokens drafted for certain are one token, at the last of their places. The simple rule chooses
    uniformly among the draws in the block, a token as often as it was drawn. Draws are exchangeable, so it takes every
    token in proportion to its draft probability. In a block with the certain token it takes that.

    Args:
        inside: Q of every prefix, 1[certain tokens below j] below_j^draws.
        below: the draft mass of every prefix, the certain tokens without any.
        certain: how many tokens are drafted for certain.
    """

    inside: Numbers
    below: Numbers
    certain: int

    @classmethod
    def of(cls, weights: Numbers, certain: int, count: int) -> "Independent":
        """Prepare a row in the order; `weights` are zero at the certain tokens and sum to one, or are all zero."""
        return cls(*_chains(weights, certain, count - certain), certain)

    def taken(self, low: int, high: int) -> Numbers:
        """Return a straight line over the draft mass; with the certain token, a step."""
        return _line(self.inside, self.below, low, high, low < self.certain)

    def choice(self, low: int, high: int) -> int:
        """Return `LOWEST`, which is the certain token, in its block, else `EVERY`."""
        return LOWEST if low < self.certain else EVERY


def certain_tokens(scheme: Scheme, draft_row: Numbers, count: int) -> Flags:
    """Mark the tokens of a row that are drafted for certain (`theory.containment.certain_and_drawn`).

    Raises:
        UnpairedScheme: the scheme's containment is not known.
    """
    law = set_law_of(scheme)
    return _likeliest(draft_row, law.certain(count), law.alike)


@compiled
def _likeliest(draft: Numbers, number: int, alike: bool) -> Flags:
    """Mark the likeliest tokens that have any mass, earlier ones first among equals; if tokens are alike, the first."""
    marked = np.zeros(len(draft), dtype=np.bool_)
    for _ in range(number):
        best = -1
        for i in range(len(draft)):
            if draft[i] > 0 and not marked[i] and (best < 0 or (not alike and draft[i] > draft[best])):
                best = i
        if best < 0:
            break
        marked[best] = True
    return marked


@compiled
def _chains(weights: Numbers, certain: int, draws: int) -> tuple[Numbers, Numbers]:
    """Return Q and the draft mass of every prefix."""
    inside, below = np.zeros(len(weights) + 1), np.zeros(len(weights) + 1)
    for j in range(len(weights)):
        below[j + 1] = below[j] + weights[j]
    total = below[-1]
    if total <= 0:
        draws = 0
    for j in range(len(below)):
        below[j] /= total if total > 0 else 1.0
        inside[j] = below[j] ** draws if j >= certain else 0.0
    return inside, below


@compiled
def _line(inside: Numbers, below: Numbers, low: int, high: int, stepped: bool) -> Numbers:
    """Return `Independent.taken` at low..high."""
    line, mass = np.zeros(len(inside)), below[high] - below[low]
    slope = (inside[high] - inside[low]) / mass if mass > 0 else 0.0
    for j in range(low, high + 1):
        if stepped:
            line[j] = inside[high] if j > low else 0.0
        else:
            line[j] = inside[low] + (below[j] - below[low]) * slope
    return line
