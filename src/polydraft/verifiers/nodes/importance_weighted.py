"""Importance-weighted selection: pick one of the drafts with weights from a maximum flow, then verify that one."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from polydraft.errors import InvalidParameter, is_whole
from polydraft.machine_code import compiled
from polydraft.schemes import IID, Product, Scheme, require_scheme
from polydraft.verifiers.selection.rule import Flags, Numbers, Places, SelectionRule

NOISE = 1e-15
"""Masses below this are rounding errors."""


class _Entrant(NamedTuple):
    """A draft, or the winner of a match: the law of its token, and the probability of being each of a node's drafts."""

    law: Numbers
    chances: Numbers


@dataclass(frozen=True)
class ImportanceWeighted(SelectionRule):
    """Select one draft with weights that bring its law close to the target's, then apply the single-draft rule to it.

    Problem: two independent drafts, x_1 ~ l and x_2 ~ r, a target mass m of total <= 1 and draft capacity 1: accept one
    draft so that no token is accepted more often than its mass.
    Rule: of two different tokens i, j select i with probability w_ij (w_ji = 1 - w_ij), so that the selected token is i
    with probability s_i = l_i r_i + sum_j (l_i r_j + l_j r_i) w_ij; accept it with probability min(1, m_i / s_i), else
    emit from norm((m - s)+). The weights maximise sum_i min(s_i, m_i), a linear program in w and min(s, m):
    a maximum flow from pairs to their tokens, which is found exactly (`share_pairs`).
    Truncated program: sort the tokens by m - (l + r) / 2 descending; only pairs of the first `free` tokens are
    variables, in every other pair the earlier token is selected.
    Truncated alphabet: the `alphabet` likeliest target tokens come before all others in that order, and only their
    pairs are variables. (The paper drops drafts off this alphabet and accepts what it selects with the alphabet's
    target mass; selecting them last is exact too and can still accept them.)
    More drafts: a tournament. Drafts are paired, the winners paired again, a draft without partner goes on; a winner's
    law s is known exactly, and winners of different pairs are independent, so every match is the problem above.
    Scheme: `IID`, or `Product` with a row per draft. The paper has one weight per ordered pair there; one per unordered
    pair loses nothing, since s depends on their mean (weighted with the orders' probabilities) only.
    Exactness: s is the exact law of the selected token whatever the weights are, so it is speculative sampling.
    Cost: one flow per match and node, solved once for equal nodes: O(f^2) per path for f free tokens and usually fewer
    than 2 f paths; O(K log K + k^2) per match for the rest. Runs on the host.
    Acceptance: sum min(m, s): the optimum for two drafts with `free` and `alphabet` None, below it for more. The pairs
    outside the program cost little where both rows are concentrated, much where they are not: softmaxes of normal
    logits, K = 64, two drafts: .637 with five free tokens, .737 with 40, .741 with all.
    Source: Khisti et al., arXiv 2410.18234, theorem 1, section 4 (algorithm 1, remark 4) and appendix G.

    Args:
        free: how many tokens the program treats freely; None for all of the alphabet.
        alphabet: how many target tokens the program knows; None for all.

    Raises:
        InvalidParameter: a number of tokens that is none.
        UnpairedScheme: the scheme does not draw independently.
    """

    scheme: Scheme = IID()
    free: int | None = 5
    alphabet: int | None = 40
    name = "importance weighted"
    lossless = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, (IID, Product), "Importance-weighted selection")
        for name, value in (("free", self.free), ("alphabet", self.alphabet)):
            if value is not None and (not is_whole(value) or value < 0):
                raise InvalidParameter(f"{name} must be an integer >= 0, or None for all, but is {value!r}.")

    def at_node(self, row: Numbers, mass: Numbers, count: int, drafts: Places) -> tuple[Numbers, Numbers]:
        """Return the shares of a node's drafts, copies of a token apart, and min(m, s)."""
        rows, alone = row.reshape(-1, row.shape[-1]), np.eye(count, len(drafts))
        entrants = [_Entrant(rows[place % len(rows)], alone[place]) for place in range(count)]
        while len(entrants) > 1:
            pairs = zip(entrants[::2], entrants[1::2], strict=False)
            matches = [self._match(left, right, mass, drafts) for left, right in pairs]
            entrants = matches + entrants[2 * len(matches) :]
        law, chances = entrants[0]
        marginal = np.minimum(mass, law)
        accepted = marginal[drafts] / np.where(law[drafts] > 0, law[drafts], 1)
        return chances * accepted, marginal

    def _match(self, left: _Entrant, right: _Entrant, mass: Numbers, drafts: Places) -> _Entrant:
        """Let two entrants meet: choose the weights and return the winner."""
        listed = _likeliest(mass, self.alphabet)
        order = ((left.law + right.law) / 2 - mass + 4 * ~listed).argsort(kind="stable")
        number = int(listed.sum())
        number = number if self.free is None else min(self.free, number)
        law, won, fixed = _met(left.law[order], right.law[order], number)
        pairs = won + won.T
        shared = share_pairs(won, mass[order[:number]] - fixed)
        result, rank, weight = _divided(law, fixed, pairs, shared, order)
        return _Entrant(result, _chances(left.chances, right.chances, drafts, rank, weight))


@compiled
def _met(one: Numbers, two: Numbers, number: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return the winner's law if the earlier token is selected in every pair, and of the first tokens more.

    Returns:
        That law; the mass of the pairs that each of the first `number` tokens wins against each other one; and what
        such a token is selected with besides, against itself and all later ones.
    """
    law, won = np.empty(len(one)), np.zeros((number, number))
    ours, theirs = 0.0, 0.0
    for i in range(len(one) - 1, -1, -1):
        law[i] = one[i] * theirs + two[i] * ours + one[i] * two[i]
        ours += one[i]
        theirs += two[i]
    fixed = law[:number].copy()
    for i in range(number):
        for j in range(i + 1, number):
            won[i, j] = one[i] * two[j] + one[j] * two[i]
            fixed[i] -= won[i, j]
        fixed[i] = max(fixed[i], 0.0)
    return law, won, fixed


@compiled
def _divided(
    law: Numbers, fixed: Numbers, pairs: Numbers, shared: Numbers, order: Places
) -> tuple[Numbers, Places, Numbers]:
    """Return the winner's law by token, each token's place in the order, and the weights of the first tokens' pairs."""
    number, result, rank = len(fixed), np.empty(len(law)), np.empty(len(law), np.int64)
    weight = np.zeros((number, number))
    for i in range(number):
        law[i] = fixed[i]
        for j in range(number):
            if i < j:
                weight[i, j] = min(max(shared[i, j] / pairs[i, j], 0.0), 1.0) if pairs[i, j] > 0 else 1.0
                weight[j, i] = 1 - weight[i, j]
            law[i] += pairs[i, j] * weight[i, j]
    for place in range(len(law)):
        result[order[place]] = law[place]
        rank[order[place]] = place
    return result, rank, weight


@compiled
def _chances(ours: Numbers, theirs: Numbers, drafts: Places, rank: Places, weight: Numbers) -> Numbers:
    """Return the probability that each of a node's drafts wins a match; one half against itself.

    Args:
        ours, theirs: the probabilities that it is one entrant, or the other.
        drafts: the node's drafts.
        rank: each token's place in the order by which pairs are decided that are not weighted.
        weight: entry [i, j] is Pr[the token of rank i wins against that of rank j], for the first ranks.
    """
    result, free = np.zeros(len(ours)), len(weight)
    for i in range(len(drafts)):
        for j in range(len(drafts)):
            met = ours[i] * theirs[j]
            if met > 0:
                mine, other = rank[drafts[i]], rank[drafts[j]]
                wins = 1.0 if mine < other else 0.5 if mine == other else 0.0
                if mine != other and max(mine, other) < free:
                    wins = weight[mine, other]
                result[i] += met * wins
                result[j] += met * (1 - wins)
    return result


def _likeliest(mass: Numbers, number: int | None) -> Flags:
    if number is None or number >= len(mass):
        return np.ones(len(mass), dtype=np.bool_)
    listed = np.zeros(len(mass), dtype=np.bool_)
    listed[np.argpartition(-mass, number)[:number]] = True
    return listed


@compiled
def share_pairs(won: Numbers, need: Numbers) -> Numbers:
    """Move mass within pairs of tokens until sum_i min(need_i, what i has won) is as large as it can be.

    Problem: the pair {i, j} has the mass won[i][j] + won[j][i], of which i has won the former; a negative need counts
    as zero. Every pair may be divided anew.
    Method: shortest augmenting paths. From tokens that have won more than they need to one that lacks, over tokens i, j
    with won[i][j] > 0; moving v along a path takes v off won[i][j] and puts it on won[j][i] for its steps, so that what
    the first has too much comes to the last. Divisions without such a path are optimal: the pairs within the tokens
    that are reached, which all have what they need, and those alone, give them all they have won. A path empties a
    step, a surplus or a lack exactly, so in floating point there are O(n^3) paths at most too.
    Cost: O(n^2) a path; usually a path is one step and its token's last, so that there are fewer than 2 n of them.
    Source: Edmonds and Karp, J. ACM 19 (1972).

    Args:
        won: n x n, the diagonal zero; changed in place and returned.
        need: what counts of each token's mass.
    """
    number = len(need)
    before, queue, extra = np.empty(number, np.int64), np.empty(number, np.int64), np.empty(number)
    for i in range(number):
        extra[i] = won[i].sum() - max(need[i], 0.0)
    while True:
        tail, end = 0, -1
        for i in range(number):
            before[i] = -2  # not seen
            if extra[i] > NOISE:
                before[i], queue[tail], tail = -1, i, tail + 1
        head = 0
        while head < tail and end < 0:
            i, head = queue[head], head + 1
            for j in range(number):
                if before[j] == -2 and won[i, j] > NOISE:
                    before[j], queue[tail], tail = i, j, tail + 1
                    if extra[j] < -NOISE:
                        end = j
                        break
        if end < 0:
            return won
        moved, j = -extra[end], end
        while before[j] >= 0:
            moved, j = min(moved, won[before[j], j]), before[j]
        moved = min(moved, extra[j])
        extra[j], extra[end], j = extra[j] - moved, extra[end] + moved, end
        while before[j] >= 0:
            i = before[j]
            won[i, j], won[j, i], j = won[i, j] - moved, won[j, i] + moved, i
