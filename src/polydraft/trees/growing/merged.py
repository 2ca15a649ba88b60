"""SpecInfer's merge: every draft model grows a tree of its own, and equal paths become one node."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.schemes import Product, Scheme, require_scheme
from polydraft.trees.growing.growth import Drawn, GrowingPolicy, Opened, bounds, require_positive
from polydraft.trees.policy import Widths, checked_widths
from polydraft.trees.tree import TreeShape


@dataclass(frozen=True)
class Merged(GrowingPolicy):
    """Trees of several draft models, or of one at several temperatures, merged into one: for `EnsembleDrafter`.

    Each of J members grows a tree of the given widths below the root. Nodes with the same path are one node, which
    knows by whom it was proposed, and how often. If n *copies* of it were drawn, it has n times the width in children:
    child j is drawn from the row of the member that drew copy j mod n. So every draft keeps the law that it was drawn
    from, and no member spends drafts below a token that it did not propose. (`Widths` with `EnsembleDrafter` is the
    other kind of tree: every node has a child of every member.)
    All copies stay among the node's siblings as drafts, since the verifier must see how often a token was drawn; they
    are leaves, and the children hang below the first. Exact, because the copies are drawn before the children.

    Args:
        widths: children per depth in each member's own tree; ones for chains.
        members: the number J of draft rows per node.

    Raises:
        InvalidParameter: a number below 1, no widths, or too many nodes.

    Source: SpecInfer, arXiv 2305.09781, section 3 (merge-based construction).
    """

    widths: tuple[int, ...]
    members: int = 2

    def __post_init__(self) -> None:
        require_positive(members=self.members)
        if not checked_widths(self.widths):
            raise InvalidParameter("A merged tree needs at least one width, but has none.")
        _ = self.shape

    @property
    def shape(self) -> TreeShape:
        """Bounds on the trees: nothing to merge, or everything."""
        levels = [len(level) for level in Widths(self.widths).shape.levels[1:]]
        opened = self.members * sum(levels[:-1])
        return bounds(self.members * sum(levels), len(levels), self.members * max(levels), opened)

    def check(self, scheme: Scheme) -> None:
        """Refuse schemes that know only one draft row of a node."""
        require_scheme(scheme, (Product,), f"{type(self).__name__}, a policy for several draft rows,")

    def opened(self, drawn: Drawn) -> Bool[Tensor, "b c"]:
        """Choose the first copy of each node."""
        return _Copies(drawn).first

    def counts(self, opened: Opened) -> Int[Tensor, "b f"]:
        """Give every node the width of its depth once for each copy."""
        width = self.widths[opened.depth]
        if opened.drawn is None:
            return torch.full_like(opened.there, width * self.members, dtype=torch.int64)
        return width * _Copies(opened.drawn).number.gather(-1, opened.places)

    def row_of_each_child(self, opened: Opened, most: int) -> Int[Tensor, "b f k"]:
        """Return the member from whose row each child is drawn.

        Raises:
            InvalidParameter: the drafter has another number of members.
        """
        if opened.rows_of_node != self.members:
            raise InvalidParameter(
                f"The policy merges {self.members} members, but the drafter has {opened.rows_of_node}."
            )
        turns = torch.arange(most, device=opened.there.device)
        if opened.drawn is None:
            return (turns % self.members).expand(*opened.there.shape, most)
        copies = _Copies(opened.drawn)
        number = copies.number.gather(-1, opened.places).clamp_min(1).unsqueeze(-1)
        rows = torch.arange(len(number), device=number.device).unsqueeze(-1)
        places = copies.order[rows, opened.places].gather(-1, turns % number)
        return opened.drawn.members.unsqueeze(1).expand(-1, places.shape[1], -1).gather(-1, places)


@dataclass(frozen=True, eq=False)
class _Copies:
    """Which nodes of one depth are copies of each other: siblings with one token."""

    drawn: Drawn

    @cached_property
    def same(self) -> Bool[Tensor, "b c c"]:
        """Whether two nodes are copies of each other."""
        one, there = self.drawn, self.drawn.there
        siblings = one.parents.unsqueeze(-1) == one.parents.unsqueeze(-2)
        tokens = one.tokens.unsqueeze(-1) == one.tokens.unsqueeze(-2)
        return siblings & tokens & there.unsqueeze(-1) & there.unsqueeze(-2)

    @cached_property
    def first(self) -> Bool[Tensor, "b c"]:
        """Whether a node is the first of its copies."""
        return self.drawn.there & ~self.same.tril(diagonal=-1).any(dim=-1)

    @cached_property
    def number(self) -> Int[Tensor, "b c"]:
        """The number of copies of each node."""
        return self.same.sum(dim=-1)

    @cached_property
    def order(self) -> Int[Tensor, "b c c"]:
        """The places of each node's copies, in drafting order, before all other places."""
        return self.same.int().argsort(dim=-1, descending=True, stable=True)
