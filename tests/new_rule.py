"""A rule as CONTRIBUTING.md tells a newcomer to write one: nothing but what that page names, and its line."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.catalogue import RuleLine
from polydraft.probs import residual
from polydraft.schemes import IID, Scheme, require_scheme
from polydraft.verifiers import OutcomeLaw


@dataclass(frozen=True)
class FirstOnly:
    """Look at the first of several independent drafts, and at no other."""

    scheme: Scheme = IID()
    name = "first only"
    lossless = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, (IID,), "The first-only rule")

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        first = drafts[..., :1]
        target, drawn = (row.gather(-1, first.clamp_min(0)) for row in (target_probs, draft_probs))
        accepted = torch.where(first >= 0, (target / drawn.where(drawn > 0, 1)).clamp_max(1), 0)
        child = torch.cat([accepted, torch.zeros_like(drafts[..., 1:], dtype=accepted.dtype)], dim=-1)
        left = residual(target_probs, draft_probs * (first >= 0))
        return OutcomeLaw(child, (1 - accepted) * left)

    def acceptance(self, draft_probs: Tensor, target_probs: Tensor, counts: Tensor) -> Tensor:
        return torch.minimum(draft_probs, target_probs).sum(dim=-1) * (counts > 0)


LINE = RuleLine("first-only", FirstOnly)
"""The line of `polydraft.catalogue.tables` that a newcomer would add."""
