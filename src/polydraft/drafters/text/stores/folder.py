"""A folder of segments that several processes write to: numbered by age, merged, and bounded in bytes."""

import errno
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
from filelock import FileLock

from polydraft.drafters.text.index import Tokens, as_tokens
from polydraft.drafters.text.stores.segment import (
    HALF,
    HEADER,
    Segment,
    StoreVocabulary,
    joined_orders,
    place_segment,
    vocabulary_of,
    write_segment,
    written_whole,
)
from polydraft.errors import InvalidParameter, StoreError, VocabularyMismatch, is_whole, lowered, shown

BOUND = "bound.json"
"""The file in a store's folder."""
VERSION = 1
MOST_BYTES = 1 << 28
"""The usual bound on a store."""


@dataclass(frozen=True)
class Bound:
    """What a folder says of its size.

    Args:
        most_bytes: the bound on all segments, beyond which the oldest are dropped; None for a store that was built to
            be only read, to which nothing is added and of which nothing is dropped.
    """

    most_bytes: int | None


def read_bound(folder: Path) -> Bound | None:
    """Return what a folder says; None for one that says nothing: an empty one, or one from before there were bounds.

    Raises:
        StoreError: the file cannot be read, is damaged, or of another version.
    """
    path = folder / BOUND
    try:
        told = json.loads(path.read_bytes())
        version, most, checksum = (told[name] for name in ("version", "most_bytes", "checksum"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StoreError(f"{path} is damaged: it does not say how large the store may grow.") from error
    if version != VERSION:
        raise StoreError(f"{path} is of version {version}, and this polydraft reads version {VERSION}.")
    if checksum != _checksum(most) or not (most is None or (is_whole(most) and most > 0)):
        raise StoreError(f"{path} is damaged: its checksum is not that of its contents.")
    return Bound(most)


def keep_bound(folder: Path, bound: Bound) -> None:
    """Write a bound into a folder whose lock is held, in one piece.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    told = {"version": VERSION, "most_bytes": bound.most_bytes, "checksum": _checksum(bound.most_bytes)}
    with written_whole(folder / BOUND) as file:
        file.write(f"{json.dumps(told)}\n".encode())


def bound_for(folder: Path, asked: int | None, found: int) -> Bound:
    """Return the bound that holds for whoever adds to a store that grows.

    A folder that says nothing may become twice as large as it is, if that is more than the usual: then dropping its
    oldest segment never leaves less than was found.

    Args:
        folder: the store.
        asked: the bound that somebody named; None for the folder's own, or the usual one.
        found: the bytes of its segments.

    Raises:
        StoreError: the folder's own cannot be read.
    """
    kept = read_bound(folder)
    if kept is not None and (asked is None or kept.most_bytes is None):
        return kept
    return Bound(max(MOST_BYTES, 2 * found) if asked is None else asked)


def check_grows(folder: Path, bound: Bound) -> None:
    """Check that texts may be added to a store.

    Raises:
        StoreError: it was built to be only read.
    """
    if bound.most_bytes is None:
        raise StoreError(f"{folder} was built to be only read, and takes no texts: name another folder to add to.")


def _checksum(most: object) -> int:
    return crc32(f"{VERSION} {most}".encode())


LOCK = ".lock"
PATIENCE = 30.0
"""Seconds that a writer waits for another."""
FAN = 4
"""So many neighbours of one size become one segment."""
PARTS = 8
"""A merged segment has at most this part of a bounded folder, so that to drop the oldest drops little."""
MERGED = 1 << 23
"""The most tokens of a merged segment: whoever adds a text waits for a merge."""
FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
"""What the system says where there is no room, or none for this user."""
NAME = re.compile(r"(\d{10})-(\d{10})\.segment")


@dataclass(frozen=True)
class SegmentPlace:
    """A segment's file, its bytes, and which of the segments that were ever written it holds: the first to the last."""

    path: Path
    first: int
    last: int
    size: int


def places(folder: Path) -> list[SegmentPlace]:
    """Return the segments of a folder, the oldest first, without those that a merged one holds.

    Raises:
        OSError: the folder cannot be read.
    """
    found = list[SegmentPlace]()
    with os.scandir(folder) as entries:
        for entry in entries:
            name = NAME.fullmatch(entry.name)
            if name:
                try:
                    found.append(SegmentPlace(Path(entry.path), int(name[1]), int(name[2]), entry.stat().st_size))
                except FileNotFoundError:  # another process has just dropped it
                    continue
    found.sort(key=lambda one: (one.first, -one.last))
    whole, last = list[SegmentPlace](), -1
    for one in found:
        if one.last > last:
            whole.append(one)
            last = one.last
    return whole


def path_of(given: object, name: str) -> Path:
    """Return where a store is, with a home directory for `~`.

    Args:
        given: what was given.
        name: the argument that it was given for.

    Raises:
        InvalidParameter: it is no path.
        StoreError: no file can have this path.
    """
    if not isinstance(given, str | Path):
        raise InvalidParameter(f"{name} must be the path of a store of texts, but is {shown(given)}.")
    try:
        found = Path(given).expanduser()
    except RuntimeError as error:
        raise StoreError(f"There is no store of texts at {given}: {lowered(error)}") from error
    if "\0" in str(given):
        raise StoreError(f"There is no store of texts at {str(given)!r}: no file has such a name.")
    return found


def is_full(error: BaseException | None) -> bool:
    """Tell whether an error says that there is no room."""
    return isinstance(error, OSError) and error.errno in FULL


def check_folder(folder: Path, *, make: bool = False) -> None:
    """Check that a folder is there, or make it.

    Raises:
        StoreError: it is not there, is no folder, holds other files and no segments, or cannot be made or read.
    """
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        names = os.listdir(folder)
    except FileNotFoundError:
        raise StoreError(f"There is no store of texts at {folder}; `polydraft store build` makes one.") from None
    except (NotADirectoryError, FileExistsError):
        raise StoreError(f"{folder} is a file; a store of texts is a folder.") from None
    except OSError as error:
        raise StoreError(f"The store {folder} cannot be used: {error.strerror or error}.") from error
    told = [name for name in names if name not in (LOCK, BOUND)]
    foreign = [name for name in told if not (NAME.fullmatch(name) or name.endswith(HALF))]
    if foreign and len(foreign) == len(told):
        raise StoreError(f"{folder} is no store of texts: it holds {sorted(foreign)[0]} and no segment.")


def opened(place: SegmentPlace, vocabulary: StoreVocabulary | None) -> Segment:
    """Open a segment.

    Raises:
        StoreError: it cannot be read.
        VocabularyMismatch: it holds tokens of another tokenizer.
    """
    try:
        found = Segment.open(place.path)
    except OSError as error:
        raise StoreError(f"{place.path} cannot be read: {error.strerror or error}.") from error
    if vocabulary is not None:
        check_same(place.path, found.vocabulary, vocabulary)
    return found


def check_same(where: Path, theirs: StoreVocabulary, ours: StoreVocabulary) -> None:
    """Check that a store's tokens are the target's.

    Raises:
        VocabularyMismatch: they are not.
    """
    if not theirs.agrees(ours):
        raise VocabularyMismatch(
            f"{where} holds tokens of {theirs.title}, and the target's are those of {ours.title}: build a store for it."
        )


def append(
    folder: Path,
    tokens: Tokens,
    texts: int,
    vocabulary: StoreVocabulary,
    most_bytes: int | None,
    *,
    merges: bool = True,
) -> OSError | None:
    """Write a segment behind all others; then merge small ones, and drop the oldest that exceed the bound.

    The bound is kept in the folder. A store that is filled without merging and without a bound is one that is only
    read; so says its folder then, and nothing is dropped.

    Args:
        folder: the store.
        tokens: texts with sentinels around them.
        texts: how many.
        vocabulary: whose tokens these are.
        most_bytes: the bound on all segments that somebody named; None for the folder's own.
        merges: whether small neighbours are merged, as in stores that grow.

    Returns:
        why small segments could not be merged though the new one was written, if that is so.

    Raises:
        StoreError: a store that is only read is to be merged or bounded, or what the folder says of its bound is
            damaged.
        VocabularyMismatch: the folder holds tokens of another tokenizer.
        OSError: it cannot be written, or another process holds the lock for too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / LOCK, timeout=PATIENCE):
        there = places(folder)
        bound = _bound(folder, there, most_bytes, merges=merges)
        _check_all(folder, there, vocabulary)
        if bound is not None and bound != read_bound(folder):
            keep_bound(folder, bound)
        number = 1 + max((one.last for one in there), default=0)
        write_segment(folder / f"{number:010d}-{number:010d}.segment", tokens, texts, vocabulary)
        try:
            tidy(folder, None if bound is None else bound.most_bytes, merges=merges)
        except OSError as error:
            return error
    return None


def unmerged(folder: Path, error: OSError) -> str:
    """Return what is said where texts were written and segments could not be merged."""
    return f"The segments of the store {folder} cannot be merged ({error.strerror or error}); its texts are kept."


def _bound(folder: Path, there: Sequence[SegmentPlace], asked: int | None, *, merges: bool) -> Bound | None:
    """Return the bound that holds from now on; None where none was ever said."""
    if not merges and asked is None:
        return read_bound(folder) or (None if there else Bound(None))
    found = bound_for(folder, asked, sum(one.size for one in there))
    check_grows(folder, found)
    return found


def _check_all(folder: Path, there: Sequence[SegmentPlace], vocabulary: StoreVocabulary) -> None:
    """Check all segments again: another process may have written since the store was opened."""
    for one in there:
        try:
            theirs = vocabulary_of(one.path)
        except StoreError:  # whoever opens the store is told
            continue
        check_same(folder, theirs, vocabulary)


def tidy(folder: Path, most_bytes: int | None, *, merges: bool = True) -> None:
    """Clean a folder whose lock is held: what killed writers left, what was merged, what exceeds the bound."""
    _evict(folder, most_bytes)
    try:
        while merges and _merge(folder, most_bytes):
            continue
    except StoreError:  # a damaged neighbour, or one of a later version: whoever opens the store is told
        pass
    finally:
        _clean(folder)


def _clean(folder: Path) -> None:
    """Drop what killed writers left, and what a merged segment holds."""
    kept = {one.path for one in places(folder)}
    for path in folder.iterdir():
        if path not in kept and (path.name.endswith(HALF) or NAME.fullmatch(path.name)):
            _drop(path)


def _evict(folder: Path, most_bytes: int | None) -> None:
    """Drop the oldest segments until the rest fits; the youngest stays."""
    there = places(folder)
    total = sum(one.size for one in there)
    for one in there[:-1]:
        if most_bytes is None or total <= most_bytes:
            break
        _drop(one.path)
        total -= one.size


def _merge(folder: Path, most_bytes: int | None) -> bool:
    """Merge the youngest neighbours of one size, if there are enough; tell whether that was done."""
    largest = HEADER.size + 8 * MERGED
    if most_bytes is not None:
        largest = min(largest, most_bytes // PARTS)
    there = places(folder)
    for run in _runs([one.size for one in there]):
        chosen = _together(there[run:], largest)
        if chosen:
            _merge_into_one(folder, chosen)
            return True
    return False


def _together(there: Sequence[SegmentPlace], largest: int) -> list[SegmentPlace]:
    """Return the first neighbours that become one segment: of one tokenizer, and no larger than that; none if alone."""
    chosen, size, known = list[SegmentPlace](), 0, StoreVocabulary(0)
    for one in there:
        theirs = vocabulary_of(one.path)
        if chosen and (size + one.size > largest or not known.agrees(theirs)):
            if len(chosen) > 1:
                break
            chosen, size, known = [], 0, StoreVocabulary(0)
        chosen, size, known = [*chosen, one], size + one.size, known.with_known(theirs)
    return chosen if len(chosen) > 1 and size <= largest else []


def _runs(sizes: Sequence[int]) -> list[int]:
    """Return where the youngest neighbours begin that are enough to be merged, the smallest kind first."""
    found, start = list[int](), len(sizes)
    bound = FAN * min(sizes[-1:], default=0)
    while start > 0:
        bound = max(bound, FAN * sizes[start - 1])
        while start > 0 and sizes[start - 1] < bound:
            start -= 1
        if len(sizes) - start >= FAN:
            found.append(start)
    return found


def _merge_into_one(folder: Path, chosen: Sequence[SegmentPlace]) -> None:
    segments = [Segment.open(one.path) for one in chosen]
    tokens = np.concatenate([segments[0].tokens, *(one.tokens[1:] for one in segments[1:])])
    starts = np.cumsum([0, *(len(one.tokens) - 1 for one in segments[:-1])])  # neighbours share a sentinel
    orders = [segments[0].order, *(one.order[one.order > 0] for one in segments[1:])]
    moved = [as_tokens(one + np.uint32(start)) for one, start in zip(orders, starts, strict=True)]
    vocabulary = segments[0].vocabulary
    for one in segments:
        vocabulary = vocabulary.with_known(one.vocabulary)
    name = f"{chosen[0].first:010d}-{chosen[-1].last:010d}.segment"
    order = joined_orders(as_tokens(tokens), moved)
    place_segment(folder / name, tokens, order, sum(one.texts for one in segments), vocabulary)
    for one in chosen:
        _drop(one.path)


def _drop(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a system that keeps open files; the next writer tries again
        return
