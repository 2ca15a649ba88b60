"""Suffix decoding and retrieval (REST): what followed wherever the text, or another one, ended like this."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.contract import Defaults, Session
from polydraft.drafters.text.guess import Bounds, Guess, TextDrafter, check_count, check_setting, rows_of
from polydraft.drafters.text.index import LONGEST, IndexedRows, IndexedText, Occurrences, Tokens, as_tokens
from polydraft.drafters.text.stores.segment import StoreVocabulary
from polydraft.drafters.text.stores.store import TextStore
from polydraft.drafters.text.stores.suffix_store import SuffixStore, shared_store
from polydraft.errors import InvalidParameter, is_number, is_whole, shown
from polydraft.machine_code import compiled
from polydraft.probs import SamplingParams
from polydraft.reading import Text
from polydraft.rows import per_row
from polydraft.schemes import Given
from polydraft.trees import Fixed, TreeShape


@dataclass(frozen=True)
class Continuing:
    """How occurrences are continued, by the numbers of `SuffixDrafter`."""

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


def room_for_paths(nodes: int, depth: int, children: int) -> TreeShape:
    """Return a shape that bounds trees of guesses: so many nodes, so deep, so many children of each at most."""
    levels, left, width = list[tuple[int, ...]](), nodes, 1
    for level in range(depth):
        own = min(children, left - (depth - 1 - level))
        levels.append((own, *(0,) * (width - 1)))
        width, left = own, left - own
    return TreeShape(tuple(levels))


TREES = Fixed(room_for_paths(16, 12, 4))
"""The usual bounds of its trees."""


@dataclass
class Once:
    """Something that is done once, though the step that does it may be taken again."""

    done: bool = False


@dataclass(frozen=True, eq=False)
class StoredText:
    """What a store was given of a row's text: how many first tokens; whether the text is over, and was given whole."""

    known: int = 0
    over: bool = False
    given: Once = field(default_factory=Once)

    def cut(self, length: int) -> "StoredText":
        """Return what holds behind a part of the text, of which the store may know something."""
        return StoredText(min(length, self.known))


@dataclass(frozen=True, eq=False)
class SuffixState(IndexedRows):
    """The rows' indices, and what the store was given of each row."""

    stored: tuple[StoredText, ...] = per_row(StoredText.cut)


@dataclass(frozen=True)
class SuffixDrafter(TextDrafter):
    """Drafts the tree of what followed earlier occurrences of the text's end, in the text itself and in a store.

    The last m tokens are looked for, for every m that occurs. What followed makes a tree, in which a token is as likely
    as it was frequent among what followed the token above; it has at most `m * factor + offset` tokens, none less
    likely than `least`. The tree with the highest sum of chances is drafted, which is how many of its tokens are
    expected to be accepted; of equal ones the one of the longer match, then that of the text itself. Texts that are
    over are added to the store, if there is one, prompt and all; nothing of a text is added twice.

    A store may hold what the same seed wrote. So a text's random numbers are forked by a digest of the store as the
    text starts: above temperature 0 a seed gives the same text as long as the store stays as it is (`outside`).

    Args:
        longest: the most last tokens that are compared, up to 64.
        store: a `SuffixStore`, its folder, or None to look in the text alone. All drafters that name one folder share
            one store.
        factor: how many tokens are drafted for each token that agrees.
        offset: how many more.
        least: the least chance of a path.
        occurrences: the most occurrences that are looked at: the latest in the text, evenly spread ones in the store.
        keeps: whether texts that are over are added to the store; False to read it alone.

    Raises:
        InvalidParameter: a number outside its range, or a store that is none.
        StoreError: the store cannot be used.
        VocabularyMismatch: at the start, if the store is of another tokenizer than the target's.

    Source: SuffixDecoding, arXiv 2411.04975; SAM-Decoding, arXiv 2411.10666.
    """

    longest: int = LONGEST
    store: SuffixStore | str | Path | None = None
    factor: float = 1.0
    offset: float = 0.0
    least: float = 0.1
    occurrences: int = 128
    keeps: bool = True
    name = "suffix"
    by_text_alone = True
    sound = True

    def __post_init__(self) -> None:
        _check_length("longest", self.longest)
        factor, offset, least = self.factor, self.offset, self.least
        check_setting("factor", factor, "a finite number >= 0", holds=_is_finite(factor) and factor >= 0)
        check_setting("offset", offset, "a finite number", holds=_is_finite(offset))
        check_setting("least", least, "a number from 0 to 1", holds=_is_finite(least) and 0 <= least <= 1)
        check_count("occurrences", self.occurrences)
        if isinstance(self.store, str | Path):
            object.__setattr__(self, "store", shared_store(self.store))
        if not isinstance(self.store, SuffixStore | None):
            raise InvalidParameter(f"store must be a SuffixStore, its folder, or None, but is {shown(self.store)}.")

    @property
    def _kept(self) -> SuffixStore | None:
        return self.store if isinstance(self.store, SuffixStore) else None

    def defaults(self, params: SamplingParams) -> Defaults:
        """Give trees of sixteen, at most twelve deep."""
        return Defaults(Given(), TREES)

    def outside(self, row: int) -> bytes:
        """Return the digest of the store as it is."""
        return b"" if self._kept is None else self._kept.digest()

    def start(self, text: Text, session: Session) -> SuffixState:
        """Begin, with a store of the target's tokens.

        Raises:
            VocabularyMismatch: the store's are others.
        """
        if self._kept is not None:
            self._kept.check(StoreVocabulary.of_target(session))
        stored = tuple(StoredText() for _ in text.counts)
        return SuffixState(session.vocab_size, tuple(IndexedText() for _ in stored), stored)

    def guesses(self, state: SuffixState, text: Text, bounds: Bounds) -> tuple[list[Guess], SuffixState]:
        """Look every row's end up, but for those that are over."""
        state = state.to(rows_of(text))
        pairs = zip(state.rows, state.stored, strict=True)
        return [Guess.nothing() if told.over else self._of(own, bounds) for own, told in pairs], state

    def finish(self, state: SuffixState, text: Text, row: int) -> SuffixState:
        """Add a text that is over to the store, once, but for what was added before."""
        told, length = state.stored[row], text.counts[row]
        if self._kept is not None and self.keeps and not told.given.done:
            told.given.done = True
            self._kept.add(text.tokens[row, max(0, told.known - self.longest) : length].cpu().numpy())
        over = StoredText(length, True, told.given)
        return replace(state, stored=(*state.stored[:row], over, *state.stored[row + 1 :]))

    def _of(self, own: IndexedText, bounds: Bounds) -> Guess:
        found = own.occurrences(self.longest)
        sources: list[Sequence[Occurrences]] = [[found]]
        if self._kept is not None:
            sources.append(self._kept.found(found.tokens, self.longest))
        return Continuing(self.factor, self.offset, self.least, self.occurrences).best(sources, bounds)[0]


PUBLISHED = Fixed(room_for_paths(64, 10, 16))
"""The published size of the trees of REST."""


@dataclass(frozen=True)
class RetrievalDrafter(TextDrafter):
    """Drafts the tree of what most often followed the text's longest end that occurs in a store.

    The last `longest` tokens are looked for, then one fewer, down to `shortest`; the first that occurs is taken. What
    followed its occurrences makes a tree by counts, of which the most frequent paths are kept, as many as the policy's
    trees have nodes.

    Every sampling setting is exact: the drafts are fixed tokens, verified node by node with one draw at each. The
    published code draws at every place of every path apart and takes the longest path that agrees, which is lossy: of
    children with probability 0.5, 0.3 and 0.2 it writes 0.675, 0.255 and 0.07.

    Args:
        store: a `TextStore`, or its folder or file; it is only read. `polydraft store build --kind rest` makes one.
        longest: tokens of the longest end to look for.
        shortest: tokens of the shortest.
        occurrences: the most occurrences that are looked at, evenly spread.
        following: the most tokens that are drafted after one another.

    Raises:
        InvalidParameter: a number outside its range, or a store that is none.
        StoreError: the store cannot be used.
        VocabularyMismatch: at the start, if the store is of another tokenizer than the target's.

    Source: REST, arXiv 2311.08252.
    """

    store: TextStore | str | Path
    longest: int = 16
    shortest: int = 2
    occurrences: int = 5000
    following: int = 10
    name = "rest"
    by_text_alone = True
    sound = True

    def __post_init__(self) -> None:
        _check_length("longest", self.longest)
        _check_length("shortest", self.shortest)
        check_count("occurrences", self.occurrences)
        check_count("following", self.following)
        if self.shortest > self.longest:
            raise InvalidParameter(
                f"shortest must be no more than longest, but they are {self.shortest} and {self.longest}."
            )
        if isinstance(self.store, str | Path):
            object.__setattr__(self, "store", TextStore(self.store))
        if not isinstance(self.store, TextStore):
            raise InvalidParameter(f"store must be a TextStore, or its folder or file, but is {shown(self.store)}.")

    @property
    def _texts(self) -> TextStore:
        assert isinstance(self.store, TextStore)
        return self.store

    def defaults(self, params: SamplingParams) -> Defaults:
        """Give trees of sixty-four, ten deep, as published."""
        return Defaults(Given(), PUBLISHED)

    def outside(self, row: int) -> bytes:
        """Return the digest of the store."""
        return self._texts.digest()

    def start(self, text: Text, session: Session) -> int:
        """Begin, with a store of the target's tokens.

        Raises:
            VocabularyMismatch: the store's are others.
        """
        self._texts.check(StoreVocabulary.of_target(session))
        return session.vocab_size

    def guesses(self, state: int, text: Text, bounds: Bounds) -> tuple[list[Guess], int]:
        """Look every row's end up."""
        own = Bounds(bounds.nodes, min(bounds.depth, self.following), bounds.children)
        contexts = [as_tokens(row[-self.longest :]) for row in rows_of(text)]
        found = [self._texts.found(context, self.longest) for context in contexts]
        lengths = [longest_of(one) for one in found]
        pairs = zip(found, lengths, strict=True)
        trees = [
            tree_of(one, size, self.occurrences, own, 0.0) if size >= self.shortest else None for one, size in pairs
        ]
        return [one or Guess.nothing() for one in trees], state


def _is_finite(value: object) -> bool:
    return is_number(value) and isfinite(cast(float, value))


def _check_length(name: str, value: Any) -> None:
    holds = is_whole(value) and 1 <= value <= LONGEST
    check_setting(name, value, f"a whole number from 1 to {LONGEST}", holds=holds)
