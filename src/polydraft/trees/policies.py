"""Tree policies: how many children each node gets, decided before they are drawn.

**The number of children at a node is decided before they are drawn, from that node's ancestors and draft row
only.** Pruning after sampling is allowed only under a deterministic scheme: dropping a sampled child because of
what it is changes the law of those that remain, and verification is then biased (drawing two and keeping the
likelier one misses the target law by 0.05 to 0.19).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

from polydraft.errors import InvalidParameter
from polydraft.trees.shape import EAGLE_25, MEDUSA_63, MOST_NODES, TreeShape


@runtime_checkable
class TreePolicy(Protocol):
    """A rule for the shape of every tree; the shape may not depend on the tokens that are drawn."""

    @property
    def shape(self) -> TreeShape:
        """The shape of the next tree."""
        ...


@dataclass(frozen=True)
class Chain:
    """One draft per node: `length` drafts in a row."""

    length: int

    @property
    def shape(self) -> TreeShape:
        """A chain of `length` drafts."""
        return _chain(self.length)


@dataclass(frozen=True)
class Widths:
    """Every node at depth i has `widths[i]` children: (4, 2, 1) gives 4, then 8, then 8 nodes."""

    widths: tuple[int, ...]

    @property
    def shape(self) -> TreeShape:
        """The full product tree."""
        return _product(tuple(self.widths))


@dataclass(frozen=True)
class Fixed:
    """A given shape, such as `EAGLE_25`, `MEDUSA_63` or the result of a shape search."""

    shape: TreeShape


def parse_policy(text: str) -> TreePolicy:
    """Read a policy from text: "4,2,2,1" is `Widths`, "chain:5" is `Chain`, "eagle" and "medusa" are published trees.

    Raises:
        InvalidParameter: the text is none of these.
    """
    published = {"eagle": EAGLE_25, "medusa": MEDUSA_63}
    if text in published:
        return Fixed(published[text])
    kind, colon, numbers = text.rpartition(":")
    try:
        widths = tuple(int(part) for part in numbers.split(","))
        policy = Chain(*widths) if kind == "chain" else Widths(widths)
        if kind == ("chain" if colon else "") and policy.shape.size > 1:
            return policy
    except (ValueError, TypeError) as error:
        if isinstance(error, InvalidParameter):
            raise
    raise InvalidParameter(
        f'A tree is written as widths per depth such as "4,2,2,1", or "chain:5", "eagle" or "medusa", not {text!r}.'
    )


@lru_cache(maxsize=256)
def _chain(length: int) -> TreeShape:
    if length >= MOST_NODES:
        raise InvalidParameter(f"The chain of {length} drafts has over {MOST_NODES} nodes.")
    return TreeShape(((1,),) * _positive("length", length))


@lru_cache(maxsize=256)
def _product(widths: tuple[int, ...]) -> TreeShape:
    counts: list[tuple[int, ...]] = []
    nodes = 1
    for width in widths:
        counts.append((_positive("every width", width),) * nodes)
        nodes *= width
        if nodes > MOST_NODES:
            raise InvalidParameter(f"The tree of widths {widths} has over {MOST_NODES} nodes.")
    return TreeShape(tuple(counts))


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise InvalidParameter(f"{name} of a tree must be at least 1, but is {value}.")
    return value
