"""Checks of values of options that are not made of dataclasses yet."""

from typing import Any

from polydraft.errors import InvalidParameter
from polydraft.options.option import LARGEST_COUNT
from polydraft.options.values import filled, model_name

__all__ = ["count", "filled", "model_name"]


def count(_: Any, param: Any, value: Any) -> Any:
    """Return a number of things, or several of them.

    Raises:
        InvalidParameter: there cannot be so many.
    """
    several = value if isinstance(value, list | tuple) else [] if value is None else [value]
    for one in several:
        if one > LARGEST_COUNT:
            raise InvalidParameter(f"{param.opts[0]} is at most {LARGEST_COUNT}, but {one} was given.")
    return value
