"""How large a store may grow: a number that its folder keeps, so that all who write to it hold to the same."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from polydraft.drafters.text.stores.segment import HALF
from polydraft.errors import StoreError, is_whole

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
    """Write a bound into a folder whose lock is held, beside its place first, so that it is never there in part.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    half = folder / f"{BOUND}.{os.getpid()}{HALF}"
    told = {"version": VERSION, "most_bytes": bound.most_bytes, "checksum": _checksum(bound.most_bytes)}
    try:
        with open(half, "w", encoding="ascii") as file:
            file.write(json.dumps(told) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, folder / BOUND)
    finally:
        half.unlink(missing_ok=True)


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
