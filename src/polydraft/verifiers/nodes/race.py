"""The race rule: one rate for every token, a race among the drafts, and how often that takes each token."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from polydraft.machine_code import compiled
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
from polydraft.verifiers.selection.ordered import certain_tokens
from polydraft.verifiers.selection.rule import Flags, Numbers, Places, SelectionRule

SCHEMES = (IID, Product, TopThenIID, TopThenSample, SpecHub, TopK, Given)
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
WIDEST = 24.0
"""The logarithm of the largest ratio of two rates."""
EARLIEST = -3.5
"""Where the integrals start, in u with time = exp(u - e^{-u}): at a time of e^-33."""
LATEST = 40.0
"""A race is over after this many times the mean time of its slowest runner."""
EXACT_NODES = 128
"""Enough for an error near 1e-12 at the widest ratio of rates."""
ROUGH_NODES = 40
"""Nodes at the widest ratio of rates while rates are fitted."""
PATIENCE = 3
WORTHWHILE = 1e-5
"""A row's rates are kept once `PATIENCE` rounds have not raised its acceptance by this much."""


@dataclass(frozen=True)
class Race(SelectionRule):
    """Give every token a rate, let the drafts race, and accept the winner as often as the target mass bears.

    Problem: that of `Optimal`: drafts of a known law, a target mass m of total a <= 1, as many drafts accepted as
    possible, no token more often than m.
    Rule: take draft j with probability a(x_j) / sum_l a(x_l); with r_i the probability, averaged over the drafts, that
    token i is taken (`RaceLaw`), accept it with min(1, m_i / r_i).
    Scheme: independent drafts: `IID`, `Product`, and those with tokens drafted for certain, `TopThenIID`,
    `TopThenSample`, `SpecHub`, `TopK`, `Given`. Any number of drafts; their order does not matter.
    Exactness: for any positive rates that do not depend on the drafts, because r is computed for the rates at hand; the
    integrals have an error near 1e-12. The rates are a function of the draft row, the mass and the number of drafts.
    Cost: O(K) per node of the quadrature and round, at most `MOST_ROUNDS` rounds, on the host, node by node; the rates
    are searched in float32.
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

    def at_node(self, row: Numbers, mass: Numbers, count: int, drafts: Places) -> tuple[Numbers, Numbers]:
        """Return the shares of a node's drafts, copies of a token apart, and min(m, r)."""
        law = RaceLaw.of(self.scheme, row, count)
        log_rates = fitted_rates(law, mass)
        return race_shares(drafts, log_rates, law.taken(log_rates), mass)


@dataclass(frozen=True, eq=False)
class RaceLaw:
    """Tokens that are drafted for certain, and independent draws from one or several rows.

    Args:
        rows: the draft rows, which sum to one or are zero, without the certain tokens.
        draws: the number of draws from each row.
        expected: the mean number of drafts of each token.
        certain: the certain tokens.
    """

    rows: Numbers
    draws: Places
    expected: Numbers
    certain: Flags

    @classmethod
    def of(cls, scheme: Scheme, draft_row: Numbers, count: int) -> "RaceLaw":
        """Return the law of a scheme's drafts, from one draft row or several."""
        rows = draft_row.reshape(-1, draft_row.shape[-1])
        if scheme.several_rows:
            live = int((rows > 0).any(axis=1).cumprod().sum())  # the first row without mass ends the drafts
            drawn, certain = count if live == len(rows) else min(count, live), np.zeros(rows.shape[1], dtype=np.bool_)
        else:
            certain = certain_tokens(scheme, rows[0], count)
            drawn = count - int(certain.sum())
        return cls(*_drawn_in_turn(rows, certain, drawn), certain)

    def taken(self, log_rates: Numbers) -> Numbers:
        """Return how often the race takes each token.

        Draft j has an exponential clock of rate a(x_j); the first to ring is taken, which is draft j with probability
        a(x_j) / (the sum of the drafts' rates). With phi_j(s) = sum_i q_j(i) e^{-a_i s}, D the certain tokens and n_j
        the draws from row j, token i is taken with probability

            sum_j n_j q_j(i) a_i integral e^{-a_i s} e^{-a(D) s} phi_j^{n_j - 1} prod_{l != j} phi_l^{n_l} ds,

        and i in D with probability a_i integral e^{-a(D) s} prod_l phi_l^{n_l} ds; by a trapezoidal rule in u with time
        exp(u - e^{-u}). The integrands fall doubly exponentially in u at both ends, where the rule converges
        exponentially in the number of nodes (Takahasi and Mori, Publ. RIMS 9, 1974). The logarithms of the rates lie in
        [-`WIDEST`, 0].
        """
        return self._integrated(log_rates, EXACT_NODES, self.rows)

    def roughly_taken(self, log_rates: Numbers) -> Numbers:
        """Return the same with errors near 1e-3, for a third of the time: enough to find rates with."""
        return self._integrated(log_rates, ROUGH_NODES, self._rough)

    @cached_property
    def _rough(self) -> NDArray[np.floating]:
        return self.rows.astype(np.float32)

    def _integrated(self, log_rates: Numbers, nodes: int, rows: NDArray[np.floating]) -> Numbers:
        """Integrate in the precision of the rows, with `nodes` nodes for the widest ratio of rates, else fewer."""
        weight, late = _exponents(log_rates, nodes, self.certain, rows)
        np.exp(late, out=late)
        last, whole = _last(late @ rows.T, self.draws, weight, rows)
        return _taken(log_rates, rows, last @ late, self.certain, whole)

    def limit(self, target_mass: Numbers) -> tuple[float, Flags]:
        """Return what no rule can exceed, 1 + m(H) - Q(H), the least over prefixes H of an order, and H.

        Drafts in H can only become tokens of H. The order is that of m / (how often a token is drafted), after the
        tokens drafted for certain: for drafts of one row the least is the optimum (`optimal_set`), for others a bound.
        """
        need = np.divide(target_mass, self.expected, out=np.full(len(target_mass), np.inf), where=self.expected > 0)
        need[self.certain] = -np.inf
        return _limit(need.argsort(kind="stable"), self.rows, self.draws, target_mass, self.certain)


def fitted_rates(law: RaceLaw, target_mass: Numbers) -> Numbers:
    """Return the logarithms, in [-`WIDEST`, 0], of rates for which sum min(m, r) is nearly as large as it can be."""
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


@compiled
def _drawn_in_turn(rows: Numbers, certain: Flags, drawn: int) -> tuple[Numbers, Places, Numbers]:
    """Return the rows without certain tokens, how many drafts come from each, and how often tokens are drafted."""
    scaled, draws, expected = np.zeros(rows.shape), np.zeros(len(rows), np.int64), np.zeros(len(certain))
    for j in range(len(rows)):
        total = 0.0
        for i in range(len(certain)):
            total += 0.0 if certain[i] else rows[j, i]
        if total > 0:
            draws[j] = max((drawn - j + len(rows) - 1) // len(rows), 0)
            for i in range(len(certain)):
                scaled[j, i] = 0.0 if certain[i] else rows[j, i] / total
                expected[i] += draws[j] * scaled[j, i]
    for i in range(len(certain)):
        expected[i] += 1.0 if certain[i] else 0.0
    return scaled, draws, expected


@compiled
def _limit(order: Places, rows: Numbers, draws: Places, mass: Numbers, certain: Flags) -> tuple[float, Flags]:
    """Return 1 + m(H) - Q(H), the least over prefixes H of the order, and H."""
    sums, missing, held = np.zeros(len(rows)), certain.sum(), 0.0
    least, size = np.inf, 0
    for place in range(len(order)):
        token = int(order[place])
        held, missing, inside = held + float(mass[token]), missing - certain[token], 1.0
        for j in range(len(rows)):
            sums[j] += rows[j, token]
            inside *= sums[j] ** draws[j]
        room = held - float(inside if missing == 0 else 0.0)
        if room < least:
            least, size = room, place + 1
    members = np.zeros(len(order), dtype=np.bool_)
    for place in range(size):
        members[order[place]] = True
    return least + 1, members


@compiled
def _exponents(
    log_rates: Numbers, number: int, certain: Flags, rows: NDArray[np.floating]
) -> tuple[Numbers, NDArray[np.floating]]:
    """Return the weights of the trapezoidal rule, times e^{-a(D) s}, and the exponents -a_i s.

    Of the nodes a third are for one rate, and others in proportion to the logarithms of rates: the error is even then.
    """
    slowest = log_rates.min()
    some = int(np.ceil(number * (1 - 2 * slowest / WIDEST) / 3))
    step = (np.log(LATEST) - EARLIEST - slowest) / (some - 1)
    rates, fixed = np.exp(log_rates), 0.0
    for i in range(len(rates)):
        if certain[i]:
            fixed += rates[i]
    weight, exponents = np.empty(some), np.empty((some, len(rates)), dtype=rows.dtype)
    for node in range(some):
        u = EARLIEST + step * node
        time = np.exp(u - np.exp(-u))
        weight[node] = step * time * (np.exp(-u) + 1) * np.exp(-time * fixed)
        for i in range(len(rates)):
            exponents[node, i] = -time * rates[i]
    return weight, exponents


@compiled
def _last(
    phi: NDArray[np.floating], draws: Places, weight: Numbers, rows: NDArray[np.floating]
) -> tuple[NDArray[np.floating], float]:
    """Return, for rows and nodes, what a draw from the row counts if it is the first to ring, and that of certain ones.

    These are weight n_j phi_j^{n_j - 1} prod_{l != j} phi_l^{n_l}, and the sum of weight prod_l phi_l^{n_l}.
    """
    last, whole = np.zeros((len(draws), len(weight)), dtype=rows.dtype), 0.0
    for node in range(len(weight)):
        every = weight[node]
        for j in range(len(draws)):
            every *= phi[node, j] ** draws[j]
            product = weight[node] * draws[j]
            for other in range(len(draws)):
                product *= phi[node, other] ** (draws[other] - (other == j)) if draws[other] else 1.0
            last[j, node] = product
        whole += every
    return last, whole


@compiled
def _taken(
    log_rates: Numbers, rows: NDArray[np.floating], rung: NDArray[np.floating], certain: Flags, whole: float
) -> Numbers:
    """Return a_i (sum_j q_j(i) rung_j(i) + 1[i is certain] whole)."""
    result = np.empty(len(log_rates))
    for i in range(len(result)):
        often = whole if certain[i] else 0.0
        for j in range(len(rows)):
            often += rows[j, i] * rung[j, i]
        result[i] = np.exp(log_rates[i]) * often
    return result


@compiled
def first_rates(expected: Numbers, mass: Numbers, members: Flags, lead: float) -> tuple[Numbers, Numbers, Numbers]:
    """Return logarithms of rates to begin with, those of the mass, and the law around whose mean rates are centred."""
    rates, wanted, common, total = np.empty(len(mass)), np.log(mass), np.minimum(expected, mass), 0.0
    for i in range(len(mass)):
        total += common[i]
        rates[i] = (wanted[i] - np.log(expected[i]) if expected[i] > 0 else 0.0) - (lead if members[i] else 0.0)
    if total > 0:
        common /= total
    return rates, wanted, common


@compiled
def race_shares(drafts: Places, log_rates: Numbers, taken: Numbers, mass: Numbers) -> tuple[Numbers, Numbers]:
    """Return the shares of a race, copies of a token apart, and the marginal."""
    shares, total, fastest = np.zeros(len(drafts)), 0.0, -np.inf
    for draft in drafts:
        fastest = max(fastest, log_rates[draft]) if draft >= 0 else fastest
    for place in range(len(drafts)):
        if drafts[place] >= 0:
            shares[place] = np.exp(log_rates[drafts[place]] - fastest)
            total += shares[place]
    for place in range(len(drafts)):
        often = taken[drafts[place]]
        shares[place] *= (min(mass[drafts[place]] / often, 1.0) if often > 0 else 1.0) / (total if total > 0 else 1.0)
    return shares, np.minimum(mass, taken)


@compiled
def moved(
    rates: Numbers, velocity: Numbers, taken: Numbers, wanted: Numbers, common: Numbers, step: float, longest: float
) -> Numbers:
    """Return logarithms of rates raised by `step` (wanted - log taken) plus the velocity, which becomes this change.

    The difference is cut to `longest` either way and nothing where both are infinite; the result is cut to a range
    around its mean over `common`.
    """
    result = np.empty(len(rates))
    for i in range(len(rates)):
        wrong = wanted[i] - np.log(taken[i])
        velocity[i] += step * min(max(wrong, -longest), longest) if wrong == wrong else 0.0
        result[i] = rates[i] + velocity[i]
    mean = 0.0
    for i in range(len(rates)):
        result[i] = min(max(result[i], -4 * WIDEST), 4 * WIDEST)
        mean += result[i] * common[i]
    for i in range(len(rates)):
        result[i] = min(max(result[i] - mean, -WIDEST / 2), WIDEST / 2) - WIDEST / 2
    return result


@compiled
def common_mass(one: Numbers, other: Numbers) -> float:
    """Return sum_i min(one_i, other_i)."""
    total = 0.0
    for i in range(len(one)):
        total += min(one[i], other[i])
    return total
