"""Clocks: what a call takes, and one thread for times that are to be compared."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from polydraft.engine.emission import Stopwatch

Progress = Callable[[str, int, int], None]
"""Told what is measured, how much of it is done, and out of how much."""


def unseen(what: str, done: int, total: int) -> None:
    """Show no progress."""


def wall_milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of a call by the clock on the wall; a GPU is waited for."""
    watch = Stopwatch(device)
    with watch.charge("call"):
        call()
    return 1e3 * watch.seconds["call"]


def own_milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of a call: processor time of this process, which other programs disturb little.

    On a GPU, which works beside the process, it is the time by the clock on the wall.
    """
    if device.type != "cpu":
        return wall_milliseconds(call, device)
    begin = time.process_time()
    call()
    return 1e3 * (time.process_time() - begin)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: the processor time of several is a sum, and waiting counts in it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
