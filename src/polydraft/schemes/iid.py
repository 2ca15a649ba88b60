"""Independent drafts."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.schemes.scheme import SchemeOfLaw, Uniforms, cut, last_positive


@dataclass(frozen=True)
class IID(SchemeOfLaw):
    """k independent draws from the draft row; the same token may come twice. A row without mass gives no drafts."""

    name = "iid"
    uniforms = Uniforms.OF_DRAFTS

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Draw by inverting the distribution function, one uniform per draft."""
        cumulative = draft_probs.double().cumsum(dim=-1)
        points = uniforms[..., :k].double() * cumulative[..., -1:]
        drafts = torch.searchsorted(cumulative, points, right=True)
        last_possible = last_positive(draft_probs).unsqueeze(-1)
        return cut(torch.minimum(drafts, last_possible), counts)

    def probability(self, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
        """Return the product of the drafts' probabilities."""
        each = draft_probs.gather(-1, drafts.clamp_min(0))
        absent = (draft_probs.sum(dim=-1, keepdim=True) <= 0).to(each.dtype)
        return each.where(drafts >= 0, absent).prod(dim=-1)
