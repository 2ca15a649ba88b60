"""Speculative sampling: the classic rule for one draft per node."""

from dataclasses import dataclass

import torch

from polydraft.schemes import IID, Scheme, require_scheme
from polydraft.schemes.scheme import largest_count
from polydraft.verifiers.outcome_law import Counts, Drafts, Rate, Row, Shares, SharesRule, accepted_alone
from polydraft.verifiers.traits import require_few


@dataclass(frozen=True)
class SpeculativeSampling(SharesRule):
    """Accept the draft x with probability min(1, target(x) / draft(x)), else draw from norm((target - draft)+).

    Problem: one draft x ~ draft; emit a token that follows the target and is x as often as possible.
    Rule: share(x) = min(1, mass(x) / draft(x)), marginal = min(mass, draft), for any target mass of total <= 1.
    Scheme: one independent draft per node.
    Exactness: min(target, draft) + (1 - overlap) norm((target - draft)+) = target.
    Cost: O(K) per node.
    Acceptance: sum_x min(target(x), draft(x)), optimal for one draft.
    Source: arXiv 2211.17192, algorithm 1; arXiv 2302.01318, algorithm 2.

    Raises:
        UnpairedScheme: a node has more than one draft.
    """

    scheme: Scheme = IID()
    name = "speculative sampling"
    most_drafts = 1
    lossless = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, (IID,), "Speculative sampling")

    def shares(self, drafts: Drafts, draft_probs: Row, target_mass: Row) -> Shares:
        """Return min(1, mass(x) / draft(x)) for the draft x, zero where it is absent."""
        require_few(self, drafts.shape[-1])
        return accepted_alone(target_mass, draft_probs, drafts.squeeze(-1)).unsqueeze(-1)

    def marginal(self, draft_probs: Row, target_mass: Row, counts: Counts) -> Row:
        """Return min(mass, draft) where there is a draft."""
        return torch.minimum(target_mass, draft_probs) * (counts > 0).unsqueeze(-1)

    def acceptance(self, draft_probs: Row, target_probs: Row, counts: Counts) -> Rate:
        """Return sum_x min(target(x), draft(x)) where there is a draft, else zero."""
        require_few(self, largest_count(counts))
        return super().acceptance(draft_probs, target_probs, counts)
