"""Tree shapes: how many children each node of a token tree gets, fixed in advance, and what follows from that."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, cast

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from polydraft.errors import InvalidParameter, is_whole
from polydraft.probs import sent

MOST_NODES = 4096


@dataclass(frozen=True)
class TreeShape:
    """A static tree, written as the number of children of every node, level by level.

    Nodes are numbered breadth first, siblings in drafting order, the root being node 0. Trailing zeros of a level
    may be left out: `((4,), (3, 2, 2, 1), (3,))` is a root with four children, which have 3, 2, 2 and 1 children,
    of which only the first has children, three of them.

    Raises:
        InvalidParameter: counts that are no tuples of integers, a negative count, more counts than nodes in a level, or
            more than 4096 nodes.
    """

    counts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not _are_counts(self.counts):
            found = repr(self.counts)[:80]
            raise InvalidParameter(
                f"A tree shape is a tuple of tuples of integers, such as ((2,), (1, 0)), not {found}."
            )
        nodes, total = 1, 1
        for depth, level in enumerate(self.counts):
            if len(level) > nodes or any(count < 0 for count in level) or not sum(level):
                raise InvalidParameter(
                    f"The tree shape has counts {level} at depth {depth}, but {nodes} nodes there can have children."
                )
            nodes, total = sum(level), total + sum(level)
        if total > MOST_NODES:
            raise InvalidParameter(f"The tree has {total} nodes; at most {MOST_NODES} can be scored in one pass.")

    @property
    def depth(self) -> int:
        """The longest path's number of drafts."""
        return len(self.counts)

    @property
    def size(self) -> int:
        """The number of nodes, the root included."""
        return 1 + sum(map(sum, self.counts))

    @property
    def max_children(self) -> int:
        """The largest number of children of one node."""
        return max((count for level in self.counts for count in level), default=0)

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """The node numbers at each depth, the root's level first."""
        first, result = 1, [range(1)]
        for level in self.counts:
            result.append(range(first, first + sum(level)))
            first += sum(level)
        return tuple(result)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The parent of each node; the root's is -1."""
        result = [-1]
        for nodes, level in zip(self.levels, self.counts, strict=False):
            result.extend(node for node, count in zip(nodes, level, strict=False) for _ in range(count))
        return tuple(result)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The place of each node among its siblings; the root's is 0."""
        return (0, *(rank for level in self.counts for count in level for rank in range(count)))


def _are_counts(value: object) -> bool:
    """Tell whether a value is a tuple of tuples of integers."""
    levels = cast(tuple[object, ...], value) if isinstance(value, tuple) else (None,)
    return all(isinstance(level, tuple) and all(map(is_whole, cast(tuple[object, ...], level))) for level in levels)


class Level(NamedTuple):
    """The nodes of one depth, in node order, padded with -1, and the most children that one of them has."""

    nodes: Int[Tensor, "b f"]
    width: int


@dataclass(frozen=True, eq=False)
class Topology:
    """Who descends from whom in a batch of trees, with the views that masks and verifiers need.

    Args:
        parents: the parent of each node; -1 for the root, which is node 0; always smaller than the node itself.
    """

    parents: Int[Tensor, "b n"]

    @cached_property
    def on_host(self) -> "Topology":
        """The same trees on the host, where sizes are counted; a device is waited for once."""
        return self if self.parents.device.type == "cpu" else Topology(self.parents.cpu())

    @cached_property
    def ancestors(self) -> Bool[Tensor, "b n n"]:
        """Entry [b, i, j] tells whether node j is node i or one of its ancestors."""
        size = self.parents.shape[-1]
        result = torch.eye(size, dtype=torch.bool, device=self.parents.device).repeat(self.parents.shape[0], 1, 1)
        rows = torch.arange(self.parents.shape[0], device=self.parents.device)
        for node in range(1, size):
            result[:, node] |= result[rows, self.parents[:, node]]
        return result

    @cached_property
    def depth(self) -> Int[Tensor, "b n"]:
        """The number of drafts on the path from the root to each node."""
        return self.ancestors.sum(dim=-1) - 1

    @cached_property
    def rank(self) -> Int[Tensor, "b n"]:
        """The place of each node among its siblings, in node order; 0 for the root."""
        same = self.parents.unsqueeze(-1) == self.parents.unsqueeze(-2)
        return same.tril(diagonal=-1).sum(dim=-1)

    @cached_property
    def children(self) -> Int[Tensor, "b n k"]:
        """The children of each node in drafting order, padded with -1."""
        batch, size = self.parents.shape
        most = max(1, int(self.on_host.rank.max()) + 1)
        result = self.parents.new_full((batch, size + 1, most), -1)
        rows = torch.arange(batch, device=self.parents.device).unsqueeze(-1)
        nodes = torch.arange(size, device=self.parents.device).expand(batch, size)
        result[rows, self.parents, self.rank] = nodes  # the root's parent, -1, is the extra last row
        return result[:, :size]

    @property
    def width(self) -> int:
        """The most children of a node; 1 where no node has any."""
        return self.children.shape[-1]

    def of_children(self, values: Shaped[Tensor, "b n"], absent: int) -> Shaped[Tensor, "b n k"]:
        """Return what belongs to each node's children, in drafting order; `absent` where there is none."""
        padded = torch.nn.functional.pad(values, (0, 1), value=absent)
        return padded.gather(-1, self._places).view_as(self.children)

    @cached_property
    def _places(self) -> Int[Tensor, "b m"]:
        """The children as places in a row of n + 1 values, of which the last belongs to absent ones."""
        return self.children.where(self.children >= 0, self.children.shape[1]).flatten(1)

    @cached_property
    def inner(self) -> int:
        """How many of the first nodes contain all that have children; the nodes after them are leaves."""
        return int(self.on_host.parents.max()) + 1

    @cached_property
    def height(self) -> int:
        """The number of drafts on the longest path."""
        return int(self.on_host.depth.max())

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The nodes of each depth, the root's level first."""
        if self.on_host is not self:
            return tuple(Level(sent(nodes, self.parents.device), width) for nodes, width in self.on_host.levels)
        counts = (self.children >= 0).sum(dim=-1)
        result: list[Level] = []
        for depth in range(self.height + 1):
            there = self.depth == depth
            order = there.int().argsort(dim=-1, descending=True, stable=True)[:, : int(there.sum(dim=-1).max())]
            result.append(Level(order.where(there.gather(-1, order), -1), int((counts * there).max())))
        return tuple(result)

    @cached_property
    def post_order(self) -> Int[Tensor, "b n"]:
        """The place of each node when children come before their parent and siblings in drafting order."""
        sizes = self.ancestors.sum(dim=-2)
        siblings = self.parents.unsqueeze(-1) == self.parents.unsqueeze(-2)
        passed = (siblings.tril(diagonal=-1) * sizes.unsqueeze(-2)).sum(dim=-1)  # nodes below earlier siblings
        return (self.ancestors * passed.unsqueeze(-2)).sum(dim=-1) + sizes - 1


@lru_cache(maxsize=256)
def topology(shape: TreeShape, batch: int, device: torch.device) -> Topology:
    """Return the topology of `batch` trees of one shape; equal shapes share it, so its views are computed once."""
    return Topology(sent(torch.tensor(shape.parents), device).repeat(batch, 1))


EAGLE_25 = TreeShape(((4,), (3, 2, 2, 1), (3, 2, 2, 1), (3,), (2,)))
"""The static tree of EAGLE-1 (arXiv 2401.15077, figure 7): 25 drafts, depth 5."""

MEDUSA_63 = TreeShape(
    (
        (10,),
        (10, 7, 3, 2, 1, 1, 1, 1, 1, 1),
        (10, 3, 2, 1, 1, 1, 1, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1),
        (2,),
    )
)
"""The tree that Medusa publishes for its 7B heads (arXiv 2401.10774, section 2.3.3): 63 drafts, depth 4."""
