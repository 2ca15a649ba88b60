"""The lookahead window: rows of guesses for the places ahead, each row one step older than the next."""

from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.text.pool import Phrase


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
    """How a window is scored.

    Args:
        places: each token's place, counted from the current token's.
        sees: whether it sees the current token, and each of the window's.
    """

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
