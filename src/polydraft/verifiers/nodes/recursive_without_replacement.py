"""Recursive rejection for drafts sampled without replacement (RSD, Sequoia)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polydraft.errors import NotConverged
from polydraft.machine_code import compiled
from polydraft.probs import normalised, without
from polydraft.schemes import Scheme, WithoutReplacement, require_scheme
from polydraft.verifiers.nodes.speculative import after_rejection, shortfall
from polydraft.verifiers.outcome_law import Counts, Drafts, OutcomeLaw, Row, Shares, SharesRule, accepted_alone
from polydraft.verifiers.selection.rule import Numbers, Places, node_by_node

ROUNDING = 2.0**-48
"""What a mass of one may seem to lack for rounding."""
SCALE = 2.0**500
"""Draft probabilities are multiplied by this where they divide, so that a subnormal one has a finite inverse."""
TOGETHER = 2**10
"""How many sequences are looked at together, to bound the memory."""
NEGLIGIBLE = 1e-18
"""Sequences less likely than this are left out; all together they are less likely than 2e-11."""
MOST = 2**24
"""The most sequences, with the last draft, that are looked at: a thirtieth of a second."""
NONE: Places = np.zeros((1, 0), dtype=np.int64)
"""The empty sequence."""

Table = NDArray[np.float64]


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


def average_accepted(draft_row: Numbers, target_mass: Numbers, count: int) -> Numbers:
    """Return how often each token is accepted on average over `count` drafts without replacement, tried in turn.

    With M_R for the multiple of the draft row that is off the mass when the tokens R have been rejected in turn, and
    one more draft (`RecursiveRejectionWithoutReplacement`), that is mass - sum_R Pr[R | as many are rejected] (mass -
    M_R draft)+ over the sequences R of count - 1 tokens. M_R grows with the draft probability of R's last token: one
    pass over tokens in this order finds which are exhausted at each M_R. So there are O(K log K) steps for two drafts
    and O(K^(count - 1)) for more.

    Raises:
        NotConverged: there are more than `MOST` sequences.
    """
    if count < 2:
        return np.minimum(draft_row, target_mass)
    row = _by_ratio(draft_row, target_mass)
    ended, several = np.zeros((2, len(row.draft) + 1)), [_Sequences(NONE, np.ones(1), np.zeros(1), np.ones(1))]
    for _ in range(count - 2):
        several = [longer for batch in several for longer in _longer(batch, _followed(row, batch, ended))]
        sequences = sum(len(batch.weight) for batch in several) * len(row.draft)
        if sequences > MOST:
            raise NotConverged(
                f"The acceptance of {count} drafts without replacement cannot be enumerated: {sequences} sequences of "
                f"rejected drafts are more than {MOST}; ask for fewer drafts or a shorter shortlist."
            )
    for batch in several:
        _end(row, batch, _followed(row, batch, ended), ended)
    return _accepted(row, ended, len(draft_row))


class _Row(NamedTuple):
    """Tokens that may be drafted, in ascending order of the ratio mass / draft.

    Args:
        tokens: the tokens in this order.
        light: their places, in ascending order of the draft row.
        draft: the draft row times `SCALE`.
        mass: the target mass.
        ratio: mass / draft.
        above: the sums of draft and mass over all but the first i of them.
        rest: what no draft takes off the mass: that of other tokens, and what the mass lacks to one.
    """

    tokens: Places
    light: Places
    draft: Numbers
    mass: Numbers
    ratio: Numbers
    above: Table
    rest: float


class _Sequences(NamedTuple):
    """B sequences of j rejected tokens.

    Args:
        tokens: the places of the tokens, in a table of B rows.
        weight: the probability of each, given that j tokens are rejected.
        dose: M, the multiple of the draft row that is off the mass.
        left: the probability that all j drafts are rejected: |(mass - M draft)+| and the rest.
    """

    tokens: Places
    weight: Numbers
    dose: Numbers
    left: Numbers


class _Following(NamedTuple):
    """What follows B sequences if one more draft is rejected.

    Args:
        chance: the weight of the sequence with one more token, for every token.
        others: the sum of the draft row over the tokens that are not rejected before.
        dose, left: as in `_Sequences`, after that draft.
    """

    chance: Table
    others: Numbers
    dose: Numbers
    left: Numbers


def _longer(before: _Sequences, following: _Following) -> list[_Sequences]:
    """Return all sequences with one more token, a few at a time."""
    number, token = (following.chance > NEGLIGIBLE).nonzero()
    tokens = np.column_stack((before.tokens[number], token))
    weight, dose, left = following.chance[number, token], following.dose[number], following.left[number]
    some = [slice(start, start + TOGETHER) for start in range(0, len(number), TOGETHER)]
    return [_Sequences(tokens[few], weight[few], dose[few], left[few]) for few in some]


@compiled
def _by_ratio(draft: Numbers, mass: Numbers) -> _Row:
    rest = max(1 - mass.sum(), 0.0)
    rest = rest if rest > ROUNDING else 0.0
    drawn = np.flatnonzero(draft > 0)
    rest += mass[draft <= 0].sum()
    ratios = mass[drawn] / (draft[drawn] * SCALE)
    order = ratios.argsort(kind="mergesort")
    tokens, above = drawn[order], np.zeros((2, len(drawn) + 1))
    law, need = draft[tokens] * SCALE, mass[tokens]
    for place in range(len(drawn) - 1, -1, -1):
        above[0, place], above[1, place] = above[0, place + 1] + law[place], above[1, place + 1] + need[place]
    return _Row(tokens, law.argsort(kind="mergesort"), law, need, ratios[order], above, rest)


@compiled
def _followed(row: _Row, before: _Sequences, ended: Table) -> _Following:
    """Reject one more draft: a token in proportion to what its draft probability is above its mass.

    Sequences that no token can follow are added to those that have ended.
    """
    number, size = len(before.weight), len(row.draft)
    chance, others, doses, left = np.ones((number, size)), np.zeros(number), np.empty(number), np.empty(number)
    for b in range(number):
        for token in before.tokens[b]:
            chance[b, token] = 0
        for i in range(size):
            others[b] += chance[b, i] * row.draft[i]
        dose, total = before.dose[b], 0.0
        step = before.left[b] / others[b] if others[b] > 0 else 0.0
        doses[b] = dose + step
        place = np.searchsorted(row.ratio, float(doses[b]), side="right")
        left[b] = max(row.above[1, place] - doses[b] * row.above[0, place], 0.0) + row.rest
        for i in range(size):
            if chance[b, i] > 0:  # what is rejected already may be too likely for a step among tiny others
                chance[b, i] = max(step * row.draft[i] - max(row.mass[i] - dose * row.draft[i], 0.0), 0.0)
            total += chance[b, i]
        for i in range(size):
            chance[b, i] *= before.weight[b] / total if total > 0 else 0.0
        if total <= 0:
            ended[0, place] += before.weight[b]
            ended[1, place] += before.weight[b] * doses[b]
    return _Following(chance, others, doses, left)


@compiled
def _end(row: _Row, before: _Sequences, following: _Following, ended: Table) -> None:
    """Add the weights of sequences with one more token, and the doses after the draft that follows, weighted.

    They are added up by how many tokens are exhausted at the dose.
    """
    free = np.ones(len(row.draft))
    for b in range(len(before.weight)):
        free[:] = 1
        for token in before.tokens[b]:
            free[token] = 0
        place = np.searchsorted(row.ratio, float(following.dose[b]), side="right")
        for i in row.light:
            if following.chance[b, i] <= 0:
                continue
            others = following.others[b] - row.draft[i]
            if others < row.draft[i]:  # digits are lost; for one token at most
                free[i], others = 0, 0.0
                for j in range(len(free)):
                    others += free[j] * row.draft[j]
                free[i] = 1
            dose = following.dose[b] + (following.left[b] / others if others > 0 else 0.0)
            while place < len(row.ratio) and row.ratio[place] <= dose:
                place += 1
            ended[0, place] += following.chance[b, i]
            ended[1, place] += following.chance[b, i] * dose


@compiled
def _accepted(row: _Row, ended: Table, size: int) -> Numbers:
    """Return mass - sum of weight (mass - dose draft)+ of all that have ended, by token."""
    result, weight, dose = np.zeros(size), 0.0, 0.0
    for place in range(len(row.tokens)):
        weight, dose = weight + ended[0, place], dose + ended[1, place]
        accepted = row.mass[place] * (1 - weight) + row.draft[place] * dose
        result[row.tokens[place]] = min(max(accepted, 0.0), row.mass[place])
    return result
