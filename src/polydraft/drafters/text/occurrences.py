"""Where earlier text ended as a text ends now, by the number of last tokens that agree, and what followed there."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from polydraft.machine_code import compiled

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
    """Occurrences in a text that was read from end to end; the latest come first.

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

    @classmethod
    def of(cls, tokens: Tokens, stop: int, context: Tokens, longest: int) -> "Scanned":
        """Find a context's last tokens in the first `stop` tokens of a text."""
        ends, lengths, counts = scan(tokens, stop, context, min(longest, len(context)))
        return cls(tokens, ends, lengths, counts.tolist())

    def followed(self, match: int, most: int, depth: int) -> Tokens:
        """Return what followed the latest places."""
        return after_scan(self.tokens, self.ends, self.lengths, match, min(most, self.counts[match]), depth)


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
        first, count = self.firsts[match], self.counts[match]
        return after_range(self.tokens, self.order, first, first + count, min(most, count), depth)


@compiled
def scan(
    tokens: Tokens, stop: int, context: Tokens, longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of the context's last token, how many tokens agree there, and the counts by that number."""
    counts, size = np.zeros(longest + 1, np.int64), len(context)
    last, found = context[size - 1], 0
    for end in range(stop):
        found += tokens[end] == last
    ends, lengths = np.empty(found, np.int64), np.empty(found, np.int64)
    at = found
    for end in range(stop):
        if tokens[end] == last:
            length = 1
            while length < longest and length <= end and tokens[end - length] == context[size - 1 - length]:
                length += 1
            at -= 1
            ends[at], lengths[at] = end, length
            counts[length] += 1
    for length in range(longest - 1, 0, -1):
        counts[length] += counts[length + 1]
    counts[0], agree = stop, 0
    while agree < longest and counts[agree + 1]:
        agree += 1
    return ends, lengths, counts[: agree + 1]


@compiled
def after_scan(
    tokens: Tokens, ends: NDArray[np.int64], lengths: NDArray[np.int64], match: int, most: int, depth: int
) -> Tokens:
    """Return what followed the first `most` ends at which so many tokens agree."""
    rows, at = np.full((most, depth), np.uint32(0xFFFFFFFF), np.uint32), 0
    for place in range(len(ends)):
        if at == most:
            break
        if lengths[place] >= match:
            for ahead in range(depth):
                here = ends[place] + 1 + ahead
                if here >= len(tokens) or tokens[here] == 0xFFFFFFFF:
                    break
                rows[at, ahead] = tokens[here]
            at += 1
    return rows


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
def after_range(tokens: Tokens, order: Tokens, first: int, stop: int, most: int, depth: int) -> Tokens:
    """Return what followed `most` places of a range of the order, evenly spread."""
    rows = np.full((most, depth), np.uint32(0xFFFFFFFF), np.uint32)
    for place in range(most):
        end = np.int64(order[first + (stop - first) * place // most])
        for ahead in range(depth):
            here = end + 1 + ahead
            if here >= len(tokens) or tokens[here] == 0xFFFFFFFF:
                break
            rows[place, ahead] = tokens[here]
    return rows


def as_tokens(tokens: NDArray) -> Tokens:
    """Return tokens as the machine code takes them: of 32 bits, side by side, and not to be written."""
    found = np.ascontiguousarray(tokens, np.uint32).view()
    found.flags.writeable = False
    return found
