"""Importance-weighted selection: pick one of the drafts with weights from a maximum flow, then verify that one."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.schemes import IID, Product, Scheme, require_scheme
from polydraft.verifiers.law import OutcomeLaw, law_of_shares, onto_first_copies, present
from polydraft.verifiers.nodes.speculative import lone_draft
from polydraft.verifiers.selection.ordered import Flags, Numbers, Places, counted, integers, numbers
from polydraft.verifiers.selection.shared_pairs import share_pairs


@dataclass(frozen=True)
class ImportanceWeighted:
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
        UnpairedScheme: the scheme does not draw independently.
    """

    scheme: Scheme = IID()
    free: int | None = 5
    alphabet: int | None = 40
    name = "importance weighted"
    lossless = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, (IID, Product), "Importance-weighted selection")

    def law(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*rows A"],
        target_probs: Float[Tensor, "*b A"],
    ) -> OutcomeLaw:
        """Return the outcome law of selection and single-draft rule."""
        return law_of_shares(*self._run(drafts, draft_probs, target_probs), target_probs)

    def shares(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*rows A"],
        target_mass: Float[Tensor, "*b A"],
    ) -> Float[Tensor, "*b k"]:
        """Return Pr[x is selected | drafts] min(1, m(x) / s(x)) for each draft x, at its first copy."""
        return self._run(drafts, draft_probs, target_mass)[0]

    def marginal(
        self, draft_probs: Float[Tensor, "*rows A"], target_mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b A"]:
        """Return min(m, s)."""
        selected = np.zeros((counts.numel(), target_mass.shape[-1]))
        for nodes, winner in self._solved(draft_probs, target_mass, counts):
            selected[nodes] = winner.law
        return torch.minimum(target_mass, _like(target_mass, selected, target_mass.shape).to(target_mass))

    def acceptance(
        self, draft_probs: Float[Tensor, "*rows A"], target_probs: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        """Return sum min(target, s)."""
        return self.marginal(draft_probs, target_probs, counts).sum(dim=-1)

    def _run(
        self, drafts: Int[Tensor, "*b k"], draft_probs: Float[Tensor, "*rows A"], mass: Float[Tensor, "*b A"]
    ) -> tuple[Float[Tensor, "*b k"], Float[Tensor, "*b A"]]:
        """Return the drafts' shares, and how often each token is accepted."""
        alone = lone_draft(self.scheme, drafts, draft_probs, mass)
        if alone:
            return alone
        atoms = mass.shape[-1]
        at, wanted = integers(drafts.reshape(-1, drafts.shape[-1])), numbers(mass.double().reshape(-1, atoms))
        shares, selected = np.zeros(at.shape), np.zeros(wanted.shape)
        for nodes, winner in self._solved(draft_probs, mass, present(drafts)):
            selected[nodes] = winner.law
            here = at[nodes]
            kept = np.minimum(wanted[nodes], winner.law) / np.where(winner.law > 0, winner.law, 1)
            shares[nodes] = winner.chances(here) * np.take_along_axis(kept, np.maximum(here, 0), axis=1)
        together = onto_first_copies(_like(drafts, shares, drafts.shape), drafts)
        return together.to(mass), torch.minimum(mass, _like(mass, selected, mass.shape).to(mass))

    def _solved(
        self, draft_probs: Float[Tensor, "*rows A"], mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> "Iterator[tuple[Places, _Entrant]]":
        """Solve each different node with drafts once; give the nodes it stands for, and the tournament's winner."""
        atoms = mass.shape[-1]
        parts = [counts.reshape(-1, 1), mass.reshape(-1, atoms), draft_probs.reshape(counts.numel(), -1)]
        nodes = torch.cat([part.double().cpu() for part in parts], dim=-1)
        place = torch.zeros(len(nodes), dtype=torch.int64)
        if len(nodes) > 1:
            unique = nodes.unique(dim=0, return_inverse=True)  # pyright: ignore  not typed in torch
            nodes, place = cast(tuple[Tensor, Tensor], unique)
        for number, node in enumerate(numbers(nodes)):
            k, wanted, rows = int(node[0]), node[1 : 1 + atoms], node[1 + atoms :].reshape(-1, atoms)
            if k:
                entrants = [_Entrant(rows[j % len(rows)], j) for j in range(k)]
                yield np.flatnonzero(integers(place) == number), self._winner(entrants, wanted)

    def _winner(self, entrants: "list[_Entrant]", mass: Numbers) -> "_Entrant":
        while len(entrants) > 1:
            pairs = zip(entrants[::2], entrants[1::2], strict=False)
            matches = [self._match(left, right, mass) for left, right in pairs]
            entrants = matches + entrants[2 * len(matches) :]
        return entrants[0]

    def _match(self, left: "_Entrant", right: "_Entrant", mass: Numbers) -> "_Entrant":
        """Let two entrants meet: choose the weights and compute the winner's law."""
        listed = _likeliest(mass, self.alphabet)
        order = ((left.law + right.law) / 2 - mass + 4 * ~listed).argsort(kind="stable")
        number = int(listed.sum())
        number = number if self.free is None else min(self.free, number)
        one, two = left.law[order], right.law[order]
        law = one * _later(two) + two * _later(one) + one * two
        earlier = _earlier(number)
        met = one[:number, None] * two[:number]
        won = (met + met.T) * earlier
        met = won + won.T
        fixed = np.maximum(law[:number] - won.sum(axis=1), 0)
        shared = np.array(share_pairs(won.tolist(), (mass[order[:number]] - fixed).tolist())).reshape(met.shape)
        there = met > 0
        weight = np.divide(shared, met, out=earlier.copy(), where=there).clip(0, 1) * earlier
        weight = weight + (1 - weight).T * earlier.T
        law[:number] = fixed + (met * weight).sum(axis=1)
        result, rank = np.empty_like(law), np.empty_like(order)
        result[order], rank[order] = law, counted(len(order))
        return _Entrant(result, matched=_Match(left, right, rank, weight))


@dataclass(frozen=True, eq=False)
class _Entrant:
    """A draft, or the winner of a match of two entrants: its law, and where it comes from.

    Args:
        law: the law of its token.
        place: the draft's place; -1 for a winner.
        matched: for a winner, the match.
    """

    law: Numbers
    place: int = -1
    matched: "_Match | None" = None

    def chances(self, drafts: Places) -> Numbers:
        """Return the probability that each draft of some rows is this entrant, given all drafts."""
        if self.matched is None:
            return np.broadcast_to(counted(drafts.shape[1]) == self.place, drafts.shape).astype(np.float64)
        ours, theirs = self.matched.left.chances(drafts), self.matched.right.chances(drafts)
        tokens = np.maximum(drafts, 0)
        wins = self.matched.wins(tokens[:, :, None], tokens[:, None, :])
        met = ours[:, :, None] * theirs[:, None, :]
        return (met * wins).sum(axis=2) + (met * (1 - wins)).sum(axis=1)


@dataclass(frozen=True, eq=False)
class _Match:
    """A match of two entrants.

    Args:
        left, right: the entrants.
        rank: each token's place in the order by which pairs are decided that are not weighted.
        weight: entry [i, j] is Pr[the token of rank i wins against that of rank j], for the first ranks.
    """

    left: _Entrant
    right: _Entrant
    rank: Places
    weight: Numbers

    def wins(self, ours: Places, theirs: Places) -> Numbers:
        """Return the probability that our token wins against theirs; one half against itself."""
        mine, other = self.rank[ours], self.rank[theirs]
        decided = np.where(mine == other, 0.5, mine < other)
        free = len(self.weight)
        if not free:
            return decided
        weighted = self.weight[np.minimum(mine, free - 1), np.minimum(other, free - 1)]
        return np.where((np.maximum(mine, other) < free) & (mine != other), weighted, decided)


def _likeliest(mass: Numbers, number: int | None) -> Flags:
    if number is None or number >= len(mass):
        return np.ones(len(mass), dtype=np.bool_)
    listed = np.zeros(len(mass), dtype=np.bool_)
    listed[np.argpartition(-mass, number)[:number]] = True
    return listed


@lru_cache(maxsize=64)
def _earlier(number: int) -> Numbers:
    """Return ones above the diagonal of a square, where the row comes before the column."""
    return np.triu(np.ones((number, number)), 1)


def _later(row: Numbers) -> Numbers:
    """Return for every place what comes after it."""
    sums = np.zeros_like(row)
    sums[:-1] = row[:0:-1].cumsum()[::-1]
    return sums


def _like(tensor: Tensor, values: Numbers, shape: torch.Size) -> Tensor:
    """Return an array as a tensor beside another one."""
    return torch.from_numpy(values).to(tensor.device).reshape(shape)  # pyright: ignore  not typed in torch
