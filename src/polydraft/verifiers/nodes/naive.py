"""Naive match: draw from the target and keep the draft if it is the token drawn."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import without
from polydraft.schemes import Scheme, TopK, check_scheme
from polydraft.theory import inclusion
from polydraft.verifiers.host.inclusion import drafted_at
from polydraft.verifiers.law import OutcomeLaw, first_copies
from polydraft.verifiers.selection.ordered import Numbers, Places


@dataclass(frozen=True)
class NaiveMatch:
    """Draw y from the target; accept draft i if y is its token, else emit y.

    Problem: drafts C of any law, known or not; emit a token that follows the target, one of C where it happens to be.
    Rule: child_i = target(x_i) for the first draft of each token, rest = the target off the drafts. For a target mass
    share_i = mass(x_i), marginal(x) = mass(x) Pr[x is drafted].
    Scheme: any, because the drafts' probabilities are not used.
    Exactness: the emitted token is a draw from the target by construction.
    Cost: O(k K) per node.
    Acceptance: E[target(C)] = sum_x target(x) Pr[x in C]. Optimal for deterministic schemes, where it is target(C);
    the worst of the exact rules for sampled drafts.
    Source: SpecInfer's greedy and naive verification, arXiv 2305.09781, section 4.3; REST, arXiv 2311.08252.
    """

    scheme: Scheme = TopK()
    name = "naive match"
    lossless = True

    def __post_init__(self) -> None:
        check_scheme(self.scheme, "Naive match")

    def law(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*rows A"],
        target_probs: Float[Tensor, "*b A"],
    ) -> OutcomeLaw:
        """Return the outcome law of one target draw."""
        return OutcomeLaw(self.shares(drafts, draft_probs, target_probs), without(target_probs, drafts))

    def shares(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*rows A"],
        target_mass: Float[Tensor, "*b A"],
    ) -> Float[Tensor, "*b k"]:
        """Return the target mass of each drafted token, at its first copy."""
        mass = target_mass.gather(-1, drafts.clamp_min(0))
        return mass.where(first_copies(drafts), torch.zeros_like(mass))

    def marginal(
        self, draft_probs: Float[Tensor, "*rows A"], target_mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b A"]:
        """Return mass(x) Pr[x is drafted]."""
        return target_mass * inclusion(self.scheme, draft_probs, counts).to(target_mass.dtype)

    def acceptance(
        self, draft_probs: Float[Tensor, "*rows A"], target_probs: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        """Return sum_x target(x) Pr[x is drafted]."""
        return self.marginal(draft_probs, target_probs, counts).sum(dim=-1)

    def at_node(self, drafts: Places, draft_row: Numbers, target_mass: Numbers) -> tuple[Numbers, Numbers]:
        """Return shares and marginal of one node, on the host."""
        count = int((drafts >= 0).sum())
        return self.law_at(drafts, draft_row, target_mass)[0], target_mass * drafted_at(self.scheme, draft_row, count)

    def law_at(self, drafts: Places, draft_row: Numbers, target_mass: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shares of a node's drafts and the target off them, on the host."""
        shares, rest = np.zeros(len(drafts)), target_mass.copy()
        for place, draft in enumerate(drafts.tolist()):
            if draft >= 0:
                shares[place], rest[draft] = rest[draft], 0.0  # a repeated draft has nothing left
        return shares, rest
