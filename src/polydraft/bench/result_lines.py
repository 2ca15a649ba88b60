"""Results in a file: conditions first, then one JSON object a line, whose values are of their fields' types."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from errno import EINVAL, ENOSPC
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from polydraft.errors import ResultsError
from polydraft.options.value_checks import has_half_character, odd_kind

HEAD = b'{"conditions": '
"""How every file of results begins."""
Row = TypeVar("Row")
Parse = Callable[[dict[str, Any]], Row]


def open_lines(path: Path, conditions: dict[str, Any], parse: Parse[Row]) -> list[Row]:
    """Return what a file of results holds, or begin the file; a last line that a crash cut short is dropped.

    Args:
        path: the file; its folder is made.
        conditions: all that determines the results, as JSON has it.
        parse: makes a result of a line's object; a ValueError says that it is none, and why.

    Raises:
        ResultsError: the file cannot be used, is damaged, or is of other conditions.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = content_of(path) if path.exists() else b""
        whole = _whole_lines(content)
        # parsed before anything is written: a file of another kind is left as it is
        theirs, rows = _parsed(path, whole, parse) if whole else (conditions, [])
        if not whole and not content.startswith(HEAD[: len(content)]):
            raise ResultsError(f"{path}, line 1: this is no line of results.")
        if theirs == conditions and len(whole) < len(content):
            os.truncate(path, len(whole))
        if not whole:
            append_lines(path, [{"conditions": conditions}])
    except OSError as error:
        raise ResultsError(f"{path}: the results cannot be kept there: {error.strerror}.") from error
    if theirs != conditions:
        raise ResultsError(
            f"{path} is of a run with other settings: {'; '.join(differences(theirs, conditions))}. "
            "Write to another place, or use these settings."
        )
    return rows


def read_lines(path: Path, parse: Parse[Row]) -> tuple[Any, list[Row]]:
    """Return a file's conditions and results without touching it; a last line that was cut short is ignored.

    Raises:
        ResultsError: the file cannot be read, is empty or is damaged.
    """
    try:
        whole = _whole_lines(content_of(path))
    except OSError as error:
        raise ResultsError(f"{path}: the results cannot be read: {error.strerror}.") from error
    if not whole:
        raise ResultsError(f"{path}: there are no results in this file.")
    return _parsed(path, whole, parse)


def content_of(path: Path) -> bytes:
    """Return what is in a regular file.

    Raises:
        OSError: it is something else, or cannot be read.
    """
    check_regular(path)
    return path.read_bytes()


def keep_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write results at the end of their file.

    Raises:
        ResultsError: they cannot be written.
    """
    try:
        append_lines(path, rows)
    except OSError as error:
        raise ResultsError(f"{path}: the results cannot be kept there: {error.strerror}.") from error


def append_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write lines at the end of a file by one call of the system.

    Raises:
        OSError: they cannot be written, or not all of them.
    """
    text = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if os.write(file, text) < len(text):
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        os.fsync(file)
    finally:
        os.close(file)


def differences(theirs: Any, ours: Any, name: str = "") -> list[str]:
    """Say in which settings two nested dictionaries differ."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        fields = dict.fromkeys([*theirs, *ours])
        found = (differences(theirs.get(one), ours.get(one), f"{name} {one}".strip()) for one in fields)
        return [one for some in found for one in some]
    return [] if theirs == ours else [f"{name or 'the header'} is {_shown(theirs)} there and {_shown(ours)} here"]


def _shown(value: Any) -> str:
    text = in_brief(value) if isinstance(value, int) else str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def _parsed(path: Path, whole: bytes, parse: Parse[Row]) -> tuple[Any, list[Row]]:
    conditions: Any = None
    rows: list[Row] = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError
            if number == 1:
                conditions = row["conditions"]
            else:
                rows.append(parse(row))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = f": {error}" if type(error) is ValueError else ""
            raise ResultsError(f"{path}, line {number}: this is no line of results{why}.") from error
    return conditions, rows


def check_regular(path: Path) -> None:
    """Check before a file is opened that reading it will end.

    Raises:
        OSError: the path is something else, or cannot be looked at.
    """
    kind = odd_kind(path)
    if kind:
        raise OSError(EINVAL, f"it is {kind}, not a regular file")


def home_expanded(path: str | Path) -> Path:
    """Return a path with ~ replaced by the home folder; as it is where there is no such user, unlike `expanduser`."""
    return Path(os.path.expanduser(path))


Made = TypeVar("Made")
PLAIN: tuple[type, ...] = (int, float, str, bool, type(None))
LARGEST = 2**63
"""Whole numbers lie below, in size."""


def from_fields(kind: type[Made], values: Any) -> Made:
    """Make a dataclass of a JSON object; lists become tuples and objects dataclasses where these are declared.

    Raises:
        ValueError: it is no object, a field is missing or not known, or holds something else than its declared type;
            numbers are to be finite, and texts without halves of surrogate pairs.
    """
    if not isinstance(values, dict):
        raise ValueError(f"there is a {type(values).__name__} in place of an object")
    given, hints = cast(dict[str, Any], values), _hints(kind)
    declared = fields(cast(Any, kind))
    needed = (one.name for one in declared if one.default is MISSING and one.default_factory is MISSING)
    for name in needed:
        if name not in given:
            raise ValueError(f"{name} is missing")
    for name in given:
        if name not in {one.name for one in declared}:
            raise ValueError(f"{name[:40]!r} is not known")
    return kind(**{name: _made(hints[name], value, name) for name, value in given.items()})


@lru_cache(maxsize=64)
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _made(hint: Any, value: Any, name: str) -> Any:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        (kind,) = (one for one in inner if one is not type(None))
        return None if value is None else _made(kind, value, name)
    if kind in PLAIN and _is_plain(kind, value):
        return value
    if kind in (list, tuple) and isinstance(value, list):
        return kind(_made(inner[0], one, name) for one in cast(list[Any], value))
    if kind is dict and isinstance(value, dict):
        named = cast(dict[str, Any], value)
        return {_made(str, key, f"a key of {name}"): _made(inner[1], one, name) for key, one in named.items()}
    if is_dataclass(kind) and isinstance(value, dict):
        return from_fields(cast(type, kind), value)
    if kind is Any:
        return value
    raise ValueError(f"{name} is {in_brief(value)}, which is no {getattr(hint, '__name__', hint)}")


def in_brief(value: Any) -> str:
    """Return the beginning of a value from JSON as text, for messages."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= LARGEST:
        return "a number of too many digits"
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(cast(Any, value))}"
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _is_plain(kind: type, value: Any) -> bool:
    if kind in (int, float) and isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < LARGEST
    if kind is float:
        return isinstance(value, float) and math.isfinite(value)
    if kind is str:
        return isinstance(value, str) and not has_half_character(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
