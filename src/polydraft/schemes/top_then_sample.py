"""The likeliest tokens, and one more that is sampled."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import without
from polydraft.schemes.drawing import clocks, cut, indicator
from polydraft.schemes.top import TopK


@dataclass(frozen=True)
class TopThenSample:
    """The k - 1 likeliest tokens, then one drawn from the others (Hu et al., arXiv 2502.18779, section 4)."""

    name = "top then sample"
    deterministic = False

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Take the top counts - 1 atoms of each row and race the rest for the last place."""
        fixed = (counts - 1).clamp_min(0)
        drafts = TopK().sample(draft_probs, fixed, uniforms, k)
        rest = without(draft_probs, drafts)
        clock, last = clocks(rest, uniforms).min(dim=-1, keepdim=True)
        last = last.where(clock < torch.inf, -torch.ones_like(last))
        place = torch.arange(k, device=counts.device) == fixed.unsqueeze(-1)
        return cut(torch.where(place, last, drafts), counts)

    def probability(self, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
        """Return q(x_k) / (1 - q(top)) where the first k - 1 drafts are the top ones, else zero."""
        head, last = drafts[..., :-1], drafts[..., -1:]
        top = indicator(TopK(), draft_probs, head) if head.shape[-1] else torch.ones_like(draft_probs[..., 0])
        rest = without(draft_probs, head)
        total = rest.sum(dim=-1)
        drawn = rest.gather(-1, last.clamp_min(0)).squeeze(-1) / total.where(total > 0, torch.ones_like(total))
        absent = (total <= 0).to(drawn.dtype)
        return top * torch.where(last.squeeze(-1) >= 0, drawn, absent)
