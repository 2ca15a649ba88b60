"""Successive drafts without replacement."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.schemes.scheme import Draws, SchemeOfLaw, SetLaw, clocks, cut, padded


@dataclass(frozen=True)
class WithoutReplacement(SchemeOfLaw):
    """k successive draws, the row renormalised without the tokens already drawn.

    Equal in law to the k smallest of independent exponential clocks with rates `draft_probs` (Gumbel-top-k,
    arXiv 1903.06059), which is how it is sampled.
    """

    name = "without replacement"
    set_law = SetLaw(Draws.SUCCESSIVE)

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Run one exponential clock per atom and take the first k to ring."""
        rings = clocks(draft_probs, uniforms)
        order = rings.topk(min(k, rings.shape[-1]), dim=-1, largest=False, sorted=True)
        return cut(padded(order.indices.where(order.values < torch.inf, -1), k), counts)

    def probability(self, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
        """Return the product of q(x_i) / (1 - q(x_1) - ... - q(x_{i-1})); zero where a token repeats."""
        result = torch.ones_like(draft_probs[..., 0])
        left = draft_probs
        for i in range(drafts.shape[-1]):
            draft = drafts[..., i : i + 1]
            drawn = left.gather(-1, draft.clamp_min(0)).squeeze(-1)
            total = left.sum(dim=-1)
            step = drawn / total.where(total > 0, torch.ones_like(total))
            absent = (total <= 0).to(step.dtype)
            result = result * torch.where(draft.squeeze(-1) >= 0, step, absent)
            left = left.scatter(-1, draft.clamp_min(0), left.gather(-1, draft.clamp_min(0)) * (draft < 0))
        return result
