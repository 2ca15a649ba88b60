"""Speed-ups: ratios of paired runs, with intervals from a bootstrap over whole prompts, and what bounds them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from polydraft.bench.bootstrap import Estimate, bootstrap_weights, widening_for_few, with_interval
from polydraft.engine import Statistics
from polydraft.theory import time_factor


@dataclass(frozen=True)
class PairedRuns:
    """An arm's run and the plain run of the same prompts, temperature, batch size and repeat."""

    tokens: int
    seconds: float
    plain_tokens: int
    plain_seconds: float

    @property
    def ratio(self) -> float:
        """The arm's tokens per second over plain decoding's."""
        return (self.tokens / self.seconds) / (self.plain_tokens / self.plain_seconds)


@dataclass(frozen=True)
class SpeedUp:
    """How much faster an arm is than plain decoding.

    Args:
        total: all tokens over all seconds, divided by the same of plain decoding; long texts weigh more.
        paired: the geometric mean of the ratios of paired runs; all pairs weigh alike.
        by_prompt: the ratio of each prompt (or batch), all repeats together.
    """

    total: Estimate
    paired: Estimate
    by_prompt: tuple[float, ...]


def speed_up(pairs: Sequence[Sequence[PairedRuns]], seed: int = 0) -> SpeedUp:
    """Return an arm's speed-up with 95 % intervals.

    Repeats of a prompt depend on each other: they share its text and its difficulty. So prompts are drawn with all
    their repeats; `widening_for_few` makes up for few of them. Ratios are averaged and widened as logarithms, in which
    a half and a double are equally far from one.
    """
    columns = [
        np.array([sum(getattr(pair, name) for pair in repeats) for repeats in pairs], dtype=float)
        for name in ("tokens", "seconds", "plain_tokens", "plain_seconds")
    ]
    logs = np.array([sum(np.log(pair.ratio) for pair in repeats) for repeats in pairs])
    counts = np.array([len(repeats) for repeats in pairs], dtype=float)
    weights = bootstrap_weights(len(pairs), seed)
    whole = np.ones((1, len(pairs)))
    return SpeedUp(
        total=_exponential(_log_ratio(whole, columns), _log_ratio(weights, columns), len(pairs)),
        paired=_exponential(whole @ logs / (whole @ counts), weights @ logs / (weights @ counts), len(pairs)),
        by_prompt=tuple(np.exp(_log_ratio(np.eye(len(pairs)), columns)).tolist()),
    )


def _log_ratio(weights: Float[np.ndarray, "r m"], columns: Sequence[Float[np.ndarray, " m"]]) -> np.ndarray:
    tokens, seconds, plain_tokens, plain_seconds = (np.log(weights @ column) for column in columns)
    return tokens - seconds - plain_tokens + plain_seconds


def _exponential(value: Float[np.ndarray, "1"], resampled: Float[np.ndarray, " r"], prompts: int) -> Estimate:
    if prompts < 2:
        return Estimate(float(np.exp(value[0])), None, None)
    found = with_interval(float(value[0]), resampled, widening_for_few(prompts))
    low, high = (None if end is None else float(np.exp(end)) for end in (found.low, found.high))
    return Estimate(float(np.exp(found.mean)), low, high)


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
