"""Ratios of sums over prompts and their uncertainty: a bootstrap that draws whole prompts."""

from dataclasses import dataclass
from math import sqrt

import numpy as np
from jaxtyping import Float
from scipy.stats import norm as normal
from scipy.stats import t as student

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean with its confidence interval; None for both ends where there are fewer than two prompts."""

    mean: float
    low: float | None
    high: float | None

    def above(self, value: float) -> bool:
        """Tell whether all of the interval lies above a value; without an interval nothing is told."""
        return self.low is not None and self.low > value

    def below(self, value: float) -> bool:
        """Tell whether all of the interval lies below a value."""
        return self.high is not None and self.high < value


def bootstrap_weights(prompts: int, seed: int) -> Float[np.ndarray, "r m"]:
    """Return how often each prompt is drawn in each resample, prompts being drawn with replacement."""
    drawn = np.random.default_rng(seed).integers(prompts, size=(RESAMPLES, prompts))
    places = drawn + prompts * np.arange(RESAMPLES)[:, None]
    return np.bincount(places.ravel(), minlength=RESAMPLES * prompts).reshape(RESAMPLES, prompts).astype(float)


def estimate(
    sums: Float[np.ndarray, " m"],
    counts: Float[np.ndarray, " m"],
    weights: Float[np.ndarray, "r m"],
    widening: float | None = None,
) -> Estimate:
    """Return the mean over positions and its percentile interval.

    Positions of one text depend on each other, so whole texts are resampled. Half the interval's width is multiplied
    by sqrt(m / (m - 1)): resampling m texts understates their variance by this factor.

    Args:
        sums: per prompt, the sum over its positions.
        counts: per prompt, the number of its positions.
        weights: what `bootstrap_weights` gives; the same for values that are compared.
        widening: what to multiply the interval's width by instead; see `widening_for_few`.
    """
    mean, prompts = float(sums.sum() / counts.sum()), len(sums)
    if prompts < 2:
        return Estimate(mean, None, None)
    factor = sqrt(prompts / (prompts - 1)) if widening is None else widening
    return with_interval(mean, (weights @ sums) / (weights @ counts), factor)


def with_interval(value: float, resampled: Float[np.ndarray, " r"], widening: float) -> Estimate:
    """Return a value with its percentile interval, made wider by a factor."""
    ends = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    low, high = value + (ends - value) * widening
    return Estimate(value, float(low), float(high))


def widening_for_few(prompts: int) -> float:
    """Return the factor that makes the interval right for few prompts too: sqrt(m / (m - 1)) t / z, 1 for one prompt.

    t and z are the quantiles of Student's law with m - 1 degrees of freedom and of the normal law: the variance of a
    few prompts is itself uncertain. The factor is 9 for two prompts, 1.2 for ten and nearly 1 for many.
    """
    if prompts < 2:
        return 1.0
    quantile = (1 + LEVEL) / 2
    return float(sqrt(prompts / (prompts - 1)) * student.ppf(quantile, prompts - 1) / normal.ppf(quantile))
