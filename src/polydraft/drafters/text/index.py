"""An index of a text that grows: where every token occurred before, and how many tokens agree there."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from polydraft.machine_code import compiled
from polydraft.rows import per_row, shared

Tokens = NDArray[np.uint32]
SENTINEL = 0xFFFFFFFF
"""Stands before, between and behind texts; no token."""
LONGEST = 64
"""How many last tokens matter at most."""


@runtime_checkable
class Occurrences(Protocol):
    """The places where the last tokens of a context occurred before.

    Attributes:
        counts: `counts[m]` is the number of places whose last m tokens are the context's; it never grows with m, and
            ends before it is zero.
    """

    @property
    def counts(self) -> list[int]:
        """The number of places by the tokens that agree."""
        ...

    def followed(self, match: int, most: int, depth: int) -> Tokens:
        """Return what followed: a row of `depth` tokens for each place, `SENTINEL` where the text had ended.

        Args:
            match: how many last tokens agree.
            most: the most places.
            depth: the number of tokens.
        """
        ...


@dataclass(frozen=True, eq=False)
class Scanned:
    """Occurrences in a text that is indexed; the latest come first.

    Args:
        tokens: the text, or several with sentinels between them.
        ends: where the context's last token occurred, the latest first.
        lengths: how many last tokens agree there.
        counts: as `Occurrences` has it.
    """

    tokens: Tokens
    ends: NDArray[np.int64]
    lengths: NDArray[np.int64]
    counts: list[int]

    def followed(self, match: int, most: int, depth: int) -> Tokens:
        """Return what followed the latest places."""
        return tokens_behind(self.tokens, self.ends[self.lengths >= match][:most], depth)


@dataclass(frozen=True, eq=False)
class Ranged:
    """Occurrences in tokens that have an order: places that agree lie side by side in it.

    Args:
        tokens: texts with sentinels around them.
        order: the places, ordered by the text before and at them, read backwards.
        firsts: the first place in the order, by the tokens that agree.
        counts: as `Occurrences` has it.
    """

    tokens: Tokens
    order: Tokens
    firsts: list[int]
    counts: list[int]

    @classmethod
    def of(cls, tokens: Tokens, order: Tokens, context: Tokens, longest: int) -> "Ranged":
        """Find a context's last tokens."""
        firsts, counts = descend(tokens, order, context, min(longest, len(context)))
        return cls(tokens, order, firsts.tolist(), counts.tolist())

    def followed(self, match: int, most: int, depth: int) -> Tokens:
        """Return what followed, of many places some that are evenly spread over the order."""
        count = self.counts[match]
        places = self.firsts[match] + count * np.arange(min(most, count)) // min(most, count)
        return tokens_behind(self.tokens, self.order[places].astype(np.int64), depth)


@compiled
def descend(
    tokens: Tokens, order: Tokens, context: Tokens, longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the nested ranges of places whose last 0, 1, 2, ... tokens are the context's: where each begins, its size.

    Damaged orders point anywhere: such places hold token 0.
    """
    firsts, counts = np.zeros(longest + 1, np.int64), np.zeros(longest + 1, np.int64)
    counts[0], size, agree = len(order), len(context), 0
    for match in range(1, longest + 1):
        wanted, back = context[size - match], match - 1
        low, high = firsts[agree], firsts[agree] + counts[agree]
        stop = high
        while low < high:
            middle = (low + high) // 2
            place = np.int64(order[middle]) - back
            token = tokens[place] if 0 <= place < len(tokens) else np.uint32(0)
            if token < wanted:
                low = middle + 1
            else:
                high = middle
        first, high = low, stop
        while low < high:
            middle = (low + high) // 2
            place = np.int64(order[middle]) - back
            token = tokens[place] if 0 <= place < len(tokens) else np.uint32(0)
            if token <= wanted:
                low = middle + 1
            else:
                high = middle
        if low == first:
            break
        firsts[match], counts[match], agree = first, low - first, match
    return firsts[: agree + 1], counts[: agree + 1]


@compiled
def tokens_behind(tokens: Tokens, ends: NDArray[np.int64], depth: int) -> Tokens:
    """Return what followed some places: a row for each, `SENTINEL` where the text had ended."""
    rows = np.full((len(ends), depth), np.uint32(0xFFFFFFFF), np.uint32)
    for row in range(len(ends)):
        for ahead in range(depth):
            here = ends[row] + 1 + ahead
            if here >= len(tokens) or tokens[here] == 0xFFFFFFFF:
                break
            rows[row, ahead] = tokens[here]
    return rows


def as_tokens(tokens: NDArray) -> Tokens:
    """Return tokens as the machine code takes them: of 32 bits, side by side, and not to be written."""
    found = np.ascontiguousarray(tokens, np.uint32).view()
    found.flags.writeable = False
    return found


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
    def of(cls, row: NDArray[np.int64] | NDArray[np.uint32]) -> "TextIndex":
        """Return the index of a text."""
        index = cls(max(ROOM, 2 * len(row)))
        index.follows(row, 0)
        return index

    def follows(self, row: NDArray[np.int64] | NDArray[np.uint32], sure: int) -> bool:
        """Take in what is new of a text, if there is room and it begins as this one; else say no.

        Args:
            row: the text.
            sure: how many of its first tokens need not be compared.
        """
        known = self._last, self._before, self._earlier, self._agree, self._used
        return len(row) <= len(self.tokens) and take_in(row, sure, self.tokens, *known)

    def add(self, more: NDArray[np.uint32]) -> bool:
        """Take in what follows the text, if there is room; else say no."""
        size, known = len(self) + len(more), (self._last, self._before, self._earlier, self._agree, self._used)
        if size > len(self.tokens):
            return False
        self.tokens[len(self) : size] = more
        return take_in(self.tokens[:size], len(self), self.tokens, *known)

    def found(self, context: Tokens, longest: int) -> Scanned:
        """Find where another text's last tokens occurred."""
        place = last_place(self.tokens, self._last, context[-1])
        return self._walked(as_tokens(self.tokens[: len(self)]), len(self), context, place, 1, longest)

    def occurrences(self, size: int, longest: int) -> Scanned:
        """Find where the last of the first `size` tokens occurred before."""
        own, place, agreed = as_tokens(self.tokens[:size]), int(self._before[size - 1]), int(self._agree[size - 1])
        return self._walked(own, size - 1, own, place, agreed, longest)

    def _walked(self, own: Tokens, stop: int, context: Tokens, place: int, agreed: int, longest: int) -> Scanned:
        """Find a context's last tokens in the first `stop` ones, from the last place with its last token down."""
        known = self._before, self._earlier, self._agree
        most = min(longest, len(context))
        ends, lengths, counts = walk(own[:stop], *known, context, place, min(agreed, most), most)
        return Scanned(own, ends, lengths, counts.tolist())


@dataclass(frozen=True, eq=False)
class IndexedText:
    """A row's index, and how many of its first tokens are known to be the row's, until it is rewound or joined.

    The index is a cache that other states look at too: after a step that was taken again it may have tokens that are
    not this row's. These are compared, and where a text differs it gets an index of its own.
    """

    index: TextIndex = field(default_factory=TextIndex)
    known: int = 0

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
    """The indices of a batch's rows, and the target's number of tokens; derive a state of more from it."""

    vocab_size: int = shared()
    rows: tuple[IndexedText, ...] = per_row(IndexedText.cut)

    def resumes(self, fresh: "IndexedRows") -> bool:
        """Say yes: it follows from the text."""
        return True

    @classmethod
    def begun(cls, vocab_size: int, count: int) -> "IndexedRows":
        """Return what is known of texts that were not looked at."""
        return cls(vocab_size, tuple(IndexedText() for _ in range(count)))

    def to(self, texts: Sequence[NDArray[np.int64]]) -> Self:
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
def last_place(tokens: Tokens, last: Numbers, token: np.uint32) -> int:
    """Return the last place with a token, from the table that `take_in` keeps; -1 for none."""
    mask = np.uint64(len(last) - 1)
    slot = (np.uint64(token) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)) & mask
    while last[slot] > 0 and tokens[last[slot] - 1] != token:
        slot = (slot + np.uint64(1)) & mask
    return last[slot] - 1


@compiled
def walk(
    tokens: Tokens,
    before: Numbers,
    earlier: Numbers,
    agree: NDArray[np.uint8],
    context: Tokens,
    place: int,
    agreed: int,
    longest: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of a context's last token, the latest first, what agrees there, and the counts by that number.

    It goes from place to place with that token, beginning at one where so many tokens are known to agree. What agrees
    at a place follows from what agrees at the one behind it and what agrees between the two: it is the less of both
    where they differ, and has to be compared where they do not.
    """
    size, counts, found = len(context), np.zeros(longest + 1, np.int64), np.int64(0)
    if place >= 0:
        found = np.int64(earlier[place]) + 1
    ends, lengths = np.empty(found, np.int64), np.empty(found, np.int64)
    here, length, between, at = np.int64(place), np.int64(agreed), np.int64(64), 0
    while here >= 0:
        if between < 64 and between < length:
            length = between
        elif between == length or between == 64:
            length = min(between, length)
            while length < longest and length <= here and tokens[here - length] == context[size - 1 - length]:
                length += 1
        ends[at], lengths[at] = here, length
        counts[length] += 1
        at += 1
        between, here = np.int64(agree[here]), np.int64(before[here])
    for match in range(longest - 1, 0, -1):
        counts[match] += counts[match + 1]
    counts[0], most = len(tokens), 0
    while most < longest and counts[most + 1]:
        most += 1
    return ends, lengths, counts[: most + 1]
