"""`polydraft store build` and `polydraft store show`: files become a store of a target's tokens, and what is in one."""

import gzip
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from polydraft.bench.prompts.sets import has_json_lines
from polydraft.bench.result_lines import check_regular, home_expanded
from polydraft.cli.printing import console, on_one_line, print_json_line
from polydraft.cli.process import FAILED, INTERRUPTED, stopped
from polydraft.drafters import StoreVocabulary, StoreWriter, TextStore
from polydraft.errors import InvalidParameter, PromptFileError, StoreError
from polydraft.models import Message, load_tokenizer
from polydraft.options.commands.making_options import StoreBuildOptions, StoreShowOptions

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


def _opened(path: Path) -> TextIOWrapper:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _pieces(path: Path, file: TextIOWrapper) -> Iterator[FileText]:
    while piece := file.read(PIECE):
        if "\0" in piece:
            yield FileText(path, bad=f"{path}: it is no text: it holds a zero byte")
            return
        piece += file.readline(PIECE) if len(piece) == PIECE else ""
        if piece.strip():
            yield FileText(path, text=piece, read=len(piece))


def _rows(path: Path, file: TextIOWrapper) -> Iterator[FileText]:
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


def run_show(options: StoreShowOptions) -> int:
    """Read a store through and tell what is in it; return the exit code 0.

    Raises:
        StoreError: there is none, or a file is damaged.
        VocabularyMismatch: its files are of different tokenizers.
    """
    store = TextStore(options.folder)
    for segment in store.segments:
        segment.check()
    if options.as_json:
        print_json_line(facts_of(store))
        return 0
    screen = console()
    screen.print(in_words(store), soft_wrap=True)
    table = Table("segment", "texts", "tokens", "MB")
    for one in store.segments:
        table.add_row(one.path.name, str(one.texts), str(one.count), f"{one.size / 1e6:,.2f}")
    screen.print(table)
    return 0


def facts_of(store: TextStore) -> dict[str, object]:
    """Return what is known of a store."""
    return {
        "folder": str(store.path),
        "texts": store.texts,
        "tokens": store.tokens,
        "bytes": store.size,
        "most_bytes": store.most_bytes,
        "bytes_per_token": round(store.size / max(store.tokens, 1), 3),
        "tokenizer": store.vocabulary.name,
        "vocabulary": store.vocabulary.size,
        "fingerprint": store.vocabulary.mark.hex(),
        "segments": [
            {"file": one.path.name, "texts": one.texts, "tokens": one.count, "bytes": one.size}
            for one in store.segments
        ],
    }


def in_words(store: TextStore) -> str:
    """Return what is known of a store, for people."""
    grows = "is only read" if store.most_bytes is None else f"may grow to {store.most_bytes / 1e6:,.0f} MB"
    return (
        f"{store.path} holds {store.texts} texts, {store.tokens} tokens of {store.vocabulary.title}, in "
        f"{store.size / 1e6:,.2f} MB ({store.size / max(store.tokens, 1):.2f} bytes per token). It {grows}."
    )


TOGETHER = 1 << 20
"""Characters that are tokenized together."""
QUIET = 2.0
"""Seconds before a bar is shown."""
BYTES = 8
"""Of a store for each token."""
SMALL_CHUNK = 1 << 20
"""Tokens of a segment of a store that grows; larger ones come of merging."""
TOLD = 5
"""So many files that cannot be used are named, the others counted."""


def run_build(options: StoreBuildOptions) -> int:
    """Build, and report; return the exit code: 0, 1 if files could not be used, or 130 after Ctrl-C.

    Raises:
        InvalidParameter: a store that is only read is there already.
        PromptFileError: a file is not there.
        StoreError: the folder holds something else or a store that is only read, or cannot be written; nothing was to
            be stored.
        VocabularyMismatch: the folder holds tokens of another tokenizer.
    """
    notes = console(errors=True, quiet=options.as_json)
    files = files_in(options.files)
    if options.kind == "rest" and options.out.is_dir() and any(options.out.glob("*.segment")):
        raise InvalidParameter(
            f"--out {options.out} holds a store already; name a new folder, or add to a growing one by --kind suffix."
        )
    tokenizer = load_tokenizer(options.target)
    vocabulary = StoreVocabulary.of(tokenizer, options.target or "the embedded pair")
    begin, bad, interrupted = time.perf_counter(), list[str](), False
    with _writer(options, vocabulary) as writer:
        try:
            _fill(writer, files, tokenizer, bad, notes, options.most_bytes if options.kind == "rest" else None)
        except KeyboardInterrupt:
            interrupted = True
    seconds = time.perf_counter() - begin
    _tell_bad(bad, notes)
    if interrupted:
        stopped(f"{options.out} holds the {writer.texts} texts that were read")
    elif not writer.texts:
        raise StoreError("Nothing was stored: the files hold no text of two tokens or more.")
    _report(options, writer, seconds, bad, interrupted)
    return INTERRUPTED if interrupted else FAILED if bad else 0


def _writer(options: StoreBuildOptions, vocabulary: StoreVocabulary) -> StoreWriter:
    if options.kind == "rest":
        return StoreWriter(options.out, vocabulary)
    return StoreWriter(options.out, vocabulary, most_bytes=options.most_bytes, chunk=SMALL_CHUNK, merges=True)


def _fill(
    writer: StoreWriter, files: Sequence[Path], tokenizer: Any, bad: list[str], notes: Console, most: int | None
) -> None:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[tokens]} tokens"))
    bar = Progress(*columns, TimeElapsedColumn(), console=notes, transient=True)
    total = sum(file.stat().st_size for file in files)
    task, begin, shown = bar.add_task("Reading", total=total, tokens=0), time.monotonic(), False
    try:
        for batch in _batches(files):
            bad += [one.bad for one in batch if one.bad]
            for tokens in _encoded(tokenizer, batch, bad):
                if most is not None and BYTES * (writer.tokens + writer.texts + len(tokens)) > most:
                    notes.print(f"The store has its {most // 1_000_000} MB; the rest is left out.", soft_wrap=True)
                    return
                writer.add(tokens)
            bar.update(task, advance=sum(one.read for one in batch), tokens=f"{writer.tokens:,}")
            if not shown and notes.is_terminal and time.monotonic() - begin > QUIET:
                bar.start()
                shown = True
    finally:
        bar.stop()


def _batches(files: Sequence[Path]) -> Iterator[list[FileText]]:
    batch, size = list[FileText](), 0
    for file in files:
        for found in texts_in(file):
            batch.append(found)
            size += found.read
            if size >= TOGETHER:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _encoded(tokenizer: Any, batch: Sequence[FileText], bad: list[str]) -> list[Sequence[int]]:
    """Return the tokens of texts and conversations, as prompts have them but for what goes around a whole prompt."""
    texts = [one.text for one in batch if one.text]
    found: list[Sequence[int]] = []
    if texts:
        found = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    for one in batch:
        if one.messages:
            told = [{"role": each.role, "content": each.content} for each in one.messages]
            try:
                found.append(tokenizer.apply_chat_template(told, tokenize=True, return_dict=False))
            except Exception as error:  # noqa: BLE001  a template is a program of the model's authors
                bad.append(f"{one.file}: the chat template refuses a conversation: {error}")
    return found


def _tell_bad(bad: Sequence[str], notes: Console) -> None:
    for one in bad[:TOLD]:
        notes.print(f"Left out: {on_one_line(one)}.", soft_wrap=True)
    if len(bad) > TOLD:
        notes.print(f"Left out: {len(bad) - TOLD} more.")


def _report(
    options: StoreBuildOptions, writer: StoreWriter, seconds: float, bad: Sequence[str], interrupted: bool
) -> None:
    there = None if interrupted and not any(options.out.glob("*.segment")) else TextStore(options.out)
    added = {"added_texts": writer.texts, "added_tokens": writer.tokens, "seconds": round(seconds, 3)}
    if options.as_json:
        facts = {} if there is None else facts_of(there)
        told = {**facts, **added, "left_out": list(bad), "finish": "interrupted" if interrupted else "done"}
        print_json_line(told)
    elif there is not None:
        console().print(f"Added {writer.texts} texts, {writer.tokens} tokens, in {seconds:.1f} s.", soft_wrap=True)
        console().print(in_words(there), soft_wrap=True)
