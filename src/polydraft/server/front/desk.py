"""The desk: it hands requests to the worker, what comes of them to those who wait, and starts the worker again."""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

from polydraft.errors import PolydraftError
from polydraft.options.commands.serve_options import Settings
from polydraft.server.front.logs import log
from polydraft.server.front.metrics import Metrics, Timing
from polydraft.server.wire.error_answers import STATUSES, Refused, ours
from polydraft.server.worker import WARNED, Ask, Cancel, Event, ProcessWorker, Spell, ThreadWorker

SOON = 2
"""After so many seconds a client may ask again whether the model is there."""
MOST_PAUSE = 30.0


class Ticket:
    """What a request, which its client knows by the id `request`, waits at for what comes of it.

    Attributes:
        deadline: when it is over, by the loop's clock.
        left: how many of its texts have not ended.
        held: tokens of its texts in progress, with their prompts.
    """

    def __init__(self, ask: Ask | Spell, timing: Timing, deadline: float, request: str = "") -> None:
        self.ask, self.timing, self.deadline, self.request = ask, timing, deadline, request or ask.name
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.left = ask.size
        self.held: dict[int, int] = {}

    async def next(self) -> Event:
        """Return the next event.

        Raises:
            Refused: the worker refused or lost the request, or its time is over.
        """
        rest = self.deadline - asyncio.get_running_loop().time()
        try:
            event = await asyncio.wait_for(self.events.get(), max(rest, 0))
        except TimeoutError:
            raise Refused(504, "The request took longer than this server allows.", None, "deadline") from None
        if event.kind not in ("refused", "failed"):
            return event
        message, code = event.said["message"], event.said["code"]
        status = STATUSES.get(str(code), 400 if event.kind == "refused" else 500)
        if status == 500:
            log("request failed", level=logging.ERROR, id=self.request, error=message)
            raise ours(self.request)
        raise Refused(status, message, event.said.get("param"), code, SOON if status == 503 else None)


class Desk:
    """Keep the worker and those who wait for it."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.tickets: dict[str, Ticket] = {}
        self.told: Mapping[str, Any] = {}
        self.stopping = False
        self.ready = False
        self.broken = ""
        self._known = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: ProcessWorker | ThreadWorker | None = None
        self._failures = 0
        self._seconds = 1.0  # what a text took lately
        self._idle = asyncio.Event()
        self._idle.set()
        self._restart: asyncio.Task[None] | None = None

    @property
    def outstanding(self) -> int:
        """How many texts are written or wait."""
        return sum(ticket.left for ticket in self.tickets.values())

    @property
    def pid(self) -> int | None:
        """The worker's process, if it has one of its own."""
        return self._worker.pid if self._worker is not None else None

    def launch(self) -> None:
        """Start the worker, if it is not there; where it cannot be started, `wait` says so."""
        if self._worker is not None:
            return
        self._known.clear()
        kind = ProcessWorker if self.settings.apart else ThreadWorker
        try:
            self._worker = worker = kind(self.settings, self._say)
        except Exception as error:  # noqa: BLE001  it may be started on a thread, where nobody would hear of it
            self.broken = f"The model's process cannot be started: {error}"
            self._known.set()
            return
        if self.stopping:  # it was not there yet when all was ended
            worker.end(0.0)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the model is loaded.

        Raises:
            PolydraftError: it cannot be.
        """
        self._known.wait(seconds)
        if self.broken:
            raise PolydraftError(self.broken)

    async def open(self, *, waits: bool = True) -> None:
        """Be there for requests: called when the loop runs.

        Args:
            waits: whether to wait until the model is loaded; otherwise requests are refused until it is.

        Raises:
            PolydraftError: it cannot be loaded.
        """
        self._loop = asyncio.get_running_loop()
        if not waits:
            threading.Thread(target=self.launch, daemon=True).start()
            return
        self.launch()
        await asyncio.to_thread(self.wait)

    async def close(self) -> None:
        """End the worker; one that is loading the model at once, since it has nothing to write down."""
        self.stopping = True
        if self._restart is not None:
            self._restart.cancel()
        worker, self._worker = self._worker, None
        if worker is not None:
            await asyncio.to_thread(worker.end, 5.0 if self.ready else 0.0)
        self._loop = None

    async def drain(self) -> None:
        """Refuse what comes, and wait until what is there has ended, or its time is over."""
        self.stopping = True
        log("draining", texts=self.outstanding)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self.settings.grace)

    def check_open(self) -> None:
        """Check that requests are taken.

        Raises:
            Refused: they are not.
        """
        if self.stopping:
            raise Refused(503, "The server is about to stop.", None, "stopping", SOON)
        if not self.ready:
            raise Refused(503, "The model is not loaded yet; try again soon.", None, "not_ready", SOON)

    async def submit(self, ask: Ask | Spell, request: str = "") -> tuple[Ticket, Event]:
        """Hand a request to the worker; return where to wait, and what it said first.

        Args:
            ask: what is asked for.
            request: the id that its client knows it by.

        Raises:
            Refused: the queue is full, or the worker refuses.
        """
        self.check_open()
        size = ask.size
        most = self.settings.batch_size + self.settings.max_queue
        if size > most:
            raise Refused(400, f"n asks for {size} texts at once, but at most {most} are taken.", "n")
        spells = sum(isinstance(ticket.ask, Spell) for ticket in self.tickets.values())
        if self.outstanding + size > most or (not size and spells >= most):
            raise Refused(429, "The queue is full; try again later.", None, "queue_full", self._patience())
        loop = asyncio.get_running_loop()
        ticket = Ticket(ask, Timing(self.metrics), loop.time() + self.settings.deadline, request)
        self.tickets[ask.name] = ticket
        self._idle.clear()
        self._tell(ask)
        try:
            return ticket, await ticket.next()
        except BaseException:
            self.leave(ticket)
            raise

    def leave(self, ticket: Ticket) -> None:
        """Forget a request; what is left of it is not written."""
        if self.tickets.pop(ticket.ask.name, None) is None:
            return
        if ticket.left:
            self._tell(Cancel(ticket.ask.name))
        if not self.tickets:
            self._idle.set()
        self._count()

    def _tell(self, told: Ask | Spell | Cancel) -> None:
        if self._worker is not None:
            self._worker.tell(told)

    def _patience(self) -> int:
        """Return after how many seconds a place in the queue is likely free."""
        return max(1, min(60, math.ceil(self._seconds * self.outstanding / self.settings.batch_size / 2)))

    def _say(self, event: Event) -> None:
        if event.kind == WARNED:
            log("warning", level=logging.WARNING, message=event.said["message"])
            return
        if event.kind in ("ready", "broken"):
            self.ready, self.broken = event.kind == "ready", str(event.said.get("message", ""))
            self.told = event.said if self.ready else self.told
            self._failures = 0 if self.ready else self._failures
            self._known.set()
        if event.kind == "gone":
            self.ready = False
            if not self._known.is_set():
                self.broken = "" if self.stopping else "The model's process ended while it was loading the model."
                self._known.set()
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._heard, event)

    def _heard(self, event: Event) -> None:
        if event.kind == "gone":
            self._lost(event)
            return
        if event.kind == "stepped":
            self.metrics.see("iteration_tokens_total", event.said["tokens"])
        ticket = self.tickets.get(event.name)
        if ticket is not None:
            self._note(ticket, event)
            ticket.events.put_nowait(event)

    def _note(self, ticket: Ticket, event: Event) -> None:
        if event.kind == "begun":
            ticket.timing.begun(event.said)
        elif event.kind == "joined":
            ticket.held[event.said["number"]] = event.said["prompt"]
            ticket.timing.joined(event.said, event.said["prompt"])
        elif event.kind == "gained":
            ticket.timing.gained(event.said)
            number = event.said["number"]
            ticket.held[number] = ticket.held.get(number, 0) + len(event.said["tokens"])
            if event.said["finish"]:
                ticket.left -= 1
                del ticket.held[number]
                self._seconds += (ticket.timing.seconds - self._seconds) / 8
        self._count()

    def _count(self) -> None:
        held = [tokens for ticket in self.tickets.values() for tokens in ticket.held.values()]
        self.metrics.put("num_requests_running", len(held))
        self.metrics.put("num_requests_waiting", self.outstanding - len(held))
        slots = self.settings.batch_size * int(self.told.get("context") or 1)
        self.metrics.put("kv_cache_usage_perc", sum(held) / slots)

    def _lost(self, event: Event) -> None:
        """Tell everybody that the worker is gone, and start another one."""
        if (self.stopping and self._worker is None) or not self.told:  # whoever waits for the first one is told
            return
        code, stalled = event.said.get("code"), event.said.get("stalled")
        log("worker gone", level=logging.ERROR, code=code, stalled=stalled, requests=len(self.tickets))
        what = "hung and was killed" if stalled else "ended"
        said = {"message": f"The model's process {what}; the request is lost, try again.", "code": "worker_gone"}
        for ticket in self.tickets.values():
            ticket.left = 0
            ticket.events.put_nowait(Event("failed", ticket.ask.name, said))
        self._worker = None
        if not self.stopping:
            self._restart = asyncio.get_running_loop().create_task(self._again())

    async def _again(self) -> None:
        pause = min(MOST_PAUSE, self._failures and 2.0**self._failures)
        self._failures += 1
        await asyncio.sleep(pause)
        begun = time.perf_counter()
        await asyncio.to_thread(self.launch)
        await asyncio.to_thread(self._known.wait)
        seconds = round(time.perf_counter() - begun, 3)
        log("worker started", pid=self.pid, ready=self.ready, seconds=seconds, error=self.broken or None)
