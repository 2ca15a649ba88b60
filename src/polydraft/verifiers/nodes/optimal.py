"""The optimal rule: the largest acceptance rate that a scheme allows, for any number of drafts."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

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
from polydraft.verifiers.host import node_by_node
from polydraft.verifiers.law import SharesRule, onto_first_copies, present
from polydraft.verifiers.nodes.speculative import lone_draft
from polydraft.verifiers.selection.clipped import clip
from polydraft.verifiers.selection.ordered import Numbers, Places
from polydraft.verifiers.selection.walk import accepted_shares

SCHEMES = (IID, WithoutReplacement, TopThenIID, ConditionalPoisson, TopThenSample, SpecHub, TopK, Given)


@dataclass(frozen=True)
class Optimal(SharesRule):
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

    def divided(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*b A"],
        target_mass: Float[Tensor, "*b A"],
    ) -> tuple[Float[Tensor, "*b k"], Float[Tensor, "*b A"]]:
        """Return the probability of accepting each draft, for a repeated token at its first copy, and min(m, t)."""
        alone = lone_draft(self.scheme, drafts, draft_probs, target_mass)
        if alone:
            return alone
        shares, marginal = node_by_node(self._at_node, draft_probs, target_mass, present(drafts), drafts)
        return onto_first_copies(shares, drafts), marginal

    def marginal(
        self, draft_probs: Float[Tensor, "*b A"], target_mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b A"]:
        """Return min(m, t)."""
        return node_by_node(self._at_node, draft_probs, target_mass, counts)[1]

    def acceptance(
        self, draft_probs: Float[Tensor, "*b A"], target_probs: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        """Return 1 + min_H [m(H) - Q(H)]."""
        return optimal_set(self.scheme, draft_probs, target_probs, counts).acceptance.to(target_probs.dtype)

    def _at_node(
        self, draft_row: Numbers, target_mass: Numbers, count: int, drafts: Places | None
    ) -> tuple[Numbers, Numbers]:
        """Return the shares of a node's drafts, copies of a token apart, and min(m, t)."""
        clipped = clip(self.scheme, draft_row, target_mass, count)
        shares = np.zeros(0) if drafts is None else accepted_shares(clipped, clipped.places(drafts))
        return shares, clipped.by_token(clipped.accepted)
