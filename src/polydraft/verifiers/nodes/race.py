"""The race rule: one rate for every token, and a race among the drafts."""

from dataclasses import dataclass

import numpy as np

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
from polydraft.verifiers.selection.ordered import Numbers, Places
from polydraft.verifiers.selection.race_law import RaceLaw, common_mass, first_rates, moved, race_shares
from polydraft.verifiers.selection.rule import SelectionRule

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
