"""Results in a file: conditions first, then one JSON object a line, so that an interrupted run can go on."""

import json
import os
from collections.abc import Callable, Sequence
from errno import EINVAL, ENOSPC
from pathlib import Path
from typing import Any, TypeVar

from polydraft.bench.typed_fields import in_brief
from polydraft.errors import ResultsError
from polydraft.options.places import odd_kind

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
