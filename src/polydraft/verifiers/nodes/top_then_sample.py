"""The optimal rule for Hu's greedy drafting: top tokens taken for certain, one more sampled from the others."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.probs import normalised, residual, without
from polydraft.schemes import Scheme, TopK, TopThenSample, require_scheme
from polydraft.schemes.scheme import largest_count
from polydraft.verifiers.nodes.speculative import after_rejection, shortfall
from polydraft.verifiers.outcome_law import (
    Counts,
    Drafts,
    OutcomeLaw,
    Row,
    Shares,
    SharesRule,
    accepted_alone,
    law_of_shares,
    lone_draft,
    present,
)


@dataclass(frozen=True)
class TopThenSampleRule(SharesRule):
    """Verify the sampled draft by the single-draft rule; a correction that hits a top token accepts that token.

    Problem: the k - 1 likeliest tokens T for certain and a draw x from draft', the draft row without T, renormalised;
    a target mass m of total a <= 1 and draft capacity 1: accept one draft so that no token is accepted more often than
    its mass.
    Rule: accept x with probability min(1, m(x) / draft'(x)); else accept y in T with probability m(y) / (1 - b), where
    b = sum min(m, draft') is what x is accepted with on average; else emit from norm((m - draft')+) off T. For a = 1
    this is: draw y from norm((m - draft')+) and accept y's node if y is in T, where draft' is zero.
    Scheme: TopThenSample.
    Exactness: speculative sampling of the target against draft'. The law takes T from the drafts, so it is exact for
    every scheme whose last draft is, given the others, drawn from the draft row without them (WithoutReplacement and
    ConditionalPoisson too); `marginal` and `acceptance` are those of TopThenSample.
    Cost: O(K log K) per node.
    Acceptance: target(T) + sum_x min(target(x), draft'(x)), the optimum of the scheme.
    Source: Hu et al., arXiv 2502.18779, section 4.

    Raises:
        UnpairedScheme: the scheme is not `TopThenSample`.
    """

    scheme: Scheme = TopThenSample()
    name = "top then sample"
    lossless = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, (TopThenSample,), "The top-then-sample rule")

    def law(self, drafts: Drafts, draft_probs: Row, target_probs: Row) -> OutcomeLaw:
        """Return the outcome law; the last present draft is the sampled one."""
        alone = lone_draft(self.scheme, drafts, draft_probs, target_probs)
        if alone:
            return law_of_shares(*alone, target_probs)
        is_last, last, top = _apart(drafts)
        drawn = _drawn(draft_probs, top) * (last >= 0).unsqueeze(-1)
        accepted = _accepted(drawn, target_probs, last)
        left = (1 - accepted) * residual(target_probs, drawn)
        return OutcomeLaw(_shared(left, top, is_last, accepted), without(left, top))

    def shares(self, drafts: Drafts, draft_probs: Row, target_mass: Row) -> Shares:
        """Return min(1, m(x) / draft'(x)) for the last draft x, and what its rejection leaves to the top ones."""
        is_last, last, top = _apart(drafts)
        drawn = _drawn(draft_probs, top) * (last >= 0).unsqueeze(-1)
        accepted = _accepted(drawn, target_mass, last)
        left, _, _ = after_rejection(target_mass, shortfall(target_mass), drawn)
        return _shared((1 - accepted) * left, top, is_last, accepted)

    def marginal(self, draft_probs: Row, target_mass: Row, counts: Counts) -> Row:
        """Return the mass itself on the top tokens and min(m, draft') elsewhere; zero where there is no draft."""
        fixed, most = (counts - 1).clamp_min(0), largest_count(counts)
        top = TopK().sample(draft_probs, fixed, draft_probs, most)
        accepted = torch.minimum(target_mass, _drawn(draft_probs, top))
        certain = target_mass - without(target_mass, top)
        return (accepted + certain) * (counts > 0).unsqueeze(-1)


def _apart(drafts: Drafts) -> tuple[Bool[Tensor, "*b k"], Int[Tensor, "*b"], Drafts]:
    """Return which draft is the last present one, that one (-1 for none), and the others with -1 in its place."""
    place = present(drafts).unsqueeze(-1) - 1
    is_last = torch.arange(drafts.shape[-1], device=drafts.device) == place
    return is_last, drafts.gather(-1, place.clamp_min(0)).squeeze(-1), drafts.masked_fill(is_last, -1)


def _accepted(drawn: Row, mass: Row, last: Int[Tensor, "*b"]) -> Float[Tensor, "*b 1"]:
    """Return min(1, m(x) / draft'(x)) for the last draft x, zero where there is none."""
    return accepted_alone(mass, drawn, last).unsqueeze(-1)


def _shared(left: Row, top: Drafts, is_last: Bool[Tensor, "*b k"], accepted: Float[Tensor, "*b 1"]) -> Shares:
    """Return the top drafts' shares of what the last one leaves, and its own."""
    return torch.where(is_last, accepted, left.gather(-1, top.clamp_min(0)) * (top >= 0))


def _drawn(draft_probs: Row, top: Drafts) -> Row:
    remaining = without(draft_probs, top)
    return normalised(remaining, remaining)
