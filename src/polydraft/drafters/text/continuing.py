"""From what followed earlier occurrences to guesses: trees of continuations by how often each was seen."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.text.guess import Bounds, Guess
from polydraft.drafters.text.occurrences import Occurrences, Tokens
from polydraft.machine_code import compiled


@dataclass(frozen=True)
class Continuing:
    """How occurrences are continued.

    Args:
        factor: how many tokens are guessed for each token that agrees.
        offset: how many more.
        least: the least chance of a path.
        occurrences: the most occurrences that are looked at.
    """

    factor: float = 1.0
    offset: float = 0.0
    least: float = 0.1
    occurrences: int = 128

    def guesses(self, match: int, bounds: Bounds) -> int:
        """Return how many tokens are guessed where so many agree."""
        return max(0, min(bounds.nodes, int(match * self.factor + self.offset)))

    def best(self, sources: Sequence[Sequence[Occurrences]], bounds: Bounds) -> tuple[Guess, int]:
        """Return the guesses of the highest promise over all lengths that agree, and that length; of equal ones the
        longer, then those of the first source.

        Args:
            sources: each a list of places to look at together.
            bounds: how large the tree may be.
        """
        best, score, longest = None, 0.0, 0
        for source in sources:
            for match in _lengths(source):
                most = self.guesses(match, bounds)
                if most < score or (most == score and match <= longest):
                    break  # no shorter match promises more
                rows = _followed(source, match, self.occurrences, min(bounds.depth, most))
                found = grow_by_counts(rows, most, bounds.children, self.least)
                promise = float(found[2].sum())
                if promise > score or (promise == score and match > longest):
                    best, score, longest = found, promise, match
        return (Guess.nothing() if best is None else Guess(*best)), longest


def longest_of(source: Sequence[Occurrences]) -> int:
    """Return the most last tokens that occurred before; 0 for none."""
    return max((len(one.counts) - 1 for one in source), default=0)


def tree_of(source: Sequence[Occurrences], match: int, occurrences: int, bounds: Bounds, least: float) -> Guess:
    """Return the tree of what followed where so many last tokens agree; a child's chance is its share of the parent's.

    Args:
        source: the places to look at together.
        match: how many last tokens agree.
        occurrences: the most places; of more, each source has its share.
        bounds: how large the tree may be.
        least: the least chance of a path.
    """
    depth = min(bounds.depth, bounds.nodes)
    if depth < 1 or not any(_count(one, match) for one in source):
        return Guess.nothing()
    return Guess(*grow_by_counts(_followed(source, match, occurrences, depth), bounds.nodes, bounds.children, least))


def _followed(source: Sequence[Occurrences], match: int, occurrences: int, depth: int) -> Tokens:
    """Return what followed where so many last tokens agree, from each place its share."""
    counts = [_count(one, match) for one in source]
    total = sum(counts)
    shares = counts if total <= occurrences else [-(-occurrences * one // total) for one in counts]
    rows = [one.followed(match, share, depth) for one, share in zip(source, shares, strict=True) if share]
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _count(one: Occurrences, match: int) -> int:
    return one.counts[match] if match < len(one.counts) else 0


def _lengths(source: Sequence[Occurrences]) -> Iterator[int]:
    """Yield the lengths that agree at other sets of places than the next longer one, the longest first."""
    counts, before = [one.counts for one in source], 0
    for match in range(longest_of(source), 0, -1):
        total = sum([one[match] for one in counts if match < len(one)])
        if total > before:
            yield match
        before = total


@compiled
def grow_by_counts(
    rows: Tokens, nodes: int, children: int, least: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return tokens, parents and chances of the likeliest paths through rows of continuations, the likeliest first.

    A node is expanded when it is taken: its rows, which lie side by side, are sorted by their next token. Of equally
    frequent tokens the one of the earliest row goes first.
    """
    count, depth = rows.shape
    most = nodes * children + children
    place = np.empty(count, np.int64)  # rows, in the order in which nodes own them
    for one in range(count):
        place[one] = one
    begin, end, level = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    token, above, chance = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most)
    open_ = np.zeros(most, np.bool_)
    tokens, parents, chances = np.empty(nodes, np.int64), np.empty(nodes, np.int64), np.empty(nodes)
    known, taken, node, share, first, stop, at = 0, 0, -1, 1.0, 0, count, 0
    while True:
        if at < depth and taken < nodes:
            size = stop - first
            keys = np.empty(size, np.int64)
            for one in range(size):
                keys[one] = np.int64(rows[place[first + one], at]) << 31 | place[first + one]
            gap = size // 2  # Shell's sort: NumPy's takes seconds to compile
            while gap > 0:
                for one in range(gap, size):
                    key, seat = keys[one], one
                    while seat >= gap and keys[seat - gap] > key:
                        keys[seat] = keys[seat - gap]
                        seat -= gap
                    keys[seat] = key
                gap //= 2
            group, own = 0, known
            for one in range(size):
                place[first + one] = keys[one] & 0x7FFFFFFF
            while group < size:
                here = keys[group] >> 31
                if here == 0xFFFFFFFF:
                    break
                behind = group + 1
                while behind < size and keys[behind] >> 31 == here:
                    behind += 1
                path = share * (behind - group) / size
                if path >= least:
                    seat = known  # the children so far are in order; a better one goes before
                    row = place[first + group]
                    while seat > own and (
                        path > chance[seat - 1] or (path == chance[seat - 1] and row < place[begin[seat - 1]])
                    ):
                        seat -= 1
                    if seat < own + children:
                        known = min(known + 1, own + children)
                        for other in range(known - 1, seat, -1):
                            begin[other], end[other], level[other] = begin[other - 1], end[other - 1], level[other - 1]
                            token[other], above[other] = token[other - 1], above[other - 1]
                            chance[other], open_[other] = chance[other - 1], open_[other - 1]
                        begin[seat], end[seat], level[seat] = first + group, first + behind, at + 1
                        token[seat], above[seat], chance[seat], open_[seat] = here, node, path, True
                group = behind
        best = -1
        for one in range(known):
            if open_[one] and (best < 0 or chance[one] > chance[best]):
                best = one
        if best < 0 or taken == nodes:
            break
        open_[best] = False
        tokens[taken], parents[taken], chances[taken] = token[best], above[best], chance[best]
        node, share, first, stop, at = taken, chance[best], begin[best], end[best], level[best]
        taken += 1
    return tokens[:taken], parents[:taken], chances[:taken]
