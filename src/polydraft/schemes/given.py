"""Drafts from outside."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.schemes.scheme import MOST_CERTAIN, SchemeOfLaw, SetLaw, Uniforms, indicator
from polydraft.schemes.top import TopK


@dataclass(frozen=True)
class Given(SchemeOfLaw):
    """Tokens from outside, such as an n-gram's continuation: the shortlist itself, in its order."""

    name = "given"
    uniforms = Uniforms.NONE
    set_law = SetLaw(most_certain=MOST_CERTAIN, alike=True)

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Return the first atoms of the shortlist that have any mass."""
        return TopK().sample((draft_probs > 0).to(draft_probs.dtype), counts, uniforms, k)

    def probability(self, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
        """Return one for the shortlist's own order and zero for all other drafts."""
        return indicator(self, draft_probs, drafts)
