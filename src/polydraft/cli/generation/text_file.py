"""A file of prompts, row by row, and the file of their texts, to which a line is added as a text ends."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polydraft.bench.prompts import NAME_FIELDS, Prompt, as_asked, has_json_lines, prompt_from_row, read_text
from polydraft.bench.result_lines import append_lines, content_of, differences
from polydraft.errors import PromptFileError, ResultsError
from polydraft.models import Message
from polydraft.options.value_checks import has_half_character
from polydraft.probs import SamplingParams

LARGEST_SEED = 2**63


@dataclass(frozen=True)
class Row:
    """One line of the input.

    Args:
        line: its number, from 1.
        id: what the line calls itself, else its number.
        prompt: the text to continue; empty where there is none.
        messages: the conversation to answer in its place; empty for a text.
        message: what a user asks in place of the text, if that goes through a chat template; empty for the text itself.
        own: generation options of its own: max_new_tokens, temperature, seed.
        error: why it cannot be used; else empty.
    """

    line: int
    id: int | str
    prompt: str = ""
    own: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    messages: tuple[Message, ...] = ()
    message: str = ""

    @property
    def asked(self) -> Prompt:
        """The prompt without a name, which is said by the line."""
        return Prompt("", "", self.prompt, messages=self.messages, message=self.message)

    @property
    def told(self) -> dict[str, Any]:
        """What the file of texts says of the prompt: the text, or the messages."""
        if not self.messages:
            return {"prompt": self.prompt}
        return {"messages": [{"role": one.role, "content": one.content} for one in self.messages]}


def read_rows(source: str | Path, chat_template: bool | None = None) -> list[Row]:
    """Read all rows of a file: JSON lines if its name says so, else one prompt a line; blank lines do not count.

    Raises:
        PromptFileError: the file cannot be read, or none of its rows can be used.
    """
    path, text = read_text(source)
    read = _json_row if has_json_lines(path) else _plain_row
    lines = enumerate(text.split("\n"), start=1)
    found = [read(number, line.removesuffix("\r")) for number, line in lines if line.strip()]
    rows = _without_twins([_as_asked(row, chat_template) for row in found])
    if not rows:
        raise PromptFileError(f"{path}: the file has no prompt in it.")
    if all(row.error for row in rows):
        others = f" None of the {len(rows)} rows can be used." if len(rows) > 1 else ""
        raise PromptFileError(f"{path}, line {rows[0].line}: {rows[0].error}.{others}")
    return rows


def _plain_row(number: int, line: str) -> Row:
    return Row(number, number, line)


def _json_row(number: int, line: str) -> Row:
    """Read a prompt as `bench.prompts` does, or a text alone, with the options of its own."""
    name: int | str = number
    try:
        row = json.loads(line)
        row = {"prompt": row} if isinstance(row, str) else row
        name = _name(row, number)
        prompt = prompt_from_row(row, "", number)
        return Row(number, name, prompt.text, _own(row), messages=prompt.messages, message=prompt.message)
    except (ValueError, RecursionError) as error:
        reason = f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
        return Row(number, name, error=reason.removesuffix("."))


def _as_asked(row: Row, chat_template: bool | None) -> Row:
    if row.error:
        return row
    try:
        prompt = as_asked(row.asked, chat_template)
    except ValueError as error:
        return replace(row, prompt="", messages=(), error=str(error))
    return replace(row, prompt=prompt.text, messages=prompt.messages)


def _name(row: Any, number: int) -> int | str:
    """Return the row's name as it stands there; what is no name is refused by the reader of prompts."""
    found = [row[one] for one in NAME_FIELDS if row.get(one) is not None] if isinstance(row, dict) else []
    if not found or isinstance(found[0], bool) or not isinstance(found[0], str | int):
        return number
    if isinstance(found[0], str) and has_half_character(found[0]):
        raise ValueError("the name has half of a surrogate pair in it, which is no character")
    return found[0] if found[0] != "" else number


def _own(row: dict[str, Any]) -> dict[str, Any]:
    own = {name: row[name] for name in ("max_new_tokens", "temperature", "seed") if row.get(name) is not None}
    for name, least, below in (("max_new_tokens", 1, LARGEST_SEED), ("seed", 0, LARGEST_SEED)):
        value = own.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < below:
            raise ValueError(f"{name} is {value!r}, not a number from {least} to 2^63 - 1")
    heat = own.get("temperature", 0)
    if not isinstance(heat, int | float) or isinstance(heat, bool):
        raise ValueError(f"temperature is {heat!r}, not a number")
    try:
        SamplingParams(temperature=float(heat))
    except OverflowError as error:
        raise ValueError("temperature is a number of too many digits") from error
    return own


def _without_twins(rows: Sequence[Row]) -> list[Row]:
    """Refuse rows with the name of an earlier one: the texts could not be told apart."""
    first: dict[str, int] = {}
    for row in rows:
        if not row.error:
            first.setdefault(str(row.id), row.line)
    return [
        replace(row, prompt="", messages=(), error=f"{row.id!r} is already the name of line {first[str(row.id)]}")
        if not row.error and first[str(row.id)] != row.line
        else row
        for row in rows
    ]


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
    told = {name: line[name] for name in ("prompt", "messages") if line.get(name) is not None}
    return (told, line.get("options", {})) == (row.told, row.own)


def _key(line: Line) -> tuple[Any, ...]:
    return line["id"], line.get("line"), str(line.get("error"))


def _foreign(path: Path, number: int) -> ResultsError:
    return ResultsError(f"{path}, line {number}: this is no line of `polydraft generate`. Write to another place.")
