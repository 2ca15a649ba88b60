"""Trees of a budget of drafts: it goes to the likeliest paths, or where verification is likeliest to accept."""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.trees.growing.growth import (
    Drawn,
    GrowingPolicy,
    Opened,
    bounds,
    entropy,
    require_positive,
    require_share,
)
from polydraft.trees.growing.stopping import surely_accepted
from polydraft.trees.tree import TreeShape


@dataclass(frozen=True)
class BestFirst(GrowingPolicy):
    """Spend a budget of drafts on the likeliest paths, depth by depth; for sampled and deterministic drafts alike.

    A place for the j-th child of an open node is worth the draft probability of the node's path times the j-th largest
    probability of its draft row: the path probability that the child will have if the drafts are the top tokens, and a
    guess of it if they are sampled. At each depth the budget that is left goes to the places of this depth and to
    those that they promise further down, best first. What is promised is guessed from the rows at hand: a child's row
    is taken to fall off as the rows of this depth do on average, weighted by their paths. So a sure draft goes deep
    and a doubtful one wide. Only the counts follow from this; which tokens are drawn is the scheme's affair, and
    nothing is dropped afterwards.

    Args:
        drafts: the budget: the most drafts of one tree.
        depth: the longest path, hence the most passes of the draft model.
        children: the most children of one node.
        beam: the most nodes of one depth that get a draft row: those with the likeliest paths.
        budgets: the budgets of a batch's rows, none larger than `drafts`; () where all have that one.

    Raises:
        InvalidParameter: a number below 1 or above 4095, or together too many.
    """

    drafts: int
    depth: int = 6
    children: int = 4
    beam: int = 8
    budgets: tuple[int, ...] = field(default=(), kw_only=True, repr=False)

    def __post_init__(self) -> None:
        require_positive(drafts=self.drafts, depth=self.depth, children=self.children, beam=self.beam)
        _ = self.shape

    @property
    def shape(self) -> TreeShape:
        """Bounds on the trees."""
        depth = min(self.depth, self.drafts)
        widest = min(self.beam, self.drafts) if self.children > 1 else 1
        return bounds(self.drafts, depth, self.children, (depth - 1) * widest)

    @property
    def most_drafts(self) -> int:
        """The budget."""
        return self.drafts

    def with_budgets(self, budgets: tuple[int, ...]) -> "BestFirst":
        """Return the same for a batch whose rows have these budgets."""
        return replace(self, budgets=budgets)

    @property
    def stops(self) -> bool:
        """Growth ends when the budget is spent."""
        return True

    def opened(self, drawn: Drawn) -> Bool[Tensor, "b c"]:
        """Choose the likeliest paths, at most as many as there are drafts left."""
        most = self._left(drawn.drafts).clamp(0, self.beam)
        return first_of(drawn.path.where(drawn.there, -1.0), most) & drawn.there

    def shares(self, opened: Opened) -> Float[Tensor, "b f k"]:
        """Return what each place below a node is worth, as a share of the node's own worth."""
        return opened.likeliest(self.children)

    def counts(self, opened: Opened) -> Int[Tensor, "b f"]:
        """Share the budget that is left between the children of this depth and those to be expected below them."""
        top = self.shares(opened).double()
        path = opened.path * opened.there
        places = path.unsqueeze(-1) * top
        share = path.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(path.dtype).tiny)
        typical = places.sum(dim=1) / share
        below = _promised(typical, min(self.depth, self.drafts) - opened.depth - 1, self.drafts)
        worth = below.unsqueeze(-1) * places.flatten(1).unsqueeze(1)
        chosen = first_of(worth.flatten(1), self._left(opened.drafts)).view(worth.shape)[:, 0]
        return (chosen.view(places.shape) & (places > 0)).sum(dim=-1)

    def _left(self, drafts: Int[Tensor, "b"]) -> Int[Tensor, "b"]:
        return (drafts.new_tensor(self.budgets) if self.budgets else self.drafts) - drafts


def first_of(worth: Float[Tensor, "b n"], most: Int[Tensor, "b"]) -> Bool[Tensor, "b n"]:
    """Tell which entries are among the `most` largest of their row; of equal ones the earlier come first."""
    order = worth.argsort(dim=-1, descending=True, stable=True)
    rank = torch.arange(worth.shape[-1], device=worth.device)
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, rank < most.unsqueeze(-1))


def _promised(typical: Float[Tensor, "b k"], levels: int, most: int) -> Float[Tensor, "b g"]:
    """Return the worth of a node's expected offspring as shares of its own, itself first: at most `most` of them."""
    latest = torch.ones_like(typical[:, :1])
    every = [latest]
    for _ in range(levels):
        born = (latest.unsqueeze(-1) * typical.unsqueeze(-2)).flatten(1)
        latest = born.topk(min(most, born.shape[-1]), dim=-1).values
        every.append(latest)
    shares = torch.cat(every, dim=-1)
    return shares.topk(min(most, shares.shape[-1]), dim=-1).values


@dataclass(frozen=True)
class Eagle2(GrowingPolicy):
    """Give the `width` likeliest nodes of each depth `width` children, then keep the `drafts` likeliest of all.

    A node's score is the draft probability of its path. It never exceeds its parent's, so that what is kept is a tree;
    of equal scores the node that was drawn first is kept. Sampled drafts are refused, because which of them are kept
    would depend on what was drawn (`BestFirst` is the policy for them): with `TopK` the children kept at a node are
    its top tokens, as if so many had been asked for.
    EAGLE's `total_token` counts the root, and its `depth` the expansions after the first: its defaults, 60 tokens,
    depth 7 and top_k 10, are `Eagle2(10, 8, 59)`. With `width` at least `drafts` the tree is the one of `drafts` nodes
    with the largest sum of path probabilities (OPT-Tree, arXiv 2406.17276).

    Args:
        width: nodes expanded per depth, and children of each.
        depth: the longest path.
        drafts: how many drafts to keep.
        budgets: how many of each row of a batch, none more than `drafts`; () where it is that for all.

    Raises:
        InvalidParameter: a number below 1 or above 4095, or together too many.

    Source: arXiv 2406.16858, section 4.
    """

    width: int = 10
    depth: int = 8
    drafts: int = 59
    budgets: tuple[int, ...] = field(default=(), kw_only=True, repr=False)

    def __post_init__(self) -> None:
        require_positive(width=self.width, depth=self.depth, drafts=self.drafts)
        _ = self.shape

    @property
    def shape(self) -> TreeShape:
        """Bounds on the trees."""
        return bounds(self.drafts, self.depth, self.width, (self.depth - 1) * self.width)

    @property
    def most_drafts(self) -> int:
        """The drafts that are kept."""
        return self.drafts

    def with_budgets(self, budgets: tuple[int, ...]) -> "Eagle2":
        """Return the same for a batch whose rows have these budgets."""
        return replace(self, budgets=budgets)

    def opened(self, drawn: Drawn) -> Bool[Tensor, "b c"]:
        """Choose the likeliest paths of this depth."""
        most = torch.full_like(drawn.drafts, self.width)
        return first_of(drawn.path.where(drawn.there, -1.0), most) & drawn.there

    def counts(self, opened: Opened) -> Int[Tensor, "b f"]:
        """Give every open node `width` children."""
        return torch.full_like(opened.there, self.width, dtype=torch.int64)

    def pruned(self, path: Float[Tensor, "b n"], there: Bool[Tensor, "b n"]) -> Bool[Tensor, "b n"]:
        """Keep the root and the likeliest drafts of all depths."""
        most = torch.full_like(there[:, 0], self.drafts + 1, dtype=torch.int64)
        most = 1 + most.new_tensor(self.budgets) if self.budgets else most
        return first_of(path.where(there, -1.0), most) & there


LATER = 0.35
"""What a second draft at a node is accepted for, as a share of the first's; measured of the shipped heads: .31 to .33
for rules that take drafts in turn, more under an optimal one."""


@dataclass(frozen=True)
class ExpectedAcceptance(BestFirst):
    """Spend a budget of *drawn* drafts where most of them are expected to be accepted.

    A drawn draft is accepted with the overlap a = sum_x min(p(x), q(x)) of its rows, however likely it is by the draft
    row alone. So where `BestFirst` counts path probabilities, which are right for the likeliest tokens, this policy
    counts chances to be accepted: the j-th child of a node that verification reaches with chance r is reached with

        r a_j,   a_1 = a,   a_j = (1 - a_1 - ... - a_{j-1}) later a   for j > 1,

    where a is estimated before the children are drawn: by the head's confidence head if it has one (DSpark), else from
    the row's entropy (AdaEDL's bound, arXiv 2410.18351). Places worth less than `least` stay empty, so that a doubtful
    step scores less. Counts follow from rows and from tokens above and beside the node, never from its children, which
    is why every scheme and rule stays exact (`trees.growing.growth`).

    Args:
        drafts: the budget: the most drafts of one tree.
        depth: the longest path.
        children: the most children of one node.
        beam: the most nodes of one depth that get a draft row: those that are likeliest to be reached.
        least: the least chance to be accepted that a draft is scored for.
        later: what a second draft is accepted for, as a share of the first's, given that the first was not.

    Raises:
        InvalidParameter: a number out of its range.
    """

    least: float = 0.02
    later: float = LATER

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("least", self.least)
        require_share("later", self.later)

    def opened(self, drawn: Drawn) -> Bool[Tensor, "b c"]:
        """Choose the nodes that are likeliest to be reached, but none below which nothing would be drafted."""
        return super().opened(drawn) & (drawn.path >= self.least)

    def shares(self, opened: Opened) -> Float[Tensor, "b f k"]:
        """Return the chance that each child of a node is accepted, if verification comes to the node."""
        return self.acceptance(opened, self.children)

    def acceptance(self, opened: Opened, most: int) -> Float[Tensor, "b f k"]:
        """Return the estimated chances of the first `most` children."""
        first = opened.overlap if opened.overlap is not None else surely_accepted(entropy(opened.rows))
        first = first.clamp(0, 1).unsqueeze(-1)
        turn = torch.arange(most, device=first.device)
        left = (1 - first) * (1 - self.later * first) ** (turn - 1).clamp_min(0)
        return (left * self.later * first).where(turn > 0, first)

    def counts(self, opened: Opened) -> Int[Tensor, "b f"]:
        """Share the budget, and leave places empty that are not worth scoring."""
        worth = opened.path.unsqueeze(-1) * self.shares(opened)
        return torch.minimum(super().counts(opened), (worth >= self.least).sum(dim=-1))
