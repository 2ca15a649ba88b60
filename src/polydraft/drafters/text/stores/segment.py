"""A segment: a file of texts of one vocabulary that is written once, mapped into memory, and searched by its order."""

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from torch import nn

from polydraft.drafters.contract import Session
from polydraft.drafters.text.index import LONGEST, SENTINEL, Ranged, Tokens, as_tokens
from polydraft.errors import InvalidParameter, StoreError, is_whole, shown
from polydraft.machine_code import compiled
from polydraft.models import tokenizer_of

MOST_PADDING = 1024
"""Models may have so many output rows more than their tokenizers have tokens."""


@dataclass(frozen=True)
class StoreVocabulary:
    """A tokenizer, as far as a store must know it.

    Args:
        size: its number of tokens, or the model's; 0 where nothing is known.
        mark: a fingerprint of its tokens; empty where the tokenizer is not known.
        name: what it is called in errors.

    Raises:
        InvalidParameter: `size` is no number of tokens.
    """

    size: int
    mark: bytes = b""
    name: str = ""

    def __post_init__(self) -> None:
        if not is_whole(self.size) or self.size < 0:
            raise InvalidParameter(
                f"The size of a vocabulary must be a whole number of at least 0, but is {shown(self.size)}."
            )

    @classmethod
    def of(cls, tokenizer: Any, name: str = "") -> "StoreVocabulary":
        """Return the vocabulary of a Hugging Face tokenizer."""
        tokens = sorted((index, token) for token, index in tokenizer.get_vocab().items())
        text = "\n".join(f"{index} {token}" for index, token in tokens)
        mark = sha256(text.encode(errors="surrogatepass")).digest()
        return cls(len(tokens), mark, name or str(getattr(tokenizer, "name_or_path", "") or ""))

    @classmethod
    def of_target(cls, session: Session) -> "StoreVocabulary":
        """Return the vocabulary of a session's target."""
        return cls.of_model(network_of(session.target), session.vocab_size)

    @classmethod
    def of_model(cls, model: nn.Module | None, vocab_size: int) -> "StoreVocabulary":
        """Return the vocabulary of a network with so many tokens: its tokenizer's where that is on this machine."""
        found = None if model is None else _of_module(model)
        return found or cls(vocab_size)

    @property
    def title(self) -> str:
        """What it is called."""
        return f"{self.name or 'a tokenizer without a name'} ({self.size} tokens)"

    def agrees(self, other: "StoreVocabulary") -> bool:
        """Tell whether two vocabularies may be one: by their fingerprints if both are known, else by their sizes."""
        if self.mark and other.mark:
            return self.mark == other.mark
        return not (self.size and other.size) or abs(self.size - other.size) <= MOST_PADDING

    def with_known(self, other: "StoreVocabulary") -> "StoreVocabulary":
        """Return the one of two that agree of which more is known."""
        return other if (other.mark and not self.mark) or not self.size else self


def network_of(model: Any) -> nn.Module | None:
    """Return the network inside a reader, a clock or a model of ours; None if there is none."""
    while model is not None and not isinstance(model, nn.Module):
        model = getattr(model, "model", None)
    return model


_KNOWN: WeakKeyDictionary[nn.Module, StoreVocabulary | None] = WeakKeyDictionary()
"""The vocabularies of models that were asked for: to read a tokenizer takes a moment."""


def _of_module(module: nn.Module) -> StoreVocabulary | None:
    if module not in _KNOWN:
        tokenizer = tokenizer_of(module)
        name = str(getattr(module, "name_or_path", "") or "")
        _KNOWN[module] = None if tokenizer is None else StoreVocabulary.of(tokenizer, name)
    return _KNOWN[module]


def backward_order(tokens: Tokens) -> NDArray[np.uint32]:
    """Return the places of tokens, ordered by their last token, then by the one before it, and so on.

    The order holds for `LONGEST` tokens and no further than a sentinel. Ranks by the last k tokens make those by 2 k;
    only places that are not yet told apart are sorted again. Twice 64 bits per token are needed meanwhile.

    Source: prefix doubling, Manber and Myers 1990; the refinement of Larsson and Sadakane 2007.
    """
    before = np.concatenate([np.zeros(1, np.uint64), tokens[:-1].astype(np.uint64)])[: len(tokens)]
    keys = (tokens.astype(np.uint64) << np.uint64(32)) | before
    del before
    order = np.argsort(keys).astype(np.uint32)
    slots = np.arange(len(tokens), dtype=np.uint32)
    ranks = np.zeros(len(tokens), np.uint32)
    known = 2
    slots = _ranked(order, slots, keys[order], ranks)
    del keys
    while known < LONGEST and len(slots):
        places = order[slots]
        keys = ranks[places].astype(np.uint64) << np.uint64(32)
        keys |= np.where(places >= known, ranks[np.maximum(places, known) - known] + np.uint32(1), np.uint32(0))
        again = np.argsort(keys)
        order[slots] = places[again]
        slots = _ranked(order, slots, keys[again], ranks)
        known *= 2
    return order


def joined_orders(tokens: Tokens, orders: Sequence[Tokens]) -> Tokens:
    """Return the order of tokens of which the orders of parts are known, in a tenth of the time of a new one.

    Args:
        tokens: all parts behind one another.
        orders: the places of each part, ordered.
    """
    left = list(orders)
    while len(left) > 1:
        pairs = [left[at : at + 2] for at in range(0, len(left), 2)]
        left = [as_tokens(merge(tokens, *pair, LONGEST)) if len(pair) > 1 else pair[0] for pair in pairs]
    return left[0]


@compiled
def merge(tokens: Tokens, first: Tokens, second: Tokens, longest: int) -> Tokens:
    """Merge two orders of places of the same tokens. Damaged ones point anywhere, and give an order of some kind."""
    whole, one, other = np.empty(len(first) + len(second), np.uint32), 0, 0
    for at in range(len(whole)):
        goes_first = one < len(first)
        if goes_first and other < len(second):
            here, there = np.int64(first[one]), np.int64(second[other])
            for back in range(longest):
                if back > here or back > there or here >= len(tokens) or there >= len(tokens):
                    break
                token, rival = tokens[here - back], tokens[there - back]
                if token != rival:
                    goes_first = token < rival
                    break
                if token == 0xFFFFFFFF:
                    break
        if goes_first:
            whole[at] = first[one]
            one += 1
        else:
            whole[at] = second[other]
            other += 1
    return whole


def _ranked(
    order: NDArray[np.uint32], slots: NDArray[np.uint32], keys: NDArray[np.uint64], ranks: NDArray[np.uint32]
) -> NDArray[np.uint32]:
    """Give the places in some slots the first slot of their group as rank; return the slots of groups of several."""
    first = np.ones(len(keys) + 1, np.bool_)
    first[1:-1] = keys[1:] != keys[:-1]
    starts = np.maximum.accumulate(np.where(first[:-1], np.arange(len(keys), dtype=np.uint32), np.uint32(0)))
    ranks[order[slots]] = slots[starts]
    return slots[~(first[:-1] & first[1:])]


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
    """Write a segment in one piece; return its bytes.

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
    head = _packed(len(tokens), texts, _checksum(tokens, order), vocabulary)
    with written_whole(path) as file:
        file.write(head)
        file.write(tokens.data.cast("B"))
        file.write(order.data.cast("B"))
    return HEADER.size + 8 * len(tokens)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside its place, which gets its name when all was written, so that it is never there in part.

    Raises:
        OSError: it cannot be written; what was there stays, and nothing is left behind.
    """
    half = path.with_name(f"{path.name}.{os.getpid()}{HALF}")
    try:
        with open(half, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


def _packed(count: int, texts: int, checksum: int, vocabulary: StoreVocabulary) -> bytes:
    name = vocabulary.name.encode(errors="replace")[-188:]
    fields = (MAGIC, VERSION, vocabulary.size, count, texts, checksum, vocabulary.mark, name)
    return HEADER.pack(*fields, crc32(HEADER.pack(*fields, 0)[:-4]))


def _header(path: Path, head: bytes) -> tuple:
    """Return a header's fields, or raise `StoreError`."""
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
    width, mark, name = told[2], *told[6:8]
    return StoreVocabulary(width, mark.rstrip(b"\0"), name.rstrip(b"\0").decode(errors="replace"))


def _checksum(*parts: NDArray[np.uint32]) -> int:
    found = 0
    for part in parts:
        found = crc32(part.data.cast("B"), found)
    return found
