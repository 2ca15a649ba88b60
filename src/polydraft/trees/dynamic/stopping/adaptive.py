"""Draft & Verify's adaptive threshold: draft on while the draft is sure, and learn how sure is enough."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.trees.dynamic.bounds import require_positive, require_share
from polydraft.trees.dynamic.policy import Drawn, Opened
from polydraft.trees.policies import Chain, FixedShape, TreePolicy
from polydraft.trees.shape import TreeShape
from polydraft.trees.tree import TokenTree, Verdict


@runtime_checkable
class LearningPolicy(TreePolicy, Protocol):
    """A policy that is told what became of its trees; values in, values out.

    One that learns something of each row has `select` besides, which returns the policy for some rows alone.
    """

    def after(self, tree: TokenTree, verdict: Verdict) -> "LearningPolicy":
        """Return the policy for the next step."""
        ...

    def joined(self, row: int) -> "LearningPolicy":
        """Return the policy after a new text took the place of a row, or came behind the last."""
        ...


def policy_after(policy: TreePolicy, tree: TokenTree, verdict: Verdict) -> TreePolicy:
    """Return the policy for the next step: itself, unless it learns."""
    return (
        policy
        if isinstance(policy, FixedShape) or not isinstance(policy, LearningPolicy)
        else policy.after(tree, verdict)
    )


def policy_joined(policy: TreePolicy, row: int) -> TreePolicy:
    """Return the policy after a new text took the place of a row, or came behind the last: itself, unless it learns."""
    return policy.joined(row) if isinstance(policy, LearningPolicy) else policy


def policy_of(policy: TreePolicy, rows: Sequence[int]) -> TreePolicy:
    """Return the policy for some rows alone, for -1, which is nobody's, some other: itself, unless it learns by row."""
    select = getattr(policy, "select", None) if isinstance(policy, LearningPolicy) else None
    return policy if select is None else select(rows)


@dataclass(frozen=True, eq=False)
class Learnt:
    """What each row has learnt: its threshold, and the smoothed share of its drafts that was accepted."""

    threshold: Float[Tensor, "b"]
    rate: Float[Tensor, "b"]


@dataclass(frozen=True)
class AdaptiveThreshold:
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

    def open(self, drawn: Drawn) -> Bool[Tensor, "b c"]:
        """Go on below tokens at least as likely as the row's threshold."""
        least = self.threshold if self.learnt is None else self.learnt.threshold.unsqueeze(-1).to(drawn.chance)
        return drawn.chance >= least

    def counts(self, opened: Opened) -> Int[Tensor, "b f"]:
        """Give every open node one child."""
        return torch.ones_like(opened.there, dtype=torch.int64)

    def after(self, tree: TokenTree, verdict: Verdict) -> "AdaptiveThreshold":
        """Move the thresholds by what was drafted and accepted."""
        drafted = tree.valid.sum(dim=-1) - 1
        old = self.learnt or self._start(drafted)
        rate = self.forgetting * old.rate + (1 - self.forgetting) * verdict.length.double() / drafted.clamp_min(1)
        doubtful, stopped = rate < self.goal, drafted < self.length
        aim = old.threshold + self.step * (doubtful.double() - (stopped & ~doubtful).double())
        threshold = (self.smoothing * old.threshold + (1 - self.smoothing) * aim).clamp(0, 1)
        taught = drafted > 0
        return replace(self, learnt=Learnt(threshold.where(taught, old.threshold), rate.where(taught, old.rate)))

    def joined(self, row: int) -> "AdaptiveThreshold":
        """Let a row begin anew; the number of rows makes one more."""
        if self.learnt is None:
            return self
        known, behind = self.learnt, (0, int(row == len(self.learnt.rate)))
        threshold, rate = (torch.nn.functional.pad(one, behind) for one in (known.threshold, known.rate))
        threshold[row], rate[row] = self.threshold, 0.0
        return replace(self, learnt=Learnt(threshold, rate))

    def select(self, rows: Sequence[int]) -> "AdaptiveThreshold":
        """Return the policy for some rows alone, with what each has learnt; for -1, which is nobody's, some other."""
        if self.learnt is None:
            return self
        own = torch.tensor([max(row, 0) for row in rows], device=self.learnt.rate.device)
        return replace(self, learnt=Learnt(self.learnt.threshold[own], self.learnt.rate[own]))

    def _start(self, rows: Int[Tensor, "b"]) -> Learnt:
        zero = torch.zeros_like(rows, dtype=torch.float64)
        return Learnt(zero + self.threshold, zero)
