"""Recursive rejection for drafts sampled without replacement (RSD, Sequoia)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polydraft.probs import normalised, without
from polydraft.schemes import Scheme, WithoutReplacement, require_scheme
from polydraft.verifiers.nodes.recursive_iid import after_rejection, shortfall
from polydraft.verifiers.outcome_law import Counts, Drafts, OutcomeLaw, Row, Shares, SharesRule, accepted_alone
from polydraft.verifiers.selection.ordered import Numbers, Places
from polydraft.verifiers.selection.rejections import MOST, average_accepted
from polydraft.verifiers.selection.rule import node_by_node


@dataclass(frozen=True)
class RecursiveRejectionWithoutReplacement(SharesRule):
    """Try the drafts in drafting order, each against the residual and the row it was really drawn from.

    Problem: successive drafts x_1, ..., x_k, a target mass m of total a <= 1 and draft capacity 1: accept one draft
    so that no token is accepted more often than its mass.
    Rule: with m_1 = m and q_1 the draft row, accept x_j with probability min(1, m_j(x_j) / q_j(x_j)); after a
    rejection, which has probability 1 - b_j, m_{j+1} = (m_j - q_j)+ / (1 - b_j) is left and q_{j+1} is q_j without x_j,
    renormalised; when all are rejected emit from norm(m_{k+1}).
    Scheme: successive sampling without replacement; uses the order of the drafts.
    Exactness: given the drafts before it, x_j is a draw from q_j, so each step is speculative sampling.
    Cost: O(k K) per node for the law.
    Acceptance: 1 once the drafts cover the target's support; below the scheme's optimum otherwise. The residual
    depends on the rejected tokens R only through one number: m_{j+1} = (m - M q)+ / g(M), where g(M) = |(m - M q)+| + 1
    - a, M = 0 before the first draft and M grows by g(M) / (1 - q(R)) with each rejection. So acceptance and marginal
    are sums over the sequences of k - 1 rejected tokens (`average_accepted`), O(K^(k-1)) on the host: k <= 4 at K =
    256, k <= 5 at K = 64, and beyond that where few sequences are likely. The law is not affected, for any k.
    Source: arXiv 2402.14160, algorithm 2 (RSD); arXiv 2402.12374, algorithm 2 (Sequoia); the number M and the scaled
    form are our derivation.

    Raises:
        UnpairedScheme: the scheme is not `WithoutReplacement`.
    """

    scheme: Scheme = WithoutReplacement()
    name = "recursive rejection without replacement"
    lossless = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, (WithoutReplacement,), "Recursive rejection without replacement")

    def law(self, drafts: Drafts, draft_probs: Row, target_probs: Row) -> OutcomeLaw:
        """Return the outcome law by running the recursion on probabilities instead of coins."""
        shares, left = _recursion(drafts, draft_probs, target_probs)
        rejected = (1 - shares.sum(dim=-1, keepdim=True)).clamp_min(0)
        return OutcomeLaw(shares, rejected * normalised(left, target_probs))

    def shares(self, drafts: Drafts, draft_probs: Row, target_mass: Row) -> Shares:
        """Return Pr[the drafts before x_j are rejected] min(1, m_j(x_j) / q_j(x_j)) for each draft x_j."""
        return _recursion(drafts, draft_probs, target_mass)[0]

    def marginal(self, draft_probs: Row, target_mass: Row, counts: Counts) -> Row:
        """Return sum_R Pr[R is rejected] min(m_R, q_R) over the sequences R of at most counts - 1 rejected tokens.

        Raises:
            NotConverged: there are too many of them.
        """
        return node_by_node(_average, draft_probs, target_mass, counts)[1]

    def follows(self, drafts: int, tokens: int) -> bool:
        """Tell whether the marginal can follow all orders of so many drafts of so many tokens."""
        return tokens ** (drafts - 1) <= MOST


def _average(draft_row: Numbers, target_mass: Numbers, count: int, drafts: Places) -> tuple[Numbers, Numbers]:
    return np.zeros(len(drafts)), average_accepted(draft_row, target_mass, count)


def _recursion(drafts: Drafts, draft_probs: Row, mass: Row) -> tuple[Shares, Row]:
    """Return the drafts' shares, and the mass that is left when all are rejected."""
    left, missing, law = mass, shortfall(mass), draft_probs
    reached = torch.ones_like(missing)
    shares: list[Tensor] = []
    for draft in drafts.unbind(dim=-1):
        there = draft >= 0
        accepted = accepted_alone(left, law, draft)
        shares.append(reached * accepted)
        reached = reached * (1 - accepted)
        after, missing_after, _ = after_rejection(left, missing, law)
        left, missing = torch.where(there.unsqueeze(-1), after, left), torch.where(there, missing_after, missing)
        remaining = without(law, draft.unsqueeze(-1))
        law = normalised(remaining, remaining)
    return torch.stack(shares, dim=-1), left
