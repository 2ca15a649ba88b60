"""What bounds a speed-up: what follows from the measured acceptance and the measured cost of each part of a step."""

from dataclasses import dataclass

from polydraft.engine import Statistics
from polydraft.theory import time_factor

PARTS = ("draft", "target", "verify", "rest")
MOSTLY = 0.95
"""The formula for chains is used if this share of the drafts that it counts on were there."""


@dataclass(frozen=True)
class SpeedUpBound:
    """What an arm's speed-up is made of. Costs are per step, in target passes of plain decoding.

    Args:
        tokens: the mean number of tokens that a target call gives, were no text cut at its end. It is the speed-up
            if drafting, verifying and scoring more tokens cost nothing.
        draft: the cost of drafting.
        target: the cost of the target's pass; 1 if a tree costs as much as a single token.
        other: the cost of verification and of everything else.
        chain: `theory.time_factor`: the speed-up if acceptance is the same at every depth, each depth costs one
            draft pass, and the target's pass and all else cost nothing more; None where drafts are not equally deep.
        passes: the speed-up if there were nothing but forward passes: tokens / (draft + target).
        steps: the speed-up of a step: with everything but the prompt's pass.
    """

    tokens: float
    draft: float
    target: float
    other: float
    chain: float | None
    passes: float
    steps: float


def bound_of(arm: Statistics, plain: Statistics) -> SpeedUpBound | None:
    """Return what bounds an arm's speed-up over plain decoding; None where times or counts are missing.

    With acceptance a_d at depth d a target call gives 1 + a_1 + a_1 a_2 + ... tokens, here counted as accepted drafts
    of each depth over target calls. Source of `chain`: Leviathan et al., arXiv 2211.17192, theorem 3.8.

    Args:
        arm: the arm's counts and times, all its runs together.
        plain: plain decoding's, on the same prompts.
    """
    if not (arm.steps and plain.steps and arm.seconds.get("target") and plain.seconds.get("target")):
        return None
    unit = plain.seconds["target"] / plain.steps
    draft, target, verify, rest = (arm.seconds.get(part, 0.0) / arm.steps / unit for part in PARTS)
    plain_step = sum(plain.seconds.get(part, 0.0) for part in PARTS) / plain.steps / unit
    tokens = 1 + sum(arm.accepted_at) / arm.target_calls
    return SpeedUpBound(
        tokens=tokens,
        draft=draft,
        target=target,
        other=verify + rest,
        chain=_chain(arm, draft),
        passes=tokens / (draft + target),
        steps=tokens * plain_step / (draft + target + verify + rest),
    )


def _chain(arm: Statistics, draft: float) -> float | None:
    """Return the formula's value if drafts were always as deep, as those of a draft model are; else it says nothing."""
    depth = len(arm.offered_at)
    due = arm.target_calls + sum(arm.accepted_at[: depth - 1])
    if not depth or sum(arm.offered_at) < MOSTLY * due:
        return None
    return time_factor(arm.acceptance_rate, depth, draft / depth)
