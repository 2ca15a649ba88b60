"""What drafts bring: the chance of each to be accepted, learnt from steps."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from polydraft.planning.lessons import Lesson
from polydraft.trees import Acceptance, TreeShape

DEEPEST, MOST = 16, 4
"""Depths and ranks beyond these count as the last ones."""
MEMORY = 0.98
"""Every lesson multiplies all that was seen before by this, because texts change."""
HOPE = (0.7, 0.35, 0.2, 0.15)
"""The chance of a draft of each rank before anything was seen."""
FOUND = (0.9, 0.0, 0.0, 0.0)
"""The same where drafts were found in a text: they continue a match of some tokens."""
OF_HOPE = 3.0
"""How many drafts' worth the hope counts for."""
OF_ALL_DEPTHS = 6.0
"""How many drafts' worth the rate over all depths counts for at each depth."""
MOST_LAWS = 64
"""The laws that were met last are remembered: a server meets any number of temperatures."""
Rates = NDArray[np.float64]
Law = tuple[str, ...]
"""The names of the processors and filters of a target's law."""


class Chances:
    """Learn how likely drafts are to be accepted.

    Problem: h(d, i) is the chance of the draft of rank i below a node at depth d, if that node is reached and the
    drafts before it are rejected.
    Rule: mean over what was tried, recent steps counting most; the mean of a depth is drawn towards that of all depths,
    and that towards a hope. Of a node with one sampled draft the overlap of both laws stands for the result.
    Approximation: depth and rank decide, not the text nor the shape of the tree.

    Args:
        known: rates that were measured before, for drafts that are not looked up.

    Texts with other processors or filters accept other drafts, so each law has means of its own (`Lesson.law`). What is
    not known of a law is hoped to be as in the law that most is known of, among those without processors.
    """

    def __init__(self, known: Acceptance | None = None) -> None:
        self._seen: dict[tuple[str, Law], _Seen] = {}
        self._rates: dict[tuple[str, Law], Rates] = {}  # until the next lesson
        self._hopes = tuple(np.tile(np.array(hope), (DEEPEST, 1)) for hope in (HOPE, FOUND))
        if known:
            self._hopes = _hazards(known), self._hopes[1]

    def learn(self, lessons: Iterable[Lesson], shape: TreeShape) -> None:
        """Learn from a step that was planned with trees of this shape.

        A drafter that drafts a shorter chain than was planned has nothing better to offer, which counts as a rejection.
        """
        lessons = [one for one in lessons if one.tried or (shape.counts and not one.source)]
        self._rates = self._rates if not lessons else {}
        for key in {(one.source, one.law) for one in lessons}:
            self._seen[key] = seen = self._seen.pop(key, None) or _Seen()
            seen.won *= MEMORY
            seen.faced *= MEMORY
        for one in lessons:
            seen = self._seen[one.source, one.law]
            for depth, rank, chance, weight in one.tried:
                seen.add(depth, rank, weight * chance, weight)
            short = not one.source and not one.stopped and one.depth < shape.depth
            if short and len(one.tried) == one.depth and one.tokens > one.depth:
                seen.add(one.depth, 0, 0.0, 1.0)
        for key in [*self._seen][:-MOST_LAWS]:
            del self._seen[key]

    def rates(self, source: str, law: Law) -> Rates:
        """Return g(d, i): the chance that the draft of rank i is the accepted one, given that its node is reached."""
        if (source, law) in self._rates:
            return self._rates[source, law]
        seen = self._seen.get((source, law))
        hope = self._hope(source, law)
        hazard = hope if seen is None else seen.drawn_to(hope)
        before = np.cumprod(1 - hazard, axis=1)
        rates = hazard * np.concatenate([np.ones((DEEPEST, 1)), before[:, :-1]], axis=1)
        self._rates[source, law] = rates
        return rates

    def _hope(self, source: str, law: Law) -> Rates:
        """Return the chances to assume where a law was not seen."""
        prior = self._hopes[bool(source)]
        plain = {key: one for key, one in self._seen.items() if _is_plain(key[1])}
        others = [one for (who, other), one in plain.items() if who == source and other != law]
        best = max(others, key=lambda one: float(one.faced.sum()), default=None)
        return prior if best is None else best.drawn_to(prior)


class _Seen:
    """Sums over what was tried: the chances, and how many drafts that were, by depth and rank."""

    def __init__(self) -> None:
        self.won, self.faced = np.zeros((DEEPEST, MOST)), np.zeros((DEEPEST, MOST))

    def add(self, depth: int, rank: int, won: float, faced: float) -> None:
        place = min(depth, DEEPEST - 1), min(rank, MOST - 1)
        self.won[place] += won
        self.faced[place] += faced

    def drawn_to(self, hope: Rates) -> Rates:
        """Return the mean chances, drawn towards those of all depths, and these towards the hope."""
        shift = ((self.won - self.faced * hope).sum(axis=0)) / (self.faced.sum(axis=0) + OF_HOPE)
        overall = (hope + shift).clip(0, 1)
        return (self.won + OF_ALL_DEPTHS * overall) / (self.faced + OF_ALL_DEPTHS)


def _hazards(known: Acceptance) -> Rates:
    """Return the chance of each draft, given that those before it were rejected, from what a plan has measured."""
    result = np.tile(np.array(HOPE), (DEEPEST, 1))
    for depth in range(DEEPEST):
        rates = next(filter(None, (known.at(depth, children) for children in range(MOST, 0, -1))), ())
        left = 1.0
        for rank, rate in enumerate(rates):
            result[depth, rank] = min(1.0, rate / left) if left > 0 else 0.0
            left -= rate
    return result


def _is_plain(law: Law) -> bool:
    """Tell whether a law has no processors: its names are those of filters, which have a value."""
    return all("=" in name for name in law)


def tokens_of(shape: TreeShape, rates: Rates) -> float:
    """Return the expected tokens of a step: sum over nodes v of the product of g along the path to v; the root is 1."""
    return _summed(nodes_of(shape), rates)


def tokens_found(parents: Sequence[int], rates: Rates) -> float:
    """Return the same of a tree that was looked up, given the place of the node above each; -1 below the root."""
    return _summed(_nodes_found(tuple(parents)), rates)


def _summed(nodes: Iterable[tuple[int, int, int]], rates: Rates) -> float:
    reached, listed = [1.0], rates.tolist()
    for parent, depth, rank in nodes:
        reached.append(reached[parent] * listed[depth][rank])
    return sum(reached)


@lru_cache(maxsize=256)
def _nodes_found(parents: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    depths, ranks, found = [0], Counter[int](), list[tuple[int, int, int]]()
    for above in (parent + 1 for parent in parents):
        found.append((above, min(depths[above], DEEPEST - 1), min(ranks[above], MOST - 1)))
        depths.append(depths[above] + 1)
        ranks[above] += 1
    return tuple(found)


@lru_cache(maxsize=256)
def nodes_of(shape: TreeShape) -> tuple[tuple[int, int, int], ...]:
    """Return the parent, its depth and the rank of every node below the root."""
    return tuple(
        (shape.parents[node], min(depth, DEEPEST - 1), min(shape.ranks[node], MOST - 1))
        for depth, level in enumerate(shape.levels[1:])
        for node in level
    )
