"""Following a prediction: where an answer stands in it, and which tokens of it the answer has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

TRUSTED = 2
"""So many tokens in the same order tell where a text goes on behind a difference."""
NOWHERE = -1


@dataclass(frozen=True)
class PredictionPlace:
    """Where a row stands in its prediction.

    Args:
        begin: where the answer begins.
        known: how many of the row's tokens have been looked at.
        at: the next token of the prediction.
        lost: how many tokens of the answer have not been those of the prediction since they last agreed.
    """

    begin: int
    known: int
    at: int = 0
    lost: int = 0

    def cut(self, length: int) -> "PredictionPlace":
        """Return the place, or the beginning if the text became shorter than what was looked at."""
        return self if self.known <= length else PredictionPlace(length, length)


@dataclass(frozen=True, eq=False)
class Followed:
    """An answer beside its prediction: each token's place there, whoever brought it, a draft or the target.

    A token has a place if it is the next one where the answer stands, or one of those by which it was found again.

    Args:
        prediction: its tokens.
        tokens: the answer so far.
        spots: which token of the prediction each of them is; -1 for none.
        place: where the answer stands.
    """

    prediction: Sequence[int]
    tokens: tuple[int, ...] = ()
    spots: tuple[int, ...] = ()
    place: PredictionPlace = field(default_factory=lambda: PredictionPlace(0, 0))

    @property
    def accepted(self) -> int:
        """How many tokens of the prediction the answer has; those that it has twice count once."""
        return len({*self.spots} - {NOWHERE})

    def on(self, more: Sequence[int]) -> "Followed":
        """Return the same with further tokens of the answer."""
        tokens, spots, now = (*self.tokens, *more), [*self.spots], self.place
        own, text = np.asarray(self.prediction, np.int64), np.asarray(tokens, np.int64)
        for now, last in _steps(self.place, own, text, TRUSTED):  # noqa: B007  the last one is wanted
            spots.append(NOWHERE)
            spots[len(spots) - len(last) :] = last
        return replace(self, tokens=tokens, spots=tuple(spots), place=now)


def moved(
    place: PredictionPlace, prediction: NDArray[np.int64], text: NDArray[np.int64], trusted: int
) -> PredictionPlace:
    """Return a row's place when its text has become longer."""
    now = place
    for now, _ in _steps(place, prediction, text, trusted):  # noqa: B007  the last one is wanted
        pass
    return replace(now, known=len(text))


def _steps(
    place: PredictionPlace, prediction: NDArray[np.int64], text: NDArray[np.int64], trusted: int
) -> Iterator[tuple[PredictionPlace, range]]:
    """Yield the place behind each further token, and which tokens of the prediction the last ones are, if any.

    Behind a difference only tokens from there on can turn out to be others of the prediction than was thought.
    """
    at, lost = place.at, place.lost
    for end in range(place.known + 1, len(text) + 1):
        same = at < len(prediction) and bool(prediction[at] == text[end - 1])
        spots = range(at, at + same)
        if lost or not same:
            lost += 1
            there = _again(prediction, text[end - trusted : end], at) if end - place.begin >= trusted else None
            if there is not None:
                at, spots, lost = there - 1, range(there - min(lost, trusted), there), 0
        at = min(at + 1, len(prediction))
        yield PredictionPlace(place.begin, end, at, lost), spots


def _again(prediction: NDArray[np.int64], last: NDArray[np.int64], near: int) -> int | None:
    """Return the place behind these tokens that is nearest, ahead before back; None if they are not there."""
    size = len(last)
    if size > len(prediction):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(prediction, size)
    ends = np.flatnonzero((windows == last).all(axis=1)) + size
    if not len(ends):
        return None
    ahead = ends[ends >= near]
    return int(ahead[0] if len(ahead) else ends[-1])
