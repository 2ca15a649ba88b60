"""Measure what stores cost and hit by their size: `python lab/stores.py`, with `pip install ".[figures]"`.

Stores of growing sizes are built from the Python files of this machine, as tokens of the embedded pair, and asked at
places of files that are held out. Draws `stores.svg` and puts the table behind it into
docs/performance/stores.md, between comments. It takes two minutes on one core; `--largest 100000 --out FOLDER` is a
quick look, `--redraw` draws the table.
"""

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import polydraft
from polydraft.bench.style import COLOURS, panels, save
from polydraft.drafters.text.guess import Bounds, Guess
from polydraft.drafters.text.index import LONGEST, Occurrences, TextIndex, as_tokens
from polydraft.drafters.text.stores.segment import StoreVocabulary
from polydraft.drafters.text.stores.store import StoreWriter, TextStore
from polydraft.drafters.text.stores.suffix_store import SuffixStore
from polydraft.drafters.text.suffix import Continuing, longest_of, tree_of
from polydraft.training.corpus import SourceFile, gather

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "performance" / "stores.md"
PICTURES = DOCS / "pictures"
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
LENGTH, STEP, BEFORE = 1024, 61, 128
"""Tokens of a held-out file that count, how far apart the places are, and what stands before the first."""
TABLE = re.compile(r"(<!-- table: stores -->\n).*?(<!-- end of table -->)", re.DOTALL)
HEADER = ["tokens", "bytes per token", "built in"] + [
    cell for way in ("suffix", "with the text", "REST") for cell in (way, "90 %", "right")
]
GREY = COLOURS[6]
WAYS = {"suffix": ("suffix", COLOURS[0]), "both": ("suffix and text", COLOURS[2]), "rest": ("REST", COLOURS[1])}
Ask = Callable[[NDArray[np.uint32]], Guess]


@dataclass(frozen=True)
class Asked:
    """What came of asking a store at all places: microseconds, and the share where the first guess was right."""

    median: float
    slow: float
    hits: float


@dataclass(frozen=True)
class Measured:
    """A store's number of tokens, its bytes for each, the seconds that building took, and the ways of asking: by the
    suffix drafter without and with the text itself, and by the retrieval drafter.
    """

    tokens: int
    width: float
    built: float
    suffix: Asked
    both: Asked
    rest: Asked


def token_ids(files: Sequence[SourceFile], most: int) -> Iterator[NDArray[np.uint32]]:
    """Return files as tokens of the embedded pair, `most` in all."""
    tokenizer = polydraft.load_pair().tokenizer
    for file in files:
        own = np.array(tokenizer(file.text, verbose=False)["input_ids"], np.uint32)[:most]
        most -= len(own)
        yield own
        if not most:
            return


def by_suffix(store: SuffixStore | None, *, text_too: bool) -> Ask:
    """Return how the suffix drafter asks a store, the text itself, or both."""

    def ask(text: NDArray[np.uint32]) -> Guess:
        own = as_tokens(text)
        sources = list[Sequence[Occurrences]]()
        if text_too:
            sources.append([TextIndex.of(text).occurrences(len(text), LONGEST)])
        if store is not None:
            sources.append(store.found(own))
        return Continuing().best(sources, Bounds(16, 12, 4))[0]

    return ask


def by_rest(store: TextStore) -> Ask:
    """Return how the retrieval drafter asks a store."""

    def ask(text: NDArray[np.uint32]) -> Guess:
        found = store.found(as_tokens(text[-16:]), 16)
        match = longest_of(found)
        return tree_of(found, match, 5000, Bounds(64, 10, 16), 0.0) if match >= 2 else Guess.nothing()

    return ask


def asked(ask: Ask, texts: Sequence[NDArray[np.uint32]]) -> Asked:
    """Ask at all places of the texts, once to warm up."""
    places = [(text, at) for text in texts for at in range(BEFORE, len(text), STEP)]
    times, hits = list[float](), 0
    for warm in (True, False):
        for text, at in places[:100] if warm else places:
            begin = time.perf_counter()
            guess = ask(text[:at])
            took = time.perf_counter() - begin
            if not warm:
                times.append(1e6 * took)
                hits += len(guess) > 0 and int(guess.tokens[0]) == int(text[at])
    return Asked(float(np.median(times)), float(np.quantile(times, 0.9)), hits / len(places))


def measured(texts: Sequence[NDArray[np.uint32]], size: int, held: Sequence[NDArray[np.uint32]]) -> Measured:
    """Build a store of the first `size` tokens and ask it."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        with StoreWriter(folder, StoreVocabulary(8192)) as writer:
            for text in texts:
                writer.add(text[: size - writer.tokens])
                if writer.tokens >= size - 1:
                    break
        built, own = time.perf_counter() - begin, TextStore(folder)
        store = SuffixStore(folder)
        ways = by_suffix(store, text_too=False), by_suffix(store, text_too=True), by_rest(own)
        return Measured(own.tokens, own.size / own.tokens, built, *(asked(one, held) for one in ways))


def row(one: Measured) -> str:
    """Return a line of the table."""
    cells = [f"{one.tokens:,}", f"{one.width:.2f}", f"{one.built:.2f} s"]
    for way in (one.suffix, one.both, one.rest):
        cells += [f"{way.median:.0f} us", f"{way.slow:.0f} us", f"{way.hits:.1%}".replace("%", " %")]
    return f"| {' | '.join(cells)} |\n"


def draw(found: Sequence[Measured], alone: Asked) -> Any:
    """Draw time and hit rate by size."""
    figure, (cost, hits) = panels(["microseconds per lookup", "first guess right"], 3.3)
    figure.set_size_inches(8.2, 3.5)
    sizes = [one.tokens for one in found]
    for way, (name, colour) in WAYS.items():
        ours: list[Asked] = [getattr(one, way) for one in found]
        cost.plot(sizes, [one.median for one in ours], "o-", color=colour, markersize=4, label=name)
        cost.plot(sizes, [one.slow for one in ours], ":", color=colour)
        hits.plot(sizes, [one.hits for one in ours], "o-", color=colour, markersize=4)
    cost.plot([], [], ":", color=GREY, label="nine of ten lookups are faster")
    cost.axhline(alone.median, color=GREY, linewidth=1, linestyle="--", label="the text alone")
    hits.axhline(alone.hits, color=GREY, linewidth=1, linestyle="--")
    cost.set_ylim(0, None)
    hits.set_ylim(0, None)
    hits.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    for axis in (cost, hits):
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.set_xlabel("tokens in the store")
    figure.legend(*cost.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def read(page: str) -> tuple[list[Measured], Asked]:
    """Return what the table of a page says, to draw it without measuring.

    Raises:
        ValueError: the page has no such table.
    """
    table = TABLE.search(page)
    alone = table and re.search(r"without a store: (\d+) us, ([\d.]+) %", table[0])
    if not (table and alone):
        raise ValueError("The page has no table of stores.")
    lines = [line.strip("|").split("|") for line in table[0].splitlines() if re.match(r"\| \d", line)]
    cells = [[float(cell.split()[0].replace(",", "")) for cell in line] for line in lines]
    ways = [[Asked(one[at], one[at + 1], one[at + 2] / 100) for at in (3, 6, 9)] for one in cells]
    found = [Measured(int(one[0]), one[1], one[2], *own) for one, own in zip(cells, ways, strict=True)]
    return found, Asked(float(alone[1]), 0.0, float(alone[2]) / 100)


def main() -> None:
    """Measure, draw, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="tokens of the largest store")
    parser.add_argument("--redraw", action="store_true", help="draw what the page says, without measuring")
    parser.add_argument(
        "--out", type=Path, default=PICTURES, help="folder of the figure; another one also gets the table"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.redraw:
        write(given.largest, given.out)
    save(
        lambda: draw(*read((PAGE if given.out == PICTURES else given.out / "page.md").read_text())),
        given.out / "stores.svg",
    )


def write(largest: int, out: Path) -> None:
    """Measure stores up to a size and write the table."""
    files, kept = gather()
    texts = list(token_ids(files, largest))
    held = [one for one in (text[:LENGTH] for text in token_ids(kept, 1 << 40)) if len(one) > 2 * BEFORE]
    found = [measured(texts, size, held) for size in SIZES if size <= largest]
    alone = asked(by_suffix(None, text_too=True), held)
    places = sum(len(range(BEFORE, len(text), STEP)) for text in held)
    lines = f"| {' | '.join(HEADER)} |\n|{'---:|' * len(HEADER)}\n" + "".join(map(row, found))
    lines += (
        f"\nThe text itself, without a store: {alone.median:.0f} us, {100 * alone.hits:.1f} %. {places:,} places of "
    )
    lines += f"{len(held)} held-out files.\n"
    print(lines)
    page = PAGE if out == PICTURES else out / "page.md"
    old = page.read_text() if out == PICTURES else "<!-- table: stores -->\n<!-- end of table -->\n"
    page.write_text(TABLE.sub(lambda mark: mark[1] + lines + mark[2], old))


if __name__ == "__main__":
    main()
