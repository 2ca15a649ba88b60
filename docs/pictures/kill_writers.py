"""Kill writers of a large store at random moments: `python docs/pictures/kill_writers.py`.

A store bounded at 200 MB is filled nearly to its bound. Then a process adds texts as fast as it can, until it is killed
(`kill -9`); the store is opened, which compares all checksums, and the next process begins. In the end all texts are
read: each must be whole, there once, and in the order of their age. It takes 1 GB of memory, 0.25 GB of disk and two
minutes.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters import StoreWriter, SuffixStore, TextStore, Vocabulary
from polydraft.drafters.text.index import SENTINEL

BOUND, VOCABULARY, LENGTH = 200_000_000, 32_000, 400


def text_of(writer: int, number: int) -> NDArray[np.int64]:
    """Return a text that follows from who wrote it and its number, which are its first tokens."""
    text = np.random.default_rng((writer, number)).integers(0, VOCABULARY, LENGTH)
    text[:3] = writer, number // VOCABULARY, number % VOCABULARY
    return text


def write(folder: str, writer: int) -> None:
    """Add texts until the process is killed."""
    store, number = SuffixStore(folder), 0
    while True:
        store.add(text_of(writer, number))
        number += 1


def texts_in(folder: str) -> list[NDArray[np.uint32]]:
    """Return all texts of a store, the oldest first."""
    found = list[NDArray[np.uint32]]()
    for segment in TextStore(folder).segments:
        ends = np.flatnonzero(segment.tokens == SENTINEL)
        found += [segment.tokens[first + 1 : stop] for first, stop in pairwise(ends)]
    return found


def main() -> None:
    """Fill, kill, check, and print what there is after each kill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--bound", type=int, default=BOUND)
    options, chance = parser.parse_args(), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        with StoreWriter(folder, Vocabulary(VOCABULARY), most_bytes=options.bound, merges=True) as first:
            for number in range(int(0.98 * options.bound / (8 * (LENGTH + 1)))):
                first.add(text_of(0, number))
        there = TextStore(folder)
        took = time.perf_counter() - begin
        print(f"filled: {there.texts} texts, {there.size / 1e6:.1f} MB, {took:.0f} s", flush=True)
        largest = 0
        for writer in range(1, options.kills + 1):
            child = os.fork()
            if not child:
                write(folder, writer)
                os._exit(1)
            wait = chance.uniform(0.5, 4.0)
            time.sleep(wait)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            halves = len([*Path(folder).glob("*.half")])
            size = sum(one.stat().st_size for one in Path(folder).iterdir())
            store = SuffixStore(folder)
            largest = max(largest, store.size)
            told = f"{len(store.segments)} segments, {store.texts} texts, {store.size / 1e6:.1f} MB"
            print(f"kill {writer} after {wait:.1f} s: {told}; files {size / 1e6:.1f} MB, {halves} half", flush=True)
        texts = texts_in(folder)
        names = [(int(one[0]), int(one[1]) * VOCABULARY + int(one[2])) for one in texts]
        whole = all(np.array_equal(one, text_of(*name)) for one, name in zip(texts, names, strict=True))
        print(f"{len(texts)} texts of writers {sorted({writer for writer, _ in names})}; all whole: {whole}")
        print(f"each there once: {len({*names}) == len(names)}; in the order of their age: {names == sorted(names)}")
        print(f"largest store: {largest / 1e6:.1f} MB; {time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
