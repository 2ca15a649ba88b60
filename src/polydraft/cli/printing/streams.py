"""Standard streams that are closed, full, or of an encoding that lacks characters."""

import os
import sys
from io import TextIOWrapper


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
