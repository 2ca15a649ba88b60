"""Importance-weighted selection: pick one of the drafts with weights from a linear program, then verify that one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import NotConverged
from polydraft.schemes import IID, Product, Scheme, require_scheme
from polydraft.verifiers.law import OutcomeLaw, law_of_shares, onto_first_copies, present


@dataclass(frozen=True)
class ImportanceWeighted:
    """Select one draft with weights that bring its law close to the target's, then apply the single-draft rule to it.

    Problem: two independent drafts, x_1 ~ l and x_2 ~ r, a target mass m of total <= 1 and draft capacity 1: accept one
    draft so that no token is accepted more often than its mass.
    Rule: of two different tokens i, j select i with probability w_ij (w_ji = 1 - w_ij), so that the selected token is i
    with probability s_i = l_i r_i + sum_j (l_i r_j + l_j r_i) w_ij; accept it with probability min(1, m_i / s_i), else
    emit from norm((m - s)+). The weights maximise sum_i min(s_i, m_i), a linear program in w and min(s, m).
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
    Cost: one linear program per match and node, solved once for equal nodes: 2 ms for five free tokens, 6 ms for 40;
    O(k^2 K^2) for the rest. Runs on the CPU.
    Acceptance: sum min(m, s): the optimum for two drafts with `free` and `alphabet` None, below it for more. The pairs
    outside the program cost little where both rows are concentrated, much where they are not: softmaxes of normal
    logits, K = 64, two drafts: .637 with five free tokens, .737 with 40, .741 with all.
    Source: Khisti et al., arXiv 2410.18234, theorem 1, section 4 (algorithm 1, remark 4) and appendix G.

    Args:
        free: how many tokens the program treats freely; None for all of the alphabet.
        alphabet: how many target tokens the program knows; None for all.
        iterations: the most iterations of the solver (HiGHS).

    Raises:
        UnpairedScheme: the scheme does not draw independently.
        NotConverged: the solver does not reach the optimum.
    """

    scheme: Scheme = IID()
    free: int | None = 5
    alphabet: int | None = 40
    iterations: int = 100_000
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
        shares, selected = self._run(drafts, draft_probs, target_probs)
        return law_of_shares(shares, torch.minimum(selected, target_probs), target_probs)

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
        selected = torch.zeros(target_mass.numel() // target_mass.shape[-1], target_mass.shape[-1]).double()
        for nodes, winner in self._solved(draft_probs, target_mass, counts):
            selected[nodes] = winner.law
        return torch.minimum(target_mass, selected.to(target_mass).reshape(target_mass.shape))

    def acceptance(
        self, draft_probs: Float[Tensor, "*rows A"], target_probs: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        """Return sum min(target, s)."""
        return self.marginal(draft_probs, target_probs, counts).sum(dim=-1)

    def _run(
        self, drafts: Int[Tensor, "*b k"], draft_probs: Float[Tensor, "*rows A"], mass: Float[Tensor, "*b A"]
    ) -> tuple[Float[Tensor, "*b k"], Float[Tensor, "*b A"]]:
        """Return the drafts' shares and the selected token's law."""
        flat, wanted = drafts.cpu().reshape(-1, drafts.shape[-1]), mass.double().cpu().reshape(-1, mass.shape[-1])
        shares, selected = torch.zeros(flat.shape).double(), torch.zeros_like(wanted)
        for nodes, winner in self._solved(draft_probs, mass, present(drafts)):
            selected[nodes] = winner.law
            kept = torch.minimum(wanted[nodes], winner.law) / winner.law.where(winner.law > 0, 1.0)
            here = flat[nodes]
            shares[nodes] = onto_first_copies(winner.chances(here) * kept.gather(-1, here.clamp_min(0)), here)
        return shares.to(mass).reshape(drafts.shape), selected.to(mass).reshape(mass.shape)

    def _solved(
        self, draft_probs: Float[Tensor, "*rows A"], mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Iterator[tuple[Int[Tensor, " n"], "_Entrant"]]:
        """Solve each different node with drafts once; give the nodes it stands for, and the tournament's winner."""
        atoms = mass.shape[-1]
        parts = [counts.reshape(-1, 1), mass.reshape(-1, atoms), draft_probs.reshape(counts.numel(), -1)]
        nodes = torch.cat([part.double().cpu() for part in parts], dim=-1)
        unique = nodes.unique(dim=0, return_inverse=True)  # pyright: ignore  not typed in torch
        different, place = cast(tuple[Tensor, Tensor], unique)
        for number, node in enumerate(different):
            k, wanted, rows = int(node[0]), node[1 : 1 + atoms], node[1 + atoms :].reshape(-1, atoms)
            if k:
                entrants = [_Entrant(rows[j % len(rows)], j) for j in range(k)]
                yield (place == number).nonzero().squeeze(-1), self._winner(entrants, wanted)

    def _winner(self, entrants: "list[_Entrant]", mass: Float[Tensor, " A"]) -> "_Entrant":
        while len(entrants) > 1:
            pairs = zip(entrants[::2], entrants[1::2], strict=False)
            matches = [self._match(left, right, mass) for left, right in pairs]
            entrants = matches + entrants[2 * len(matches) :]
        return entrants[0]

    def _match(self, left: "_Entrant", right: "_Entrant", mass: Float[Tensor, " A"]) -> "_Entrant":
        """Let two entrants meet: choose the weights and compute the winner's law."""
        listed = _likeliest(mass, self.alphabet)
        gain = mass - (left.law + right.law) / 2
        order = (gain + 2 * listed).argsort(descending=True, stable=True)
        rank = torch.empty_like(order).scatter(0, order, torch.arange(len(order)))
        weight = (rank.unsqueeze(-1) < rank).double() + torch.eye(len(rank)).double() / 2
        met = left.law.unsqueeze(-1) * right.law
        met = met + met.T
        number = int(listed.sum()) if self.free is None else min(self.free, int(listed.sum()))
        weight = _optimised(weight, met, mass, order[:number], self.iterations)
        return _Entrant((met * weight).sum(dim=-1), matched=(left, right, weight))


@dataclass(frozen=True, eq=False)
class _Entrant:
    """A draft, or the winner of a match of two entrants: its law, and where it comes from.

    Args:
        law: the law of its token.
        place: the draft's place; -1 for a winner.
        matched: for a winner, the two entrants and the weights: entry [x, y] is Pr[x wins against y].
    """

    law: Float[Tensor, " A"]
    place: int = -1
    matched: "tuple[_Entrant, _Entrant, Tensor] | None" = None

    def chances(self, drafts: Int[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the probability that each draft is this entrant, given all drafts."""
        if self.matched is None:
            return torch.zeros(drafts.shape).double().index_fill(-1, torch.tensor(self.place), 1.0)
        left, right, weight = self.matched
        ours, theirs = left.chances(drafts), right.chances(drafts)
        tokens = drafts.clamp_min(0)
        wins = weight[tokens.unsqueeze(-1), tokens.unsqueeze(-2)]
        met = ours.unsqueeze(-1) * theirs.unsqueeze(-2)
        return (met * wins).sum(dim=-1) + (met * (1 - wins)).sum(dim=-2)


def _likeliest(mass: Float[Tensor, " A"], number: int | None) -> Bool[Tensor, " A"]:
    if number is None or number >= len(mass):
        return torch.ones_like(mass, dtype=torch.bool)
    return torch.zeros_like(mass, dtype=torch.bool).index_fill(0, mass.topk(number).indices, True)


def _optimised(
    weight: Float[Tensor, "A A"],
    met: Float[Tensor, "A A"],
    mass: Float[Tensor, " A"],
    free: Int[Tensor, " f"],
    iterations: int,
) -> Float[Tensor, "A A"]:
    """Replace the weights of pairs of free tokens by those that maximise sum min(mass, the winner's law).

    Variables: the weight v of each pair (i, j), i before j, and z_i <= min(mass_i, s_i) for the free tokens.
    `met` is the probability of each pair, in either order.
    """
    first, second = torch.triu_indices(len(free), len(free), 1)
    met_free = met[free.unsqueeze(-1), free][first, second]
    if not bool((met_free > 0).any()):
        return weight
    pairs, number = len(first), len(free)
    weight = weight.clone()
    weight[free[first], free[second]], weight[free[second], free[first]] = 0.0, 1.0
    fixed = (met * weight).sum(dim=-1)[free]  # every pair's mass at its second token, moved to the first by v
    flows = torch.zeros(number, pairs + number).double()
    flows[first, torch.arange(pairs)], flows[second, torch.arange(pairs)] = -met_free, met_free
    flows[:, pairs:] = torch.eye(number)
    highest = torch.cat([torch.ones(pairs).double(), mass[free]])
    gains = (torch.arange(pairs + number) >= pairs).double()
    chosen = _maximum(gains, flows, fixed, highest, iterations)[:pairs]
    weight[free[first], free[second]], weight[free[second], free[first]] = chosen, 1 - chosen
    return weight


def _maximum(
    gains: Float[Tensor, " n"],
    flows: Float[Tensor, "f n"],
    limits: Float[Tensor, " f"],
    highest: Float[Tensor, " n"],
    iterations: int,
) -> Float[Tensor, " n"]:
    """Return the x in [0, highest] with flows x <= limits that maximises gains x."""
    bounds = torch.stack([torch.zeros_like(highest), highest], dim=-1).numpy()
    options = {"maxiter": iterations}
    solve: Callable[..., Any] = import_module("scipy.optimize").linprog  # slow to import, and without stubs
    solution = solve(-gains.numpy(), flows.numpy(), limits.numpy(), bounds=bounds, method="highs", options=options)
    if solution.status != 0:
        raise NotConverged(f"The linear program of {len(gains)} weights was not solved: {solution.message}")
    return torch.minimum(torch.from_numpy(solution.x).clamp_min(0), highest)  # pyright: ignore  not typed in torch
