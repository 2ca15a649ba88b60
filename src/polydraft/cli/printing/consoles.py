"""Rich's console for text from outside."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from polydraft.cli.printing.visible import visible


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


def styled(text: str, style: str) -> Text:
    """Return a text in a style; for strings of which some come from outside, where markup would be misread."""
    return Text(visible(text), style=style)


def progress_bar(notes: Console, *, silent: bool = False) -> Progress:
    """Return a bar on standard error: a description, how many of how many, times."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, *times, console=notes, transient=True, disable=silent)
