"""Prompt lookup: what followed the last times the text ended like this."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.text.given import TextDrafter, rows_of
from polydraft.drafters.text.guess import Bounds, Guess
from polydraft.errors import InvalidParameter
from polydraft.reading import Text


@dataclass(frozen=True)
class NgramDrafter(TextDrafter):
    """Drafts the continuations of the most recent earlier occurrences of the text's longest matching suffix.

    One occurrence gives a chain as long as the policy's tree is deep, or shorter where the text ends. Several give
    branches, the most recent first, where the policy's trees may branch. No match, no drafts.

    Args:
        longest: tokens of the longest suffix to look for.
        shortest: tokens of the shortest suffix to look for.
        matches: the most occurrences that are continued.

    Raises:
        InvalidParameter: a number is below 1, or the shortest suffix is longer than the longest.

    Source: prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding; LLMA, arXiv 2304.04487.
    """

    longest: int = 3
    shortest: int = 1
    matches: int = 1
    name = "n-gram"
    sound = True

    def __post_init__(self) -> None:
        if min(self.longest, self.shortest, self.matches) < 1 or self.shortest > self.longest:
            raise InvalidParameter(
                "longest, shortest and matches must be at least 1, and longest no less than shortest, but are "
                f"{self.longest}, {self.shortest} and {self.matches}."
            )

    def guesses(self, state: int, text: Text, bounds: Bounds) -> tuple[list[Guess], int]:
        """Look up every row's continuations."""
        return [self._of(row, bounds) for row in rows_of(text)], state

    def _of(self, row: NDArray[np.int64], bounds: Bounds) -> Guess:
        found = continuations(row, self.longest, self.shortest, bounds.depth, min(self.matches, bounds.children))
        weights = 0.5 ** np.arange(len(found))  # the more recent, the likelier
        return (
            Guess.paths(found, (weights / max(weights.sum(), 1)).tolist()) if len(found) != 1 else Guess.chain(found[0])
        )


def continuations(
    text: NDArray[np.int64], longest: int, shortest: int, most: int, matches: int = 1
) -> list[NDArray[np.int64]]:
    """Return up to `most` tokens that followed the latest earlier occurrences of the longest repeated suffix.

    Suffixes of `longest` down to `shortest` tokens are tried; an occurrence may overlap the suffix itself.
    """
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
        ends = np.flatnonzero((windows == text[-size:]).all(axis=1)) + size
        if len(ends):
            return [text[end : end + most] for end in ends[: -matches - 1 : -1]]
    return []
