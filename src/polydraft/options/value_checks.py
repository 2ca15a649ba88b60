"""Checks of values: models, devices, precisions, stop strings; files and folders, before anything is done."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from polydraft.errors import CheckpointError, InvalidParameter, hint
from polydraft.fetched import MODELS, SHIPPED, is_stack

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def odd_kind(path: Path) -> str:
    """Return what a path is, if it is no regular file: "a pipe"; empty if it is one, or if nothing is there.

    Raises:
        OSError: the path cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return "" if stat.S_ISREG(mode) else KINDS.get(stat.S_IFMT(mode), "no file")


def to_write(path: Path) -> Path:
    """Return the place of a file to write, ~ expanded.

    Raises:
        InvalidParameter: no file can be written there, and why.
    """
    place = _expanded(path)
    kind = _kind(place)
    if kind:
        raise InvalidParameter(f"{path} is {kind}, not a regular file: give the name of a file to write.")
    if place.exists() and not os.access(place, os.W_OK):
        raise InvalidParameter(f"{path} cannot be written: Permission denied.")
    _check_parent(path, place.parent)
    return place


def to_write_beside(path: Path) -> Path:
    """Return the place of a file to write into a folder that is there.

    Raises:
        InvalidParameter: no file can be written there, and why.
    """
    place = to_write(path)
    if not place.parent.is_dir():
        raise InvalidParameter(f"{path} cannot be written: there is no folder {place.parent}.")
    return place


def folder_to_write(path: Path) -> Path:
    """Return the place of a folder to fill, ~ expanded.

    Raises:
        InvalidParameter: no folder can be made there, and why.
    """
    place = _expanded(path)
    if _kind(place) != "a folder" and os.path.lexists(place):
        raise InvalidParameter(f"{path} is {_kind(place) or 'a file'}, not a folder: give the name of a folder.")
    _check_parent(path, place)
    return place


def to_read(path: Path) -> Path:
    """Return the place of a file to read, ~ expanded; whether it is there is seen when it is read.

    Raises:
        InvalidParameter: it is something else than a regular file.
    """
    place = _expanded(path)
    kind = _kind(place)
    if kind:
        raise InvalidParameter(f"{path} is {kind}, not a regular file: save what is to be read in a file first.")
    return place


def to_look_at(path: Path) -> Path:
    """Return the place of a folder or file to read, ~ expanded; whether it is there is seen when it is read.

    Raises:
        InvalidParameter: there can be nothing of that name.
    """
    place = _expanded(path)
    _kind(place)
    return place


def _expanded(path: Path) -> Path:
    place = Path(os.path.expanduser(path))
    first = str(place).split("/", 1)[0]
    if first.startswith("~") and not os.path.lexists(first):
        raise InvalidParameter(f"{path}: there is no home folder {first}.")
    return place


def _kind(place: Path) -> str:
    try:
        return odd_kind(place)
    except OSError as error:
        raise InvalidParameter(f"{place} cannot be used: {error.strerror}.") from error


def _check_parent(given: Path, folder: Path) -> None:
    there = next((one for one in (folder, *folder.parents) if os.path.lexists(one)), Path())
    if not there.is_dir():
        raise InvalidParameter(f"{given} cannot be written: {there} is no folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InvalidParameter(f"{given} cannot be written: {there} may not be written to.")


DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def listed(words: Sequence[str]) -> str:
    """Return words for people: "a, b or c"."""
    return f"{', '.join(words[:-1])} or {words[-1]}"


def has_half_character(text: str) -> bool:
    """Tell whether a text has half of a surrogate pair in it, which is no character: it was not UTF-8."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def model_name(name: str) -> str:
    """Return the folder, GGUF file or hub name of a model, ~ expanded, or a stack of drafters as it is.

    Raises:
        InvalidParameter: it is empty.
        CheckpointError: it means a folder, and there is none.
    """
    if not name.strip():
        raise InvalidParameter("The name of a model is empty: give a folder or a name on the hub.")
    place = os.path.expanduser(name)
    if is_stack(name):
        return name
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
        raise InvalidParameter(f"There is no dtype {name!r}{hint(name, DTYPES)}; use {listed(DTYPES)}.")
    return name


def filled(values: Sequence[str]) -> Sequence[str]:
    """Return the values of an option that may be repeated.

    Raises:
        InvalidParameter: one is empty.
    """
    if any(not value for value in values):
        raise InvalidParameter('One of the values is "", which is no name of anything: leave the option out.')
    return values


def stop_strings(values: Sequence[str]) -> Sequence[str]:
    """Return the strings at which a text ends.

    Raises:
        InvalidParameter: one is empty, and would end the text anywhere or nowhere.
    """
    if any(not value for value in values):
        raise InvalidParameter('--stop "" stops nowhere: give at least one character, or leave --stop out.')
    return values
