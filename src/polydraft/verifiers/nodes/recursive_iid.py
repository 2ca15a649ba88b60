"""Recursive rejection for independent drafts (SpecInfer's multi-step speculative sampling)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import residual
from polydraft.schemes import IID, Scheme
from polydraft.verifiers.law import OutcomeLaw, accept_ratio, at_draft


@dataclass(frozen=True)
class RecursiveRejection:
    """Try the drafts in turn, each against what is left of the target after the rejections before it.

    Rule: with target_1 = target, accept draft x_i with probability min(1, target_i(x_i) / draft(x_i)); after a
    rejection target_{i+1} = norm((target_i - draft)+); when all are rejected draw from the last residual.
    Scheme: independent drafts. A repeated token is rejected with probability one, but its rejection still updates
    the residual: skipping it biases the output.
    Exactness: induction over the drafts, each step being speculative sampling.
    Cost: O(k K) per node.
    Acceptance: below the optimum for k >= 2; no closed form beyond the recursion itself.
    Source: arXiv 2305.09781, algorithm 2.
    """

    scheme: Scheme = IID()
    name = "recursive rejection"
    lossless = True

    def law(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*b A"],
        target_probs: Float[Tensor, "*b A"],
    ) -> OutcomeLaw:
        """Return the outcome law by running the recursion on probabilities instead of coins."""
        left = target_probs
        reached = torch.ones_like(target_probs[..., 0])
        child: list[Tensor] = []
        for draft in drafts.unbind(dim=-1):
            present = draft >= 0
            accepted = accept_ratio(at_draft(left, draft), at_draft(draft_probs, draft)) * present
            child.append(reached * accepted)
            reached = reached * (1 - accepted)
            left = torch.where(present.unsqueeze(-1), residual(left, draft_probs), left)
        return OutcomeLaw(torch.stack(child, dim=-1), reached.unsqueeze(-1) * left)
