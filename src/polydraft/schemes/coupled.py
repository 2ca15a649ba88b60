"""Drafts that guess the target's draw, from the random numbers that it will be made with."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.schemes.scheme import Draws, SchemeOfLaw, SetLaw, Uniforms
from polydraft.schemes.without_replacement import WithoutReplacement


@dataclass(frozen=True)
class Coupled(SchemeOfLaw):
    """The k tokens whose clocks ring first, the clocks being shared with the target.

    Token i has a uniform u_i tied to the seed, the position in the text and the token id, hence an exponential time
    S_i = -log(1 - u_i). The target's token is argmin S_i / target_i; the drafts are the k smallest S_i / draft_i. So at
    one node their law is that of `WithoutReplacement`, but equal seeds give equal drafts, and drafts at equal positions
    of one text are dependent: in the subtrees of siblings, and in all steps that reach the position. A rule that looks
    at drafts below those which it keeps, as all do that verify from the leaves up, is biased: what failed is drafted
    again. Exact are the rules that are so for every single draft, not on average over drafts: `SharedNoise`, and
    `TopDown(NaiveMatch(Coupled()))`, which draws from the target with noise of its own, whatever was drafted.
    Source: Daliri et al., arXiv 2408.07978, for one draft.
    """

    name = "coupled"
    uniforms = Uniforms.SHARED
    set_law = SetLaw(Draws.SUCCESSIVE)

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Take the first k clocks to ring; `uniforms` are those of the shortlist's tokens, in its order."""
        return WithoutReplacement().sample(draft_probs, counts, uniforms, k)

    def probability(self, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
        """Return the probability over seeds, which is that of sampling without replacement."""
        return WithoutReplacement().probability(draft_probs, drafts)
