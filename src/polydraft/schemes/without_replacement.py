"""Successive drafts without replacement, drawn anew at every node or from numbers that the target shares."""

from dataclasses import dataclass

import torch

from polydraft.schemes.scheme import (
    Counts,
    Drafts,
    Draws,
    RandomNumbers,
    Rate,
    Row,
    SchemeOfLaw,
    SetLaw,
    Uniforms,
    clocks,
    cut,
    padded,
)


@dataclass(frozen=True)
class WithoutReplacement(SchemeOfLaw):
    """k successive draws, the row renormalised without the tokens already drawn.

    Equal in law to the k smallest of independent exponential clocks with rates `draft_probs` (Gumbel-top-k,
    arXiv 1903.06059), which is how it is sampled.
    """

    name = "without replacement"
    set_law = SetLaw(Draws.SUCCESSIVE)

    def sample(self, draft_probs: Row, counts: Counts, uniforms: RandomNumbers, k: int) -> Drafts:
        """Run one exponential clock per atom and take the first k to ring."""
        rings = clocks(draft_probs, uniforms)
        order = rings.topk(min(k, rings.shape[-1]), dim=-1, largest=False, sorted=True)
        return cut(padded(order.indices.where(order.values < torch.inf, -1), k), counts)

    def probability(self, draft_probs: Row, drafts: Drafts) -> Rate:
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

    def sample(self, draft_probs: Row, counts: Counts, uniforms: RandomNumbers, k: int) -> Drafts:
        """Take the first k clocks to ring; `uniforms` are those of the shortlist's tokens, in its order."""
        return WithoutReplacement().sample(draft_probs, counts, uniforms, k)

    def probability(self, draft_probs: Row, drafts: Drafts) -> Rate:
        """Return the probability over seeds, which is that of sampling without replacement."""
        return WithoutReplacement().probability(draft_probs, drafts)
