"""What a user says: a line that is typed, a file of messages, a pipe, and a file that is one message."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polydraft.bench.prompts import has_json_lines, read_text
from polydraft.bench.result_lines import check_regular, home_expanded
from polydraft.errors import InvalidParameter, PromptFileError
from polydraft.options.value_checks import has_half_character


@dataclass(frozen=True)
class Command:
    """A command: how it is typed, what it does, and whether something follows its name."""

    usage: str
    does: str
    takes: bool = False


COMMANDS: Mapping[str, Command] = {
    "reset": Command("/reset", "forget the conversation"),
    "system": Command("/system TEXT", "set the system message, and begin anew", takes=True),
    "file": Command("/file PATH", "send the text of a file", takes=True),
    "stats": Command("/stats", "show counts and times of the conversation"),
    "help": Command("/help", "show this"),
    "exit": Command("/exit", "leave, as Ctrl-D does"),
}
ELSE: Mapping[str, str] = {
    '"""': "begin a message of several lines, and end it",
    "//TEXT": "send text that begins with a slash",
    "Ctrl-C": "end the answer; what was written stays",
}
"""What else help tells."""
FENCE = '"""'


def parsed(line: str) -> tuple[str, str] | None:
    """Return the name of a command and what follows it; None if the line is a message.

    Raises:
        InvalidParameter: there is no such command, or it takes more or less than what follows.
    """
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, _, rest = line[1:].strip().partition(" ")
    rest = rest.strip()
    if name not in COMMANDS:
        raise InvalidParameter(f"There is no command /{name}: /help lists them, and // sends text that begins with /.")
    command = COMMANDS[name]
    if rest and not command.takes:
        raise InvalidParameter(f"/{name} takes nothing: type it alone.")
    if command.takes and not rest:
        raise InvalidParameter(f"/{name} needs something after it: {command.usage}.")
    return name, rest


def message_of(line: str) -> str:
    """Return the message that a line is: // at its beginning means /."""
    return line[1:] if line.startswith("//") else line


def whole_message(first: str, more: Callable[[], str]) -> str:
    """Return a message of several lines, given its first, which begins with three quotation marks."""
    lines = [first.removeprefix(FENCE)]
    while not lines[-1].rstrip().endswith(FENCE):
        lines.append(more())
    lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
    return "\n".join(lines).strip("\n")


MOST_BYTES = 2**20
"""A message of a file is no larger; it is read whole before its tokens are counted."""


def read_messages(source: str | Path) -> list[str]:
    """Read a file of messages: JSON lines if its name says so, else one a line; blank lines do not count.

    Raises:
        PromptFileError: the file cannot be read, has no message, or a line is none.
    """
    path, text = read_text(source)
    lines = enumerate(text.split("\n"), start=1)
    rows = [(number, line.removesuffix("\r")) for number, line in lines if line.strip()]
    if not rows:
        raise PromptFileError(f"{path}: the file has no message in it.")
    if not has_json_lines(path):
        return [line for _, line in rows]
    found: list[str] = []
    for number, line in rows:
        try:
            found.append(_content(json.loads(line)))
        except (ValueError, RecursionError) as error:
            reason = f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise PromptFileError(f"{path}, line {number}: {reason.removesuffix('.')}.") from error
    return found


def piped_messages(readline: Callable[[int], bytes]) -> Iterator[str]:
    """Yield the lines of standard input as they come; blank ones do not count.

    Raises:
        PromptFileError: a line is not UTF-8, or too long.
    """
    for number, line in enumerate(iter(lambda: readline(MOST_BYTES + 1), b""), start=1):
        if len(line) > MOST_BYTES:
            raise PromptFileError(f"Standard input, line {number}: the line has more than {MOST_BYTES} bytes.")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise PromptFileError(f"Standard input, line {number}: the text is not UTF-8: {error.reason}.") from error
        if text.strip():
            yield text


def read_message(name: str) -> str:
    """Return the text of a file that is one message.

    Raises:
        PromptFileError: the file cannot be read, is too large, blank or not UTF-8.
    """
    path = home_expanded(name)
    try:
        check_regular(path)
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        reason = getattr(error, "strerror", None) or str(error)
        raise PromptFileError(f"{name}: the file cannot be read: {reason}.") from error
    if len(content) > MOST_BYTES:
        raise PromptFileError(f"{name}: the file has more than {MOST_BYTES // 2**20} MiB; send a part of it.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptFileError(f"{name}: the text is not UTF-8: {error.reason}.") from error
    if not text.strip():
        raise PromptFileError(f"{name}: there is no text in the file.")
    return text


def _content(row: Any) -> str:
    if isinstance(row, dict):
        strange = next((name for name in row if name not in ("role", "content")), None)
        if strange is not None:
            raise ValueError(f"{strange!r} is not known: a row is a text, or an object with content")
        if row.get("role", "user") != "user":
            raise ValueError(f"the role is {row['role']!r}, but only the user's messages are read")
        row = row.get("content")
    if not isinstance(row, str):
        raise ValueError("the row is neither a text nor an object with content that is one")
    if not row.strip():
        raise ValueError("the message is empty")
    if has_half_character(row):
        raise ValueError("the message has half of a surrogate pair in it, which is no character")
    return row
