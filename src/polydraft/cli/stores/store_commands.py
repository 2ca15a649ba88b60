"""`polydraft store build` and `polydraft store show`: files become a store of a target's tokens, and what is in one."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from polydraft.cli.printing import console, on_one_line
from polydraft.cli.process import FAILED, INTERRUPTED, stopped
from polydraft.cli.stores.reading import FileText, files_in, texts_in
from polydraft.drafters import StoreVocabulary, StoreWriter, TextStore
from polydraft.errors import InvalidParameter, StoreError
from polydraft.models import load_tokenizer
from polydraft.options.commands.store_options import StoreBuildOptions, StoreShowOptions


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
        sys.stdout.write(json.dumps(facts_of(store)) + "\n")
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
    """Add the files' texts, as many as there is room for; note what cannot be used."""
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
        sys.stdout.write(json.dumps(told) + "\n")
    elif there is not None:
        console().print(f"Added {writer.texts} texts, {writer.tokens} tokens, in {seconds:.1f} s.", soft_wrap=True)
        console().print(in_words(there), soft_wrap=True)
