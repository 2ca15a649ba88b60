"""The command `polydraft`. It lies outside the package, whose import takes seconds in which Ctrl-C may come."""

import gc
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Run the command line; Ctrl-C ends it with exit code 130 from the first import on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored on purpose, as by nohup
        signal.signal(signal.SIGINT, leave)
    from polydraft.cli import main as run

    try:
        run()
    finally:
        gc.freeze()  # else Python looks at its end through all that was imported: a second in which nothing answers


def leave(number: int, frame: FrameType | None) -> None:
    """End the process at once: nothing is in progress yet, and an exception in an import might be caught there."""
    stopped()
    os._exit(INTERRUPTED)


def stopped(kept: str = "nothing was kept") -> int:
    """Say that Ctrl-C ends the command, and what was kept of its work; return the exit code."""
    say(f"Interrupted: {kept}.")
    return INTERRUPTED


def say(sentence: str) -> None:
    """Write a sentence to standard error; where nobody can be told, it is lost."""
    with suppress(AttributeError, OSError, RuntimeError, ValueError):  # none, full, in the midst of a line, or closed
        sys.stderr.write(f"polydraft: {sentence}\n")
        sys.stderr.flush()
