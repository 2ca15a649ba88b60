"""Predicted output: a text that the answer will resemble, as in edits, drafted from where the answer stands in it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.outside import digest_of
from polydraft.drafters.protocol import Defaults, Session
from polydraft.drafters.text.following import TRUSTED, PredictionPlace, moved
from polydraft.drafters.text.guess import Bounds, Guess, TextDrafter, rows_of
from polydraft.errors import InvalidParameter, is_whole, shown
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Text
from polydraft.rows import per_row, shared
from polydraft.schemes import Given
from polydraft.trees import Chain

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
        if not is_whole(self.trusted) or self.trusted < 1:
            raise InvalidParameter(f"trusted must be a whole number of at least 1, but is {shown(self.trusted)}.")
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
        counts = text.counts
        rows = self._rows(len(counts))
        return PredictedState(rows, tuple(PredictionPlace(count, count) for count in counts), session.vocab_size)

    def read(self, state: PredictedState, text: Text, features: Features | None) -> PredictedState:
        """Keep the places: the whole prompts are known from the start."""
        return state

    def guesses(self, state: PredictedState, text: Text, bounds: Bounds) -> tuple[list[Guess], PredictedState]:
        """Return the rest of every row's prediction."""
        found, places = list[Guess](), list[PredictionPlace]()
        for row, own, place in zip(rows_of(text), state.predictions, state.places, strict=True):
            now = moved(place, own, row, self.trusted)
            places.append(now)
            rest = own[now.at : now.at + min(bounds.depth, bounds.nodes)]
            found.append(Guess.chain(rest, 0.95) if not now.lost else _scaled(Guess.chain(rest, 0.9), LOST))
        return found, replace(state, places=tuple(places))

    def _of_row(self, row: int) -> NDArray[np.int64]:
        """Return a row's prediction; none where there are fewer, which `start` refuses."""
        if isinstance(self.prediction[0], int | np.integer):
            return np.asarray(self.prediction, np.int64)
        return np.asarray(self.prediction[row] if row < len(self.prediction) else (), np.int64)

    def _rows(self, count: int) -> tuple[NDArray[np.int64], ...]:
        if not isinstance(self.prediction[0], int | np.integer) and len(self.prediction) != count:
            raise InvalidParameter(
                f"There are {len(self.prediction)} predictions for {count} rows; give one for all, or one for each."
            )
        return tuple(self._of_row(row) for row in range(count))


def _are_tokens(given: object) -> bool:
    listed = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes) or not listed:
        return False
    return all(is_whole(one) and 0 <= one < MOST_TOKEN for one in listed)


def _scaled(guess: Guess, chance: float) -> Guess:
    return replace(guess, chances=guess.chances * chance)
