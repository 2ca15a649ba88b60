"""The race rule: one rate for every token, and a race among the drafts."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.schemes import (
    IID,
    Given,
    Product,
    Scheme,
    SpecHub,
    TopK,
    TopThenIID,
    TopThenSample,
    require_scheme,
)
from polydraft.verifiers.law import (
    OutcomeLaw,
    law_of_shares,
    onto_first_copies,
    present,
    summed_at_first,
)
from polydraft.verifiers.nodes.speculative import lone_draft, lone_draft_at
from polydraft.verifiers.selection.host_race import HostRace, common_mass, first_rates, moved, race_at
from polydraft.verifiers.selection.ordered import Numbers, Places, integers, numbers, tensor
from polydraft.verifiers.selection.race_law import WIDEST, RaceLaw

SCHEMES = (IID, Product, TopThenIID, TopThenSample, SpecHub, TopK, Given)
FITTING_NODES = 48
"""Nodes of the integrals while rates are fitted; what is wrong with the rates costs acceptance, not exactness."""
MOST_ROUNDS = 40
STEP = 1.8
MOMENTUM = 0.2
LONGEST_STEP = 4.0
LEAD = 6.0
"""The logarithm by which rates off the set that limits the acceptance are raised at first."""
NEAR = 1e-4
"""A row's search stops when its acceptance is as near as this to what no rule can exceed.

It is where the iteration stops, and no bound on what is missed: rows that need larger ratios of rates never come so
near and end by `PATIENCE` or `MOST_ROUNDS`; 9e-4 were seen missing for `TopThenIID(1)`.
"""
PATIENCE = 3
WORTHWHILE = 1e-5
"""A row's rates are kept once `PATIENCE` rounds have not raised its acceptance by this much."""


@dataclass(frozen=True)
class Race:
    """Give every token a rate, let the drafts race, and accept the winner as often as the target mass bears.

    Problem: that of `Optimal`: drafts of a known law, a target mass m of total a <= 1, as many drafts accepted as
    possible, no token more often than m.
    Rule: take draft j with probability a(x_j) / sum_l a(x_l); with r_i the probability, averaged over the drafts, that
    token i is taken (`RaceLaw`), accept it with min(1, m_i / r_i).
    Scheme: independent drafts: `IID`, `Product`, and those with tokens drafted for certain, `TopThenIID`,
    `TopThenSample`, `SpecHub`, `TopK`, `Given`. Any number of drafts; their order does not matter.
    Exactness: for any positive rates that do not depend on the drafts, because r is computed for the rates at hand; the
    integrals have an error near 1e-12. The rates are a function of the draft row, the mass and the number of drafts.
    Cost: O(K) per node of the quadrature and round, at most `MOST_ROUNDS` rounds. On a GPU a few tensor operations per
    round for all nodes at once; on a CPU node by node, the rates being searched in float32.
    Acceptance: sum min(m, r), mostly within 1e-4 of the optimum, which is where the search stops, and no bound: 9e-4
    were seen missing. Rates start with a lead of e^6 for tokens off the set H that limits the acceptance, 1 + m(H) -
    Q(H); they are raised where m > r and lowered where m < r, by 1.8 (log m - log r) and a fifth of the last change,
    until the limit is nearly reached; the best are kept. Races come as near as one likes to every selection law, but a
    priority of one token over another takes an infinite ratio of rates, and ratios are
    bounded.
    Source: our own; the choice among the drafts is Luce's (Individual Choice Behavior, 1959).

    Raises:
        UnpairedScheme: the drafts are not independent; use `Optimal`.
    """

    scheme: Scheme = IID()
    name = "race"
    lossless = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, SCHEMES, "The race, unlike Optimal,")

    def law(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*rows A"],
        target_probs: Float[Tensor, "*b A"],
    ) -> OutcomeLaw:
        """Return the outcome law, as shares and a residual that does not depend on the drafts."""
        return law_of_shares(*self._solve(drafts, draft_probs, target_probs), target_probs)

    def shares(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*rows A"],
        target_mass: Float[Tensor, "*b A"],
    ) -> Float[Tensor, "*b k"]:
        """Return a(x_j) / sum_l a(x_l) min(1, m_j / r_j), for a repeated token at its first copy."""
        return self._solve(drafts, draft_probs, target_mass)[0]

    def marginal(
        self, draft_probs: Float[Tensor, "*rows A"], target_mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b A"]:
        """Return min(m, r)."""
        return _kept(target_mass, self._fitted(draft_probs, target_mass, counts)[1])

    def acceptance(
        self, draft_probs: Float[Tensor, "*rows A"], target_probs: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        """Return sum min(m, r)."""
        return self.marginal(draft_probs, target_probs, counts).sum(dim=-1)

    @np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore")
    def at_node(self, drafts: Places, draft_row: Numbers, target_mass: Numbers) -> tuple[Numbers, Numbers]:
        """Return shares and marginal of one node, on the host."""
        alone = lone_draft_at(self.scheme, drafts, draft_row, target_mass)
        if alone:
            return alone
        log_rates, taken = self._fitted_at(draft_row, target_mass, int((drafts >= 0).sum()))
        shares, marginal = race_at(drafts, log_rates, taken, target_mass)
        return summed_at_first(shares, drafts), marginal

    def _fitted_at(self, draft_row: Numbers, target_mass: Numbers, count: int) -> tuple[Numbers, Numbers]:
        """Return what `_fitted` does, for one node on the host."""
        law = HostRace.of(self.scheme, draft_row, count)
        log_rates = fitted_rates_at(law, target_mass)
        return log_rates, law.taken(log_rates)

    def _solve(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*rows A"],
        target_mass: Float[Tensor, "*b A"],
    ) -> tuple[Float[Tensor, "*b k"], Float[Tensor, "*b A"]]:
        """Return shares and marginal."""
        alone = lone_draft(self.scheme, drafts, draft_probs, target_mass)
        if alone:
            return alone
        log_rates, taken = self._fitted(draft_probs, target_mass, present(drafts))
        return race_shares(drafts, log_rates, taken, target_mass), _kept(target_mass, taken)

    @np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore")
    def _fitted(
        self, draft_probs: Float[Tensor, "*rows A"], target_mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> tuple[Float[Tensor, "*b A"], Float[Tensor, "*b A"]]:
        """Return the logarithms of the rates, and how often each token is taken; on a CPU node by node."""
        size = target_mass.shape[-1]
        if target_mass.device.type == "cpu":
            masses = numbers(target_mass.reshape(-1, size))
            draft_rows = numbers(draft_probs).reshape(len(masses), -1, size)
            nodes = zip(draft_rows, masses, integers(counts.flatten()), strict=True)
            both = [self._fitted_at(row, mass, int(count)) for row, mass, count in nodes]
            fitted = tensor(np.array(both).reshape(len(masses), 2, size))
            return fitted[:, 0].view(target_mass.shape), fitted[:, 1].view(target_mass.shape)
        rows = draft_probs.shape[-2] if isinstance(self.scheme, Product) else 1
        law = RaceLaw.of(self.scheme, draft_probs.double().reshape(-1, rows, size), counts.flatten())
        log_rates = fitted_rates(law, target_mass.double().reshape(-1, size))
        taken = law.taken(log_rates)
        return log_rates.view(target_mass.shape), taken.view(target_mass.shape)


def fitted_rates(law: RaceLaw, target_mass: Float[Tensor, "n A"]) -> Float[Tensor, "n A"]:
    """Return the logarithms, in [-`WIDEST`, 0], of rates for which sum min(m, r) is nearly as large as it can be.

    Rows stop on their own, so that a row's rates do not depend on its neighbours.
    """
    expected = law.expected
    limit, inside = _limit(law, expected, target_mass)
    state = _Fit(law, target_mass, target_mass.log(), _common(expected, target_mass), limit)
    rates = state.centred((state.wanted - expected.log()).where(expected > 0, 0.0) - LEAD * inside)
    best, reached = rates.clone(), torch.full_like(limit, -1.0)
    rows, since, velocity = torch.arange(len(rates), device=rates.device), torch.zeros_like(limit), 0.0
    for _ in range(MOST_ROUNDS):
        taken = state.law.taken(rates, FITTING_NODES)
        accepted = torch.minimum(state.mass, taken).sum(dim=-1)
        better = accepted > reached[rows] + WORTHWHILE
        best[rows[better]], reached[rows[better]] = rates[better], accepted[better]
        since = torch.where(better, 0.0, since + 1)
        going = (since < PATIENCE) & (accepted < state.limit - NEAR)
        wrong = (state.wanted - taken.log()).nan_to_num(0.0).clamp(-LONGEST_STEP, LONGEST_STEP)
        velocity = STEP * wrong + MOMENTUM * velocity
        moved = state.centred(rates + velocity)
        if not bool(going.all()):
            (kept,) = going.nonzero(as_tuple=True)
            if kept.numel() == 0:
                break
            state, rows, since, velocity, moved = state.at(kept), rows[kept], since[kept], velocity[kept], moved[kept]
        rates = moved
    return best


def fitted_rates_at(law: HostRace, target_mass: Numbers) -> Numbers:
    """Return what `fitted_rates` does, for one node on the host."""
    limit, members = law.limit(target_mass)
    rates, wanted, common = first_rates(law.expected, target_mass, members, LEAD)
    velocity = np.zeros(len(rates))
    rates = moved(rates, velocity, target_mass, wanted, common, 0.0, LONGEST_STEP)  # no step: cut to its range
    best, reached, since = rates, -1.0, 0
    for _ in range(MOST_ROUNDS):
        taken = law.roughly_taken(rates)
        accepted = common_mass(target_mass, taken)
        if accepted > reached + WORTHWHILE:
            best, reached, since = rates, accepted, 0
        else:
            since += 1
        if since >= PATIENCE or accepted >= limit - NEAR:
            break
        velocity *= MOMENTUM
        rates = moved(rates, velocity, taken, wanted, common, STEP, LONGEST_STEP)
    return best


@dataclass(frozen=True, eq=False)
class _Fit:
    """What stays fixed while the rates of some rows are fitted.

    Args:
        law: the drafts' law.
        mass: the target mass.
        wanted: its logarithm.
        common: the law over which rates are centred, of the tokens that are likely among drafts and target; or zero.
        limit: what no rule can exceed.
    """

    law: RaceLaw
    mass: Float[Tensor, "n A"]
    wanted: Float[Tensor, "n A"]
    common: Float[Tensor, "n A"]
    limit: Float[Tensor, " n"]

    def centred(self, log_rates: Float[Tensor, "n A"]) -> Float[Tensor, "n A"]:
        """Cut the logarithms to a range around their mean."""
        finite = log_rates.clamp(-4 * WIDEST, 4 * WIDEST)
        centre = (finite * self.common).sum(dim=-1, keepdim=True)
        return (finite - centre).clamp(-WIDEST / 2, WIDEST / 2) - WIDEST / 2

    def at(self, rows: Int[Tensor, " m"]) -> "_Fit":
        """Return what belongs to some rows."""
        fixed = (one[rows] for one in (self.mass, self.wanted, self.common, self.limit))
        return _Fit(self.law.rows_at(rows), *fixed)


def _common(expected: Float[Tensor, "n A"], target_mass: Float[Tensor, "n A"]) -> Float[Tensor, "n A"]:
    both = torch.minimum(expected, target_mass)
    total = both.sum(dim=-1, keepdim=True)
    return both / total.where(total > 0, 1.0)


def _limit(
    law: RaceLaw, expected: Float[Tensor, "n A"], target_mass: Float[Tensor, "n A"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, "n A"]]:
    """Return what no rule can exceed, 1 + m(H) - Q(H), the least over prefixes H of an order, and 1 on H.

    Drafts in H can only become tokens of H. The order is that of m / (how often a token is drafted), after the tokens
    drafted for certain: for drafts of one row the least is the optimum (`optimal_set`), for others it is a bound.
    """
    need = (target_mass / expected).where(expected > 0, torch.inf)
    if law.certain is not None:
        need = need.masked_fill(law.certain, -torch.inf)
    order = need.argsort(dim=-1)
    room, last = (target_mass.gather(-1, order).cumsum(dim=-1) - law.contained(order)).min(dim=-1)
    place = torch.arange(need.shape[-1], device=need.device)
    inside = torch.empty_like(law.rows[:, 0]).scatter(-1, order, (place <= last.unsqueeze(-1)).double())
    return room + 1, inside


def race_shares(
    drafts: Int[Tensor, "*b k"],
    log_rates: Float[Tensor, "*b A"],
    taken: Float[Tensor, "*b A"],
    target_mass: Float[Tensor, "*b A"],
) -> Float[Tensor, "*b k"]:
    """Return the shares of a race with any rates, given how often it takes each token on average."""
    there = drafts.clamp_min(0)
    logs = log_rates.gather(-1, there).masked_fill(drafts < 0, -torch.inf)
    wins = logs.softmax(dim=-1).where(drafts >= 0, 0.0)
    often = taken.gather(-1, there)
    accepted = (target_mass.double().gather(-1, there) / often).where(often > 0, 1.0).clamp_max(1)
    return onto_first_copies(wins * accepted, drafts).to(target_mass.dtype)


def _kept(target_mass: Float[Tensor, "*b A"], taken: Float[Tensor, "*b A"]) -> Float[Tensor, "*b A"]:
    return torch.minimum(target_mass.double(), taken).to(target_mass.dtype)
