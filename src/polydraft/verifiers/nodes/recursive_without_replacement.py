"""Recursive rejection for drafts sampled without replacement (RSD, Sequoia)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import normalised, residual, without
from polydraft.schemes import Scheme, WithoutReplacement
from polydraft.verifiers.law import OutcomeLaw, accept_ratio, at_draft


@dataclass(frozen=True)
class RecursiveRejectionWithoutReplacement:
    """Try the drafts in drafting order, each against the residual and the row it was really drawn from.

    Rule: with target_1 = target and draft_1 = draft, accept x_i with probability
    min(1, target_i(x_i) / draft_i(x_i)); after a rejection target_{i+1} = norm((target_i - draft_i)+) and draft_{i+1}
    is draft_i without x_i, renormalised; when all are rejected draw from the last residual.
    Scheme: successive sampling without replacement; uses the order of the drafts.
    Exactness: given the drafts before it, x_i is a draw from draft_i, so each step is speculative sampling.
    Cost: O(k K) per node.
    Acceptance: 1 once the drafts cover the target's support; below the scheme's optimum otherwise.
    Source: arXiv 2402.14160, algorithm 2 (RSD); arXiv 2402.12374, algorithm 2 (Sequoia).
    """

    scheme: Scheme = WithoutReplacement()
    name = "recursive rejection without replacement"
    lossless = True

    def law(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*b A"],
        target_probs: Float[Tensor, "*b A"],
    ) -> OutcomeLaw:
        """Return the outcome law by running the recursion on probabilities instead of coins."""
        left, law = target_probs, draft_probs
        reached = torch.ones_like(target_probs[..., 0])
        child: list[Tensor] = []
        for draft in drafts.unbind(dim=-1):
            present = draft >= 0
            accepted = accept_ratio(at_draft(left, draft), at_draft(law, draft)) * present
            child.append(reached * accepted)
            reached = reached * (1 - accepted)
            left = torch.where(present.unsqueeze(-1), residual(left, law), left)
            remaining = without(law, draft.unsqueeze(-1))
            law = normalised(remaining, remaining)
        return OutcomeLaw(torch.stack(child, dim=-1), reached.unsqueeze(-1) * left)
