"""How many tokens of prompts are read in a step: so many that texts in progress do not wait long for them."""

from collections import deque
from collections.abc import Callable
from statistics import median

import torch

from polydraft.machine_code import clock as seconds

LEAST = 16
"""Fewer tokens than these are not worth a pass of their own."""
WAITS = 2.0
"""Reading may take so many times as long as the step that it delays."""
LATEST = 5
"""Steps whose median time counts: one that was disturbed by other work says nothing."""

Clock = Callable[[], float]


class PromptChunkSize:
    """Learns from the passes measured so far how many tokens may be read beside texts in progress.

    A pass over w tokens takes a + b w seconds. Of the last one only the sum is known, T for W tokens. More tokens than
    W take at most T w / W, which is so if a = 0; fewer take at most s + (T - s) w / W as long as a is no more than the
    time s of a step, which is a pass itself. So the smaller of both answers keeps to `WAITS` steps, and where T is as
    long as that, both say W again. Which tokens are read when changes no text but by rounding.

    Args:
        most: the most tokens; None to read prompts whole. So many are read where nobody waits.
        clock: tells seconds.
        least: the least tokens beside texts in progress, however long they take.
    """

    def __init__(self, most: int | None, clock: Clock = seconds, least: int = LEAST) -> None:
        self.most, self.clock, self.least = most, clock, least
        self._steps = deque[float](maxlen=LATEST)
        self._last: tuple[int, float] | None = None
        self._since: float | None = None

    def size(self, *, delays: bool) -> int | None:
        """Return how many tokens may be read now.

        Args:
            delays: whether there are texts that wait for it.
        """
        if self.most is None or not delays:
            return self.most
        return min(self.most, max(self.least, self._fitting()))

    def begins(self, *, reads: bool) -> None:
        """Take note that a step begins; one without prompts is not timed: on a GPU the clock waits for the work."""
        self._since = self.clock() if reads and self.most is not None else None

    def has_read(self, tokens: int) -> None:
        """Take note that prompts were read; the last few tokens of one say too little of a pass."""
        if self._since is not None:
            now = self.clock()
            if tokens >= min(self.least, self.most or 0):
                self._last = tokens, now - self._since
            self._since = now

    def has_stepped(self) -> None:
        """Take note that the texts in progress have had their step."""
        if self._since is not None:
            self._steps.append(self.clock() - self._since)

    def _fitting(self) -> int:
        if self._last is None or not self._steps:
            return 0
        (tokens, took), step = self._last, median(self._steps)
        if took <= 0:
            return self.most or 0
        more = tokens * WAITS * step / took
        fewer = tokens * (WAITS - 1) * step / (took - step) if took > step else more
        return int(min(more, fewer))


def clock_of(device: torch.device) -> Clock:
    """Return a clock that waits for the work of a device before it is read."""
    if device.type != "cuda":
        return seconds

    def told() -> float:
        torch.cuda.synchronize(device)
        return seconds()

    return told
