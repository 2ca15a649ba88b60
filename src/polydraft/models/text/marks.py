"""Where marks stand in a text that comes in pieces: found, certainly not there, or perhaps about to come."""

from collections.abc import Sequence
from dataclasses import dataclass

BLANKS = " \t\r\n"


@dataclass(frozen=True)
class Thinking:
    """The marks around an answer's reasoning, and what a chat template has that knows them: one of these."""

    begin: str
    end: str
    signs: tuple[str, ...] = ()


def find_mark(text: str, marks: Sequence[str]) -> tuple[int, str | None]:
    """Return where the first mark begins, and which it is; None with the place up to which no mark can begin.

    Problem: a mark may stand half in this piece of the text and half in the next one.
    Rule: the earliest place counts, of two marks at one place the longer one. Without a mark, the longest end of the
    text that is the beginning of a mark may still become one.
    """
    found = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark)) >= 0]
    if found:
        place, _, mark = min(found)
        return place, mark
    held = max((_held(text, mark) for mark in marks), default=0)
    return len(text) - held, None


def _held(text: str, mark: str) -> int:
    """Return how many characters at the end of a text are the beginning of a mark that it does not hold."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


def begins_with(text: str, mark: str) -> bool | None:
    """Tell whether a text begins with a mark; None as long as it may."""
    return True if text.startswith(mark) else None if mark.startswith(text) else False
