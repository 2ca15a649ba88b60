"""Checks of values: names of models, devices, precisions, stop strings."""

import os
from collections.abc import Sequence

from polydraft.errors import CheckpointError, InvalidParameter, hint
from polydraft.fetched import MODELS, SHIPPED

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def model_name(name: str | None) -> str | None:
    """Return the folder, GGUF file or hub name of a model, ~ expanded.

    Raises:
        InvalidParameter: it is empty.
        CheckpointError: it means a folder, and there is none.
    """
    if name is None:
        return None
    if not name.strip():
        raise InvalidParameter("The name of a model is empty: give a folder or a name on the hub.")
    place = os.path.expanduser(name)
    if name in MODELS or name in SHIPPED or (place.lower().endswith(".gguf") and os.path.isfile(place)):
        return place
    if place.startswith(("~", "/", ".")) and not os.path.isdir(place):
        raise CheckpointError(f"There is no model folder {name!r}.")
    if os.path.lexists(place) and not os.path.isdir(place):
        raise CheckpointError(
            f"{name!r} is no folder: give the folder that a model is in, a .gguf file, or a name on the hub."
        )
    return place


def device_name(name: str) -> str:
    """Return the name of a device that numbers can be kept on; whether it is there is seen when models are loaded.

    Raises:
        InvalidParameter: it is empty, or torch's device without memory.
    """
    if not name.strip() or name.split(":")[0] == "meta":
        raise InvalidParameter(f"There is no device {name!r} to generate on; use auto, cpu, or cuda or cuda:1.")
    return name


def precision(name: str) -> str:
    """Return the name of a precision.

    Raises:
        InvalidParameter: it is none of `DTYPES`.
    """
    if name not in DTYPES:
        there = f"use {', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
        raise InvalidParameter(f"There is no dtype {name!r}{hint(name, DTYPES)}; {there}.")
    return name


def filled(values: Sequence[str] | None) -> Sequence[str] | None:
    """Return the values of an option that may be repeated.

    Raises:
        InvalidParameter: one is empty.
    """
    if any(not value for value in values or ()):
        raise InvalidParameter('One of the values is "", which is no name of anything: leave the option out.')
    return values


def stop_strings(values: Sequence[str] | None) -> Sequence[str] | None:
    """Return the strings at which a text ends.

    Raises:
        InvalidParameter: one is empty, and would end the text anywhere or nowhere.
    """
    if any(not value for value in values or ()):
        raise InvalidParameter('--stop "" stops nowhere: give at least one character, or leave --stop out.')
    return values
