"""Texts from files: plain text, rows of JSON, and folders of both."""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from polydraft.bench.prompts.sets import has_json_lines
from polydraft.bench.result_lines import check_regular, home_expanded
from polydraft.errors import PromptFileError
from polydraft.models import Message

PIECE = 1 << 20
"""Characters of a plain text that are one text; longer files are several."""
ASKED, ANSWERED = ("prompt", "question"), ("output", "completion", "answer", "response", "text")


@dataclass(frozen=True)
class FileText:
    """What a file holds: a text, a conversation, or a reason why a part of it cannot be used.

    Args:
        file: the file.
        text: a plain text, or what a row's prompt and answer come to.
        messages: a conversation.
        bad: why the file, or a row of it, is left out.
        read: the bytes or characters of the file that this took, for progress.
    """

    file: Path
    text: str = ""
    messages: tuple[Message, ...] = ()
    bad: str = ""
    read: int = 0


def files_in(given: Sequence[Path]) -> list[Path]:
    """Return the files that are named, and all in folders that are named but for hidden ones.

    Raises:
        PromptFileError: one is not there, is no regular file, or there is none.
    """
    found = list[Path]()
    for path in map(home_expanded, given):
        if path.is_dir():
            inside = sorted(one for one in path.rglob("*") if one.is_file())
            found += [one for one in inside if not any(part.startswith(".") for part in one.relative_to(path).parts)]
        else:
            try:
                check_regular(path)
            except OSError as error:
                raise PromptFileError(f"{path}: {error.strerror}; give a file or a folder.") from error
            if not path.exists():
                raise PromptFileError(f"{path}: there is no such file or folder.")
            found.append(path)
    if not found:
        raise PromptFileError(f"There is no file in {', '.join(map(str, given))}.")
    return found


def texts_in(path: Path) -> Iterator[FileText]:
    """Yield the texts of a file, and what of it is bad, as far as it can be read."""
    try:
        with _opened(path) as file:
            yield from _rows(path, file) if has_json_lines(path) else _pieces(path, file)
    except UnicodeDecodeError as error:
        yield FileText(path, bad=f"{path}: it is not UTF-8: {error.reason}")
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        yield FileText(path, bad=f"{path}: it cannot be read: {reason}")


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _pieces(path: Path, file: TextIO) -> Iterator[FileText]:
    while piece := file.read(PIECE):
        if "\0" in piece:
            yield FileText(path, bad=f"{path}: it is no text: it holds a zero byte")
            return
        piece += file.readline(PIECE) if len(piece) == PIECE else ""
        if piece.strip():
            yield FileText(path, text=piece, read=len(piece))


def _rows(path: Path, file: TextIO) -> Iterator[FileText]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                yield _row(path, json.loads(line), len(line))
            except (ValueError, RecursionError) as error:
                reason = f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else error
                yield FileText(path, bad=f"{path}, line {number}: {reason}", read=len(line))


def _row(path: Path, row: Any, read: int) -> FileText:
    """Return a row's conversation with its answer, or its prompt with its answer, or its text.

    Raises:
        ValueError: it has none of these, or one is no text.
    """
    if not isinstance(row, dict):
        raise ValueError(f"the row is a {type(row).__name__}, not an object")
    answer = _first(row, ANSWERED)
    messages = row.get("messages")
    if messages is not None:
        told = tuple(_message(one) for one in messages) if isinstance(messages, list) else ()
        if not told:
            raise ValueError("messages is not a list with at least one message")
        if answer and told[-1].role != "assistant":
            told = (*told, Message("assistant", answer))
        return FileText(path, messages=told, read=read)
    text = _first(row, ASKED) + answer
    if not text:
        raise ValueError("the row has no text: no messages, prompt, question, text or output")
    return FileText(path, text=text, read=read)


def _message(one: Any) -> Message:
    if not (isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)):
        raise ValueError("a message has no role and content that are texts")
    return Message(one["role"], one["content"])


def _first(row: dict[str, Any], fields: Sequence[str]) -> str:
    for field in fields:
        if row.get(field) is not None:
            if not isinstance(row[field], str):
                raise ValueError(f"{field} is no text")
            return row[field]
    return ""
