"""Predicted output: a text that the answer will resemble, as in edits, drafted from where the answer stands in it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.contract import Defaults, Session, digest_of
from polydraft.drafters.text.guess import Bounds, Guess, TextDrafter, check_count, rows_of
from polydraft.errors import InvalidParameter, is_whole, shown
from polydraft.probs import SamplingParams
from polydraft.reading import Text
from polydraft.rows import per_row, shared
from polydraft.schemes import Given
from polydraft.trees import Chain

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


SOURCE = "prediction"
"""The source of drafts that came from a prediction."""
MOST_TOKEN = 1 << 31
"""No token id is as large."""
LOST = 0.3
"""The chance that is given to a guess about where a text goes on behind a difference."""


@dataclass(frozen=True, eq=False)
class PredictedState:
    """The rows' predictions, their places in these, and the target's number of tokens."""

    predictions: tuple[NDArray[np.int64], ...] = per_row(learnt=True)
    places: tuple[PredictionPlace, ...] = per_row(PredictionPlace.cut, learnt=True)
    vocab_size: int = shared()


@dataclass(frozen=True, eq=False)
class PredictedDrafter(TextDrafter):
    """Drafts a prediction from where the answer stands in it, and finds its place again behind a difference.

    While the answer is as predicted, the rest of the prediction is drafted. After another token the place is the
    nearest one, first ahead and then back, where the prediction has the answer's last `trusted` tokens. Until there is
    one, the guess is that as many tokens were replaced as the answer had others.

    Args:
        prediction: the tokens, of all rows or one sequence for each row. A row that joins a running batch brings its
            own drafter.
        trusted: how many of the answer's last tokens must be in the prediction in the same order.

    Raises:
        InvalidParameter: no tokens, or less than one trusted.

    Source: OpenAI's predicted outputs; LLMA, arXiv 2304.04487.
    """

    prediction: Sequence[int] | Sequence[Sequence[int]]
    trusted: int = TRUSTED
    name = "prediction"
    sound = True

    def __post_init__(self) -> None:
        check_count("trusted", self.trusted)
        given = self.prediction
        if isinstance(given, Sequence) and not given:
            raise InvalidParameter("The prediction is empty: give the tokens of a text that the answer will resemble.")
        if not (_are_tokens(given) or (isinstance(given, Sequence) and all(map(_are_tokens, given)))):
            raise InvalidParameter(f"prediction must be token ids, of all rows or of each, but is {shown(given)}.")

    def defaults(self, params: SamplingParams) -> Defaults:
        """Give long chains: where a prediction is right, it is right for long."""
        return Defaults(Given(), Chain(16))

    def outside(self, row: int) -> bytes:
        """Return the digest of the row's prediction, which may be what the same seed wrote."""
        return digest_of(self._of_row(row).tobytes())

    def start(self, text: Text, session: Session) -> PredictedState:
        """Place every row at its prediction's beginning: what it has so far is its prompt.

        Raises:
            InvalidParameter: there are predictions for another number of rows.
        """
        count = len(text.counts)
        if not isinstance(self.prediction[0], int | np.integer) and len(self.prediction) != count:
            raise InvalidParameter(
                f"There are {len(self.prediction)} predictions for {count} rows; give one for all, or one for each."
            )
        rows = tuple(map(self._of_row, range(count)))
        return PredictedState(rows, tuple(PredictionPlace(known, known) for known in text.counts), session.vocab_size)

    def guesses(self, state: PredictedState, text: Text, bounds: Bounds) -> tuple[list[Guess], PredictedState]:
        """Return the rest of every row's prediction."""
        found, places = list[Guess](), list[PredictionPlace]()
        for row, own, place in zip(rows_of(text), state.predictions, state.places, strict=True):
            now = moved(place, own, row, self.trusted)
            places.append(now)
            rest = own[now.at : now.at + min(bounds.depth, bounds.nodes)]
            guess = Guess.chain(rest, 0.9 if now.lost else 0.95)
            found.append(replace(guess, chances=guess.chances * LOST) if now.lost else guess)
        return found, replace(state, places=tuple(places))

    def _of_row(self, row: int) -> NDArray[np.int64]:
        """Return a row's prediction; none where there are fewer, which `start` refuses."""
        if isinstance(self.prediction[0], int | np.integer):
            return np.asarray(self.prediction, np.int64)
        return np.asarray(self.prediction[row] if row < len(self.prediction) else (), np.int64)


def _are_tokens(given: object) -> bool:
    listed = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes) or not listed:
        return False
    return all(is_whole(one) and 0 <= one < MOST_TOKEN for one in listed)
