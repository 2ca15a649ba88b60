"""Growing policies: trees whose shape follows the draft, what they may look at, and why that is exact.

**What may be looked at.** A tree is grown depth by depth. Which nodes are *opened* (given a draft row) and how many
children an open node gets are decided from what was drawn *before* these children: the tokens above and beside the
node, all draft rows so far and the node's own. A node gets all its children at once, and afterwards none is dropped.

**Why that is exact.** Let T be a tree in the middle of its growth, and L(T) the law of the text that comes out if T is
verified as it is and the text goes on by the target. Give a leaf v of T, whichever, some number k of children, drawn
by the scheme. Averaged over these children L(T) does not change:

* top down, everything outside v is as before; if the walk comes to v, a lossless node rule emits a token by the
  target's row whatever k is, and after it the text follows the target, as it did when v was a leaf;
* bottom up, v's scale a is fixed by what lies above and beside it, its children and itself are neighbours in the order
  of trials, and together they succeed with probability a and emit by the target, as the leaf v did alone; no other
  node's scale depends on them.

So given everything drawn so far the mean of L stays what it is at each expansion, whichever leaf and whichever k were
chosen by looking at what was drawn so far: L is a martingale. It begins with the root alone, whose L is the target's
law. In particular a count may depend on tokens drawn at *other* branches, so that branches may share one budget, and
growth may end early for any reason, an error included.
The argument takes *one* verifier for all trees that the step may come to, fixed before the first draw: L is the law
under it, and the mean over children at v is taken under it. A verifier that is another rule for another tree must
choose by what is known before, such as `Draft.most_children`, never by the tree: L would change with the rule.
The argument breaks if a node's children are looked at before all of them are drawn, or thrown away after that: then
they are not a draw of the scheme. Only a deterministic scheme, whose children are functions of the row, allows it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isfinite

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, UnpairedScheme, is_number, is_whole
from polydraft.schemes import Scheme
from polydraft.trees.policy import TreePolicy
from polydraft.trees.tree import MOST_NODES, TreeShape


def entropy(rows: Float[Tensor, "b n K"]) -> Float[Tensor, "b n"]:
    """Return the entropy of each row in nats."""
    return -torch.xlogy(rows, rows).sum(dim=-1)


@dataclass(frozen=True, eq=False)
class Drawn:
    """The nodes of one depth, just drawn; they have no draft rows of their own yet.

    Args:
        depth: their depth, 1 or more.
        there: False at padding.
        path: the product of the draft probabilities of the tokens from the root to the node, or of the policy's
            `acceptance`; float64.
        parents: each node's parent, as a place in `rows`.
        rows: the draft rows of the nodes above; the mean of a node's rows under `Product`.
        chance: the draft probability of the node's own token.
        drafts: the drafts of each tree so far, these included.
        tokens: token ids; any at padding.
        members: which of its parent's draft rows each node was drawn from; 0 but under `Product`.
    """

    depth: int
    there: Bool[Tensor, "b c"]
    path: Float[Tensor, "b c"]
    parents: Int[Tensor, "b c"]
    rows: Float[Tensor, "b f K"]
    chance: Float[Tensor, "b c"]
    drafts: Int[Tensor, "b"]
    tokens: Int[Tensor, "b c"]
    members: Int[Tensor, "b c"]

    @cached_property
    def entropy(self) -> Float[Tensor, "b c"]:
        """The entropy in nats of the row that each node was drawn from."""
        return entropy(self.rows).gather(-1, self.parents)

    @cached_property
    def top(self) -> Float[Tensor, "b c"]:
        """The largest probability in the row that each node was drawn from."""
        return self.rows.amax(dim=-1).gather(-1, self.parents)


@dataclass(frozen=True, eq=False)
class Opened:
    """The open nodes of one depth with their draft rows, about to get children.

    Args:
        depth: their depth; 0 is the root's.
        there: False at padding.
        path: as in `Drawn`; 1 at the root.
        rows: their draft rows; the mean of a node's rows under `Product`.
        drafts: the drafts of each tree so far.
        drawn: all nodes of this depth as they were drawn; None at the root.
        places: the open nodes' places among these.
        estimate: asks the drafter for `overlap`; None where it does not say.
        rows_of_node: how many draft rows each node has; 1 but under `Product`.
    """

    depth: int
    there: Bool[Tensor, "b f"]
    path: Float[Tensor, "b f"]
    rows: Float[Tensor, "b f K"]
    drafts: Int[Tensor, "b"]
    drawn: Drawn | None
    places: Int[Tensor, "b f"]
    estimate: Callable[[], Float[Tensor, "b f"]] | None = None
    rows_of_node: int = 1

    @cached_property
    def overlap(self) -> Float[Tensor, "b f"] | None:
        """What the drafter thinks of its rows: an estimate of sum_x min(p(x), q(x)) with the target's.

        It may follow from what was drawn above, as the rows do. None where the drafter does not say.
        """
        return None if self.estimate is None else self.estimate()

    def likeliest(self, most: int) -> Float[Tensor, "b f k"]:
        """Return the `most` largest probabilities of each row, in falling order; fewer if the row is shorter."""
        return self.rows.topk(min(most, self.rows.shape[-1]), dim=-1).values


class GrowingPolicy(TreePolicy, ABC):
    """A rule that shapes each tree as it grows; see the module's text for what it may depend on.

    Its `shape` bounds the trees: none has more nodes, levels or children of a node, nor opens more nodes. If it
    `stops`, growth may end before its full depth because no node is opened.
    """

    __slots__ = ()

    @abstractmethod
    def opened(self, drawn: Drawn) -> Bool[Tensor, "b c"]:
        """Choose the nodes that get a draft row and may have children; the root always does."""

    @abstractmethod
    def counts(self, opened: Opened) -> Int[Tensor, "b f"]:
        """Return the number of children of each open node."""

    def acceptance(self, opened: Opened, most: int) -> Float[Tensor, "b f k"] | None:
        """Return the chances of each node's first `most` children to be accepted, before these are drawn.

        A node's path is the product of these. None leaves the draft probabilities in their place.
        """
        return None

    def row_of_each_child(self, opened: Opened, most: int) -> Int[Tensor, "b f k"] | None:
        """Return from which of a node's draft rows each of its first `most` children is drawn.

        It is decided before they are drawn. None where the scheme takes the rows in turn.
        """
        return None

    def pruned(self, path: Float[Tensor, "b n"], there: Bool[Tensor, "b n"]) -> Bool[Tensor, "b n"]:
        """Choose the nodes to keep of a grown tree; a kept node's parent and earlier siblings are kept.

        Nodes are numbered by depth, parents before children, siblings in drafting order; `path` is as in `Drawn`.
        Whoever prunes is refused under schemes that draw at random (`check`).
        """
        return there

    def with_budgets(self, budgets: tuple[int, ...]) -> "GrowingPolicy":
        """Return the same for a batch whose rows have these budgets of drafts, none larger than `most_drafts`.

        A row's tree follows from its own budget alone, not from its neighbours'.

        Raises:
            InvalidParameter: the policy has no budget that could be split.
        """
        raise InvalidParameter(
            f"A merge splits trees of a fixed shape or of a budget of drafts, such as best-first:16, not {self!r}."
        )

    def check(self, scheme: Scheme) -> None:
        """Check that trees are not pruned of what was drawn at random.

        Raises:
            UnpairedScheme: they are.
        """
        if type(self).pruned is not GrowingPolicy.pruned and not scheme.deterministic:
            raise UnpairedScheme(
                f"{type(self).__name__} drops drafts after they were drawn, which is exact for deterministic drafts "
                f"(top-k) only, not {scheme.name}; BestFirst decides before it draws."
            )


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
