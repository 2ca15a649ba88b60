"""A grammar's states along the paths of a tree."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from polydraft.models.grammar.grammar import cleaned, is_dead_end

FIRST_BLOCK, SIZE = 8, 8
"""The tokens that are looked at first, from the end, to see where paths part; and the bytes of a token."""


@dataclass(frozen=True, eq=False)
class State:
    """Where a grammar is after a path.

    Args:
        bits: a bit for each token, whether it may not come next; llguidance's end may not.
        ends: whether the text may end here.
        goes_on: whether any token may come next.
        free: whether the grammar has not begun, and says nothing.
    """

    bits: np.ndarray
    ends: bool
    goes_on: bool
    free: bool = False


class AnyWalk(Protocol):
    """What tells where a grammar is after any path."""

    failure: str

    def state(self, path: bytes) -> State | None:
        """Return where the grammar is after a path, the bytes of its tokens as int64; None outside of it."""


class Walk:
    """Answer where a grammar is after any path of tokens.

    The answers depend on the path alone. The matcher takes back what the last path had more and takes what the next
    one has more, which costs a microsecond a token however long the text is; a copy of a matcher costs as much as the
    text is long. It never takes a token that the grammar forbids, after which it could not go back.

    Args:
        start: a matcher at the beginning, which stays as it is.
        end: the id of llguidance's end.
    """

    def __init__(self, start: Any, end: int) -> None:
        self.failure = ""
        self._start, self._end = start, end
        self._matcher: Any = None
        self._at = b""
        self._last: tuple[bytes, State] | None = None

    def state(self, path: bytes) -> State | None:
        """Return where the grammar is after a path, the bytes of its tokens as int64; None outside of it.

        Where llguidance gives up, a path counts as outside, and `failure` says why.
        """
        last = self._last
        if last is not None and last[0] == path:
            return last[1]
        self.failure = ""
        matcher = self._led(path)
        found = None if matcher is None else self._found(matcher)
        if found is not None:
            self._last = path, found
        return found

    def _led(self, path: bytes) -> Any:
        """Lead the matcher along a path; None if it does not get there."""
        matcher, at = self._matcher, self._at
        self._matcher = None  # whoever is interrupted below begins anew
        common = 0 if matcher is None else common_start(at, path)
        back = len(at) // SIZE - common
        if matcher is None or (back and not matcher.rollback(back)):
            matcher, common = self._start.deep_copy(), 0
        more = np.frombuffer(path[SIZE * common :], np.int64).tolist()
        taken = 0 if self._end in more else matcher.try_consume_tokens(more)
        if matcher.is_error():
            self.failure = cleaned(matcher.get_error())
            return None
        self._matcher, self._at = matcher, path[: SIZE * (common + taken)]
        return matcher if taken == len(more) else None

    def _found(self, matcher: Any) -> State | None:
        ends = bool(matcher.is_accepting())
        bits = ~np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            self._matcher = None
            if not is_dead_end(matcher):
                self.failure = cleaned(matcher.get_error())
                return None
            bits[:] = 0xFF
        bits[self._end >> 3] |= 1 << (self._end & 7)
        return State(bits, ends, bits.tobytes().count(0xFF) < len(bits))


def common_start(one: bytes, other: bytes) -> int:
    """Return how many tokens two paths begin with in common; they mostly part near their ends."""
    most, block = min(len(one), len(other)), SIZE * FIRST_BLOCK
    if one[:most] == other[:most]:
        return most // SIZE
    while block < most and one[: most - block] != other[: most - block]:
        block *= 2
    place = max(most - block, 0)
    while one[place : place + SIZE] == other[place : place + SIZE]:
        place += SIZE
    return place // SIZE
