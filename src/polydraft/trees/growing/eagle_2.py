"""EAGLE-2: expand the likeliest nodes, then keep the likeliest of all drafts; for deterministic drafts only."""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.trees.growing.best_first import first_of
from polydraft.trees.growing.bounds import bounds, require_positive
from polydraft.trees.growing.growth import Drawn, GrowingPolicy, Opened
from polydraft.trees.shape import TreeShape


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

    def widest(self, depth: int) -> int:
        """Return the width."""
        return self.width

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
