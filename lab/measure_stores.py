"""Measure what large stores cost: `python lab/measure_stores.py`, with `pip install ".[figures]"`.

A store that is only read is built of synthetic tokens, and a store that grows takes more texts than its bound has room
for; both are asked at places of texts that they do not hold. Prints the table of docs/performance/stores.md with its
conditions. It takes 2.5 GB of memory, 0.8 GB of disk and some minutes; `--rest-tokens 100000 --texts 500` is a quick
look.

Texts are made of phrases of 16 tokens from a book of 20,000, of which some are far more frequent than others; every
tenth token is replaced by any other. So contexts recur as they do in texts of one kind, and most end somewhere.
"""

import argparse
import os
import platform
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.text.stores.segment import StoreVocabulary
from polydraft.drafters.text.stores.store import StoreWriter, TextStore
from polydraft.drafters.text.stores.suffix_store import SuffixStore
from stores import Ask, by_rest, by_suffix

LENGTH, VOCABULARY, PHRASES, PHRASE = 400, 32_000, 20_000, 16
PLACES = 20
"""Places of each text at which a store is asked."""
QUANTILES = (0.5, 0.9, 0.99)


@contextmanager
def memory() -> Iterator[list[float]]:
    """Yield a list that has three numbers in the end: the process's own memory, that of mapped files not counted,
    before, at most, and after, in MB.
    """
    found, over, before = list[float](), threading.Event(), resident("Anon")

    def look() -> None:
        while not over.wait(0.05):
            most.append(max(most.pop(), resident("Anon")))

    most, watch = [before], threading.Thread(target=look, daemon=True)
    watch.start()
    try:
        yield found
    finally:
        over.set()
        watch.join()
        found += [before, most[0], resident("Anon")]


def resident(kind: str) -> float:
    """Return the resident memory of this process of a kind, in MB."""
    found = re.search(rf"Rss{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1000


@dataclass(frozen=True)
class Texts:
    """Synthetic texts; the same seed gives the same book, and the same number the same text."""

    seed: int
    book: NDArray[np.uint32]

    @classmethod
    def of(cls, seed: int) -> "Texts":
        """Return texts of a seed."""
        noise = np.random.default_rng(seed)
        return cls(seed, noise.integers(0, VOCABULARY, (PHRASES, PHRASE)).astype(np.uint32))

    def __getitem__(self, number: int) -> NDArray[np.uint32]:
        """Return a text."""
        noise = np.random.default_rng((self.seed, number))
        ranks = (PHRASES * noise.random(-(-LENGTH // PHRASE)) ** 3).astype(np.int64)
        text = self.book[ranks].reshape(-1)[:LENGTH].copy()
        other = noise.random(LENGTH) < 0.1
        text[other] = noise.integers(0, VOCABULARY, int(other.sum()))
        return text

    def some(self, count: int, begin: int = 0) -> Iterator[NDArray[np.uint32]]:
        """Yield texts."""
        return (self[number] for number in range(begin, begin + count))


@dataclass(frozen=True)
class Asked:
    """What came of asking: microseconds by the clock and of the CPU, the share with a draft, and that where the first
    guess was right.
    """

    times: tuple[float, ...]
    own: tuple[float, ...]
    hits: float
    right: float
    drafts: float
    memory: Sequence[float] = ()

    @classmethod
    def of(cls, ask: Ask, texts: Sequence[NDArray[np.uint32]]) -> "Asked":
        """Ask at places of the texts, at some of them once before to warm up."""
        places = [(text, at) for text in texts for at in range(LENGTH // PLACES, LENGTH, LENGTH // PLACES)]
        for text, at in places[:200]:
            ask(text[:at])
        times, own, sizes, right = list[float](), list[float](), list[int](), 0
        for text, at in places:
            begin, busy = time.perf_counter(), time.thread_time()
            guess = ask(text[:at])
            own.append(1e6 * (time.thread_time() - busy))
            times.append(1e6 * (time.perf_counter() - begin))
            sizes.append(len(guess))
            right += len(guess) > 0 and int(guess.tokens[0]) == int(text[at])
        found = np.array(sizes)
        clock, busy = (tuple(map(float, np.quantile(one, QUANTILES))) for one in (times, own))
        return cls(clock, busy, float((found > 0).mean()), right / len(places), float(found[found > 0].mean()))

    def cells(self) -> list[tuple[str, str]]:
        """Return its part of the table's column."""
        times, own = (", ".join(f"{one:,.0f}" for one in kind) for kind in (self.times, self.own))
        return [
            ("own memory before, at most while, after asking", in_mb(self.memory)),
            ("microseconds of a lookup: median, 90 %, 99 %", times),
            ("the same by CPU time", own),
            ("lookups with a draft; drafts in these", f"{100 * self.hits:.1f} %; {self.drafts:.1f}"),
            ("first guess right", f"{100 * self.right:.1f} %"),
        ]


@dataclass(frozen=True)
class Filled:
    """A store: what it was given and holds, the seconds that texts waited, by the clock and of the CPU, and memory."""

    given: int
    tokens: int
    texts: int
    size: int
    waits: NDArray[np.float64]
    memory: Sequence[float]

    @classmethod
    def of(cls, folder: Path, given: int, waits: NDArray[np.float64], memory: Sequence[float]) -> "Filled":
        """Return what is in a folder."""
        store = TextStore(folder)
        return cls(given, store.tokens, store.texts, store.size, waits, memory)

    def cells(self) -> list[tuple[str, str]]:
        """Return its part of the table's column."""
        clock, busy = self.waits.sum(axis=0)
        slow = 1000 * np.quantile(self.waits[:, 0], 0.99), 1000 * self.waits[:, 0].max()
        return [
            ("tokens given", f"{self.given:,}"),
            ("texts and tokens kept", f"{self.texts:,} and {self.tokens:,}"),
            ("on disk", f"{self.size / 1e6:,.1f} MB, {self.size / self.tokens:.2f} bytes per token"),
            ("tokens taken per second; per second of CPU time", f"{self.given / clock:,.0f}; {self.given / busy:,.0f}"),
            ("a text waits until it is taken: 99 %, most", f"{slow[0]:,.2f} ms, {slow[1]:,.0f} ms"),
            ("own memory before, at most while, after building", in_mb(self.memory)),
        ]


def in_mb(found: Sequence[float]) -> str:
    """Return memory in words."""
    return ", ".join(f"{one:.0f}" for one in found) + " MB"


def filled(
    add: Callable[[NDArray[np.uint32]], None], flush: Callable[[], None], texts: Iterator[NDArray[np.uint32]]
) -> NDArray[np.float64]:
    """Add texts; return the seconds that each one waited, by the clock and of the CPU, and those of the end."""
    waits = list[tuple[float, float]]()
    for task in chain((partial(add, text) for text in texts), [flush]):
        begin, busy = time.perf_counter(), time.thread_time()
        task()
        waits.append((time.perf_counter() - begin, time.thread_time() - busy))
    return np.array(waits)


def built(folder: Path, count: int, texts: Texts) -> Filled:
    """Build a store that is only read."""
    with memory() as own:
        writer = StoreWriter(folder, StoreVocabulary(VOCABULARY))
        waits = filled(writer.add, writer.flush, texts.some(count))
    return Filled.of(folder, writer.tokens, waits, own)


def grown(folder: Path, count: int, most_bytes: int, texts: Texts) -> Filled:
    """Let a store take texts and grow to its bound."""
    with memory() as own:
        store = SuffixStore(folder, most_bytes=most_bytes, vocabulary=StoreVocabulary(VOCABULARY))
        waits = filled(store.add, store.flush, texts.some(count))
    return Filled.of(folder, count * LENGTH, waits, own)


def by_kind(kind: str, folder: Path, held: Sequence[NDArray[np.uint32]]) -> Asked:
    """Ask a store as `rest:FOLDER` does, or as `suffix:FOLDER` does for its store."""
    with memory() as own:
        ask = by_rest(TextStore(folder)) if kind == "rest" else by_suffix(SuffixStore(folder), text_too=False)
        found = Asked.of(ask, held)
    return replace(found, memory=own)


def conditions(before: float) -> str:
    """Return where and when this was measured."""
    told = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    packages = ", ".join(f"{name} {version(name)}" for name in ("polydraft", "numpy", "numba"))
    return (
        f"{told[1] if told else platform.processor()}, {os.cpu_count()} CPUs, one thread; Python "
        f"{platform.python_version()}, {packages}; load {before:.1f} at the beginning and {os.getloadavg()[0]:.1f} at "
        f"the end; {date.today()}."
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rest-tokens", type=int, default=100_000_000, help="tokens of the store that is only read")
    parser.add_argument("--texts", type=int, default=100_000, help="texts for the store that grows")
    parser.add_argument("--most-mb", type=int, default=200, help="its bound in millions of bytes")
    parser.add_argument("--asked", type=int, default=500, help=f"texts of which {PLACES - 1} places each are asked")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(table(given.rest_tokens, given.texts, 1_000_000 * given.most_mb, given.asked, given.seed))


def table(rest_tokens: int, count: int, most_bytes: int, asked: int, seed: int) -> str:
    """Measure both stores, each part in a process of its own, and return the table."""
    texts, before = Texts.of(seed), os.getloadavg()[0]
    held = [*texts.some(asked, begin=1 << 40)]
    with tempfile.TemporaryDirectory() as folder:
        rest, suffix = Path(folder, "rest"), Path(folder, "suffix")
        warm_up(Path(folder, "small"), texts)  # machine code is compiled before memory is looked at
        both = (
            apart(built, rest, rest_tokens // LENGTH, texts).cells() + apart(by_kind, "rest", rest, held).cells(),
            apart(grown, suffix, count, most_bytes, texts).cells() + apart(by_kind, "suffix", suffix, held).cells(),
        )
    return "\n".join([*rows(*both), "", conditions(before)])


def warm_up(folder: Path, texts: Texts) -> None:
    """Do everything once."""
    built(folder / "rest", 20, texts)
    grown(folder / "suffix", 500, 1_000_000, texts)
    for kind in ("rest", "suffix"):
        by_kind(kind, folder / kind, [texts[1 << 50]])


def apart(measure: Callable[..., Any], *given: Any) -> Any:
    """Measure in a copy of this process."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(measure, *given).result()


def rows(rest: Sequence[tuple[str, str]], suffix: Sequence[tuple[str, str]]) -> list[str]:
    """Return the table's lines."""
    lines = [f"| {name} | {one} | {other} |" for (name, one), (_, other) in zip(rest, suffix, strict=True)]
    return ["| | REST | suffix |", "|---|---|---|", *lines]


if __name__ == "__main__":
    main()
