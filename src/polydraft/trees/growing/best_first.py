"""Best first: a budget of drafts goes where the draft's own probability is highest; counts precede draws."""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.trees.growing.bounds import bounds, require_positive
from polydraft.trees.growing.growth import Drawn, GrowingPolicy, Opened
from polydraft.trees.shape import TreeShape


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
        return bounds(self.drafts, depth, self.children, (depth - 1) * self.widest(1))

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

    def widest(self, depth: int) -> int:
        """Return the beam, where a tree may branch at all."""
        return min(self.beam, self.drafts) if self.children > 1 else 1

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
