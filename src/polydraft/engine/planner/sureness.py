"""What a drafter's own probabilities say: how likely a drawn token is to be accepted, learnt from steps."""

from bisect import bisect
from collections.abc import Iterable, Sequence

from polydraft.engine.lessons import Lesson
from polydraft.engine.planner.chances import MOST_LAWS, Law

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


class Sureness:
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
