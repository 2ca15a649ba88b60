"""Stopping criteria: which are asked for a row alone, and copies for texts that do not know of each other."""

import copy
from collections.abc import Callable
from typing import Any

from transformers.generation.stopping_criteria import MaxTimeCriteria, StopStringCriteria

from polydraft.errors import InvalidParameter

Criterion = Callable[..., Any]
KEEPS_NOTHING = (MaxTimeCriteria, StopStringCriteria)
"""Hugging Face's criteria whose answer depends on the row and the clock alone; a class derived from one may not."""


def is_of_rows(criterion: Criterion) -> bool:
    """Tell whether a criterion may be asked for each row alone: by its very class, or as it says `stateless = True`.

    All others see all rows together, as Hugging Face's `generate` shows them.
    """
    return type(criterion) in KEEPS_NOTHING or getattr(criterion, "stateless", False) is True


def copied(criterion: Criterion) -> Criterion:
    """Return a copy of a criterion, for a text of its own; itself if it is asked for rows alone.

    Raises:
        InvalidParameter: it cannot be copied.
    """
    if is_of_rows(criterion):
        return criterion
    try:
        return copy.deepcopy(criterion)
    except Exception as error:
        name = getattr(criterion, "__name__", None) or type(criterion).__name__
        raise InvalidParameter(
            f"The stopping criterion {name} cannot be copied for each prompt; call polydraft.generate for each."
        ) from error
