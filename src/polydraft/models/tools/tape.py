"""A text that comes in pieces, read by generators: each `yield` waits for more of it."""

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

from polydraft.models.text.marks import BLANKS, begins_with, find_mark

Reading = Generator[None, None, Any]
"""What reads: it yields where it needs more, and returns what it read."""
Put = Callable[[str], None]
TELLING = re.compile(r'[{}\[\]"\\]')
WORD_ENDS = re.compile(r"[,\]}\s]")


class BrokenCallError(Exception):
    """What is written is no call."""


class Tape:
    """A text up to where it has come, and the place up to which it was read.

    Attributes:
        text: what has come and was not forgotten.
        at: the place.
        closed: whether no more comes.
        kept: whether a reader may yet go back behind the place.
    """

    def __init__(self) -> None:
        self.text, self.at, self.closed, self.kept = "", 0, False, True

    @property
    def left(self) -> str:
        """What was not read yet."""
        return self.text[self.at :]

    def forget(self) -> None:
        """Forget what was read: nobody goes back behind here."""
        self.text, self.at = self.left, 0

    def more(self) -> Reading:
        """Wait for more text.

        Raises:
            BrokenCallError: no more comes.
        """
        if self.closed:
            raise BrokenCallError
        yield

    def skip_blanks(self) -> Reading:
        """Go to the next character that is no blank, or to the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in BLANKS:
                self.at += 1
            if self.at < len(self.text) or self.closed:
                return
            yield

    def starts(self, word: str) -> Reading:
        """Tell whether a word comes next, and go behind it if so."""
        while (found := begins_with(self.text[self.at : self.at + len(word)], word)) is None and not self.closed:
            yield
        self.at += len(word) if found else 0
        return bool(found)

    def has(self, text: str) -> Reading:
        """Tell whether a text comes next, whatever its blanks are, and go behind it if so."""
        begun = self.at
        for word in text.split():
            yield from self.skip_blanks()
            if not (yield from self.starts(word)):
                self.at = begun
                return False
        return True

    def expect(self, text: str) -> Reading:
        """Go behind a text, whatever its blanks are.

        Raises:
            BrokenCallError: another one comes.
        """
        if not (yield from self.has(text)):
            raise BrokenCallError

    def pass_end(self, text: str) -> Reading:
        """Go behind a text that may come, or that begins to come where all ends."""
        if not (yield from self.has(text)) and self.closed:
            rest = "".join(self.left.split())
            self.at = len(self.text) if "".join(text.split()).startswith(rest) else self.at

    def until(self, marks: Sequence[str]) -> Reading:
        """Return the text before the first of these marks, and go behind the mark.

        Raises:
            BrokenCallError: the text ends before.
        """
        searched = self.at
        while True:
            place, mark = find_mark(self.text[searched:], marks)
            if mark is not None:
                found = self.text[self.at : searched + place]
                self.at = searched + place + len(mark)
                return found
            searched += place
            yield from self.more()

    def value(self, put: Put) -> Reading:
        """Hand on the text of a JSON value as it comes, up to its end; it is not checked to be one.

        Raises:
            BrokenCallError: the text ends before.
        """
        yield from self.skip_blanks()
        if self.left[:1] not in ("{", "[", '"'):
            yield from self._word(put)
            return
        depth, quoted, place = 0, False, self.at
        while True:
            found = TELLING.search(self.text, place)
            halves = found is not None and found[0] == "\\" and found.end() == len(self.text)
            if found is None or halves:
                end = len(self.text) if found is None else found.start()
                self._handed(put, end)
                place = self.at
                yield from self.more()
                continue
            sign, place = found[0], found.end()
            if sign == "\\":
                place += quoted
                continue
            if sign == '"':
                quoted = not quoted
            elif not quoted:
                depth += 1 if sign in "{[" else -1
            if depth <= 0 and not quoted:
                self._handed(put, place)
                return

    def _handed(self, put: Put, end: int) -> None:
        """Hand on the text up to a place, and forget it where nobody goes back."""
        if end > self.at:
            put(self.text[self.at : end])
        self.at = end
        if not self.kept:
            self.forget()

    def _word(self, put: Put) -> Reading:
        """Hand on a number or a word such as true, which ends where something else begins."""
        while (found := WORD_ENDS.search(self.text, self.at)) is None:
            yield from self.more()
        self._handed(put, found.start())

    def whole_value(self) -> Reading:
        """Return a JSON value as Python has it.

        Raises:
            BrokenCallError: it is none.
        """
        parts: list[str] = []
        yield from self.value(parts.append)
        return parsed("".join(parts))


def parsed(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        BrokenCallError: it is none.
    """
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BrokenCallError from error


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
