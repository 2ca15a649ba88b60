"""Value curves: what a child's share brings in kept drafts, itself and those below it, guessed or measured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import isfinite

import numpy as np

from polydraft.errors import InvalidParameter, shortened
from polydraft.theory.tree_program import Subtree, subtrees
from polydraft.trees import TreeShape
from polydraft.verifiers.selection.rule import Numbers
from polydraft.verifiers.selection.valued_shares import PARTS, STEPS, Slopes

FIRST = (1.0, 1.0, 0.85, 0.6)
"""How much of each quarter of a node's scale its first child gets on average: usual of pairs that agree in .8 or so."""
LATER = (0.8, 0.6, 0.4, 0.3)
"""How much of each quarter of what is left a later child gets."""
FIRST_BELOW: Subtree = ((((),),),)
"""What is usual below a first child of a tree that grows: a chain of three."""
LATER_BELOW: Subtree = ((),)
"""What is usual below a later one: one draft."""
LEAF = (STEPS,) * PARTS
"""A leaf brings itself, whatever its share."""


@lru_cache(maxsize=1024)
def curve(below: Subtree) -> tuple[int, ...]:
    """Return the slopes of a child's share, part by part in steps of price, from the shape below it.

    A share is worth itself and, by composition from the leaves up, what its own children get of it: the first by
    `FIRST`, each later one by `LATER` of what is left. Slopes are kept from rising, so that the curve is concave. Any
    slopes are exact; better ones keep more.
    """
    return _in_steps(_composed(below))


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


def _in_steps(slopes: Iterable[float]) -> tuple[int, ...]:
    """Return slopes in steps of price; those that are given are of what is kept below."""
    return tuple(STEPS + 2 * int(slope * STEPS / 2 + 0.5) for slope in slopes)


Path = tuple[int, ...]
"""Where a node stands: the ranks from below the root down to it, such as (0, 1), the first child's second one."""
Seen = tuple[Path, float, float]
"""A node of a finished step: where it stood, its share when it was looked at, and what was kept below it on average."""
OF_USUAL = 8.0
"""How many nodes with a whole share a guessed curve counts for."""
STEEPEST = 64.0
"""No part of a share brings more than so many drafts; prices are found in time that grows with the steepest part."""


@dataclass(frozen=True)
class ValueCurves:
    """Curves of a tree's nodes by where they stand, composed from the shape below them, or measured.

    In a tree that grows the shape below a node follows from what is drawn, so no curve may be composed from it: a curve
    has to be known before the node is drawn. Where the node stands is known then.

    Args:
        slopes: for each path that was measured, what each of `PARTS` equal parts of a share brings below the node, in
            falling order. Other nodes have the curve of the shape below them.
        shape: of the trees whose curves these are; None for trees that grow, where `FIRST_BELOW` is taken to be below a
            first child and `LATER_BELOW` below others.

    Raises:
        InvalidParameter: slopes that are no such numbers.
    """

    slopes: tuple[tuple[Path, tuple[float, ...]], ...] = ()
    shape: TreeShape | None = None

    def __post_init__(self) -> None:
        for path, parts in self.slopes:
            in_range = all(isfinite(one) and 0 <= one <= STEEPEST for one in parts)
            if not path or len(parts) != PARTS or not in_range or [*parts] != sorted(parts, reverse=True):
                raise InvalidParameter(
                    f"The curve at {path} must be {PARTS} falling numbers in 0 to {STEEPEST:g}, below the root, but is "
                    f"{shortened(parts)}."
                )

    @cached_property
    def _known(self) -> Mapping[Path, tuple[float, ...]]:
        return dict(self.slopes)

    def at(self, path: Path) -> tuple[float, ...]:
        """Return what the parts of a share bring below a node."""
        return self._known.get(path) or _composed(_below(self.shape, path))

    def after(self, seen: Iterable[Seen]) -> "ValueCurves":
        """Return the curves that fit finished steps best, the composed ones counting for `OF_USUAL` nodes at each path.

        With x_u the part u of a node's share, what is kept below it is taken to be sum_u slope_u x_u: least squares,
        made falling by pooling.
        """
        sums, usual = dict[Path, tuple[Numbers, Numbers]](), replace(self, slopes=())
        for path, share, below in seen:
            if path not in sums:
                prior = OF_USUAL / PARTS**2
                sums[path] = prior * np.eye(PARTS), prior * np.array(usual.at(path))
            parts = np.clip(share - np.arange(PARTS) / PARTS, 0, 1 / PARTS)
            sums[path][0][:] += np.outer(parts, parts)
            sums[path][1][:] += parts * below
        fitted = (
            (path, _falling(np.asarray(np.linalg.solve(*both), np.float64))) for path, both in sorted(sums.items())
        )
        slopes = ((path, tuple(float(min(max(one, 0), STEEPEST)) for one in row)) for path, row in fitted)
        return replace(self, slopes=tuple(slopes))


def _falling(slopes: Numbers) -> list[float]:
    """Return the nearest falling numbers."""
    count = range(len(slopes))
    return [min(max(float(slopes[a : b + 1].mean()) for b in count[i:]) for a in count[: i + 1]) for i in count]


def _below(shape: TreeShape | None, path: Path) -> Subtree:
    """Return the shape below a node, or what is usual there."""
    if shape is None:
        return LATER_BELOW if path[-1] else FIRST_BELOW
    below = subtrees(shape.counts)
    for rank in path:
        below = below[rank] if rank < len(below) else ()
    return below


@lru_cache(maxsize=1024)
def _composed(below: Subtree) -> tuple[float, ...]:
    return tuple(_slopes_of(_kept(below)))


@lru_cache(maxsize=1024)
def paths_of(parents: tuple[int, ...]) -> tuple[Path, ...]:
    """Return where each node of a tree stands, given its parent, which is -1 for the root."""
    paths, born = list[Path]([()]), [0] * len(parents)
    for parent in parents[1:]:
        paths.append((*paths[parent], born[parent]))
        born[parent] += 1
    return tuple(paths)


@lru_cache(maxsize=1024)
def slopes_of(curves: ValueCurves, parents: tuple[int, ...]) -> Slopes:
    """Return the slopes of the share of each node of a tree, not to be written to."""
    table: Slopes = np.array([LEAF, *(_in_steps(curves.at(path)) for path in paths_of(parents)[1:])], dtype=np.int64)
    table.flags.writeable = False
    return table


def curves_of(shape: TreeShape) -> Slopes:
    """Return the slopes of each node's share in trees of a shape, not to be written to."""
    return slopes_of(ValueCurves(shape=shape), shape.parents)
