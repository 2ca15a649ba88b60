"""An index of a text that grows: where every token occurred before, and how many tokens agree there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.text.occurrences import LONGEST, Scanned, Tokens, as_tokens
from polydraft.machine_code import compiled
from polydraft.rows import per_row, shared

Numbers = NDArray[np.int32]
ROOM = 1024
"""Tokens that a new index has room for, at least; of a longer text it has twice as much as the text takes."""


class TextIndex:
    """All places of a text, each with the place before it that has the same token.

    It only ever grows: what it says of a place follows from the tokens up to there, so that a text that is cut short is
    still indexed. Room for a token costs 21 to 29 bytes.
    """

    def __init__(self, room: int = ROOM) -> None:
        self.tokens = np.empty(room, np.uint32)
        self._before, self._earlier = np.empty(room, np.int32), np.empty(room, np.int32)
        self._agree = np.empty(room, np.uint8)
        self._last = np.zeros(2 << (room - 1).bit_length(), np.int32)
        self._used = np.zeros(1, np.int64)  # written by the machine code, which an interrupt does not cut in two

    def __len__(self) -> int:
        """Return how many tokens it has."""
        return int(self._used[0])

    @classmethod
    def of(cls, row: NDArray[np.int64]) -> "TextIndex":
        """Return the index of a text."""
        index = cls(max(ROOM, 2 * len(row)))
        index.follows(row, 0)
        return index

    @property
    def full(self) -> int:
        """The most tokens that there is room for."""
        return len(self.tokens)

    def follows(self, row: NDArray[np.int64], sure: int) -> bool:
        """Take in what is new of a text, if there is room and it begins as this one; else say no.

        Args:
            row: the text.
            sure: how many of its first tokens need not be compared.
        """
        known = self._last, self._before, self._earlier, self._agree, self._used
        return len(row) <= self.full and take_in(row, sure, self.tokens, *known)

    def add(self, more: NDArray[np.uint32]) -> bool:
        """Take in what follows the text, if there is room; else say no."""
        size, known = len(self) + len(more), (self._last, self._before, self._earlier, self._agree, self._used)
        if size > self.full:
            return False
        self.tokens[len(self) : size] = more
        return take_in(self.tokens[:size], len(self), self.tokens, *known)

    def found(self, context: Tokens, longest: int) -> Scanned:
        """Find where another text's last tokens occurred, as `Scanned.of` does by reading all of this one."""
        own = as_tokens(self.tokens[: len(self)])
        known = self._last, self._before, self._earlier, self._agree
        ends, lengths, counts = walk_with(own, *known, context, min(longest, len(context)))
        return Scanned(own, ends, lengths, counts.tolist())

    def occurrences(self, size: int, longest: int) -> Scanned:
        """Find where the last of the first `size` tokens occurred before, as `Scanned.of` does by reading them all."""
        own = as_tokens(self.tokens[:size])
        ends, lengths, counts = walk(own, self._before, self._earlier, self._agree, min(longest, size))
        return Scanned(own, ends, lengths, counts.tolist())


@dataclass(frozen=True, eq=False)
class IndexedText:
    """A row's index, and how many of its tokens are known to be the row's.

    The index is a cache that other states look at too: after a step that was taken again it may have tokens that are
    not this row's. These are compared, and where a text differs it gets an index of its own.

    Args:
        index: the index.
        known: how many of its first tokens are the row's. They stay so until the row is rewound or joined.
    """

    index: TextIndex
    known: int = 0

    @classmethod
    def begun(cls) -> "IndexedText":
        """Return what is known of a text that was not looked at."""
        return cls(TextIndex())

    def to(self, row: NDArray[np.int64]) -> "IndexedText":
        """Return the same for a row's text as it is now."""
        sure = max(0, min(self.known, len(row)) - LONGEST)  # the last that are known are compared all the same
        index = self.index if self.index.follows(row, sure) else TextIndex.of(row)
        return IndexedText(index, len(row))

    def cut(self, length: int) -> "IndexedText":
        """Return the same when the row's text is known up to a length only."""
        return replace(self, known=min(self.known, length))

    def occurrences(self, longest: int) -> Scanned:
        """Find where the last tokens of the row occurred before."""
        return self.index.occurrences(self.known, longest)


@dataclass(frozen=True, eq=False)
class IndexedRows:
    """The indices of a batch's rows, and the target's number of tokens.

    Args:
        vocab_size: the number of tokens.
        rows: per row.
    """

    vocab_size: int = shared()
    rows: tuple[IndexedText, ...] = per_row(IndexedText.cut)

    def resumes(self, fresh: "IndexedRows") -> bool:
        """Say yes: it follows from the text."""
        return True

    @classmethod
    def begun(cls, vocab_size: int, count: int) -> "IndexedRows":
        """Return what is known of texts that were not looked at."""
        return cls(vocab_size, tuple(IndexedText.begun() for _ in range(count)))

    def to(self, texts: Sequence[NDArray[np.int64]]) -> "IndexedRows":
        """Return the same for the rows' texts as they are now."""
        return replace(self, rows=tuple(own.to(row) for own, row in zip(self.rows, texts, strict=True)))


@compiled
def take_in(
    row: NDArray[np.int64] | NDArray[np.uint32],
    sure: int,
    tokens: Tokens,
    last: Numbers,
    before: Numbers,
    earlier: Numbers,
    agree: NDArray[np.uint8],
    used: NDArray,
) -> bool:
    """Index what is new of a row that begins as the text: the place with the same token before each, and what agrees.

    Args:
        row: the row's tokens.
        sure: how many of them need not be compared.
        tokens: the text as far as it is indexed, and room.
        last: a table, addressed by tokens, of one more than the place where each was last; 0 for none.
        before: by place, the last one with the same token; -1 for none.
        earlier: by place, how many places before it have its token.
        agree: by place, how many tokens that end there and at the place before are the same, up to 64.
        used: how many tokens are indexed; brought up to date.

    Returns:
        whether the row begins as the text.
    """
    for place in range(sure, min(len(row), used[0])):
        if tokens[place] != row[place]:
            return False
    mask = np.uint64(len(last) - 1)
    for place in range(used[0], len(row)):
        token = np.uint32(row[place])
        tokens[place] = token
        slot = (np.uint64(token) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)) & mask
        while last[slot] > 0 and tokens[last[slot] - 1] != token:
            slot = (slot + np.uint64(1)) & mask
        there = last[slot] - 1
        before[place], earlier[place], agree[place], last[slot] = there, 0, 0, place + 1
        if there >= 0:
            size = 1
            while size < 64 and size <= there and tokens[there - size] == tokens[place - size]:
                size += 1
            earlier[place], agree[place] = earlier[there] + 1, size
    used[0] = max(used[0], len(row))
    return True


@compiled
def walk(
    tokens: Tokens, before: Numbers, earlier: Numbers, agree: NDArray[np.uint8], longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return what `scan` does for a text's last tokens, from place to place with the last token.

    What agrees at a place follows from what agrees at the one behind it and what agrees between the two: it is the less
    of both where they differ, and has to be compared where they do not.
    """
    final = len(tokens) - 1
    found, counts = earlier[final], np.zeros(longest + 1, np.int64)
    ends, lengths = np.empty(found, np.int64), np.empty(found, np.int64)
    place, length, at = final, longest, 0
    while before[place] >= 0:
        between, place = np.int64(agree[place]), np.int64(before[place])
        if between < 64 and between < length:
            length = between
        elif between == length or between == 64:
            length = min(between, length)
            while length < longest and length <= place and tokens[place - length] == tokens[final - length]:
                length += 1
        ends[at], lengths[at] = place, length
        counts[length] += 1
        at += 1
    for size in range(longest - 1, 0, -1):
        counts[size] += counts[size + 1]
    counts[0], most = final, 0
    while most < longest and counts[most + 1]:
        most += 1
    return ends, lengths, counts[: most + 1]


@compiled
def walk_with(
    tokens: Tokens,
    last: Numbers,
    before: Numbers,
    earlier: Numbers,
    agree: NDArray[np.uint8],
    context: Tokens,
    longest: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return what `scan` does for a context, from place to place with its last token, the latest first."""
    size, counts = len(context), np.zeros(longest + 1, np.int64)
    final, mask = context[size - 1], np.uint64(len(last) - 1)
    slot = (np.uint64(final) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)) & mask
    while last[slot] > 0 and tokens[last[slot] - 1] != final:
        slot = (slot + np.uint64(1)) & mask
    place, at = np.int64(last[slot]) - 1, 0
    found = np.int64(0) if place < 0 else np.int64(earlier[place]) + 1
    ends, lengths = np.empty(found, np.int64), np.empty(found, np.int64)
    length, between = np.int64(1), np.int64(64)
    while place >= 0:
        if between < 64 and between < length:
            length = between
        elif between == length or between == 64:
            while length < longest and length <= place and tokens[place - length] == context[size - 1 - length]:
                length += 1
        ends[at], lengths[at] = place, length
        counts[length] += 1
        at += 1
        between, place = np.int64(agree[place]), np.int64(before[place])
    for match in range(longest - 1, 0, -1):
        counts[match] += counts[match + 1]
    counts[0], most = len(tokens), 0
    while most < longest and counts[most + 1]:
        most += 1
    return ends, lengths, counts[: most + 1]
