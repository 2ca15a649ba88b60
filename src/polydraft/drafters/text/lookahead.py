"""Lookahead decoding: a window of guesses rides beside the tree, and the n-grams that it finds are the drafts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from polydraft.drafters.contract import Defaults, DraftRequest, Needs, Session
from polydraft.drafters.text.guess import Bounds, GivenDrafter, Guess, check_count, given, rows_of
from polydraft.drafters.text.pool import NgramPool, Phrase
from polydraft.drafters.text.stores.segment import StoreVocabulary, network_of
from polydraft.errors import InvalidParameter, shown
from polydraft.probs import SamplingParams
from polydraft.reading import Step, Text
from polydraft.rows import per_row, scratch, shared
from polydraft.schemes import Given
from polydraft.trees import Draft, Riders, Widths


@dataclass(frozen=True)
class Window:
    """Rows of guesses behind a row's text.

    Row r holds, at column i, a guess for the place i + r behind the current token; the current token itself is column 0
    of row 0 and is not stored. The rows of one column, read downward, are an n-gram in the making. A window of level N
    and width W has N - 1 rows of W columns, the current token included. It begins as row 0 alone with W + N - 2 columns
    and gains a row and loses a column with each of the first N - 2 steps.

    Args:
        rows: row 0 without its column 0, then the others; none before the first step.
    """

    rows: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def begun(cls, prompt: NDArray[np.int64], level: int, width: int) -> "Window":
        """Return the first window: tokens of the prompt, drawn uniformly from a stream that the prompt seeds."""
        drawn = np.random.default_rng(crc32(prompt.tobytes())).integers(len(prompt), size=width + level - 3)
        return cls((tuple(prompt[drawn].tolist()),))

    @property
    def columns(self) -> int:
        """The columns of each row."""
        return len(self.rows[0]) + 1

    @property
    def tokens(self) -> list[int]:
        """All tokens, row by row, as they are scored."""
        return [token for row in self.rows for token in row]

    def is_full(self, level: int) -> bool:
        """Tell whether it has all its rows, so that columns are n-grams but for the last token."""
        return len(self.rows) == level - 1

    def advanced(self, level: int, current: int, new: list[int]) -> tuple["Window", list[Phrase]]:
        """Return the window one place further, and the n-grams that were found.

        It moves by one place, whatever was accepted, as published.

        Args:
            level: tokens of an n-gram.
            current: the current token.
            new: the target's likeliest tokens behind the last row, column by column.
        """
        stack = [(current, *self.rows[0]), *self.rows[1:], tuple(new)]
        if not self.is_full(level):
            return Window((self.rows[0][1:], *(row[1:] for row in stack[1:]))), []
        columns = zip(*stack, strict=True)
        return Window((stack[1][1:], *stack[2:])), [(first, tuple(others)) for first, *others in columns]


@dataclass(frozen=True, eq=False)
class Layout:
    """How a window is scored: each token's place behind the current one, and whether it sees that and the window's."""

    places: NDArray[np.int64]
    sees: NDArray[np.bool_]


@lru_cache(maxsize=256)
def layout(rows: int, columns: int) -> Layout:
    """Return the published layout of a window: row 0 is a text, and below it each column goes on by itself.

    A token of row r and column i sees row 0 up to column i, and of its own column the rows 1 to r.
    """
    row, column = np.divmod(np.arange(rows * columns), columns)
    text = (row == 0) & (column <= column[:, None])
    above = (row >= 1) & (row <= row[:, None]) & (column == column[:, None])
    return Layout((row + column)[1:], (text | above)[1:])


def most_scored(level: int, width: int) -> int:
    """Return the most tokens that a window has in any step, the first ones included."""
    rows = min(level - 1, (width + level - 1) // 2)  # of the step with the most, which may come before the last row
    return rows * (width + level - 1 - rows) - 1


MOST_SCORED = 512
"""Tokens that window and guesses of a batch may add to a pass. A guess: what is free lies between some tens of tokens
on a CPU and some hundreds on a GPU."""
MOST_BESIDE = 4095
"""Tokens that a row's window may have, and its guesses: as many as a tree may have drafts."""


@dataclass(frozen=True, eq=False)
class LookaheadRow:
    """A row's window and pool, the pool that it began with, and how many tokens of its text were put into the pool."""

    window: Window
    pool: NgramPool
    first: NgramPool
    read: int = 0

    @classmethod
    def begun(cls, pool: NgramPool) -> "LookaheadRow":
        """Return what is known of a row at its beginning."""
        return cls(Window(), pool, pool)

    def advanced(self, level: int, current: int, new: list[int]) -> "LookaheadRow":
        """Return the row with its window one place further, and the n-grams that were found in its pool."""
        window, phrases = self.window.advanced(level, current, new)
        return replace(self, window=window, pool=self.pool.added(phrases))

    def cut(self, length: int) -> "LookaheadRow":
        """Return the row when its text is known up to a length only; what was found stays, unless no text is left."""
        return replace(self, read=min(self.read, length)) if length else LookaheadRow.begun(self.first)


@dataclass(frozen=True, eq=False)
class LookaheadState:
    """What is known of the rows, and of the model whose tokens these are, as far as that is known itself.

    In a step `rides` says whether the windows ride, and `before` what the rows were before its draft.
    """

    rows: tuple[LookaheadRow, ...] = per_row(LookaheadRow.cut, learnt=True)
    vocab_size: int = shared()
    model: nn.Module | None = shared()
    rides: bool = scratch(False)
    before: tuple[LookaheadRow, ...] = scratch(())

    def pools(self) -> tuple[NgramPool, ...]:
        """Return the pool of every row, which says whose tokens it holds."""
        vocabulary = StoreVocabulary.of_model(self.model, self.vocab_size)
        return tuple(replace(row.pool, vocabulary=vocabulary) for row in self.rows)


@dataclass(frozen=True, eq=False)
class LookaheadDrafter(GivenDrafter):
    """Drafts n-grams that the target wrote beside the text, in passes that it makes anyway.

    Each pass scores a window of guesses for the next places, N - 1 rows of W columns, laid out so that every column
    goes on by itself behind a guessed text (`Window`). What the target holds likeliest behind the last row completes
    W n-grams, which go into a pool by their first token, and the window moves on by one place. The drafts of a step are
    the pool's newest continuations of the last token, as branches below the root. The first N - 2 steps fill the window
    and draft nothing. A step adds (N - 1)(W + G) - 1 tokens to the pass and brings up to N tokens, the target's own
    behind a full match included.

    **A full batch.** Tokens in a pass are free only up to what the machine does at once. So if (N - 1)(W + G) tokens
    for each row of the batch are more than `most_scored`, no window rides, and each row has as many guesses as then fit
    in, at last none. This looks at the number of rows alone; with another number a seed may give another text, of the
    same law.

    The usual numbers are small ones, since tokens in a pass are not free on a CPU (docs/lookahead.md). Published are
    N = 5, W = G = 7, for GPUs.

    Args:
        level: N, tokens of an n-gram.
        window: W, columns of the window.
        guesses: G, the most guesses of a step, and the most continuations that the pool keeps of a token.
        pool_from_prompt: whether n-grams of the prompt and of the accepted text go into the pool too.
        pool: what every text begins with; None for nothing.
        most_scored: tokens that a pass may have beside the roots, in all rows together.

    Raises:
        InvalidParameter: a number is too small or too large, or the pool has n-grams of another length.
        VocabularyMismatch: at the start, if the pool is of another tokenizer.

    Source: Fu et al., arXiv 2402.02057; github.com/hao-ai-lab/LookaheadDecoding.
    """

    level: int = 3
    window: int = 4
    guesses: int = 4
    pool_from_prompt: bool = False
    pool: NgramPool | None = None
    most_scored: int = MOST_SCORED
    needs: Needs = field(init=False)
    name = "lookahead"
    sound = True

    def __post_init__(self) -> None:
        numbers = {"level": self.level, "window": self.window, "guesses": self.guesses}
        for name, number in {**numbers, "most_scored": self.most_scored}.items():
            check_count(name, number, {"level": 2, "most_scored": 0}.get(name, 1), "an integer")
        if self.pool is not None and not isinstance(self.pool, NgramPool):
            raise InvalidParameter(f"pool must be an NgramPool, or None, but is {shown(self.pool)}.")
        if self.pool is not None and self.pool.level != self.level:
            raise InvalidParameter(f"The pool has n-grams of {self.pool.level} tokens, but level is {self.level}.")
        riders, drafts = most_scored(self.level, self.window), self.guesses * (self.level - 1)
        if max(riders, drafts) > MOST_BESIDE:
            raise InvalidParameter(
                f"A window and guesses may have {MOST_BESIDE} tokens each, but level {shown(self.level)}, window "
                f"{shown(self.window)} and guesses {shown(self.guesses)} ask for more."
            )
        object.__setattr__(self, "needs", Needs(riders=riders))

    def defaults(self, params: SamplingParams) -> Defaults:
        """Give trees of all guesses, side by side."""
        return Defaults(Given(), Widths((self.guesses, *(1,) * (self.level - 2))))

    def outside(self, row: int) -> bytes:
        """Return the digest of the pool that texts begin with."""
        return b"" if self.pool is None else self.pool.digest

    def start(self, text: Text, session: Session) -> LookaheadState:
        """Return rows whose windows begin with the first draft.

        Raises:
            VocabularyMismatch: the pool holds tokens of another tokenizer.
        """
        model = network_of(session.target)
        if self.pool is not None and self.pool.vocabulary is not None:
            self.pool.check(StoreVocabulary.of_model(model, session.vocab_size))
        new = LookaheadRow.begun(self.pool or NgramPool(self.level, self.guesses))
        return LookaheadState((new,) * len(text.counts), session.vocab_size, model=model)

    def draft(self, state: LookaheadState, request: DraftRequest) -> tuple[Draft, LookaheadState]:
        """Return the pool's continuations of each row's last token, and the windows as riders."""
        text, scheme, policy = request.text, request.scheme, request.policy
        bounds = Bounds.of(policy)
        if not bounds.nodes:
            return Draft.nothing(text.last()), state
        rides, most = self.sizes(len(state.rows))
        pairs = [(self._read(row, own), own) for row, own in zip(state.rows, rows_of(text), strict=True)]
        found = [self._guess(row, own, rides, most).within(bounds, state.vocab_size) for row, own in pairs]
        after = replace(state, rows=tuple(row for row, _ in pairs), rides=rides, before=state.rows)
        draft = given(text, found, scheme)
        riders = self._riders(after, draft.tree.tokens.shape[1], text) if rides else None
        return replace(draft, riders=riders), after

    def commit(self, state: LookaheadState, step: Step) -> LookaheadState:
        """Move the windows on, and put the n-grams that they completed into the pools.

        Rows for which another drafter drafted had no window in the pass. They are as before the draft, as if nobody had
        asked: whether somebody does hangs on their neighbours.
        """
        rows = state.rows
        if state.rides:
            new, roots = self._outputs(state, step), step.tree.tokens[:, 0].tolist()
            told = zip(rows, roots, new, strict=True)
            rows = tuple(row.advanced(self.level, current, columns) for row, current, columns in told)
        if state.before:
            rows = tuple(state.before[row] if row in step.others else own for row, own in enumerate(rows))
        return replace(state, rows=rows, rides=False, before=())

    def sizes(self, rows: int) -> tuple[bool, int]:
        """Return whether windows ride in a batch of so many rows, and how many guesses each row may have."""
        share = self.most_scored // rows
        if (self.level - 1) * (self.window + self.guesses) <= share:
            return True, self.guesses
        return False, min(self.guesses, share // (self.level - 1))

    def _read(self, row: LookaheadRow, text: NDArray[np.int64]) -> LookaheadRow:
        """Begin the window, and put the n-grams of what is new in the text into the pool, if they are wanted."""
        window = row.window if row.window.rows else Window.begun(text, self.level, self.window)
        first, stop = max(0, row.read - self.level + 1), len(text) - self.level + 1
        if not self.pool_from_prompt or first >= stop:
            return replace(row, window=window)
        grams = np.lib.stride_tricks.sliding_window_view(text[first:], self.level).tolist()
        phrases: list[Phrase] = [(key, tuple(others)) for key, *others in grams]
        return replace(row, window=window, pool=row.pool.added(phrases), read=len(text))

    def _guess(self, row: LookaheadRow, text: NDArray[np.int64], rides: bool, most: int) -> Guess:
        """Return the newest continuations of the last token; none while the window fills."""
        if rides and not row.window.is_full(self.level):
            return Guess.nothing()
        return newest_first([one.tokens for one in row.pool.of(int(text[-1]), most)])

    def _riders(self, state: LookaheadState, nodes: int, text: Text) -> Riders | None:
        """Return the windows of all rows; shorter ones are padded behind their own."""
        windows = [row.window for row in state.rows]
        most, batch = max(len(one.tokens) for one in windows), len(windows)
        if not most:
            return None
        tokens, places = np.zeros((batch, most), np.int64), np.zeros((batch, most), np.int64)
        valid = np.zeros((batch, most), bool)
        sees = np.tile(np.eye(most, nodes + most, nodes, dtype=bool), (batch, 1, 1))
        for row, window in enumerate(windows):
            own, count = layout(len(window.rows), window.columns), len(window.tokens)
            tokens[row, :count], places[row, :count], valid[row, :count] = window.tokens, own.places, True
            sees[row, :count, 0], sees[row, :count, nodes : nodes + count] = own.sees[:, 0], own.sees[:, 1:]
        sent = [torch.from_numpy(one).to(text.tokens.device) for one in (tokens, places, sees, valid)]
        sent[0] = sent[0].clamp_max(state.vocab_size - 1)  # a draft model may have fewer tokens than the text
        return Riders(*sent)

    def _outputs(self, state: LookaheadState, step: Step) -> list[list[int]]:
        riders, found = step.scored.riders, list[list[int]]()
        roots = step.scored.logits[:, 0].argmax(dim=-1).tolist()
        lasts = [(len(one.window.tokens), one.window.columns) for one in state.rows]
        first = min(max(0, count - columns) for count, columns in lasts)
        behind = [[]] * len(lasts) if riders is None else riders[:, first:].argmax(dim=-1).tolist()
        for root, own, (count, columns) in zip(roots, behind, lasts, strict=True):
            last = own[max(0, count - columns) - first : count - first]
            found.append([root, *last] if count < columns else last)
        return found


def newest_first(paths: Sequence[Sequence[int]]) -> Guess:
    """Return paths as branches, each thought half as likely as the one before it."""
    weights = 0.5 ** np.arange(1.0, len(paths) + 1)
    return Guess.paths([np.array(one, np.int64) for one in paths], weights.tolist())
