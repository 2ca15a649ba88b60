"""A pool of n-grams: what followed a token, the newest last."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.contract import digest_of
from polydraft.drafters.text.stores.segment import StoreVocabulary, written_whole
from polydraft.errors import CheckpointError, InvalidParameter, VocabularyMismatch, is_whole

FORMAT = 1
"""The number of the form of files, which a later form raises."""
Phrase = tuple[int, tuple[int, ...]]
"""A token and the tokens that follow it."""


@dataclass(frozen=True)
class Entry:
    """The tokens that followed one, under a number that no other entry of the pool has or had, and that it keeps."""

    number: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class NgramPool:
    """Continuations of single tokens, at most so many of each, the newest last; a value, which no verb changes.

    A continuation that is added again moves to the end and keeps its number; where there is no room the oldest goes. So
    a pool has at most one list for every token of the vocabulary.

    Args:
        level: tokens of an n-gram, the key included.
        most: continuations of a key.
        entries: per key, its continuations, the oldest first.
        following: the number of the next new entry.
        vocabulary: whose tokens these are; None where nobody has said so.

    Raises:
        InvalidParameter: `level` is below 2, or `most` below 1.

    Source: lookahead decoding, arXiv 2402.02057; numbers instead of places since the lists move (arXiv 2402.13720's
    code refines the last places of a list, where others may stand by then).
    """

    level: int
    most: int
    entries: Mapping[int, tuple[Entry, ...]] = field(default_factory=dict[int, tuple[Entry, ...]], repr=False)
    following: int = 0
    vocabulary: StoreVocabulary | None = None

    def __post_init__(self) -> None:
        if not (is_whole(self.level) and is_whole(self.most)) or self.level < 2 or self.most < 1:
            raise InvalidParameter(
                f"A pool needs n-grams of at least 2 tokens and 1 per key, but has {self.level} and {self.most}."
            )

    def __len__(self) -> int:
        """Return the number of entries."""
        return sum(map(len, self.entries.values()))

    @cached_property
    def digest(self) -> bytes:
        """A digest of the continuations; nothing of an empty pool."""
        told = repr([(key, [one.tokens for one in entries]) for key, entries in self.entries.items()])
        return digest_of(told.encode()) if self.entries else b""

    def of(self, key: int, most: int | None = None) -> tuple[Entry, ...]:
        """Return the continuations of a token, the newest first, and no more than `most`."""
        return self.entries.get(key, ())[::-1][:most]

    def added(self, phrases: Iterable[Phrase]) -> "NgramPool":
        """Return the pool with phrases added in turn.

        Raises:
            InvalidParameter: one has not `level` tokens.
        """
        entries, following = dict(self.entries), self.following
        for key, tokens in phrases:
            self._check(tokens)
            known = entries.get(key, ())
            again = next((one for one in known if one.tokens == tokens), None)
            new = again or Entry(following, tokens)
            following += again is None
            entries[key] = (*(one for one in known if one is not again), new)[-self.most :]
        return replace(self, entries=entries, following=following)

    def refined(self, key: int, better: Mapping[int, tuple[int, ...]]) -> "NgramPool":
        """Return the pool with other tokens in some entries of a key, which keep their places.

        Numbers that are no longer there are passed over. Of entries that become alike the newest stays.

        Args:
            key: the token that they follow.
            better: by number, the tokens.

        Raises:
            InvalidParameter: some have not `level` tokens, the key included.
        """
        for tokens in better.values():
            self._check(tokens)
        changed = [Entry(one.number, better.get(one.number, one.tokens)) for one in self.entries.get(key, ())]
        last = {one.tokens: one.number for one in changed}
        kept = tuple(one for one in changed if last[one.tokens] == one.number)
        return replace(self, entries={**self.entries, key: kept}) if kept else self

    def check(self, vocabulary: StoreVocabulary) -> None:
        """Check that the n-grams are of a model's tokens, as far as that is known.

        Raises:
            VocabularyMismatch: they are not.
        """
        if self.vocabulary is not None and not self.vocabulary.agrees(vocabulary):
            raise VocabularyMismatch(
                f"The pool holds tokens of {self.vocabulary.title}, and the model's are those of {vocabulary.title}: "
                "leave it out, or save one of this model."
            )

    def save(self, path: str | Path) -> None:
        """Write the pool to a file, in one piece: the file is the old one or the whole new one.

        Raises:
            InvalidParameter: the file cannot be written.
        """
        goal = Path(path)
        known: dict[str, Any] = {} if self.vocabulary is None else {"vocabulary": _packed(self.vocabulary)}
        every = [(key, one) for key, entries in self.entries.items() for one in entries]
        try:
            with written_whole(goal) as file:
                np.savez(
                    file,
                    head=np.array([FORMAT, self.level, self.most, self.following], np.int64),
                    keys=np.array([key for key, _ in every], np.int64),
                    numbers=np.array([one.number for _, one in every], np.int64),
                    tokens=np.array([one.tokens for _, one in every], np.int64).reshape(len(every), self.level - 1),
                    **known,
                )
        except OSError as error:
            raise InvalidParameter(f"{goal}: the pool cannot be written there: {error.strerror}.") from error

    @classmethod
    def load(cls, path: str | Path) -> "NgramPool":
        """Read a pool from a file, which runs no code of it.

        Raises:
            CheckpointError: the file is missing, damaged, or holds something else.
        """
        try:
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as whole:
                arrays = {name: whole[name] for name in whole.files}
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: there is no such file.") from error
        except Exception as error:  # nobody lists what archives and arrays raise where a byte is wrong
            raise CheckpointError(f"{path} is damaged, or no pool of n-grams.") from error
        return _read(cls, str(path), arrays)

    def _check(self, tokens: Sequence[int]) -> None:
        if len(tokens) != self.level - 1:
            raise InvalidParameter(
                f"A phrase of this pool has {self.level - 1} tokens behind its key, but this one has {len(tokens)}."
            )


def _read(kind: type[NgramPool], path: str, arrays: Mapping[str, NDArray]) -> NgramPool:
    """Return the pool in a file's arrays, or raise `CheckpointError`."""
    names = ("head", "keys", "numbers", "tokens")
    if missing := [name for name in names if name not in arrays]:
        raise CheckpointError(f"{path} is damaged, or no pool of n-grams: it has no {missing[0]}.")
    head, keys, numbers, tokens = (arrays[name] for name in names)
    whole = all(one.dtype == np.int64 and not (one < 0).any() for one in arrays.values()) and head.shape == (4,)
    version, level, most, following = head.tolist() if whole else (0, 0, 0, 0)
    if version != FORMAT or level < 2 or most < 1:
        raise CheckpointError(f"{path} holds no pool of n-grams that this version reads.")
    count, named = len(np.atleast_1d(keys)), numbers.flatten().tolist()
    if keys.shape != (count,) or numbers.shape != (count,) or tokens.shape != (count, level - 1):
        raise CheckpointError(f"{path} is damaged: its arrays do not fit one another.")
    entries = dict[int, tuple[Entry, ...]]()
    for key, number, row in zip(keys.tolist(), named, tokens.tolist(), strict=True):
        entries[key] = (*entries.get(key, ()), Entry(number, tuple(row)))
    lists = entries.values()
    repeated = len({*named}) < count or any(len({one.tokens for one in own}) < len(own) for own in lists)
    if repeated or max(map(len, lists), default=0) > most or max(named, default=-1) >= following:
        raise CheckpointError(f"{path} is damaged: it has entries twice, too many of a key, or numbers out of range.")
    return kind(
        level, most, entries, following, _unpacked(path, arrays["vocabulary"]) if "vocabulary" in arrays else None
    )


def _packed(vocabulary: StoreVocabulary) -> NDArray[np.int64]:
    """Return a vocabulary as numbers: its size, the length of its mark, then the bytes of mark and name."""
    mark = vocabulary.mark
    return np.array([vocabulary.size, len(mark), *mark, *vocabulary.name.encode(errors="replace")], np.int64)


def _unpacked(path: str, told: NDArray) -> StoreVocabulary:
    """Return the vocabulary in a file's numbers, or raise `CheckpointError`."""
    size, length, *every = told.tolist() if told.ndim == 1 and len(told) > 1 else (0, 1)
    if length > len(every) or max(every, default=0) > 255:
        raise CheckpointError(f"{path} is damaged: it does not say whose tokens these are.")
    return StoreVocabulary(size, bytes(every[:length]), bytes(every[length:]).decode(errors="replace"))
