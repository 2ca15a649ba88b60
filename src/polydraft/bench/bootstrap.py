"""Ratios of sums over prompts and their uncertainty: a bootstrap that draws whole prompts."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean with its confidence interval; None for both ends where there are fewer than two prompts."""

    mean: float
    low: float | None
    high: float | None


def bootstrap_weights(prompts: int, seed: int) -> Float[np.ndarray, "r m"]:
    """Return how often each prompt is drawn in each resample, prompts being drawn with replacement."""
    drawn = np.random.default_rng(seed).integers(prompts, size=(RESAMPLES, prompts))
    places = drawn + prompts * np.arange(RESAMPLES)[:, None]
    return np.bincount(places.ravel(), minlength=RESAMPLES * prompts).reshape(RESAMPLES, prompts).astype(float)


def estimate(
    sums: Float[np.ndarray, " m"], counts: Float[np.ndarray, " m"], weights: Float[np.ndarray, "r m"]
) -> Estimate:
    """Return the mean over positions and its percentile interval.

    Positions of one text depend on each other, so whole texts are resampled. Half the interval's width is multiplied
    by sqrt(m / (m - 1)): resampling m texts understates their variance by this factor.

    Args:
        sums: per prompt, the sum over its positions.
        counts: per prompt, the number of its positions.
        weights: what `bootstrap_weights` gives; the same for values that are compared.
    """
    mean, prompts = float(sums.sum() / counts.sum()), len(sums)
    if prompts < 2:
        return Estimate(mean, None, None)
    return with_interval(mean, (weights @ sums) / (weights @ counts), prompts)


def with_interval(value: float, resampled: Float[np.ndarray, " r"], prompts: int) -> Estimate:
    """Return a value with its percentile interval, widened by sqrt(m / (m - 1)) for m prompts, at least two."""
    ends = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    low, high = value + (ends - value) * np.sqrt(prompts / (prompts - 1))
    return Estimate(value, float(low), float(high))
