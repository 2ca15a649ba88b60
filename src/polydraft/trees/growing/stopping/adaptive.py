"""Draft & Verify's adaptive threshold: draft on while the draft is sure, and learn how sure is enough."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.trees.growing.bounds import require_positive, require_share
from polydraft.trees.growing.growth import Drawn, GrowingPolicy, Opened
from polydraft.trees.policy import Chain
from polydraft.trees.shape import TreeShape
from polydraft.trees.tree import TokenTree, Verdict


@dataclass(frozen=True, eq=False)
class Learnt:
    """What each row has learnt: its threshold, and the smoothed share of its drafts that was accepted."""

    threshold: Float[Tensor, "b"]
    rate: Float[Tensor, "b"]


@dataclass(frozen=True)
class AdaptiveThreshold(GrowingPolicy):
    """A chain that goes on while the drawn token's draft probability is at least a threshold, which each row learns.

    After a step that accepted the share r of its drafts, the mean share becomes R <- f R + (1 - f) r, with R = 0 at
    the start and f the `forgetting`. If R < goal the threshold t aims at t' = t + step; else at t' = t if the chain
    ran to its full length, and at t' = t - step if not. Then t <- s t + (1 - s) t', with s the `smoothing`. A step
    without drafts teaches nothing. Exact as any threshold is: it depends on steps that are over.

    Args:
        length: the longest chain.
        threshold: where it starts, in 0 to 1.
        goal: the share of accepted drafts to aim at.
        step: how far the threshold is moved, before smoothing.
        forgetting: weight of the past in the mean share.
        smoothing: weight of the past in the threshold.
        learnt: the rows' state; None before the first step.

    Raises:
        InvalidParameter: a length below 1, or a number outside 0 to 1.

    Source: Draft & Verify, arXiv 2309.08168, section 3.3; start, goal, step and weights are those of its code.
    """

    length: int = 8
    threshold: float = 0.6
    goal: float = 0.9
    step: float = 0.01
    forgetting: float = 0.5
    smoothing: float = 0.9
    learnt: Learnt | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        require_positive(length=self.length)
        for name in ("threshold", "goal", "step", "forgetting", "smoothing"):
            require_share(name, getattr(self, name))

    @property
    def shape(self) -> TreeShape:
        """The longest chain."""
        return Chain(self.length).shape

    @property
    def stops(self) -> bool:
        """A chain ends where the draft is not sure."""
        return True

    def widest(self, depth: int) -> int:
        """Return 1: it is a chain."""
        return 1

    def opened(self, drawn: Drawn) -> Bool[Tensor, "b c"]:
        """Go on below tokens at least as likely as the row's threshold."""
        least = self.threshold if self.learnt is None else self.learnt.threshold.unsqueeze(-1).to(drawn.chance)
        return drawn.chance >= least

    def counts(self, opened: Opened) -> Int[Tensor, "b f"]:
        """Give every open node one child."""
        return torch.ones_like(opened.there, dtype=torch.int64)

    def after(self, tree: TokenTree, verdict: Verdict) -> "AdaptiveThreshold":
        """Move the thresholds by what was drafted and accepted."""
        drafted = tree.valid.sum(dim=-1) - 1
        old = self._of(len(drafted), drafted.device)
        rate = self.forgetting * old.rate + (1 - self.forgetting) * verdict.length.double() / drafted.clamp_min(1)
        doubtful, stopped = rate < self.goal, drafted < self.length
        aim = old.threshold + self.step * (doubtful.double() - (stopped & ~doubtful).double())
        threshold = (self.smoothing * old.threshold + (1 - self.smoothing) * aim).clamp(0, 1)
        taught = drafted > 0
        return replace(self, learnt=Learnt(threshold.where(taught, old.threshold), rate.where(taught, old.rate)))

    def select(self, rows: Sequence[int]) -> "AdaptiveThreshold":
        """Return the policy for some rows, with what each has learnt."""
        if self.learnt is None:
            return self
        device = self.learnt.rate.device
        old, places = self._of(max(rows) + 1, device), torch.tensor(rows, device=device)
        return replace(self, learnt=Learnt(old.threshold[places], old.rate[places]))

    def put(self, row: int, other: Any) -> Self:
        """Return the policy with what another has learnt of its only row."""
        known = self.learnt or other.learnt
        if known is None:
            return self
        count = max(row + 1, 0 if self.learnt is None else len(self.learnt.rate))
        own, new = self._of(count, known.rate.device), other._of(1, known.rate.device)
        at = torch.arange(count, device=known.rate.device) == row
        return replace(self, learnt=Learnt(own.threshold.where(~at, new.threshold), own.rate.where(~at, new.rate)))

    def _of(self, rows: int, device: torch.device) -> "Learnt":
        """Return what was learnt of so many rows; those behind the last of which something was begin anew."""
        zero = torch.zeros(rows, dtype=torch.float64, device=device)
        threshold, rate = zero + self.threshold, zero
        if self.learnt is not None:
            more = max(rows - len(self.learnt.rate), 0)
            threshold = torch.cat([self.learnt.threshold, threshold[:more]])
            rate = torch.cat([self.learnt.rate, rate[:more]])
        return Learnt(threshold, rate)
