"""Value curves: what a child's share brings in kept drafts, itself and those below it, guessed from the shape."""

from functools import lru_cache

import numpy as np

from polydraft.theory.tree_program import Subtree, subtrees
from polydraft.trees import TreeShape
from polydraft.verifiers.selection.valued_shares import PARTS, STEPS, Slopes

FIRST = (1.0, 1.0, 0.85, 0.6)
"""How much of each quarter of a node's scale its first child gets on average: usual of pairs that agree in .8 or so."""
LATER = (0.8, 0.6, 0.4, 0.3)
"""How much of each quarter of what is left a later child gets."""
LEAF = (STEPS,) * PARTS
"""A leaf brings itself, whatever its share."""


@lru_cache(maxsize=1024)
def curve(below: Subtree) -> tuple[int, ...]:
    """Return the slopes of a child's share, part by part in steps of price, from the shape below it.

    A share is worth itself and, by composition from the leaves up, what its own children get of it: the first by
    `FIRST`, each later one by `LATER` of what is left. Slopes are kept from rising, so that the curve is concave. Any
    slopes are exact; better ones keep more.
    """
    return tuple(STEPS + 2 * int(slope * STEPS / 2 + 0.5) for slope in _slopes_of(_kept(below)))


def _kept(below: Subtree) -> tuple[float, ...]:
    """Return what is kept below a node whose scale is 0, 1/4, ..., 1."""
    worth = [np.array(_kept(child)) for child in below]
    places = np.linspace(0, 1, PARTS + 1)
    gains = [np.cumsum((0.0, *slopes)) / PARTS for slopes in (FIRST, LATER)]
    points: list[float] = []
    for scale in places:
        left, total = float(scale), 0.0
        for rank, kept in enumerate(worth):
            share = float(np.interp(left, places, gains[min(rank, 1)]))
            left, total = left - share, total + share + float(np.interp(share, places, kept))
        points.append(total)
    return tuple(points)


def _slopes_of(points: tuple[float, ...]) -> list[float]:
    return [float(slope) for slope in np.minimum.accumulate(np.diff(points) * PARTS)]


@lru_cache(maxsize=256)
def curves_of(shape: TreeShape) -> Slopes:
    """Return the slopes of each node's share, not to be written to."""
    nodes = [subtrees(shape.counts)]
    for node in nodes:  # breadth first, as nodes are numbered; the list grows on the way
        nodes.extend(node)
    curves: Slopes = np.array([curve(node) for node in nodes], dtype=np.int64)
    curves.flags.writeable = False
    return curves
