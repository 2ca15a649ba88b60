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
from polydraft.verifiers.law import OutcomeLaw, law_of_shares, node_by_node, summed_at_first
from polydraft.verifiers.nodes.speculative import lone_draft, lone_draft_at
from polydraft.verifiers.selection.clipped import Clipped, clip
from polydraft.verifiers.selection.ordered import Numbers, Places, integers, numbers, tensor
from polydraft.verifiers.selection.walk import accepted_shares

SCHEMES = (IID, WithoutReplacement, TopThenIID, ConditionalPoisson, TopThenSample, SpecHub, TopK, Given)
REPEATING = (IID, TopThenIID, SpecHub, Given)
"""The schemes among these that may draft a token twice."""


@dataclass(frozen=True)
class Optimal:
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

    def law(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*b A"],
        target_probs: Float[Tensor, "*b A"],
    ) -> OutcomeLaw:
        """Return the outcome law, as shares and a residual that does not depend on the drafts."""
        shares, marginal = self._solve(drafts, draft_probs, target_probs)
        return law_of_shares(shares, marginal, target_probs)

    def shares(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*b A"],
        target_mass: Float[Tensor, "*b A"],
    ) -> Float[Tensor, "*b k"]:
        """Return the probability of accepting each draft, for a repeated token at its first copy."""
        return self._solve(drafts, draft_probs, target_mass)[0]

    @np.errstate(divide="ignore", invalid="ignore", over="ignore")
    def marginal(
        self, draft_probs: Float[Tensor, "*b A"], target_mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b A"]:
        """Return min(m, t)."""
        masses = numbers(target_mass.reshape(-1, target_mass.shape[-1]))
        rows = numbers(draft_probs.reshape(masses.shape))
        kept = np.zeros(masses.shape)
        for number, count in enumerate(integers(counts.flatten())):
            kept[number] = self._clipped(rows[number], masses[number], int(count))[1]
        return tensor(kept).to(target_mass).view(target_mass.shape)

    def acceptance(
        self, draft_probs: Float[Tensor, "*b A"], target_probs: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        """Return 1 + min_H [m(H) - Q(H)]."""
        return optimal_set(self.scheme, draft_probs, target_probs, counts).acceptance.to(target_probs.dtype)

    @np.errstate(divide="ignore", invalid="ignore", over="ignore")
    def at_node(self, drafts: Places, draft_row: Numbers, target_mass: Numbers) -> tuple[Numbers, Numbers]:
        """Return shares and marginal of one node, on the host."""
        alone = lone_draft_at(self.scheme, drafts, draft_row, target_mass)
        if alone:
            return alone
        clipped, marginal = self._clipped(draft_row, target_mass, int((drafts >= 0).sum()))
        shares = accepted_shares(clipped, clipped.places(drafts))
        return summed_at_first(shares, drafts) if isinstance(self.scheme, REPEATING) else shares, marginal

    def _clipped(self, draft_row: Numbers, target_mass: Numbers, count: int) -> tuple[Clipped, Numbers]:
        """Return the clipped target and min(m, t), which is zero without drafts."""
        clipped = clip(self.scheme, draft_row, target_mass, count)
        return clipped, clipped.by_token(clipped.accepted) if count else np.zeros(len(target_mass))

    def _solve(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*b A"],
        target_mass: Float[Tensor, "*b A"],
    ) -> tuple[Float[Tensor, "*b k"], Float[Tensor, "*b A"]]:
        """Return shares and marginal."""
        return lone_draft(self.scheme, drafts, draft_probs, target_mass) or node_by_node(
            self, drafts, draft_probs, target_mass
        )
