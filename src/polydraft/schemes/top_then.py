"""The likeliest tokens, and others that are sampled: one, or several independent ones."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, is_whole
from polydraft.probs import normalised, sample, without
from polydraft.schemes.iid import IID
from polydraft.schemes.scheme import MOST_CERTAIN, SchemeOfLaw, SetLaw, Uniforms, cut, indicator
from polydraft.schemes.top import TopK


@dataclass(frozen=True)
class TopThenSample(SchemeOfLaw):
    """The k - 1 likeliest tokens, then one drawn from the others (Hu et al., arXiv 2502.18779, section 4)."""

    name = "top then sample"
    uniforms = Uniforms.OF_DRAFTS
    set_law = SetLaw(drawn=1, most_certain=MOST_CERTAIN)

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Take the top counts - 1 atoms of each row and draw the last from the rest."""
        if k == 1:  # nothing is taken for certain
            return cut(_drawn(draft_probs, uniforms), counts)
        fixed = (counts - 1).clamp_min(0)
        drafts = TopK().sample(draft_probs, fixed, uniforms, k)
        last = _drawn(without(draft_probs, drafts), uniforms)
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


@dataclass(frozen=True)
class TopThenIID(SchemeOfLaw):
    """The `top` likeliest tokens, then independent draws from the others.

    Law: with q the draft row, T its `top` likeliest tokens (earlier atoms first among equals) and q' the row without
    T, renormalised, the drafts are T in descending order and k - top independent draws from q'. `top` = 0 is `IID`,
    `top` = k - 1 is `TopThenSample`, `top` >= k is `TopK`. Where T has all the mass, T's tokens are all the drafts.
    Containment: Pr[all drafts in H] = 1[T in H] q'(H)^(k - top).
    Source: Hu et al., arXiv 2502.18779, section 4, whose greedy drafting has k - 1 fixed tokens.

    Args:
        top: the number of tokens taken for certain.

    Raises:
        InvalidParameter: `top` is no integer from 0 to `MOST_CERTAIN`.
    """

    top: int
    uniforms = Uniforms.OF_DRAFTS

    def __post_init__(self) -> None:
        if not is_whole(self.top) or self.top < 0:
            raise InvalidParameter(f"top must be an integer >= 0, but is {self.top!r}.")
        if self.top > MOST_CERTAIN:
            raise InvalidParameter(
                f"top must be at most {MOST_CERTAIN}, but is {self.top}; TopK takes all for certain."
            )
        object.__setattr__(self, "set_law", SetLaw(most_certain=self.top))

    @property
    def name(self) -> str:
        """The scheme's name in tables."""
        return f"top {self.top} then iid"

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Take the top atoms, then invert the distribution function of the rest, one uniform per draft."""
        likeliest = TopK().sample(draft_probs, torch.full_like(counts, min(self.top, k)), uniforms, k)
        drawn = IID().sample(without(draft_probs, likeliest), counts, uniforms, k)
        fixed = torch.arange(k, device=counts.device) < self.top
        return cut(torch.where(fixed, likeliest, drawn), counts)

    def probability(self, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
        """Return the product of q'(x_i) after the top ones; zero where the first drafts are not the top ones."""
        head, drawn = drafts[..., : self.top], drafts[..., self.top :]
        chance = TopK().probability(draft_probs, head)
        rest = without(draft_probs, head)
        return chance * IID().probability(normalised(rest, rest), drawn)


def _drawn(weights: Float[Tensor, "*b K"], uniforms: Float[Tensor, "*b u"]) -> Int[Tensor, "*b 1"]:
    """Return one atom per row, drawn with the first uniform; -1 in a row without mass."""
    return sample(weights, uniforms[..., 0]).unsqueeze(-1).where(weights.amax(dim=-1, keepdim=True) > 0, -1)
