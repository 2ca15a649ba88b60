"""Whether a draft goes on: at every depth, by the tokens that were drawn, against what its time is worth elsewhere."""

from collections.abc import Sequence

from polydraft.engine.planner.chances import Rates, nodes_of
from polydraft.engine.planner.sureness import RANKS, Hazards, class_of
from polydraft.trees import TreeShape

CHEAP = 0.1
"""Growth is not asked to stop where the next level needs to bring no more tokens of a text than this."""


class Going:
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
