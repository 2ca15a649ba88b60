"""What reaches the terminal: consoles that take no text for markup, and foreign text without control characters."""

from polydraft.cli.printing.consoles import console, progress_bar, styled
from polydraft.cli.printing.streams import keep_streams_usable, loss_of_output, turn_to_nowhere
from polydraft.cli.printing.visible import on_one_line, visible
from polydraft.cli.printing.warned import warnings_as_sentences

__all__ = [
    "console",
    "keep_streams_usable",
    "loss_of_output",
    "on_one_line",
    "progress_bar",
    "styled",
    "turn_to_nowhere",
    "visible",
    "warnings_as_sentences",
]
