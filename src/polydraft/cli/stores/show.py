"""`polydraft store show`: what is in a store."""

import json
import sys

from rich.table import Table

from polydraft.cli.printing import console
from polydraft.drafters import TextStore
from polydraft.options.commands.store_options import StoreShowOptions


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
