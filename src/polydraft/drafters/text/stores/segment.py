"""A segment: a file of texts that is written once, mapped into memory, and searched by its order."""

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.text.index import SENTINEL, Ranged, Tokens
from polydraft.drafters.text.stores.order import backward_order
from polydraft.drafters.text.stores.vocabulary import StoreVocabulary
from polydraft.errors import InvalidParameter, StoreError, shown

MAGIC, VERSION = b"PDTEXTS\0", 1
HEADER = struct.Struct("<8sIIQQI32s188sI")
"""Magic, version, vocabulary's size, tokens, texts, checksum, the tokenizer's mark and name, the header's checksum."""
CHECKED = 1 << 26
"""Larger files are not read through when they are opened; `Segment.check` does it."""
HALF = ".half"
"""What a file's name ends with while it is written."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A file of texts, mapped into memory; what is read of it takes memory that the system may take back.

    Args:
        path: the file.
        vocabulary: whose tokens these are.
        texts: the number of texts.
        tokens: the texts, with a sentinel before, between and behind them.
        order: the places of the tokens, as `backward_order` has them.
        checksum: of tokens and order, as the header says.
    """

    path: Path
    vocabulary: StoreVocabulary
    texts: int
    tokens: Tokens
    order: Tokens
    checksum: int

    @classmethod
    def open(cls, path: Path) -> "Segment":
        """Map a file into memory. Files of up to `CHECKED` bytes are compared with their checksum.

        Raises:
            StoreError: it is no segment, one of another version, cut short or damaged.
            OSError: it cannot be read.
        """
        with open(path, "rb") as file:
            head, size = file.read(HEADER.size), os.fstat(file.fileno()).st_size
            told = _header(path, head)
            count, texts, checksum = told[3:6]
            whole = HEADER.size + 8 * count
            if size != whole:
                raise StoreError(f"{path} is cut short or damaged: it has {size} bytes instead of {whole}.")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        every = np.frombuffer(mapped, np.uint32, offset=HEADER.size)
        found = cls(path, _vocabulary(told), texts, every[:count], every[count:], checksum)
        if size <= CHECKED:
            found.check()
        return found

    @cached_property
    def size(self) -> int:
        """The file's bytes."""
        return HEADER.size + 8 * len(self.tokens)

    @cached_property
    def told(self) -> bytes:
        """What tells it from other segments: its name, its tokens and its checksum."""
        return f"{self.path.name} {len(self.tokens)} {self.checksum}".encode()

    @property
    def count(self) -> int:
        """The number of tokens, without sentinels."""
        return len(self.tokens) - self.texts - 1

    def check(self) -> None:
        """Read the file through and compare it with its checksum.

        Raises:
            StoreError: it is damaged.
        """
        if _checksum(self.tokens, self.order) != self.checksum:
            raise StoreError(f"{self.path} is damaged: its checksum is not that of its contents.")

    def found(self, context: Tokens, longest: int) -> Ranged:
        """Find a context's last tokens."""
        return Ranged.of(self.tokens, self.order, context, longest)


def vocabulary_of(path: Path) -> StoreVocabulary:
    """Return whose tokens a segment holds, of which the header alone is read.

    Raises:
        StoreError: it is no segment, one of another version, or its header is cut short or damaged.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return _vocabulary(_header(path, file.read(HEADER.size)))


def stored(tokens: object) -> NDArray[np.uint32]:
    """Return a text's tokens as stores keep them.

    Raises:
        InvalidParameter: they are no sequence of token ids.
    """
    try:
        found = np.asarray(tokens)
    except ValueError:  # rows of different lengths
        found = np.zeros((0, 0))
    whole = found.ndim == 1 and (found.dtype.kind in "iu" or not len(found))
    if not whole or (len(found) and not 0 <= int(found.min()) <= int(found.max()) < SENTINEL):
        raise InvalidParameter(f"A store takes the token ids of one text, but was given {shown(tokens)}.")
    return found.astype(np.uint32)


def joined(texts: Sequence[NDArray]) -> NDArray[np.uint32]:
    """Return texts with a sentinel before, between and behind them."""
    whole = np.full(1 + sum(len(text) + 1 for text in texts), SENTINEL, np.uint32)
    at = 1
    for text in texts:
        whole[at : at + len(text)] = text
        at += len(text) + 1
    return whole


def write_segment(path: Path, tokens: NDArray[np.uint32], texts: int, vocabulary: StoreVocabulary) -> int:
    """Write a segment beside its place, then give it its name, so that it is never there in part; return its bytes.

    Args:
        path: its place; what is there is replaced.
        tokens: as `joined` returns them.
        texts: how many.
        vocabulary: whose tokens these are.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    return place_segment(path, tokens, backward_order(tokens), texts, vocabulary)


def place_segment(
    path: Path, tokens: NDArray[np.uint32], order: NDArray[np.uint32], texts: int, vocabulary: StoreVocabulary
) -> int:
    """Write a segment of which the order is known; see `write_segment`."""
    half = path.with_name(f"{path.name}.{os.getpid()}{HALF}")
    head = _packed(len(tokens), texts, _checksum(tokens, order), vocabulary)
    try:
        with open(half, "wb") as file:
            file.write(head)
            file.write(tokens.data.cast("B"))
            file.write(order.data.cast("B"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)
    return HEADER.size + 8 * len(tokens)


def _packed(count: int, texts: int, checksum: int, vocabulary: StoreVocabulary) -> bytes:
    name = vocabulary.name.encode(errors="replace")[-188:]
    fields = (MAGIC, VERSION, vocabulary.size, count, texts, checksum, vocabulary.mark, name)
    return HEADER.pack(*fields, crc32(HEADER.pack(*fields, 0)[:-4]))


def _header(path: Path, head: bytes) -> tuple:
    """Return a header's fields.

    Raises:
        StoreError: it is none, or of another version.
    """
    if head[:8] != MAGIC[: len(head)] or not head:
        raise StoreError(f"{path} is no store of texts: it does not begin as one.")
    if len(head) < HEADER.size:
        raise StoreError(f"{path} is cut short: it has {len(head)} bytes, and the header alone {HEADER.size}.")
    told = HEADER.unpack(head)
    if told[1] != VERSION:
        raise StoreError(f"{path} is a store of version {told[1]}, and this polydraft reads version {VERSION}.")
    if told[-1] != crc32(head[:-4]):
        raise StoreError(f"{path} is damaged: its header does not agree with its checksum.")
    return told


def _vocabulary(told: tuple) -> StoreVocabulary:
    """Return the vocabulary of a header's fields."""
    width, mark, name = told[2], *told[6:8]
    return StoreVocabulary(width, mark.rstrip(b"\0"), name.rstrip(b"\0").decode(errors="replace"))


def _checksum(*parts: NDArray[np.uint32]) -> int:
    found = 0
    for part in parts:
        found = crc32(part.data.cast("B"), found)
    return found
