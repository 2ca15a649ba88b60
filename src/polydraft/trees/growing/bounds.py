"""Bounds on the trees of a growing policy, as a shape that is at least as large in every respect."""

from functools import lru_cache
from math import isfinite

from polydraft.errors import InvalidParameter, is_number, is_whole
from polydraft.trees.shape import MOST_NODES, TreeShape


@lru_cache(maxsize=256)
def bounds(drafts: int, depth: int, children: int, opened: int) -> TreeShape:
    """Return a bushy tree of this depth, with a node of so many children, and room for the drafts and open nodes.

    Args:
        drafts: the most drafts of one tree.
        depth: the longest path.
        children: the most children of one node.
        opened: the most nodes below the root that get a draft row, all rows of a batch padded alike.
    """
    left = max(drafts, opened, children + depth - 1)
    levels: list[tuple[int, ...]] = []
    nodes = 1
    for below in reversed(range(depth)):
        nodes = min(nodes * children, left - below)
        left -= nodes
        full, rest = divmod(nodes, children)
        levels.append((children,) * full + (rest,) * (rest > 0))
    return TreeShape(tuple(levels))


def require_positive(**values: int) -> None:
    """Check that numbers are at least 1, and no larger than trees can be.

    Raises:
        InvalidParameter: one is not.
    """
    for name, value in values.items():
        if not is_whole(value) or not 1 <= value < MOST_NODES:
            raise InvalidParameter(
                f"{name} of a tree must be an integer, at least 1 and below {MOST_NODES}, but is {value!r}."
            )


def require_share(name: str, value: float) -> None:
    """Check that a number lies between 0 and 1.

    Raises:
        InvalidParameter: it does not.
    """
    if not is_number(value) or not 0 <= value <= 1:
        raise InvalidParameter(f"{name} must be a number in 0 to 1, but is {value!r}.")


def require_finite(name: str, value: float) -> None:
    """Check that a number is finite.

    Raises:
        InvalidParameter: it is not.
    """
    if not is_number(value) or not isfinite(value):
        raise InvalidParameter(f"{name} must be a finite number, but is {value!r}.")
