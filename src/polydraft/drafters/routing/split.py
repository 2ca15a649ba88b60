"""How a merge splits its nodes between guesses and another drafter's tree: by what each place is expected to bring."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate

from polydraft.reading import Step
from polydraft.trees import Branches, TreeShape

PRIOR_DRAFTS = 4
"""How many drafts the hope counts as, beside those that were tried."""


@dataclass(frozen=True)
class RowHistory:
    """What finished steps of a row have shown of the other drafter.

    Args:
        tried: how many of its drafts were compared with the text: those that stood where the text came by.
        kept: how many of them the text went on with.
    """

    tried: int = 0
    kept: int = 0

    def chance(self, hope: float) -> float:
        """Return the chance that the next draft is kept, from 0.01 to 0.99 in steps of a hundredth."""
        chance = (PRIOR_DRAFTS * hope + self.kept) / (PRIOR_DRAFTS + self.tried)
        return min(99, max(1, round(100 * chance))) / 100

    def after(self, both: Branches, row: int, written: Sequence[int]) -> "RowHistory":
        """Return the same after a step.

        Args:
            both: the joint draft, the other drafter's nodes being the first's.
            row: the row in it.
            written: the tokens that the step wrote.
        """
        tree = both.draft.tree
        mine, parents, tokens = (one[row].tolist() for one in (both.first & tree.valid, tree.parents, tree.tokens))
        at, tried, kept = 0, self.tried, self.kept
        for token in written:
            below = [node for node, own in enumerate(mine) if node and own and parents[node] == at]
            place = next((place for place, node in enumerate(below) if tokens[node] == token), -1)
            tried += place + 1 if place >= 0 else len(below)
            if place < 0:
                break
            at, kept = below[place], kept + 1
        return RowHistory(tried, kept)


def written_by(step: Step) -> list[list[int]]:
    """Return the tokens that a step wrote, per row."""
    emitted = (step.whole or step.verdict).tokens(step.tree).tolist()
    return [[token for token in row if token >= 0] for row in emitted]


def best_split(own: Sequence[tuple[int, float]], guesses: Sequence[float], nodes: int) -> int:
    """Return how many nodes the other drafter gets: as many as bring most together with the guesses beside them.

    Args:
        own: the sizes that its tree may have, rising, and how many of its drafts are expected to be accepted then.
        guesses: the chances of the guesses, falling.
        nodes: the nodes of both.
    """
    beside = [0.0, *accumulate(guesses)]
    worth = [value + beside[min(nodes - size, len(guesses))] for size, value in own]
    return own[max(range(len(own)), key=lambda place: (worth[place], place))][0]


@lru_cache(maxsize=1024)
def worth_of_levels(shape: TreeShape, chance: float) -> tuple[tuple[int, float], ...]:
    """Return the sizes of a shape's first 1, 2, ... levels, and how many drafts of each are expected to be accepted.

    A draft is accepted with the chance `chance`, where the one above it was and its earlier siblings were not.
    """
    reached, found, size, value = [1.0], list[tuple[int, float]](), 0, 0.0
    for level in shape.counts:
        reached = [
            above * chance * (1 - chance) ** rank
            for above, count in zip(reached, level, strict=False)
            for rank in range(count)
        ]
        size, value = size + len(reached), value + sum(reached)
        found.append((size, value))
    return tuple(found)


@lru_cache(maxsize=1024)
def worth_of_budgets(nodes: int, depth: int, children: int, chance: float) -> tuple[tuple[int, float], ...]:
    """Return the budgets 1, 2, ... and how many drafts of a tree grown with each are expected to be accepted, likewise.

    The rows that the tree will follow are not known yet; it is taken to have the places that are best on average.
    """
    waiting, found, value = [(-chance, 1, 0)], list[tuple[int, float]](), 0.0
    while waiting and len(found) < nodes:
        worth, level, rank = heappop(waiting)
        value -= worth
        found.append((len(found) + 1, value))
        if level < depth:
            heappush(waiting, (worth * chance, level + 1, 0))
        if rank + 1 < children:
            heappush(waiting, (worth * (1 - chance), level, rank + 1))
    return tuple(found)
