"""The likeliest tokens: deterministic drafts."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.schemes.scheme import MOST_CERTAIN, SchemeOfLaw, SetLaw, Uniforms, cut, indicator, padded


@dataclass(frozen=True)
class TopK(SchemeOfLaw):
    """The k likeliest tokens: a function of the row, no randomness."""

    name = "top-k"
    uniforms = Uniforms.NONE
    set_law = SetLaw(most_certain=MOST_CERTAIN)

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Take the largest entries, earlier atoms first among equals; the uniforms are not used."""
        values, order = draft_probs.sort(dim=-1, descending=True, stable=True)
        return cut(padded(order[..., :k].where(values[..., :k] > 0, -1), k), counts)

    def probability(self, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
        """Return one for the drafts that `sample` returns and zero for all others."""
        return indicator(self, draft_probs, drafts)
