"""Expected acceptance: a budget of drawn drafts goes where verification is likely to come and to accept."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.trees.growing.best_first import BestFirst
from polydraft.trees.growing.bounds import require_share
from polydraft.trees.growing.growth import Drawn, Opened, entropy
from polydraft.trees.growing.stopping import surely_accepted

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
