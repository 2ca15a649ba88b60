"""Ctrl-C that waits for the step in progress."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from polydraft_command import say


@contextmanager
def noted_interruption(ending: str = "") -> Iterator[Callable[[], bool]]:
    """Give a function that tells whether Ctrl-C was pressed; pressed again, it interrupts at once.

    Where Ctrl-C is ignored on purpose, as by nohup, it stays so.

    Args:
        ending: what comes to its end first, such as "this step", which is said at once; "" where that takes no time.
    """
    pressed: list[int] = []
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield lambda: False
        return

    def note(number: int, _: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)
        if ending:
            say(f"Stopping after {ending}; Ctrl-C again stops at once.")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
