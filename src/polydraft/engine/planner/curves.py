"""What passes cost by their size, as it was measured: monotone curves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from scipy.optimize import isotonic_regression

from polydraft.errors import InvalidParameter
from polydraft.trees import TreeShape, step_seconds


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of a count: linear between the points and beyond the last, never falling.

    Args:
        points: counts, ascending, with their seconds.

    Raises:
        InvalidParameter: no points, or counts or seconds that do not ascend from at least 1 and 0.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        counts, seconds = [count for count, _ in self.points], [value for _, value in self.points]
        rising = all(before <= after for before, after in zip([0.0, *seconds], [*seconds, float("inf")], strict=True))
        if not counts or counts[0] < 1 or sorted({*counts}) != counts or not rising or max(seconds) == float("inf"):
            raise InvalidParameter(
                f"A cost curve needs ascending counts and finite, ascending times, not {self.points}."
            )

    def __call__(self, count: int) -> float:
        """Return the seconds at a count."""
        counts, seconds = zip(*self.points, strict=True)
        if count <= counts[-1] or len(counts) == 1:
            return float(np.interp(count, counts, seconds))
        slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        return seconds[-1] + slope * (count - counts[-1])

    @classmethod
    def through(cls, samples: Mapping[int, Sequence[float]]) -> "Curve":
        """Return the monotone curve next to the medians of the samples at each count, in least squares."""
        counts = sorted(samples)
        medians = [max(0.0, median(samples[count])) for count in counts]
        return cls(tuple(zip(counts, map(float, isotonic_regression(medians).x), strict=True)))


@dataclass(frozen=True)
class StepCosts:
    """What a decoding step takes, in seconds.

    Args:
        target: the target's pass over n nodes.
        draft: one level of drafting over f nodes.
        start: what a draft takes beyond its levels.
        overhead: the rest of a step with drafts: distributions, verification, bookkeeping.
        plain_overhead: the rest of a step without.
    """

    target: Curve
    draft: Curve
    start: float
    overhead: float
    plain_overhead: float

    def __post_init__(self) -> None:
        for name in ("start", "overhead", "plain_overhead"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise InvalidParameter(f"{name} must be a time >= 0, but is {value}.")

    def verifying(self, nodes: int) -> float:
        """Return the time of a step but for what drafts add to it beside nodes."""
        return self.target(nodes) + self.plain_overhead

    @property
    def drafting(self) -> float:
        """What a step with drafts takes more than a plain one, whatever its tree."""
        return self.start + max(0.0, self.overhead - self.plain_overhead)

    def of(self, shape: TreeShape) -> float:
        """Return the time of a step with trees of this shape; the root alone is plain decoding."""
        return step_seconds(shape, self.verifying, self.draft, self.drafting)
