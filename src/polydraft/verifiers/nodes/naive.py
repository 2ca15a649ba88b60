"""Naive match: draw from the target and keep the draft if it is the token drawn."""

from dataclasses import dataclass

import torch

from polydraft.probs import without
from polydraft.schemes import Scheme, TopK, check_scheme
from polydraft.theory import inclusion
from polydraft.verifiers.outcome_law import Counts, DraftRows, Drafts, OutcomeLaw, Row, Shares, SharesRule, first_copies


@dataclass(frozen=True)
class NaiveMatch(SharesRule):
    """Draw y from the target; accept draft i if y is its token, else emit y.

    Problem: drafts C of any law, known or not; emit a token that follows the target, one of C where it happens to be.
    Rule: child_i = target(x_i) for the first draft of each token, rest = the target off the drafts. For a target mass
    share_i = mass(x_i), marginal(x) = mass(x) Pr[x is drafted].
    Scheme: any, because the drafts' probabilities are not used.
    Exactness: the emitted token is a draw from the target by construction.
    Cost: O(k K) per node.
    Acceptance: E[target(C)] = sum_x target(x) Pr[x in C]. Optimal for deterministic schemes, where it is target(C);
    the worst of the exact rules for sampled drafts.
    Source: SpecInfer's greedy and naive verification, arXiv 2305.09781, section 4.3; REST, arXiv 2311.08252.
    """

    scheme: Scheme = TopK()
    name = "naive match"
    lossless = True
    best_alone = False

    def __post_init__(self) -> None:
        check_scheme(self.scheme, "Naive match")

    def law(self, drafts: Drafts, draft_probs: DraftRows, target_probs: Row) -> OutcomeLaw:
        """Return the outcome law of one target draw."""
        return OutcomeLaw(self.shares(drafts, draft_probs, target_probs), without(target_probs, drafts))

    def shares(self, drafts: Drafts, draft_probs: DraftRows, target_mass: Row) -> Shares:
        """Return the target mass of each drafted token, at its first copy."""
        mass = target_mass.gather(-1, drafts.clamp_min(0))
        return mass.where(first_copies(drafts), torch.zeros_like(mass))

    def marginal(self, draft_probs: DraftRows, target_mass: Row, counts: Counts) -> Row:
        """Return mass(x) Pr[x is drafted]."""
        return target_mass * inclusion(self.scheme, draft_probs, counts).to(target_mass.dtype)
