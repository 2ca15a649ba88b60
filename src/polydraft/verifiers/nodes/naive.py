"""Naive match: draw from the target and keep the draft if it is the token drawn."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import without
from polydraft.schemes import Scheme, TopK
from polydraft.verifiers.law import OutcomeLaw


@dataclass(frozen=True)
class NaiveMatch:
    """Draw y from the target; accept draft i if y is its token, else emit y.

    Rule: child_i = target(x_i) for the first draft of each token, rest = the target off the drafts.
    Scheme: any, because the drafts' probabilities are not used.
    Exactness: the emitted token is a draw from the target by construction.
    Cost: O(k K) per node.
    Acceptance: E[target(C)] for drafts C. Optimal for deterministic schemes, where it is target(C); the worst of
    the exact rules for sampled drafts.
    Source: SpecInfer's greedy and naive verification, arXiv 2305.09781, section 4.3; REST, arXiv 2311.08252.
    """

    scheme: Scheme = TopK()
    name = "naive match"
    lossless = True

    def law(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*b A"],
        target_probs: Float[Tensor, "*b A"],
    ) -> OutcomeLaw:
        """Return the outcome law of one target draw."""
        earlier = torch.tril(drafts.unsqueeze(-1) == drafts.unsqueeze(-2), diagonal=-1).any(dim=-1)
        mass = target_probs.gather(-1, drafts.clamp_min(0))
        child = mass.where((drafts >= 0) & ~earlier, torch.zeros_like(mass))
        return OutcomeLaw(child, without(target_probs, drafts))
