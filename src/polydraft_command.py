"""The command `polydraft`. It lies outside the package, whose import takes seconds in which Ctrl-C may come."""

import os
import signal
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Run the command line; Ctrl-C ends it with exit code 130 from the first import on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored on purpose, as by nohup
        signal.signal(signal.SIGINT, leave)
    from polydraft.cli import main as run

    run()


def leave(number: int, frame: FrameType | None) -> None:
    """End the process at once: nothing is in progress yet, and an exception in an import might be caught there."""
    os._exit(INTERRUPTED)
