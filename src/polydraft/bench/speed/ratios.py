"""Speed-ups: ratios of tokens per second of paired runs, with intervals from a bootstrap that draws whole prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from polydraft.bench.bootstrap import Estimate, bootstrap_weights, widening_for_few, with_interval


@dataclass(frozen=True)
class PairedRuns:
    """An arm's run and the plain run of the same prompts, temperature, batch size and repeat.

    Args:
        tokens: the arm's new tokens.
        seconds: the arm's time.
        plain_tokens: plain decoding's new tokens.
        plain_seconds: plain decoding's time.
    """

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

    Args:
        pairs: for each prompt (or batch of prompts) its repeats, at least one.
        seed: fixes the resamples.
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
