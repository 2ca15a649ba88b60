"""The file of texts: one JSON object a line, added as a text ends, so that an interrupted run goes on from it."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polydraft.bench.result_lines import append_lines, content_of, differences
from polydraft.cli.generation.prompt_rows import Row
from polydraft.errors import ResultsError

Line = dict[str, Any]
BEGINNING = b'{"id": '
NOTHING = type(None)
KINDS = {
    "id": (int, str),
    "line": (int, NOTHING),
    "prompt": (str, NOTHING),
    "messages": (list, NOTHING),
    "text": (str, NOTHING),
    "error": (str, NOTHING),
    "options": (dict, NOTHING),
}
"""What a line holds that is read again."""


class Output:
    """What a file of texts holds, and what is added to it.

    The first line has the settings of the run beside its text; lines are of texts or of rows with an error.

    Args:
        path: the file; it is made with the first line, and its folder too.
        settings: all that determines the texts, but the rows.

    Raises:
        ResultsError: the file cannot be read, holds something else, or is of a run with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        content = self._content()
        whole = content[: content.rfind(b"\n") + 1]
        lines = [_parsed(path, number, line) for number, line in enumerate(whole.split(b"\n")[:-1], start=1)]
        if not whole and content and not content.startswith(BEGINNING):
            raise _foreign(path, 1)
        self.texts = {line["id"]: line for line in lines if "text" in line}
        self.errors = {_key(line) for line in lines if "text" not in line}
        self._begun = bool(lines)
        if lines:
            self._check(lines[0])
        self._cut = len(whole) if len(whole) < len(content) else None

    def check_rows(self, rows: Sequence[Row], source: str | Path) -> None:
        """Check that the texts that are there continue these rows.

        Raises:
            ResultsError: a row with the name of a text has another prompt or other options.
        """
        for row in rows:
            there = self.texts.get(row.id)
            if there and not row.error and not _is_of(there, row):
                raise ResultsError(
                    f"{self.path}: the text {row.id!r} there has another prompt or other options than line {row.line} "
                    f"of {source}. Write to another place."
                )

    def add(self, line: Line) -> None:
        """Write a line, the settings with the first one; what a crash left of a last line is cut off before.

        Raises:
            ResultsError: the file cannot be written.
        """
        given = line if self._begun else {**line, "settings": self.settings}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._cut is not None:
                os.truncate(self.path, self._cut)
            append_lines(self.path, [given])
        except OSError as error:
            raise ResultsError(f"{self.path}: the texts cannot be kept there: {error.strerror}.") from error
        self._begun, self._cut = True, None
        if "text" in line:
            self.texts[line["id"]] = line
        else:
            self.errors.add(_key(line))

    def add_error(self, row: Row, error: str) -> None:
        """Write why a row has no text, unless that is there already."""
        line = {"id": row.id, "line": row.line, "error": error}
        if _key(line) not in self.errors:
            self.add(line)

    def _content(self) -> bytes:
        try:
            return content_of(self.path) if self.path.exists() else b""
        except OSError as error:
            raise ResultsError(f"{self.path}: the texts there cannot be read: {error.strerror}.") from error

    def _check(self, first: Line) -> None:
        if not isinstance(first.get("settings"), dict):
            raise ResultsError(f"{self.path}, line 1: the settings of the run are missing. Write to another place.")
        found = differences(first["settings"], self.settings)
        if found:
            raise ResultsError(
                f"{self.path} is of a run with other settings: {'; '.join(found)}. "
                "Write to another place, or use these settings."
            )


def _parsed(path: Path, number: int, content: bytes) -> Line:
    try:
        line = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _foreign(path, number) from error
    if not (isinstance(line, dict) and all(isinstance(line.get(name), kinds) for name, kinds in KINDS.items())):
        raise _foreign(path, number)
    if line.get("text") is None and line.get("error") is None:
        raise _foreign(path, number)
    return line


def _is_of(line: Line, row: Row) -> bool:
    """Tell whether a text is of this row's prompt and options."""
    told = {name: line[name] for name in ("prompt", "messages") if line.get(name) is not None}
    return (told, line.get("options", {})) == (row.told, row.own)


def _key(line: Line) -> tuple[Any, ...]:
    return line["id"], line.get("line"), str(line.get("error"))


def _foreign(path: Path, number: int) -> ResultsError:
    return ResultsError(f"{path}, line {number}: this is no line of `polydraft generate`. Write to another place.")
