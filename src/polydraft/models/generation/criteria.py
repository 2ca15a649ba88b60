"""Stopping criteria of several rows: each row has its own copy, as if it were generated alone."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.generation.stopping_criteria import MaxTimeCriteria, StopStringCriteria

from polydraft.errors import InvalidParameter

Criterion = Callable[..., Any]
KEEPS_NOTHING = (MaxTimeCriteria, StopStringCriteria)
"""Hugging Face's criteria whose answer depends on the row and the clock alone."""


def row_criteria(criteria: Sequence[Criterion], prompts: Int[Tensor, "b t"]) -> tuple[tuple[Criterion, ...], ...]:
    """Return each row's criteria; those of a batch of one are the user's own.

    Hugging Face asks a criterion once for each new token, for all rows together; here each row is asked for by itself,
    as often as it gained tokens. So a criterion that counts needs a copy for each row.

    Raises:
        InvalidParameter: there are several rows, and a criterion cannot be copied or answers by a row's number.
    """
    if len(prompts) == 1:
        return (tuple(criteria),)
    for one in criteria:
        if not _keeps_nothing(one):
            _check_rows(one, prompts[:2])
    return tuple(tuple(map(copied, criteria)) for _ in range(len(prompts)))


def copied(criterion: Criterion) -> Criterion:
    """Return a copy of a criterion; itself if it keeps nothing, by its kind or because it says `stateless = True`.

    Raises:
        InvalidParameter: it cannot be copied.
    """
    if _keeps_nothing(criterion):
        return criterion
    try:
        return copy.deepcopy(criterion)
    except Exception as error:
        raise InvalidParameter(
            f"The stopping criterion {_name(criterion)} cannot be copied for each row; generate row by row."
        ) from error


def _keeps_nothing(criterion: Criterion) -> bool:
    return type(criterion) in KEEPS_NOTHING or getattr(criterion, "stateless", False) is True


def _check_rows(criterion: Criterion, prompts: Int[Tensor, "2 t"]) -> None:
    """Check, on copies, that two rows together get the answers that each gets alone."""
    try:
        together = torch.as_tensor(copied(criterion)(prompts, None)).flatten().tolist()
        alone = [bool(torch.as_tensor(copied(criterion)(row.unsqueeze(0), None)).all()) for row in prompts]
    except InvalidParameter:
        raise
    except Exception:  # noqa: BLE001  it is asked again while decoding, and named then
        return
    if together not in (alone, alone[:1]):
        raise InvalidParameter(
            f"The stopping criterion {_name(criterion)} answers for a row by its number or by the rows beside it, but "
            "rows are decoded each by itself; generate row by row."
        )


def _name(criterion: Criterion) -> str:
    return getattr(criterion, "__name__", None) or type(criterion).__name__
