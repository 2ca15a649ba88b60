"""Prompt lookup: what followed the last times the text ended like this."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.contract import Defaults, Session
from polydraft.drafters.text.guess import Bounds, Guess, TextDrafter, rows_of
from polydraft.drafters.text.index import IndexedRows, IndexedText
from polydraft.errors import InvalidParameter, is_whole, shown
from polydraft.probs import SamplingParams
from polydraft.reading import Text
from polydraft.schemes import Given
from polydraft.trees import BestFirst

DRAFTS = 8
"""The usual number of drafts of a tree, as of a chain."""
REPEATS = 2
"""Where so many tokens agree, a continuation that comes to the text's end goes on as if the text repeated itself."""


@dataclass(frozen=True)
class NgramDrafter(TextDrafter):
    """Drafts the continuations of the most recent earlier occurrences of the text's longest matching suffix.

    One occurrence gives a chain as long as the policy's tree is deep. Where it comes to the end of the text, whose last
    tokens then repeat the ones before them, it goes on with its own beginning if two tokens or more agree, else it ends
    there. Several give branches, the most recent first, where the policy's trees may branch: each is half as likely as
    the one after it in the text, and each further token goes on as it did with the chance 1 - 2^-m, where m tokens
    agree. No match, no drafts.

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
    name = "ngram"
    by_text_alone = True
    sound = True

    def __post_init__(self) -> None:
        numbers = (self.longest, self.shortest, self.matches)
        if not all(map(is_whole, numbers)) or min(numbers) < 1 or self.shortest > self.longest:
            raise InvalidParameter(
                "longest, shortest and matches must be whole numbers of at least 1, and longest no less than shortest, "
                f"but are {shown(self.longest)}, {shown(self.shortest)} and {shown(self.matches)}."
            )

    def defaults(self, params: SamplingParams) -> Defaults:
        """Give chains of eight; for several matches trees of eight drafts, which may branch at any node."""
        if self.matches == 1:
            return super().defaults(params)
        return Defaults(Given(), BestFirst(DRAFTS, depth=DRAFTS, children=min(self.matches, DRAFTS)))

    def start(self, text: Text, session: Session) -> IndexedRows:
        """Begin with texts that were not looked at."""
        return IndexedRows.begun(session.vocab_size, len(text.counts))

    def guesses(self, state: IndexedRows, text: Text, bounds: Bounds) -> tuple[list[Guess], IndexedRows]:
        """Look up every row's continuations."""
        rows = rows_of(text)
        state = state.to(rows)
        return [self._of(row, own, bounds) for row, own in zip(rows, state.rows, strict=True)], state

    def _of(self, row: NDArray[np.int64], own: IndexedText, bounds: Bounds) -> Guess:
        most = min(self.matches, bounds.children)
        size, found = continuations(row, own, self.longest, self.shortest, bounds.depth, most)
        sure = 1 - 0.5**size  # that a token goes on as it did: the more, the longer the suffix
        weights = 0.5 ** np.arange(len(found))  # the more recent, the likelier
        return Guess.paths(found, (weights / max(1.0, weights.sum())).tolist(), sure)


def continuations(
    text: NDArray[np.int64], known: IndexedText, longest: int, shortest: int, most: int, matches: int = 1
) -> tuple[int, list[NDArray[np.int64]]]:
    """Return the length of the longest repeated suffix, and what followed its latest earlier occurrences.

    Suffixes of `longest` down to `shortest` tokens are tried; an occurrence may overlap the suffix itself. Behind the
    occurrence at a distance of p tokens there are p of them. If `REPEATS` tokens agree, more are drafted than that: the
    text has then begun to repeat its last p tokens, and the i-th to come is the i-th behind the occurrence, modulo p.

    Args:
        text: the tokens.
        known: their index.
        longest: tokens of the longest suffix.
        shortest: tokens of the shortest suffix.
        most: tokens of each continuation.
        matches: the most occurrences.
    """
    found = known.occurrences(longest)
    size = len(found.counts) - 1
    if size < shortest:
        return 0, []
    ends = found.ends[found.lengths == size][:matches] + 1
    behind = [text[end : end + most] for end in ends.tolist()]
    return size, [np.resize(one, most) for one in behind] if size >= REPEATS else behind
