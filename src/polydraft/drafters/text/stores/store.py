"""A store of texts that is built once and then read: a folder of segments, or one of them."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.contract import digest_of
from polydraft.drafters.text.index import LONGEST, Occurrences, Tokens
from polydraft.drafters.text.stores.folder import (
    PARTS,
    SegmentPlace,
    append,
    bound_for,
    check_folder,
    check_grows,
    check_same,
    opened,
    path_of,
    places,
    unmerged,
)
from polydraft.drafters.text.stores.segment import Segment, StoreVocabulary, joined, stored
from polydraft.errors import InvalidParameter, StoreError, is_whole, shown

CHUNK = 1 << 25
"""Tokens of a segment that is built: to order them takes nearly two gigabytes of memory."""
BYTES = 8
"""Of a segment for each token."""


class TextStore:
    """Texts in a folder of segments, or in one segment, to read.

    Args:
        path: the folder or file.

    Raises:
        InvalidParameter: `path` is no path.
        StoreError: there is none, it holds no segment, or a segment is damaged.
        VocabularyMismatch: two segments are of different tokenizers.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path_of(path, "path")
        if self.path.is_file():
            there = [SegmentPlace(self.path, 1, 1, 0)]
        else:
            check_folder(self.path)
            there = places(self.path)
        if not there:
            raise StoreError(f"The store {self.path} is empty; `polydraft store build` fills it.")
        segments, vocabulary = list[Segment](), None
        for place in there:
            segments.append(opened(place, vocabulary))
            vocabulary = segments[-1].vocabulary if vocabulary is None else vocabulary
        self.segments: tuple[Segment, ...] = tuple(segments)

    @property
    def vocabulary(self) -> StoreVocabulary:
        """Whose tokens the texts are."""
        return self.segments[0].vocabulary

    @property
    def texts(self) -> int:
        """How many texts there are."""
        return sum(one.texts for one in self.segments)

    @property
    def tokens(self) -> int:
        """How many tokens they have."""
        return sum(one.count for one in self.segments)

    @property
    def size(self) -> int:
        """The bytes of the files."""
        return sum(one.size for one in self.segments)

    @property
    def most_bytes(self) -> int | None:
        """The bytes to which a suffix drafter lets it grow; None for a file, and for a store that is only read.

        Raises:
            StoreError: what the folder says of it is damaged.
        """
        return bound_for(self.path, None, self.size).most_bytes if self.path.is_dir() else None

    def digest(self) -> bytes:
        """Return a digest of the texts, by the names and checksums of segments; nothing of them is read."""
        return digest_of(*(one.told for one in self.segments))

    def check(self, vocabulary: StoreVocabulary) -> None:
        """Check that the texts are of a target's tokens.

        Raises:
            VocabularyMismatch: they are not.
        """
        check_same(self.path, self.vocabulary, vocabulary)

    def found(self, context: Tokens, longest: int = LONGEST) -> list[Occurrences]:
        """Find where the last tokens of a text occurred, in each segment.

        Args:
            context: the text, or its end.
            longest: the most last tokens that matter.
        """
        return [one.found(context, longest) for one in self.segments]


class StoreWriter(AbstractContextManager):
    """Fill a folder with texts, chunk by chunk; what was added is whole whenever it ends, also by Ctrl-C.

    Args:
        folder: the store's folder; what is in it stays.
        vocabulary: whose tokens the texts are.
        most_bytes: the bound on the store, beyond which the oldest segments are dropped, and which the folder keeps;
            None for the one that it has. A new folder gets the usual one with `merges`, and else becomes a store that
            is only read, of which nothing is dropped.
        chunk: tokens of a segment, fewer where that would be more than a small part of a bounded store.
        merges: whether small segments are merged, as in stores that grow.

    Raises:
        InvalidParameter: an argument is of another type, or a number is below one.
        StoreError: the folder cannot be used, or holds a store that is only read and is to be bounded or merged.
        VocabularyMismatch: it holds texts of another tokenizer.
    """

    def __init__(
        self,
        folder: str | Path,
        vocabulary: StoreVocabulary,
        *,
        most_bytes: int | None = None,
        chunk: int = CHUNK,
        merges: bool = False,
    ) -> None:
        self.folder, self.vocabulary = path_of(folder, "folder"), vocabulary
        if not isinstance(vocabulary, StoreVocabulary):
            raise InvalidParameter(f"vocabulary must be a Vocabulary, but is {shown(vocabulary)}.")
        for name, value in (("most_bytes", 1 if most_bytes is None else most_bytes), ("chunk", chunk)):
            if not is_whole(value) or value < 1:
                raise InvalidParameter(f"{name} must be a whole number of at least 1, but is {shown(value)}.")
        if not isinstance(merges, bool):
            raise InvalidParameter(f"merges must be True or False, but is {shown(merges)}.")
        self.most_bytes, self.chunk, self.merges = most_bytes, chunk, merges
        check_folder(self.folder, make=True)
        there = places(self.folder)
        for place in there[:1]:
            opened(place, vocabulary)
        if merges or most_bytes is not None:
            bound = bound_for(self.folder, most_bytes, sum(one.size for one in there))
            check_grows(self.folder, bound)
            self.chunk = min(chunk, max(1, (bound.most_bytes or 0) // (BYTES * PARTS)))
        self.texts = self.tokens = 0
        self._waiting: list[NDArray[np.uint32]] = []
        self._size = 1

    def add(self, tokens: Sequence[int] | NDArray) -> None:
        """Add a text; one of fewer than two tokens has nothing that follows.

        Raises:
            InvalidParameter: these are no token ids.
            StoreError: a chunk is full and cannot be written.
        """
        text = stored(tokens)
        if len(text) < 2:
            return
        if self._waiting and self._size + len(text) + 1 > self.chunk:
            self.flush()
        self._waiting.append(text)
        self._size += len(text) + 1
        self.texts, self.tokens = self.texts + 1, self.tokens + len(text)

    def flush(self) -> None:
        """Write what was added since the last segment.

        Raises:
            StoreError: it cannot be written.
            VocabularyMismatch: somebody has written texts of another tokenizer meanwhile.
        """
        if not self._waiting:
            return
        whole = joined(self._waiting)
        try:
            left = append(self.folder, whole, len(self._waiting), self.vocabulary, self.most_bytes, merges=self.merges)
        except OSError as error:
            raise StoreError(f"The store {self.folder} cannot be written: {error.strerror or error}.") from error
        self._waiting, self._size = [], 1
        if left is not None:
            warnings.warn(unmerged(self.folder, left), RuntimeWarning, stacklevel=2)

    def __exit__(self, *_: object) -> None:
        self.flush()
