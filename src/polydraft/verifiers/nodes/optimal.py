"""The optimal rule: the largest acceptance rate that a scheme allows, for any number of drafts."""

from dataclasses import dataclass

from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Given,
    Scheme,
    SpecHub,
    TopK,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
    require_scheme,
)
from polydraft.theory import optimal_set
from polydraft.verifiers.outcome_law import Counts, Rate, Row
from polydraft.verifiers.selection.optimal_selection import accepted_shares, clip
from polydraft.verifiers.selection.rule import Numbers, Places, SelectionRule

SCHEMES = (IID, WithoutReplacement, TopThenIID, ConditionalPoisson, TopThenSample, SpecHub, TopK, Given)


@dataclass(frozen=True)
class Optimal(SelectionRule):
    """Accept drafts as often as any exact rule can.

    Problem: drafts of a known law, a target mass m of total a <= 1: accept one of the drafts or none, each token at
    most m of the time, as often as possible: a transport from drafted sets to tokens.
    Rule: t is a clipped target such that some rule takes tokens t of the time and sum min(m, t) is the optimum
    (`Clipped`); accept draft i with a probability such that token x is accepted min(m(x), t(x)) of the time on average
    (`accepted_shares`).
    Scheme: `IID`, `WithoutReplacement`, `TopThenIID`, `ConditionalPoisson`, `TopThenSample`, `SpecHub`, `TopK` and
    `Given`; any number of drafts. The drafting order matters for `WithoutReplacement` only.
    Exactness: the shares add up to min(m, t) on average, to rounding, after a bounded number of steps; nothing is
    iterated to convergence.
    Cost: the containment of all prefixes once, then O(K) per round, without replacement O(k K) per round and node of
    the quadrature. The rounds, at most one per token, run on the host, node by node. At 64 nodes of a pair at
    temperature 1 (K = 64) they were 2 on average for two independent drafts, 3 for four, 3 and 7 without replacement,
    and 6 for four conditional Poisson drafts.
    Acceptance: 1 + min_H [m(H) - Q(H)], the optimum (`optimal_set`). With one draft it is speculative sampling.
    Source: acceptance and H: arXiv 2502.18779; clipped target and selection: our own. For independent drafts
    arXiv 2511.15898 approaches the same optimum numerically.

    Raises:
        UnpairedScheme: the scheme is another one; `Race` works with independent drafts of different rows.
    """

    scheme: Scheme = WithoutReplacement()
    name = "optimal"
    lossless = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, SCHEMES, "The optimal rule")

    def acceptance(self, draft_probs: Row, target_probs: Row, counts: Counts) -> Rate:
        """Return 1 + min_H [m(H) - Q(H)]."""
        return optimal_set(self.scheme, draft_probs, target_probs, counts).acceptance.to(target_probs.dtype)

    def at_node(self, row: Numbers, mass: Numbers, count: int, drafts: Places) -> tuple[Numbers, Numbers]:
        """Return the shares of a node's drafts, copies of a token apart, and min(m, t)."""
        clipped = clip(self.scheme, row, mass, count)
        return accepted_shares(clipped, clipped.places(drafts)), clipped.by_token(clipped.accepted)
