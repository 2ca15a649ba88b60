"""A node's draft law over tokens in an order: Q of its prefixes, and a simple rule for every run of tokens."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from polydraft.machine_code import compiled
from polydraft.schemes import Scheme, set_law_of
from polydraft.verifiers.selection.rule import Flags, Numbers

EVERY, FIRST, LOWEST = range(3)
"""Which drafts of a block a simple rule takes: one at random, the first in drafting order, or that of lowest place."""


@runtime_checkable
class OrderedRow(Protocol):
    """The draft law of a node, its tokens in an order, on the host.

    A *block* is the run of tokens at places low..high - 1. Given that all drafts lie below `high` and that some are in
    the block, its simple rule takes one of those. Divided by the token's draft probability, the probability that the
    rule takes a token must not increase along the block: `walk` relies on it.
    """

    @property
    def inside(self) -> Numbers:
        """Q of every prefix: Pr[all drafts are at the first j places], for j = 0..A."""
        ...

    def taken(self, low: int, high: int) -> Numbers:
        """Return Q(first low places) + Pr[the rule takes a token of the block below place j] at j = low..high.

        Entries at other j have no meaning.
        """
        ...

    def choice(self, low: int, high: int) -> int:
        """Return which of the drafts in the block the rule takes: `EVERY`, `FIRST` or `LOWEST`."""
        ...


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
    """Mark the tokens of a row that are drafted for certain, earlier ones first among equals.

    Raises:
        UnpairedScheme: the scheme's containment is not known.
    """
    law = set_law_of(scheme)
    number = law.certain(count)
    return _likeliest(draft_row, number, law.alike) if number else np.zeros(len(draft_row), dtype=np.bool_)


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
        count = min(count, int((weights > 0).sum()))
        before = np.full((count + 1, len(logs) + 1), -np.inf)
        before[0] = 0
        for j in range(1, count + 1):
            before[j, 1:] = np.logaddexp.accumulate(logs + before[j - 1, :-1])
        return cls(np.exp(before[-1] - before[-1, -1]), logs, before)

    def taken(self, low: int, high: int) -> Numbers:
        """Return 1 - Q(X_j) plus a constant."""
        return self.inside[high] + self.inside[low] - _joint(self.logs, self.before, low, high)

    def choice(self, low: int, high: int) -> int:
        """Return `LOWEST`."""
        return LOWEST


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
