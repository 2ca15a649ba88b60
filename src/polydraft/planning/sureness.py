"""What a drafter's own probabilities say of drafts, and whether a draft goes on by that: at every depth."""

from bisect import bisect
from collections.abc import Iterable, Sequence

from polydraft.planning.chances import MOST_LAWS, Law, Rates, nodes_of
from polydraft.planning.lessons import Lesson
from polydraft.trees import TreeShape

BOUNDS = (0.2, 0.4, 0.6, 0.8, 0.9, 0.97)
"""Draft probabilities between two of these count as one."""
RANKS = 2
"""First children, and all others."""
MEMORY = 0.995
"""Every lesson multiplies all that was seen before by this."""
OF_MEAN = 4.0
"""How many drafts' worth the mean of all drafts counts for in each class."""

Hazards = tuple[tuple[float, ...], ...]
"""By rank and class of probability: the chance of a draft, given that its node is reached and those before it fail."""


class AcceptanceByProbability:
    """Learn how likely drafts are to be accepted, by the draft probability of their tokens.

    Problem: h(i, c) is the chance of a draft of rank i whose token has a draft probability of class c, if its node is
    reached and the drafts before it are rejected.
    Rule: the mean over what was tried, recent steps counting most, drawn towards the mean of the rank. It is learnt and
    not taken from the drafter: above temperature 0 a token is often unlikely and accepted all the same.
    """

    def __init__(self) -> None:
        classes = len(BOUNDS) + 1
        self._won: dict[Law, list[list[float]]] = {}
        self._faced: dict[Law, list[list[float]]] = {}
        self._none = [[0.0] * classes for _ in range(RANKS)]

    def learn(self, lessons: Iterable[Lesson]) -> None:
        """Learn from what became of drafts."""
        for one in lessons:
            if not one.judged:
                continue
            tables = [self._last(kept, one.law) for kept in (self._won, self._faced)]
            for table in tables:
                table[:] = [[MEMORY * value for value in row] for row in table]
            for rank, sure, chance in one.judged:
                place, found = min(rank, RANKS - 1), class_of(sure)
                for table, value in zip(tables, (chance, 1.0), strict=True):
                    table[place][found] += value

    def _last(self, kept: dict[Law, list[list[float]]], law: Law) -> list[list[float]]:
        """Return the table of a law, which is now the one met last; of so many laws the oldest is forgotten."""
        kept[law] = table = kept.pop(law, None) or [[*row] for row in self._none]
        for old in [*kept][:-MOST_LAWS]:
            del kept[old]
        return table

    def hazards(self, law: Law, mean: Sequence[float]) -> Hazards:
        """Return the chances in force.

        Args:
            law: the target's.
            mean: by rank, the chance of a draft whatever its probability.
        """
        won, faced = self._won.get(law, self._none), self._faced.get(law, self._none)
        return tuple(
            tuple((w + OF_MEAN * mean[rank]) / (f + OF_MEAN) for w, f in zip(won[rank], faced[rank], strict=True))
            for rank in range(RANKS)
        )


def class_of(sure: float) -> int:
    """Return the class of a draft probability."""
    return bisect(BOUNDS, sure)


CHEAP = 0.1
"""Growth is not asked to stop where the next level needs to bring no more tokens of a text than this."""


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

    def on(self, depth: int, sure: Sequence[Sequence[float]]) -> bool:
        """Tell whether the nodes of a depth, whose tokens have these draft probabilities, get children."""
        level, above = self.shape.levels[depth], self.shape.levels[depth - 1].start
        parents = [self.shape.parents[node] - above for node in level]
        ranks = [min(self.shape.ranks[node], RANKS - 1) for node in level]
        before = [[1.0]] * len(sure) if depth == 1 else self._reached
        self._reached = [self._of_row(*one, parents, ranks) for one in zip(sure, before, strict=True)]
        return sum(map(sum, self._reached)) > len(sure) * self.need[depth]

    def _of_row(self, sure: Sequence[float], before: list[float], parents: list[int], ranks: list[int]) -> list[float]:
        left, found = [*before], list[float]()
        for chance, parent, rank in zip(sure, parents, ranks, strict=True):
            own = self.hazards[rank][class_of(chance)] if chance > 0 else 0.0  # it is absent
            found.append(left[parent] * own)
            left[parent] *= 1 - own
        return found


def by_depth(shape: TreeShape, rates: Rates) -> list[float]:
    """Return the expected number of accepted nodes of every depth, the root's first."""
    reached, listed = [1.0], rates.tolist()
    for parent, depth, rank in nodes_of(shape):
        reached.append(reached[parent] * listed[depth][rank])
    return [sum(reached[level.start : level.stop]) for level in shape.levels]
