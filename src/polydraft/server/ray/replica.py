"""A copy of the model in a Ray cluster: the same worker as elsewhere, on a thread of an actor."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import torch

from polydraft.options.commands.serve_options import Settings
from polydraft.server.worker import Ask, Cancel, Event, Spell, ThreadWorker
from polydraft.server.worker.asks import OVER


class TimedWorker(ThreadWorker):
    """A worker of which it can be told how long it has been in one step."""

    _begun: float | None = None

    @property
    def busy(self) -> float:
        """The seconds since it last heard what it is told; 0 while it waits for something to do."""
        begun = self._begun
        return time.monotonic() - begun if begun is not None else 0.0

    def _hear(self, seconds: float | None) -> Any:
        if seconds != 0:
            self._begun = None
        told = super()._hear(seconds)
        self._begun = time.monotonic()
        return told


class ModelReplica:
    """A model and its worker; whoever asks gets what the worker says of the request, as it comes.

    It forks nothing: a process of its own for the model would outlive an actor that is killed. A model that cannot be
    loaded is no error here, which Ray would answer with another try, and another; `known` tells of it.

    Args:
        settings: the server's; `threads` are those of this copy.
    """

    def __init__(self, settings: Settings) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._stall = settings.stall
        self._streams: dict[str, asyncio.Queue[Event]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._first: Event | None = None
        self._gone = False
        known = self._known = threading.Event()
        self._worker = TimedWorker(settings, self._say)
        known.wait()

    def _say(self, event: Event) -> None:
        """Take what the worker says, on its thread."""
        if not self._known.is_set() and event.kind in ("ready", "broken", "gone"):
            self._first = event if event.kind == "ready" else Event("broken", said={"message": self._unloaded(event)})
            self._known.set()
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._heard, event)
        elif self._first is not None and self._first.kind == "ready":  # nobody has asked for anything yet
            self._gone = event.kind == "gone"

    def _unloaded(self, event: Event) -> str:
        said = event.said.get("message", "its worker ended while it loaded it; the logs of Ray say why.")
        return f"Node {socket.gethostname()} of the Ray cluster cannot load the model: {said}"

    def _heard(self, event: Event) -> None:
        self._gone = self._gone or event.kind == "gone"
        for name in [*self._streams] if self._gone else [event.name or next(iter(self._streams), "")]:
            if name in self._streams:
                self._streams[name].put_nowait(event)

    async def known(self, place: str | None = None) -> Event:
        """Return "ready" with what is served, or "broken" with the reason.

        Args:
            place: which copy is asked, which `PlacingRouter` reads.

        Raises:
            RuntimeError: the worker has ended.
        """
        self._check()
        assert self._first is not None
        return self._first

    async def write(self, asked: Ask | Spell, place: str | None = None) -> AsyncIterator[list[Event]]:
        """Yield what the worker says of a request, several things at once if they have come, to its end.

        What counts a whole step goes to one of those who wait. Whoever leaves before the end cancels the request.

        Args:
            asked: what is asked for.
            place: which copy is asked, which `PlacingRouter` reads.

        Raises:
            RuntimeError: the worker has ended.
        """
        self._check()
        self._loop = asyncio.get_running_loop()
        heard = self._streams[asked.name] = asyncio.Queue()
        self._worker.tell(asked)
        left = asked.size
        over = False
        try:
            while not over:
                events = [await heard.get()]
                while not heard.empty():
                    events.append(heard.get_nowait())
                self._check()
                for event in events:
                    left -= event.kind == "gained" and bool(event.said["finish"])
                    over = over or event.kind in OVER or (event.kind == "gained" and not left)
                yield events
        finally:
            del self._streams[asked.name]
            if not over:
                self._worker.tell(Cancel(asked.name))

    def check_health(self) -> None:
        """Check that the worker is there and not in one step for too long; else Ray ends this copy and starts another.

        Raises:
            RuntimeError: it is not.
        """
        self._check()
        if self._worker.busy > self._stall:
            raise RuntimeError(f"The model's worker has been in one step for more than {self._stall:g} seconds.")

    def _check(self) -> None:
        if self._gone:
            raise RuntimeError("The model's worker has ended.")
