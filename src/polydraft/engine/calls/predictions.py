"""What callers give as a prediction, as tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from polydraft.engine.calls.choices import Choices
from polydraft.errors import InvalidParameter, is_whole, shown


def predicting(choices: Choices, prediction: object, tokenizer: Any) -> Choices:
    """Return the choices with a prediction as tokens; unchanged if there is none.

    Args:
        choices: the call's.
        prediction: a text, tokens, or tokens for each row.
        tokenizer: makes tokens of a text; None if the call has none.

    Raises:
        InvalidParameter: it is something else, or a text, and the tokenizer is missing or none.
    """
    if prediction is None:
        return choices
    if isinstance(prediction, str):
        if tokenizer is None:
            raise InvalidParameter("prediction is a text, for which tokenizer is missing; give it, or token ids.")
        if not callable(cast(object, tokenizer)):
            raise InvalidParameter(f"tokenizer must be the target's tokenizer, but is {shown(tokenizer)}.")
        return replace(choices, prediction=_row(tokenizer(prediction, add_special_tokens=False)["input_ids"]))
    given = prediction.tolist() if isinstance(prediction, Tensor) else prediction
    if isinstance(given, Sequence) and given and all(isinstance(one, Sequence | Tensor) for one in given):
        return replace(choices, prediction=tuple(_row(one) for one in given))
    return replace(choices, prediction=_row(given))


def check_predictions(prediction: object, rows: int, vocab_size: int) -> None:
    """Check that there is one prediction for all rows, or one for each, of tokens that the target has.

    Raises:
        InvalidParameter: there is another number of them, or a token is none of the target's.
    """
    if isinstance(prediction, tuple):
        nested = isinstance(prediction[0], tuple)
        told = cast(tuple[tuple[int, ...], ...], prediction if nested else (prediction,))
        most = max(map(max, told))
        if most >= vocab_size:
            raise InvalidParameter(
                f"prediction has the token {shown(most)}, but the target has {vocab_size} tokens; give a text of the "
                "target's own tokenizer."
            )
    if isinstance(prediction, tuple) and isinstance(prediction[0], tuple):
        found = len(cast(tuple[object, ...], prediction))
        if found != rows:
            raise InvalidParameter(f"There are {found} predictions for {rows} rows; give one for all, or one for each.")


def _row(given: Any) -> tuple[int, ...]:
    """Return one row's tokens.

    Raises:
        InvalidParameter: they are none.
    """
    tokens: Any = given.tolist() if isinstance(given, Tensor) else given
    listed = isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes)
    if not listed or not tokens or not all(is_whole(one) and int(one) >= 0 for one in tokens):
        raise InvalidParameter(f"prediction must be a text or token ids, at least one, but is {shown(given)}.")
    return tuple(int(one) for one in tokens)
