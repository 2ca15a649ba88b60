"""What drafts bring: the chance of each to be accepted, learnt from steps, by its place and by its own probability."""

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from polydraft.planning.lessons import Lesson
from polydraft.trees import Acceptance, TreeShape

DEEPEST, MOST = 16, 4
"""Depths and ranks beyond these count as the last ones."""
MEMORY = 0.98
"""Every step with a law multiplies all that was seen of the law before by this, because texts change."""
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
BOUNDS = (0.2, 0.4, 0.6, 0.8, 0.9, 0.97)
"""Draft probabilities between two of these count as one class."""
RANKS = 2
"""The ranks that are told apart beside a draft probability: first children, and all others."""
MEMORY_OF_PROBABILITIES = 0.995
"""Every lesson multiplies what was seen of draft probabilities before by this."""
OF_MEAN = 4.0
"""How many drafts' worth the mean of all drafts counts for in each class."""
CHEAP = 0.1
"""Growth is not asked to stop where the next level needs to bring no more tokens of a text than this."""
Rates = NDArray[np.float64]
Law = tuple[str, ...]
"""The names of the processors and filters of a target's law."""
Hazards = Sequence[Sequence[float]]
"""By rank and class of probability: the chance of a draft, given that its node is reached and those before it fail."""
Key = TypeVar("Key")


class Chances:
    """Learn how likely drafts are to be accepted.

    Problem: h(d, i) is the chance of the draft of rank i below a node at depth d, if that node is reached and the
    drafts before it are rejected; h(i, c) is the same of a draft whose token has a draft probability of class c.
    Rule: mean over what was tried, recent steps counting most; the mean of a depth is drawn towards that of all depths,
    and that towards a hope; the mean of a class is drawn towards that of the rank. Of a node with one sampled draft the
    overlap of both laws stands for the result. What a draft probability means is learnt and not taken from the drafter:
    above temperature 0 a token is often unlikely and accepted all the same.
    Approximation: depth and rank, or class and rank decide, not the text nor the shape of the tree.

    Args:
        known: rates that were measured before, for drafts that are not looked up.

    Texts with other processors or filters accept other drafts, so each law has means of its own (`Lesson.law`). What is
    not known of a law is hoped to be as in the law that most is known of, among those without processors.
    """

    def __init__(self, known: Acceptance | None = None) -> None:
        self._seen: dict[tuple[str, Law], _Seen] = {}
        self._judged: dict[Law, _Seen] = {}
        self._rates: dict[tuple[str, Law], Rates] = {}  # until the next lesson
        self._hopes = tuple(np.tile(np.array(hope), (DEEPEST, 1)) for hope in (HOPE, FOUND))
        if known:
            self._hopes = _hazards(known), self._hopes[1]

    def learn(self, lessons: Sequence[Lesson], shape: TreeShape) -> None:
        """Learn from a step that was planned with trees of this shape.

        A drafter that drafts a shorter chain than was planned has nothing better to offer, which counts as a rejection.
        """
        self._learn_probabilities(lessons)
        lessons = [one for one in lessons if one.tried or (shape.counts and not one.source)]
        self._rates = self._rates if not lessons else {}
        for key in {(one.source, one.law) for one in lessons}:
            _latest(self._seen, key, DEEPEST, MOST).fade(MEMORY)
        for one in lessons:
            seen = self._seen[one.source, one.law]
            for depth, rank, chance, weight in one.tried:
                seen.add(depth, rank, weight * chance, weight)
            short = not one.source and not one.stopped and one.depth < shape.depth
            if short and len(one.tried) == one.depth and one.tokens > one.depth:
                seen.add(one.depth, 0, 0.0, 1.0)
        _forget_oldest(self._seen)

    def _learn_probabilities(self, lessons: Iterable[Lesson]) -> None:
        for one in lessons:
            if one.judged:
                seen = _latest(self._judged, one.law, RANKS, len(BOUNDS) + 1)
                seen.fade(MEMORY_OF_PROBABILITIES)
                for rank, probability, chance in one.judged:
                    seen.add(rank, class_of(probability), chance, 1.0)
                _forget_oldest(self._judged)

    def rates(self, source: str, law: Law) -> Rates:
        """Return g(d, i): the chance that the draft of rank i is the accepted one, given that its node is reached."""
        if (source, law) in self._rates:
            return self._rates[source, law]
        seen = self._seen.get((source, law))
        hope = self._hope(source, law)
        hazard = hope if seen is None else seen.drawn_over_depths(hope)
        before = np.cumprod(1 - hazard, axis=1)
        rates = hazard * np.concatenate([np.ones((DEEPEST, 1)), before[:, :-1]], axis=1)
        self._rates[source, law] = rates
        return rates

    def hazards(self, law: Law, mean: Sequence[float]) -> Hazards:
        """Return h(i, c), given the chance of a draft of each rank whatever its probability."""
        seen = self._judged.get(law) or _Seen(RANKS, len(BOUNDS) + 1)
        return seen.drawn_to(np.array(mean)[:, np.newaxis], OF_MEAN).tolist()

    def _hope(self, source: str, law: Law) -> Rates:
        """Return the chances to assume where a law was not seen."""
        prior = self._hopes[bool(source)]
        plain = {key: one for key, one in self._seen.items() if _is_plain(key[1])}
        others = [one for (who, other), one in plain.items() if who == source and other != law]
        best = max(others, key=lambda one: float(one.faced.sum()), default=None)
        return prior if best is None else best.drawn_over_depths(prior)


class _Seen:
    """Sums over what was tried: the chances, and how many drafts that were, in a table of two axes."""

    def __init__(self, *sizes: int) -> None:
        self.won, self.faced = np.zeros(sizes), np.zeros(sizes)

    def fade(self, share: float) -> None:
        self.won *= share
        self.faced *= share

    def add(self, row: int, column: int, won: float, faced: float) -> None:
        place = min(row, len(self.won) - 1), min(column, self.won.shape[1] - 1)
        self.won[place] += won
        self.faced[place] += faced

    def drawn_to(self, mean: Rates, weight: float) -> Rates:
        return (self.won + weight * mean) / (self.faced + weight)

    def drawn_over_depths(self, hope: Rates) -> Rates:
        """Return the mean chances, drawn towards those of all depths, and these towards the hope."""
        shift = ((self.won - self.faced * hope).sum(axis=0)) / (self.faced.sum(axis=0) + OF_HOPE)
        return self.drawn_to((hope + shift).clip(0, 1), OF_ALL_DEPTHS)


def _latest(kept: dict[Key, _Seen], key: Key, *sizes: int) -> _Seen:
    """Return what was seen of a key, which is now the one met last."""
    kept[key] = seen = kept.pop(key, None) or _Seen(*sizes)
    return seen


def _forget_oldest(kept: dict[Key, _Seen]) -> None:
    for key in [*kept][:-MOST_LAWS]:
        del kept[key]


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


def class_of(probability: float) -> int:
    """Return the class of a draft probability."""
    return bisect(BOUNDS, probability)


def tokens_of(shape: TreeShape, rates: Rates) -> float:
    """Return the expected tokens of a step: sum over nodes v of the product of g along the path to v; the root is 1."""
    return sum(_reached(shape.parents[1:], rates))


def tokens_found(parents: Sequence[int], rates: Rates) -> float:
    """Return the same of a tree that was looked up, given the place of the node above each; -1 below the root."""
    return sum(_reached(tuple(parent + 1 for parent in parents), rates))


def accepted_by_depth(shape: TreeShape, rates: Rates) -> list[float]:
    """Return the expected number of accepted nodes of every depth, the root's first."""
    reached = _reached(shape.parents[1:], rates)
    return [sum(reached[level.start : level.stop]) for level in shape.levels]


def _reached(parents: tuple[int, ...], rates: Rates) -> list[float]:
    """Return the chance of every node to be accepted, the root first, given the parents of those below it."""
    reached, listed = [1.0], rates.tolist()
    for parent, depth, rank in _places_below_root(parents):
        reached.append(reached[parent] * listed[depth][rank])
    return reached


@lru_cache(maxsize=512)
def _places_below_root(parents: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return the parent, its depth and the rank of every node below the root."""
    depths, ranks, places = [0], Counter[int](), list[tuple[int, int, int]]()
    for above in parents:
        places.append((above, min(depths[above], DEEPEST - 1), min(ranks[above], MOST - 1)))
        depths.append(depths[above] + 1)
        ranks[above] += 1
    return tuple(places)


class GrowthRule:
    """Whether trees of a shape go on: what the nodes of a depth need to promise, and how likely drawn tokens are.

    Args:
        shape: the full tree.
        need: by depth, from the root's on, the least expected number of accepted nodes of a text, all rows together.
        hazards: the chances of drawn tokens.
    """

    def __init__(self, shape: TreeShape, need: Sequence[float], hazards: Hazards) -> None:
        self.shape, self.need, self.hazards = shape, need, hazards
        self.stops = len(need) > 1 and max(need[1:]) > CHEAP
        self._reached: list[list[float]] = []

    def on(self, depth: int, probabilities: Sequence[Sequence[float]]) -> bool:
        """Tell whether the nodes of a depth, whose tokens have these draft probabilities, get children."""
        level, above = self.shape.levels[depth], self.shape.levels[depth - 1].start
        parents = [self.shape.parents[node] - above for node in level]
        ranks = [min(self.shape.ranks[node], RANKS - 1) for node in level]
        before = [[1.0]] * len(probabilities) if depth == 1 else self._reached
        self._reached = [self._of_row(*one, parents, ranks) for one in zip(probabilities, before, strict=True)]
        return sum(map(sum, self._reached)) > len(probabilities) * self.need[depth]

    def _of_row(
        self, probabilities: Sequence[float], before: list[float], parents: list[int], ranks: list[int]
    ) -> list[float]:
        left, reached = [*before], list[float]()
        for probability, parent, rank in zip(probabilities, parents, ranks, strict=True):
            hazard = self.hazards[rank][class_of(probability)] if probability > 0 else 0.0  # it is absent
            reached.append(left[parent] * hazard)
            left[parent] *= 1 - hazard
        return reached
