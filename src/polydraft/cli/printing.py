"""What reaches the terminal: usable streams, consoles that take no text for markup, foreign text made harmless."""

import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from polydraft.errors import CUT, InvalidParameter
from polydraft_command import say

STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, line separators, bidirectional overrides, halves of surrogate pairs."""


def visible(text: str) -> str:
    """Return a text with control characters written out, such as \\x1b; tabs and newlines stay.

    Every character is judged alone. So a sequence that begins in one piece of a text and ends in another is caught too.
    """
    return STEERING.sub(_written_out, text)


def on_one_line(text: str) -> str:
    """Return a text as `visible` does, tabs and newlines written out too: for names and messages."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def keep_streams_usable() -> bool:
    """Let nothing fail for want of a stream, or of a character in its encoding; tell whether there is an output."""
    closed = sys.stdout is None
    for number in range(3):  # a file opened later would take a free number, and get what is printed
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    if closed:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    return not closed


def loss_of_output() -> OSError | None:
    """Return why nothing more can be written to standard output; None if it can."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    return None


def turn_to_nowhere() -> None:
    """Send what is left of standard output to nowhere, so that Python does not try again when it ends."""
    try:
        number = sys.stdout.fileno()
    except OSError:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


class _PlainConsole(Console):
    """A console on which no string is markup and no character of a string steers the terminal.

    Strings are made visible before they are laid out, so that tables keep their widths; what comes in rich's own
    classes is made visible where it is rendered.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a string printable."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render anything, without control characters but rich's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def console(*, errors: bool = False, quiet: bool = False, width: int | None = None) -> Console:
    """Return a console for standard output, or for standard error; the only kind that the commands use."""
    return _PlainConsole(stderr=errors, quiet=quiet, width=width, markup=False, highlight=False, emoji=False)


def notes_beside(options: Any) -> Console:
    """Return the console of what is said beside a command's results, which --json and --quiet leave out.

    Raises:
        InvalidParameter: both are given, each of which says that nothing else is printed.
    """
    if options.as_json and options.quiet:
        raise InvalidParameter("--json and --quiet each print one thing and nothing else: give one of them.")
    return console(errors=True, quiet=options.as_json or options.quiet)


def print_json_line(value: object) -> None:
    """Print a value as a line of JSON."""
    sys.stdout.write(json.dumps(value) + "\n")


def say_on_one_line(sentence: str) -> None:
    """Write a sentence to standard error; where nobody can be told, it is lost."""
    say(on_one_line(sentence))


def columns(names: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """Return a table without lines, of columns of text and behind them columns of numbers."""
    table = Table(padding=(0, 2, 0, 0), box=None)
    for name in (*names, *numbers):
        table.add_column(name, justify="right" if name in numbers else "left")
    return table


def named_values() -> Table:
    """Return a table of two columns, for names and what they are."""
    return Table(box=None, show_header=False, padding=(0, 2, 0, 0))


def counted(count: int, word: str) -> str:
    """Return a number of things in words."""
    return f"{count} {word}{'s' * (count != 1)}"


def styled(text: str, style: str) -> Text:
    """Return a text in a style; for strings of which some come from outside, where markup would be misread."""
    return Text(visible(text), style=style)


def progress_bar(notes: Console, *, silent: bool = False) -> Progress:
    """Return a bar on standard error: a description, how many of how many, times."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, *times, console=notes, transient=True, disable=silent)


@contextmanager
def warnings_as_sentences(*, always: bool = True) -> Iterator[None]:
    """Write warnings to standard error as they come, one sentence each.

    Args:
        always: whether what goes wrong in a run is said however often it comes; else as Python's filters have it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("default", CUT, UserWarning)
        if always:
            warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = lambda message, *_, **__: sys.stderr.write(f"polydraft: {on_one_line(str(message))}\n")
        yield
