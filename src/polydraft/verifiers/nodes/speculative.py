"""Speculative sampling: the classic rule for one draft per node."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import UnpairedScheme
from polydraft.probs import residual
from polydraft.schemes import IID, Scheme
from polydraft.verifiers.law import OutcomeLaw, accept_ratio, at_draft


@dataclass(frozen=True)
class SpeculativeSampling:
    """Accept the draft x with probability min(1, target(x) / draft(x)), else draw from norm((target - draft)+).

    Scheme: one independent draft per node.
    Exactness: min(target, draft) + (1 - overlap) norm((target - draft)+) = target.
    Cost: O(K) per node.
    Acceptance: sum_x min(target(x), draft(x)), optimal for one draft.
    Source: arXiv 2211.17192, algorithm 1; arXiv 2302.01318, algorithm 2.

    Raises:
        UnpairedScheme: a node has more than one draft.
    """

    scheme: Scheme = IID()
    name = "speculative sampling"
    lossless = True

    def law(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*b A"],
        target_probs: Float[Tensor, "*b A"],
    ) -> OutcomeLaw:
        """Return the outcome law for one draft."""
        if drafts.shape[-1] > 1:
            raise UnpairedScheme(
                f"Speculative sampling verifies one draft per node, but the tree has {drafts.shape[-1]}; "
                "use a chain, or recursive rejection."
            )
        draft = drafts.squeeze(-1)
        present = (draft >= 0).to(target_probs.dtype)
        accepted = accept_ratio(at_draft(target_probs, draft), at_draft(draft_probs, draft)) * present
        after = residual(target_probs, draft_probs * present.unsqueeze(-1))
        return OutcomeLaw(accepted.unsqueeze(-1), (1 - accepted).unsqueeze(-1) * after)
