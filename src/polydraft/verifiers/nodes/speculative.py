"""Speculative sampling: the classic rule for one draft per node."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.schemes import IID, Product, Scheme, require_scheme
from polydraft.verifiers.law import SharesRule, accept_ratio, at_draft, present, require_few


@dataclass(frozen=True)
class SpeculativeSampling(SharesRule):
    """Accept the draft x with probability min(1, target(x) / draft(x)), else draw from norm((target - draft)+).

    Problem: one draft x ~ draft; emit a token that follows the target and is x as often as possible.
    Rule: share(x) = min(1, mass(x) / draft(x)), marginal = min(mass, draft), for any target mass of total <= 1.
    Scheme: one independent draft per node.
    Exactness: min(target, draft) + (1 - overlap) norm((target - draft)+) = target.
    Cost: O(K) per node.
    Acceptance: sum_x min(target(x), draft(x)), optimal for one draft.
    Source: arXiv 2211.17192, algorithm 1; arXiv 2302.01318, algorithm 2.

    Raises:
        UnpairedScheme: a node has more than one draft.
    """

    scheme: Scheme = IID()
    name = "speculative sampling"
    most_drafts = 1
    lossless = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, (IID,), "Speculative sampling")

    def shares(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*b A"],
        target_mass: Float[Tensor, "*b A"],
    ) -> Float[Tensor, "*b k"]:
        """Return min(1, mass(x) / draft(x)) for the draft x, zero where it is absent."""
        require_few(self, drafts.shape[-1])
        draft = drafts.squeeze(-1)
        accepted = accept_ratio(at_draft(target_mass, draft), at_draft(draft_probs, draft))
        return (accepted * (draft >= 0)).unsqueeze(-1)

    def marginal(
        self, draft_probs: Float[Tensor, "*b A"], target_mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b A"]:
        """Return min(mass, draft) where there is a draft."""
        return torch.minimum(target_mass, draft_probs) * (counts > 0).unsqueeze(-1)

    def acceptance(
        self, draft_probs: Float[Tensor, "*b A"], target_probs: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        """Return sum_x min(target(x), draft(x)) where there is a draft, else zero."""
        require_few(self, int(counts.max()) if counts.numel() else 0)
        return super().acceptance(draft_probs, target_probs, counts)


def lone_draft(
    scheme: Scheme,
    drafts: Int[Tensor, "*b k"],
    draft_probs: Float[Tensor, "*rows A"],
    target_mass: Float[Tensor, "*b A"],
) -> tuple[Float[Tensor, "*b k"], Float[Tensor, "*b A"]] | None:
    """Return shares and marginal of the best rule for one draft per node; None if there is room for more.

    Of a draft from the row the best coupling keeps min(mass, draft), and no other is as good; a draft that is certain
    is accepted as often as its mass. Every rule that comes to this with one draft may save its general computation.
    """
    if drafts.shape[-1] != 1:
        return None
    if not is_drawn(scheme):
        shares = at_draft(target_mass, drafts.squeeze(-1)).unsqueeze(-1) * (drafts >= 0)
        return shares, torch.zeros_like(target_mass).scatter_(-1, drafts.clamp_min(0), shares)
    row = draft_probs[..., 0, :] if isinstance(scheme, Product) else draft_probs
    rule = SpeculativeSampling()
    return rule.shares(drafts, row, target_mass), rule.marginal(row, target_mass, present(drafts))


def is_drawn(scheme: Scheme) -> bool:
    """Tell whether a node's only draft is a draw from its row; some schemes' first draft is certain."""
    return scheme.lone_draft_is_drawn
