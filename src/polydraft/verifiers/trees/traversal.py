"""Traversal verification: recursive rejection of whole subtrees, children before their parent."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import Noise, normalised, without
from polydraft.schemes import IID, Scheme, WithoutReplacement, require_scheme
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.host.bottom_up import HostDivision, first_success_at
from polydraft.verifiers.law import at_draft
from polydraft.verifiers.selection.compiled import compiled
from polydraft.verifiers.selection.ordered import Numbers, Places
from polydraft.verifiers.trees.block import by_block
from polydraft.verifiers.trees.certain import certain_verdict
from polydraft.verifiers.trees.chain import is_whole
from polydraft.verifiers.trees.emission import plain
from polydraft.verifiers.trees.law import PathLaw
from polydraft.verifiers.trees.trials import Division, first_success, share_of, trials


@dataclass(frozen=True)
class TraversalVerification:
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

    def __post_init__(self) -> None:
        require_scheme(self.scheme, (IID, WithoutReplacement), "Traversal verification")

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep the path to the first node that succeeds, from the leaves up."""
        if draft.tree.tokens.shape[-1] == 1:
            return plain(target_probs, noise)
        certain = certain_verdict(draft, target_probs)
        if certain:
            return certain
        if is_whole(draft):
            return by_block(draft, target_probs, noise)
        if target_probs.device.type == "cpu":
            return first_success_at(self._divide_at, draft, target_probs, noise)
        return first_success(trials(draft, target_probs, self._divide), draft, target_probs, noise)

    def path_law(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        return trials(draft, target_probs, self._divide).law(draft.tree.topology.post_order)

    def _divide_at(self, drafts: Places, draft_row: Numbers, target_row: Numbers, scale: float) -> HostDivision:
        """Do what `_divide` does, for one node on the host."""
        return HostDivision(*_divided_at(drafts, draft_row, target_row, scale, isinstance(self.scheme, IID)))

    def _divide(
        self,
        drafts: Int[Tensor, "b f k"],
        draft_probs: Float[Tensor, "b f A"],
        target_probs: Float[Tensor, "b f A"],
        scale: Float[Tensor, "b f"],
    ) -> Division:
        mass, law = scale.unsqueeze(-1) * target_probs, draft_probs
        children: list[Tensor] = []
        for place, draft in enumerate(drafts.unbind(dim=-1), 1):
            there = draft >= 0
            children.append(share_of(at_draft(mass, draft), at_draft(law, draft)) * there)
            left = (mass - law).clamp_min(0)
            failed = left.sum(dim=-1) + 1 - scale
            mass = torch.where(there.unsqueeze(-1), share_of(left, failed.unsqueeze(-1)), mass)
            scale = torch.where(there, mass.sum(dim=-1), scale)
            if isinstance(self.scheme, WithoutReplacement) and place < drafts.shape[-1]:
                law = normalised(without(law, draft.unsqueeze(-1)), law)
        return Division(torch.stack(children, dim=-1), mass, scale)


@compiled
def _divided_at(
    drafts: Places, draft_row: Numbers, target_row: Numbers, scale: float, again: bool
) -> tuple[Numbers, Numbers, float]:
    """Return the children's scales, what is left and the node's scale; `again`: drafts may be drawn again."""
    mass, law, children = scale * target_row, draft_row.copy(), np.zeros(len(drafts))
    for place in range(len(drafts)):
        draft = drafts[place]
        children[place] = min(mass[draft] / law[draft], 1.0) if law[draft] > 0 else 0.0
        left = 0.0
        for i in range(len(mass)):
            mass[i] = max(mass[i] - law[i], 0.0)
            left += mass[i]
        failed = left + 1 - scale
        scale = 0.0
        for i in range(len(mass)):
            mass[i] = min(mass[i] / failed, 1.0) if failed > 0 else 0.0
            scale += mass[i]
        if not again:
            rest = 0.0
            for i in range(len(law)):
                rest += law[i] if i != draft else 0.0
            for i in range(len(law) if rest > 0 else 0):
                law[i] = law[i] / rest if i != draft else 0.0
    return children, mass, scale
