"""Dynamic policies: trees whose shape follows the draft, what they may look at, and why that is exact.

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

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.schemes import Product, Scheme, require_scheme
from polydraft.trees.policies import FixedShape
from polydraft.trees.shape import TreeShape


def entropy(rows: Float[Tensor, "b n K"]) -> Float[Tensor, "b n"]:
    """Return the entropy of each row in nats."""
    return -torch.xlogy(rows, rows).sum(dim=-1)


@dataclass(frozen=True, eq=False)
class Drawn:
    """The nodes of one depth, just drawn; they have no draft rows of their own yet.

    Args:
        depth: their depth, 1 or more.
        there: False at padding.
        path: the product of the draft probabilities of the tokens from the root to the node, or of the chances of an
            `EstimatingPolicy`; float64.
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
        overlap: what the drafter thinks of its rows: an estimate of sum_x min(p(x), q(x)) with the target's; None where
            it does not say. It may follow from what was drawn above, as the rows do.
    """

    depth: int
    there: Bool[Tensor, "b f"]
    path: Float[Tensor, "b f"]
    rows: Float[Tensor, "b f K"]
    drafts: Int[Tensor, "b"]
    drawn: Drawn | None
    places: Int[Tensor, "b f"]
    overlap: Float[Tensor, "b f"] | None = None

    def likeliest(self, most: int) -> Float[Tensor, "b f k"]:
        """Return the `most` largest probabilities of each row, in falling order; fewer if the row is shorter."""
        return self.rows.topk(min(most, self.rows.shape[-1]), dim=-1).values


@runtime_checkable
class DynamicPolicy(Protocol):
    """A rule that shapes each tree as it grows; see the module's text for what it may depend on."""

    @property
    def shape(self) -> TreeShape:
        """Bounds: no tree has more nodes, levels or children of a node than this one, nor opens more nodes."""
        ...

    @property
    def stops(self) -> bool:
        """Whether growth may end before its full depth because no node is opened: this is asked at every depth."""
        ...

    def widest(self, depth: int) -> int:
        """Return the most nodes of a depth, 1 or more, that are opened; of all depths and 1, at most `shape.size`.

        On a device every depth is padded to this, so that the number of nodes need not be waited for.
        """
        ...

    def open(self, drawn: Drawn) -> Bool[Tensor, "b c"]:
        """Choose the nodes that get a draft row and may have children; the root always does."""
        ...

    def counts(self, opened: Opened) -> Int[Tensor, "b f"]:
        """Return the number of children of each open node."""
        ...


MEMBERS = ("shape", "stops", "widest", "open", "counts")
"""What every dynamic policy has."""


def is_dynamic(policy: object) -> TypeGuard[DynamicPolicy]:
    """Tell whether a policy shapes each tree as it grows; quick for the common ones, unlike a protocol's check.

    Raises:
        InvalidParameter: it says which nodes are opened, but lacks something else of a dynamic policy.
    """
    if isinstance(policy, FixedShape):
        return False
    lacks = [name for name in MEMBERS if getattr(policy, name, None) is None]
    if lacks and "open" not in lacks:
        raise InvalidParameter(f"{type(policy).__name__} is a dynamic policy without {lacks[0]}; see DynamicPolicy.")
    return not lacks


@runtime_checkable
class PruningPolicy(DynamicPolicy, Protocol):
    """A dynamic policy that drops drafts when the tree is grown; for deterministic schemes only."""

    def keep(self, path: Float[Tensor, "b n"], there: Bool[Tensor, "b n"]) -> Bool[Tensor, "b n"]:
        """Choose the nodes to keep; a kept node's parent and earlier siblings are kept.

        Nodes are numbered by depth, parents before children, siblings in drafting order; `path` is as in `Drawn`.
        """
        ...


@runtime_checkable
class MergingPolicy(DynamicPolicy, Protocol):
    """A dynamic policy that says from which of a node's draft rows each child is drawn; for `Product` only."""

    @property
    def members(self) -> int:
        """The number of draft rows of each node."""
        ...

    def members_of(self, opened: Opened, most: int) -> Int[Tensor, "b f k"]:
        """Return the row of each child, for the first `most` children of each node; decided before they are drawn."""
        ...


@runtime_checkable
class EstimatingPolicy(DynamicPolicy, Protocol):
    """A dynamic policy that estimates what will be accepted; a node's path is then the product of its estimates."""

    def accepted(self, opened: Opened, most: int) -> Float[Tensor, "b f k"]:
        """Return the chances of each node's first `most` children to be accepted, before these are drawn."""
        ...


def check_policy(policy: object, scheme: Scheme) -> None:
    """Check that a policy's trees can be drawn under a scheme.

    Raises:
        UnpairedScheme: the policy drops drafts after they were drawn, and the scheme draws them at random; or it
            merges the drafts of several rows, and the scheme knows only one.
    """
    if isinstance(policy, MergingPolicy):
        require_scheme(scheme, (Product,), f"{type(policy).__name__}, a policy for several draft rows,")
    if isinstance(policy, PruningPolicy) and not scheme.deterministic:
        raise UnpairedScheme(
            f"{type(policy).__name__} drops drafts after they were drawn, which is exact for deterministic drafts "
            f"(top-k) only, not {scheme.name}; BestFirst decides before it draws."
        )
