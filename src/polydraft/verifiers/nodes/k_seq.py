"""K-SEQ: sequential selection with one acceptance threshold for all drafts (SpecTr)."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.schemes import IID, Scheme, require_scheme
from polydraft.verifiers.outcome_law import (
    Counts,
    Drafts,
    Rate,
    Row,
    Shares,
    SharesRule,
    lone_draft,
    onto_first_copies,
    present,
)

PARTS = 64
ROUNDS = 7
"""Every round leaves one part of the interval: 2^42 parts. A threshold that is too large by one costs no exactness."""


@dataclass(frozen=True)
class KSeq(SharesRule):
    """Accept each draft in turn with probability min(1, target / (rho draft)), rho just large enough to be exact.

    Problem: k independent drafts of one law q, a target mass m of total a <= 1 and draft capacity 1: accept one draft
    so that no token is accepted more often than its mass.
    Rule: let beta(rho) = sum_x min(m(x) / rho, q(x)); rho in [1, k] solves 1 - (1 - beta)^k = rho beta. Accept the
    first draft x that passes a coin of probability min(1, m(x) / (rho q(x))); when none does, emit from
    norm(m - min(m / rho, q) (1 - (1 - beta)^k) / beta).
    Scheme: `IID`. A repeated token is tried again with a fresh coin; its shares are added up at its first copy.
    Exactness: every token is accepted min(m / rho, q) (1 - (1 - beta)^k) / beta of the time, which is at most m because
    1 - (1 - beta)^k - rho beta decreases in rho, so that every rho above the solution is exact too: the search keeps
    the upper end.
    Cost: O(K log K) per node for the interval of rho on which every minimum stays on its side, beta being A / rho + B
    there; then seven rounds of 64 values, and O(k) for the law.
    Acceptance: 1 - (1 - beta)^k, at least 1 - 1/e of the optimum.
    Source: SpecTr, arXiv 2310.15141, algorithm 3; the scaled form is our derivation.

    Raises:
        UnpairedScheme: the scheme is not `IID`.
    """

    scheme: Scheme = IID()
    name = "k-seq"
    lossless = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, (IID,), "K-SEQ")

    def marginal(self, draft_probs: Row, target_mass: Row, counts: Counts) -> Row:
        """Return min(m / rho, q) (1 - (1 - beta)^k) / beta."""
        return _marginal(_passing(draft_probs, target_mass, counts), counts).to(target_mass.dtype)

    def acceptance(self, draft_probs: Row, target_probs: Row, counts: Counts) -> Rate:
        """Return 1 - (1 - beta)^k."""
        beta = _passing(draft_probs, target_probs, counts).sum(dim=-1)
        return _accepted(beta, counts).to(target_probs.dtype)

    def divided(self, drafts: Drafts, draft_probs: Row, target_mass: Row) -> tuple[Shares, Row]:
        """Return Pr[the drafts before x_j fail] min(1, m(x_j) / (rho q(x_j))), at first copies, and the marginal."""
        alone = lone_draft(self.scheme, drafts, draft_probs, target_mass)
        if alone:
            return alone
        counts = present(drafts)
        passing = _passing(draft_probs, target_mass, counts)
        shares, marginal = _shares(drafts, draft_probs, passing), _marginal(passing, counts)
        return shares.to(target_mass.dtype), marginal.to(target_mass.dtype)


def threshold(draft_probs: Row, target_mass: Row, counts: Counts) -> Rate:
    """Return rho in [1, k] with 1 - (1 - beta(rho))^k = rho beta(rho), rounded up, in float64.

    Where the two sides agree for all rho, as at disjoint rows, any rho in [1, k] may come back.
    """
    most = counts.clamp_min(1).unsqueeze(-1)
    low, high, limited, free = _sides(draft_probs.double(), target_mass.double(), most)
    passed = (_too_small(high, limited, free, most) | (high <= 1))[..., :-1].sum(dim=-1, keepdim=True)
    low, high, limited, free = (row.gather(-1, passed) for row in (low, high, limited, free))
    width = high - low
    steps = torch.arange(1, PARTS + 1, dtype=low.dtype, device=low.device) / PARTS
    for _ in range(ROUNDS):
        beyond = _too_small(low + width * steps, limited, free, most)[..., :-1]  # true up to the solution
        low = low + width * beyond.sum(dim=-1, keepdim=True) / PARTS
        width = width / PARTS
    return (low + width).squeeze(-1)


def _sides(
    draft: Row, mass: Row, most: Int[Tensor, "*b 1"]
) -> tuple[Float[Tensor, "*b I"], Float[Tensor, "*b I"], Float[Tensor, "*b I"], Float[Tensor, "*b I"]]:
    """Cut [1, k] where m / rho and q change places for a token; beta(rho) = A / rho + B between two cuts.

    Returns:
        The lower and upper ends of the A + 1 intervals, and A and B of each.
    """
    drafted = draft > 0
    cuts = (mass / draft.where(drafted, 1.0)).where(drafted, 1.0).clamp_min(1)
    cuts, order = torch.minimum(cuts, most.to(cuts.dtype)).sort(dim=-1)
    limited = torch.nn.functional.pad((mass * drafted).gather(-1, order).cumsum(dim=-1), (1, 0))
    free = torch.nn.functional.pad(draft.gather(-1, order).flip(-1).cumsum(dim=-1).flip(-1), (0, 1))
    low = torch.nn.functional.pad(cuts, (1, 0), value=1.0)
    return low, torch.cat([cuts, most.to(cuts.dtype)], dim=-1), limited, free


def _too_small(
    rho: Float[Tensor, "*b n"], limited: Float[Tensor, "*b #n"], free: Float[Tensor, "*b #n"], most: Int[Tensor, "*b 1"]
) -> Bool[Tensor, "*b n"]:
    """Tell where 1 - (1 - beta)^k > rho beta, with beta = limited / rho + free."""
    beta = limited / rho + free
    return _accepted(beta, most) > rho * beta


def _passing(draft_probs: Row, target_mass: Row, counts: Counts) -> Row:
    """Return min(m / rho, q) in float64: how often one draft is this token and passes."""
    rho = threshold(draft_probs, target_mass, counts)
    return torch.minimum(target_mass.double() / rho.unsqueeze(-1), draft_probs.double())


def _shares(drafts: Drafts, draft_probs: Row, passing: Row) -> Shares:
    draft = draft_probs.double().gather(-1, drafts.clamp_min(0))
    passed = passing.gather(-1, drafts.clamp_min(0)) / draft.where(draft > 0, torch.ones_like(draft)) * (drafts >= 0)
    failed = torch.nn.functional.pad((1 - passed).cumprod(dim=-1)[..., :-1], (1, 0), value=1.0)
    return onto_first_copies(passed * failed, drafts)


def _marginal(passing: Row, counts: Counts) -> Row:
    beta = passing.sum(dim=-1)
    tries = _accepted(beta, counts) / beta.where(beta > 0, torch.ones_like(beta))
    return passing * tries.unsqueeze(-1)


def _accepted(beta: Rate, counts: Int[Tensor, "*#b"]) -> Rate:
    """Return 1 - (1 - beta)^k, keeping the digits of a small beta."""
    return -torch.expm1(counts * torch.log1p(-beta.clamp(0, 1 - 2.0**-53)))
