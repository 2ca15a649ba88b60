"""The optimal rule for Hu's greedy drafting: top tokens taken for certain, one more sampled from the others."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import normalised, residual, without
from polydraft.schemes import Scheme, TopThenSample
from polydraft.verifiers.law import OutcomeLaw, accept_ratio, at_draft


@dataclass(frozen=True)
class TopThenSampleRule:
    """Verify the sampled draft by the single-draft rule; a correction that hits a top token accepts that token.

    Rule: let T be the first k - 1 drafts and draft' the draft row without T, renormalised. Accept the last draft
    x with probability min(1, target(x) / draft'(x)); else draw y from norm((target - draft')+) and accept y's node
    if y is in T, where draft' is zero, so that all of T's target mass is in the residual.
    Scheme: TopThenSample.
    Exactness: speculative sampling of the target against draft'.
    Cost: O(K) per node.
    Acceptance: target(T) + sum_x min(target(x), draft'(x)), the optimum of the scheme.
    Source: Hu et al., arXiv 2502.18779, section 4.
    """

    scheme: Scheme = TopThenSample()
    name = "top then sample"
    lossless = True

    def law(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*b A"],
        target_probs: Float[Tensor, "*b A"],
    ) -> OutcomeLaw:
        """Return the outcome law; the last present draft is the sampled one."""
        place = (drafts >= 0).sum(dim=-1, keepdim=True) - 1
        last = drafts.gather(-1, place.clamp_min(0)).squeeze(-1)
        is_last = torch.arange(drafts.shape[-1], device=drafts.device) == place
        top = drafts.where(~is_last, torch.full_like(drafts, -1))
        remaining = without(draft_probs, top)
        law = normalised(remaining, remaining) * (last >= 0).unsqueeze(-1)
        accepted = accept_ratio(at_draft(target_probs, last), at_draft(law, last)) * (last >= 0)
        after = (1 - accepted).unsqueeze(-1) * residual(target_probs, law)
        hits = after.gather(-1, top.clamp_min(0)) * (top >= 0)
        return OutcomeLaw(hits + is_last * accepted.unsqueeze(-1), without(after, top))
