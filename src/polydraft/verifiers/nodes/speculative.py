"""Speculative sampling of one draft, and of several independent ones in turn (SpecInfer)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.schemes import IID, Product, Scheme, require_scheme
from polydraft.schemes.scheme import largest_count
from polydraft.verifiers.outcome_law import (
    Counts,
    DraftRows,
    Drafts,
    Rate,
    Row,
    Shares,
    SharesRule,
    accepted_alone,
    require_few,
)


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


@dataclass(frozen=True)
class RecursiveRejection(SharesRule):
    """Try the drafts in turn, each against what is left of the target after the rejections before it.

    Problem: independent drafts x_1, ..., x_k with laws q_1, ..., q_k (all the same under `IID`), a target mass of
    total a <= 1 and draft capacity 1: accept one draft so that no token is accepted more often than its mass.
    Rule: with m_1 the mass, accept x_j with probability min(1, m_j(x_j) / q_j(x_j)), which is b_j = sum min(m_j, q_j)
    on average; after a rejection m_{j+1} = (m_j - q_j)+ / (1 - b_j) is left, again a mass of total <= 1. When all are
    rejected, emit from norm(m_{k+1}).
    Scheme: independent drafts, `IID` or `Product` (SpecInfer with several draft models). A repeated token is rejected
    with probability one, but its rejection still updates the residual: skipping it biases the output.
    Exactness: x_j is independent of the rejections before it, so each step is speculative sampling; the marginal
    sum_j (1 - b_1) ... (1 - b_{j-1}) min(m_j, q_j) is at most the mass, by induction, with equality of what is left.
    Cost: O(k K) per node.
    Acceptance: 1 - (1 - b_1) ... (1 - b_k): the residuals do not depend on the drafts. Below the optimum for k >= 2.
    Source: arXiv 2305.09781, algorithm 2; the scaled form is our derivation.

    Raises:
        UnpairedScheme: the scheme does not draw independently.
    """

    scheme: Scheme = IID()
    name = "recursive rejection"
    lossless = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, (IID, Product), "Recursive rejection")

    def shares(self, drafts: Drafts, draft_probs: DraftRows, target_mass: Row) -> Shares:
        """Return Pr[the drafts before x_j are rejected] min(1, m_j(x_j) / q_j(x_j)) for each draft x_j."""
        left, missing = target_mass, shortfall(target_mass)
        reached = torch.ones_like(missing)
        shares: list[Tensor] = []
        for place, draft in enumerate(drafts.unbind(dim=-1)):
            row = self._row(draft_probs, place)
            accepted = accepted_alone(left, row, draft)
            shares.append(reached * accepted)
            reached = reached * (1 - accepted)
            left, missing, _ = after_rejection(left, missing, row)
        return torch.stack(shares, dim=-1)

    def marginal(self, draft_probs: DraftRows, target_mass: Row, counts: Counts) -> Row:
        """Return sum_j Pr[the first j - 1 drafts are rejected] min(m_j, q_j)."""
        left, missing = target_mass, shortfall(target_mass)
        reached = torch.ones_like(missing)
        marginal = torch.zeros_like(target_mass)
        for place in range(largest_count(counts)):
            row = self._row(draft_probs, place)
            reached = reached * (place < counts)
            marginal = marginal + reached.unsqueeze(-1) * torch.minimum(left, row)
            left, missing, rejected = after_rejection(left, missing, row)
            reached = reached * rejected
        return marginal

    def _row(self, draft_probs: DraftRows, place: int) -> Row:
        """Return the law of the draft at this place."""
        return draft_probs[..., place % draft_probs.shape[-2], :] if self.scheme.several_rows else draft_probs


def shortfall(mass: Row) -> Rate:
    """Return what a mass lacks to a distribution: 1 - |mass|, exactly zero where only rounding is missing."""
    missing = 1 - mass.sum(dim=-1)
    return missing.where(missing > 16 * torch.finfo(mass.dtype).eps, torch.zeros_like(missing))


def after_rejection(mass: Row, missing: Rate, draft: Row) -> tuple[Row, Rate, Rate]:
    """Return the mass left after a rejection, what it lacks to one, and the probability of the rejection.

    A draft x ~ q is rejected with probability 1 - b = |(m - q)+| + 1 - |m|, where m is the mass and b = sum min(m, q);
    (m - q)+ / (1 - b) is left of the mass. The sum on the right keeps its digits where m and q nearly agree.
    """
    left = (mass - draft).clamp_min(0)
    rejected = left.sum(dim=-1) + missing
    scale = rejected.where(rejected > 0, torch.ones_like(rejected))
    return left / scale.unsqueeze(-1), missing / scale, rejected
