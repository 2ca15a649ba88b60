"""Traversal verification: recursive rejection of whole subtrees, children before their parent."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.probs import normalised, without
from polydraft.schemes import IID, Draws, Scheme, WithoutReplacement, require_scheme, set_law_of
from polydraft.verifiers.outcome_law import Drafts, Rate, Row, at_draft
from polydraft.verifiers.trees.lifts import Division, FromLeaves, share_of


@dataclass(frozen=True)
class TraversalVerification(FromLeaves):
    """Try the leaves first; a subtree that fails changes its parent's target and scale for the next.

    Rule: a node v has a target row and a scale a, 1 at the root. The subtree of its child x gets the scale
    min(1, a target(x) / draft(x)); if that fails, with Z = sum (a target - draft)+ v's target becomes
    (a target - draft)+ / Z, its scale Z / (Z + 1 - a), and without replacement its draft row loses x. When all
    children have failed the path ends at v with probability a, and a token of v's target is emitted.
    Scheme: independent drafts, or successive ones without replacement. Repeated drafts are tried with their own
    subtrees: a second copy counts where the first one's subtree failed.
    Exactness: given those before it each draft is a draw from v's draft row, so a step takes min(a target, draft) from
    the mass a * target and leaves (a target - draft)+.
    Cost: O(k K) per node.
    Acceptance: on a chain this is block verification; for independent drafts `BottomUp(RecursiveRejection())`. Below
    the lift of an optimal rule for k >= 2.
    Source: arXiv 2505.12398, algorithm 1.

    Raises:
        UnpairedScheme: the scheme is neither of the two.
    """

    scheme: Scheme = WithoutReplacement()
    name = "traversal verification"
    lossless = True
    best_alone = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, (IID, WithoutReplacement), "Traversal verification")

    def divide(self, drafts: Drafts, draft_probs: Row, target_probs: Row, scale: Rate) -> Division:
        """Divide the mass of nodes among their drafts in turn, each against what the failures before it leave."""
        mass, law = scale.unsqueeze(-1) * target_probs, draft_probs
        children: list[Tensor] = []
        for place, draft in enumerate(drafts.unbind(dim=-1), 1):
            there = draft >= 0
            children.append(share_of(at_draft(mass, draft), at_draft(law, draft)) * there)
            left = (mass - law).clamp_min(0)
            failed = left.sum(dim=-1) + 1 - scale
            mass = torch.where(there.unsqueeze(-1), share_of(left, failed.unsqueeze(-1)), mass)
            scale = torch.where(there, mass.sum(dim=-1), scale)
            if set_law_of(self.scheme).draws is Draws.SUCCESSIVE and place < drafts.shape[-1]:
                law = normalised(without(law, draft.unsqueeze(-1)), law)
        return Division(torch.stack(children, dim=-1), mass, scale)
