"""A stopwatch that a step is given, so that the algorithms themselves know nothing of time."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from polydraft.machine_code import clock


class Clock(Protocol):
    """What the parts of a step are charged to."""

    def charge(self, name: str, whose: object = None) -> AbstractContextManager[None]:
        """Charge the time spent inside to "prefill", "draft", "target", "verify" or "total", and to somebody."""
        ...


class Untimed:
    """No clock."""

    def charge(self, name: str, whose: object = None) -> AbstractContextManager[None]:
        """Charge nothing."""
        return nullcontext()


UNTIMED = Untimed()


class Stopwatch:
    """Seconds by name, by the clock; on a GPU the total alone, and of the rest what events on the device say.

    The clock stands still while machine code is made.

    Events are marks in the stream of work: to record one waits for nothing. Their times are read when somebody asks for
    `seconds`, who then waits for the last.

    Args:
        device: where the work is done.
        timed: whether events are recorded on a GPU.
    """

    def __init__(self, device: torch.device, *, timed: bool = True) -> None:
        self._clock: dict[str, float] = {}
        self._own: dict[int, float] = {}
        self._before: dict[str, float] = {}
        self._on_gpu, self.timed = device.type == "cuda", timed
        self._marks: list[tuple[str, object, Any, Any]] = []

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds so far."""
        marks, self._marks = self._marks, []
        for name, whose, begin, end in marks:
            end.synchronize()
            self._add(name, whose, begin.elapsed_time(end) / 1000)
        return self._clock

    @contextmanager
    def charge(self, name: str, whose: object = None) -> Iterator[None]:
        """Charge the time spent inside to `name`, and to somebody (`own`)."""
        if self._on_gpu and name != "total":
            with self._marked(name, whose) if self.timed else nullcontext():
                yield
            return
        begin = clock()
        try:
            yield
        finally:
            self._add(name, whose, clock() - begin)

    @contextmanager
    def _marked(self, name: str, whose: object) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._marks.append((name, whose, begin, end))

    def _add(self, name: str, whose: object, seconds: float) -> None:
        self._clock[name] = self._clock.get(name, 0.0) + seconds
        if whose is not None:
            self._own[id(whose)] = self._own.get(id(whose), 0.0) + seconds

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last lap for drafts, the target's passes, and in total but for prompts."""
        seconds = self.seconds
        now = {name: seconds.get(name, 0.0) for name in ("draft", "target", "total")}
        now["total"] -= seconds.get("prefill", 0.0)
        took = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        self._before = now
        self._own = {}
        return took

    def forget(self, whose: object) -> None:
        """Drop what was charged to somebody who is gone."""
        self._own.pop(id(whose), None)

    def own(self, whose: object) -> float:
        """Return the seconds since the last lap that were charged to somebody."""
        _ = self.seconds  # which reads the marks
        return self._own.get(id(whose), 0.0)
