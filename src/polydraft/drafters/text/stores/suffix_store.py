"""A store of texts that grows while it is used, shared by requests and processes."""

import os
import time
import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, RLock

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.contract import digest_of
from polydraft.drafters.text.index import LONGEST, Occurrences, TextIndex, Tokens
from polydraft.drafters.text.stores.folder import (
    SegmentPlace,
    append,
    bound_for,
    check_folder,
    check_grows,
    check_same,
    is_full,
    opened,
    path_of,
    places,
    unmerged,
)
from polydraft.drafters.text.stores.segment import Segment, StoreVocabulary, joined, stored
from polydraft.errors import InvalidParameter, PolydraftError, StoreError, VocabularyMismatch, is_whole, shown

FLUSHED = 1 << 15
"""Tokens that are kept in memory before they are written."""
LATEST = 60.0
"""Seconds after which they are written with the next text in any case."""
RESCAN = 1.0
"""Seconds between two looks at what other processes wrote."""


@dataclass
class _Buffer:
    """Texts that are not written yet, with sentinels around them, in an index with room."""

    folder: Path
    most_bytes: int | None
    vocabulary: StoreVocabulary | None
    index: TextIndex = field(default_factory=lambda: _begun(FLUSHED + 1))
    texts: int = 0
    digest: bytes = b""
    since: float = 0.0
    process: int = field(default_factory=os.getpid)
    told: set[str] = field(default_factory=set[str])

    def add(self, tokens: NDArray[np.uint32]) -> None:
        more = joined([tokens])[1:]
        if not self.index.add(more):
            known = self.index.tokens[1 : self.used]
            self.index = _begun(2 * (self.used + len(more)))
            self.index.add(known)
            self.index.add(more)
        self.texts += 1
        self.digest = digest_of(self.digest, tokens.tobytes())
        self.since = self.since if self.texts > 1 else time.monotonic()

    @property
    def used(self) -> int:
        """How many tokens there are, sentinels included."""
        return len(self.index)

    def empty(self) -> None:
        """Forget the texts; whoever found something in them may still look."""
        self.index, self.texts, self.digest = _begun(FLUSHED + 1), 0, b""

    def write(self) -> None:
        """Write what is there as a segment; if that fails, drop it and warn once."""
        if not self.texts or self.process != os.getpid():  # a fork's texts are its parent's to write
            return
        own, texts = self.index.tokens[: self.used], self.texts
        self.empty()
        try:
            left = append(self.folder, own, texts, self.vocabulary or StoreVocabulary(0), self.most_bytes)
        except (OSError, PolydraftError) as error:
            self.lost(error)
        else:
            if left is not None:
                self.warn("merge", unmerged(self.folder, left))

    def lost(self, error: BaseException) -> None:
        """Warn that nothing can be written."""
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error).removesuffix(".")
        self.warn("lost", f"The store {self.folder} cannot be written ({why}); texts are not kept in it.")

    def warn(self, what: str, sentence: str) -> None:
        """Warn of something for the first time."""
        if what not in self.told:
            self.told.add(what)
            warnings.warn(sentence, RuntimeWarning, stacklevel=4)


def _begun(room: int) -> TextIndex:
    index = TextIndex(room)
    index.add(joined([]))
    return index


class SuffixStore(AbstractContextManager):
    """Texts of the past in a folder, to find what followed wherever a text ended as another one ends now.

    Texts are added when they are over. They are searchable at once, and written as a segment when `FLUSHED` tokens have
    come together, with the next text after a minute, when the store is closed, by `flush_stores`, and at the end of the
    process. Segments are never changed: small neighbours are merged into larger ones, and the oldest are dropped when
    the store outgrows its bound. Other processes may read and write the same folder; what they wrote is seen within
    seconds. A process that is killed loses the texts that it had not written, and damages nothing. If nothing can be
    written, as on a full disk, a warning says so once, and the texts are dropped; a disk without room for the folder is
    no error either.

    Threads may share it. The texts lie on disk as they are, for everyone who may read the folder.

    Args:
        folder: the store's folder; it is made if it is not there.
        most_bytes: the bound on its files, which the folder keeps; None for the one that it has, and 256 MiB for a new
            store. While segments are merged an eighth of it is needed in addition. A folder from before bounds were
            kept may become twice as large as it is, if that is more.
        vocabulary: whose tokens its texts are; None for that of the first target.

    Attributes:
        most_bytes: the bound when it was opened; None for a store that was built to be only read (`polydraft store
            build --kind rest`). To such a one nothing is added, which a warning says once.
        made: whether there was room for its folder when it was opened; else it is made as soon as there is.

    Raises:
        StoreError: the folder cannot be used, a file in it is no segment or damaged, or a bound is named for a store
            that is only read.
        VocabularyMismatch: the texts in it are of another tokenizer.
        InvalidParameter: the bound is no whole number, or below a million.
    """

    def __init__(
        self, folder: str | Path, *, most_bytes: int | None = None, vocabulary: StoreVocabulary | None = None
    ) -> None:
        if most_bytes is not None and (not is_whole(most_bytes) or most_bytes < 1_000_000):
            raise InvalidParameter(f"most_bytes must be a whole number, at least 1000000, but is {shown(most_bytes)}.")
        self.folder = path_of(folder, "folder")
        self._buffer = _Buffer(self.folder, most_bytes, vocabulary)
        self.made = self._make()
        self._segments: dict[SegmentPlace, Segment | None] = {}
        self._seen, self._looked, self._lock = -1, -RESCAN, RLock()
        self._look(strict=True)
        bound = bound_for(self.folder, most_bytes, self.size)
        if most_bytes is not None:
            check_grows(self.folder, bound)
        self.most_bytes = bound.most_bytes
        self._at_exit = weakref.finalize(self, self._buffer.write)
        with _OPENING:
            _OPEN.add(self)

    @property
    def vocabulary(self) -> StoreVocabulary | None:
        """Whose tokens the texts are; None for an empty store."""
        return self._buffer.vocabulary

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, the oldest first."""
        return tuple(one for one in self._segments.values() if one is not None)

    @property
    def texts(self) -> int:
        """How many texts there are."""
        return sum(one.texts for one in self.segments) + self._buffer.texts

    @property
    def size(self) -> int:
        """The bytes of its files."""
        return sum(one.size for one in self.segments)

    def check(self, vocabulary: StoreVocabulary) -> None:
        """Check that the texts are of a target's tokens; an empty store takes them from now on.

        Raises:
            VocabularyMismatch: they are not.
        """
        with self._lock:
            self._look()
            ours = self._buffer.vocabulary
            if ours is None:
                self._buffer.vocabulary = vocabulary
            else:
                check_same(self.folder, ours, vocabulary)
                self._buffer.vocabulary = ours.with_known(vocabulary)

    def digest(self) -> bytes:
        """Return a digest of what is in the store now; nothing of an empty one.

        It is made of the names and checksums of segments, and of a running digest of what is not written yet, so that
        no text is read. It changes with every text, and also where texts are written or segments merged.
        """
        with self._lock:
            self._look()
            told = [one.told for one in self.segments]
            return digest_of(*told, self._buffer.digest) if told or self._buffer.texts else b""

    def add(self, tokens: Sequence[int] | NDArray) -> None:
        """Add a text; one of fewer than two tokens has nothing that follows.

        Args:
            tokens: the whole text, its prompt included.

        Raises:
            InvalidParameter: these are no token ids.
        """
        text = stored(tokens)
        if len(text) < 2:
            return
        with self._lock:
            buffer = self._buffer
            if self.most_bytes is None:
                buffer.warn("read", f"The store {self.folder} was built to be only read; no texts are added to it.")
                return
            if buffer.process != os.getpid():
                buffer.empty()
                buffer.process = os.getpid()
            buffer.add(text)
            if buffer.used >= FLUSHED or time.monotonic() - buffer.since > LATEST:
                self.flush()

    def flush(self) -> None:
        """Write what was added since the last segment."""
        with self._lock:
            self._buffer.write()
            self._seen = -1
            self._look()

    def close(self) -> None:
        """Write what was added; the store may be used again."""
        self.flush()

    def __exit__(self, *_: object) -> None:
        self.close()

    def found(self, context: Tokens, longest: int = LONGEST) -> list[Occurrences]:
        """Find where the last tokens of a text occurred, in each segment and in what is not written yet.

        Args:
            context: the text, or its end.
            longest: the most last tokens that matter.
        """
        with self._lock:
            if time.monotonic() - self._looked > RESCAN:
                self._look()
            found: list[Occurrences] = [one.found(context, longest) for one in self.segments]
            buffer = self._buffer
            if buffer.texts:
                found.append(buffer.index.found(context, longest))
            return found

    def _make(self) -> bool:
        """Make the folder and return True; where there is no room for it, texts are found in memory alone until then.

        Raises:
            StoreError: it cannot be made for another reason, or is no store.
        """
        try:
            check_folder(self.folder, make=True)
        except StoreError as error:
            if error.__cause__ is None or not is_full(error.__cause__):
                raise
            self._buffer.lost(error.__cause__)
            return False
        return True

    def _look(self, *, strict: bool = False) -> None:
        """Open what is new in the folder and forget what is gone; if strict, raise for a segment that is of no use."""
        self._looked = time.monotonic()
        try:
            changed = os.stat(self.folder).st_mtime_ns
            if changed == self._seen:
                return
            there = places(self.folder)
        except OSError:
            return
        recent = time.time_ns() - changed < 2e9  # a change in the same tick of the clock would not be seen
        self._seen = -1 if recent else changed
        known = self._segments
        self._segments = {place: known[place] if place in known else self._open(place, strict) for place in there}

    def _open(self, place: SegmentPlace, strict: bool) -> Segment | None:
        try:
            found = opened(place, self._buffer.vocabulary)
        except (StoreError, VocabularyMismatch) as error:
            if not place.path.exists():  # dropped since the folder was read
                return None
            if strict:
                raise
            strange = "strange" if isinstance(error, VocabularyMismatch) else place.path.name
            self._buffer.warn(strange, f"{error} It is left out.")
            return None
        ours = self._buffer.vocabulary
        self._buffer.vocabulary = found.vocabulary if ours is None else ours.with_known(found.vocabulary)
        return found


_SHARED: dict[str, SuffixStore] = {}
_OPEN: weakref.WeakSet[SuffixStore] = weakref.WeakSet()
_OPENING = Lock()


def flush_stores() -> None:
    """Write what was added to any store that this process has open, whoever holds it.

    For whoever ends a process without Python's exit, or knows that nothing will be added for a while. What cannot be
    written is warned of by the store.
    """
    with _OPENING:
        there = tuple(_OPEN)
    for store in there:
        store.flush()


def shared_store(folder: str | Path) -> SuffixStore:
    """Return this process's store of a folder: it is opened once, however many drafters name the folder.

    Raises:
        StoreError: as for `SuffixStore`.
    """
    name = os.path.abspath(path_of(folder, "store"))
    store = _SHARED.get(name)
    if store is None or (store.made and not os.path.isdir(name)):
        store = _SHARED[name] = SuffixStore(name)
    return store
