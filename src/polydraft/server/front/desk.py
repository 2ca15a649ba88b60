"""The desk: it hands requests to workers, what comes of them to those who wait, and asks again where one is gone."""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from polydraft.errors import PolydraftError
from polydraft.options.commands.serve_options import Settings
from polydraft.server.front.learners import LearnerPlace
from polydraft.server.front.logs import log
from polydraft.server.front.metrics import Metrics, Timing
from polydraft.server.front.slots import WorkerSlot, chosen
from polydraft.server.front.tickets import SOON, Attempt, Ticket
from polydraft.server.wire.error_answers import Refused
from polydraft.server.worker import WARNED, Ask, Event, Hire, Spell, Unlearning, new_worker
from polydraft.server.worker.asks import OVER
from polydraft.server.worker.teaching import LESSON

MOST_PAUSE = 30.0
ENDING = 5.0
"""Seconds that a worker has to end by itself."""
GLANCE = 0.05
"""Seconds between two looks at a worker that is to be replaced."""


class Desk:
    """Keep the workers and those who wait for them.

    Args:
        settings: the server's.
        metrics: where it measures.
        hire: makes a worker for a place that has none; where it is None these are processes or threads.
    """

    def __init__(self, settings: Settings, metrics: Metrics, hire: Hire | None = None) -> None:
        self.settings, self.metrics, self._hire = settings, metrics, hire
        self._least, places = settings.places
        texts = settings.batch_size + settings.kept_texts if places > 1 else 0
        self.slots = [WorkerSlot(number, texts) for number in range(places)]
        self.tickets: dict[str, Ticket] = {}
        self.told: Mapping[str, Any] = {}
        self.stopping = False
        self._closed = False
        self._known = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._backlog: list[Attempt] = []  # for which there is no worker yet
        self._seconds = 1.0  # what a text took lately
        self._idle = asyncio.Event()
        self._idle.set()
        self._restarts: set[asyncio.Task[None]] = set()
        self.learner = None if settings.learn is None else LearnerPlace(settings, metrics, self._unlearn)

    @property
    def outstanding(self) -> int:
        """How many texts are written or wait."""
        return sum(ticket.left for ticket in self.tickets.values())

    @property
    def pids(self) -> list[int]:
        """The workers' processes, where they have some of their own."""
        return [slot.worker.pid for slot in self.slots if slot.worker is not None and slot.worker.pid is not None]

    @property
    def ready(self) -> bool:
        """Whether there is a worker whose model is loaded."""
        return any(slot.ready for slot in self.slots)

    def launch(self) -> None:
        """Start the workers that are not there; where one cannot be started, `wait` says so."""
        for slot in self.slots:
            if slot.worker is None:
                self._launch(slot)

    def _launch(self, slot: WorkerSlot) -> None:
        slot.known.clear()
        slot.broken, slot.closed = "", False
        try:
            slot.worker = worker = (self._hire or new_worker)(self.settings, partial(self._say, slot))
        except Exception as error:  # noqa: BLE001  it may be started on a thread, where nobody would hear of it
            slot.broken = f"The model's process cannot be started: {error}"
            self._settled(slot)
            return
        if self._closed:  # it was not there yet when all was ended
            worker.end(0.0)
        elif slot.ready:  # so soon that nothing could be sent
            self._soon(self._dispatch)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all workers that there are at least have loaded the model.

        Raises:
            PolydraftError: one cannot.
        """
        self._known.wait(seconds)
        for slot in self.slots:
            if slot.broken:
                raise PolydraftError(slot.broken)

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
        """End the workers; those that load the model at once, since they have nothing to write down."""
        self.stopping = self._closed = True
        for task in self._restarts:
            task.cancel()
        ending: list[Any] = [] if self.learner is None else [asyncio.to_thread(self.learner.end, ENDING)]
        for slot in self.slots:
            worker, slot.worker = slot.worker, None
            if worker is not None:
                ending.append(asyncio.to_thread(worker.end, ENDING if slot.ready else 0.0))
        await asyncio.gather(*ending)
        self._loop = None

    async def drain(self) -> None:
        """Refuse what comes, and wait until what is there has ended, or its time is over."""
        self.stopping = True
        log("draining", texts=self.outstanding)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self.settings.grace)

    async def replace_workers(self) -> None:
        """Let workers be started anew, one after another, while the others take what comes.

        Each ends what it has begun; what it has not ended when its time is over is asked for again.
        """
        log("replacing workers")
        for slot in self.slots:
            worker, end = slot.worker, time.monotonic() + self.settings.grace
            if slot.closed or worker is None:  # somebody is at it already, or it is started anew just now
                continue
            slot.closed = True
            try:
                while slot.attempts and time.monotonic() < end:
                    await asyncio.sleep(GLANCE)
                await asyncio.to_thread(worker.end, ENDING)
                while slot.worker is worker or not slot.known.is_set():
                    await asyncio.sleep(GLANCE)
            finally:
                slot.closed = False
            self._dispatch()
            if not slot.ready:  # the others are better than nothing
                return

    def check_open(self) -> None:
        """Check that there is a worker for requests.

        Raises:
            Refused: there is none.
        """
        if self.stopping:
            raise Refused(503, "The server is about to stop.", None, "stopping", SOON)
        if not self.ready:
            raise Refused(503, "The model is not loaded yet; try again soon.", None, "not_ready", SOON)

    async def submit(self, ask: Ask | Spell, request: str = "") -> tuple[Ticket, Event]:
        """Hand a request to a worker; return where to wait, and what it said first.

        Args:
            ask: what is asked for.
            request: the id that its client knows it by.

        Raises:
            Refused: the queue is full, or the worker refuses.
        """
        if self.stopping or not (self.told and self._hopeful):
            self.check_open()
        size = ask.size
        texts = self.settings.batch_size * len(self.slots)
        most = texts + self.settings.max_queue
        if size > most:
            raise Refused(400, f"n asks for {size} texts at once, but at most {most} are taken.", "n")
        spells = sum(isinstance(ticket.ask, Spell) for ticket in self.tickets.values())
        if self.outstanding + size > most or (not size and spells >= most):
            patience = max(1, min(60, math.ceil(self._seconds * self.outstanding / texts / 2)))
            raise Refused(429, "The queue is full; try again later.", None, "queue_full", patience)
        ask = ask.seeded() if isinstance(ask, Ask) else ask
        deadline = asyncio.get_running_loop().time() + self.settings.deadline
        ticket = Ticket(ask, Timing(self.metrics), deadline, request)
        self.tickets[ask.name] = ticket
        self._idle.clear()
        self._backlog.append(Attempt(ask, ticket))
        self._dispatch()
        try:
            return ticket, await ticket.next()
        except BaseException:
            self.leave(ticket)
            raise

    def leave(self, ticket: Ticket) -> None:
        """Forget a request; what is left of it is not written."""
        if self.tickets.pop(ticket.ask.name, None) is None:
            return
        self._withdraw(ticket)
        if not self.tickets:
            self._idle.set()
        self._count()

    def _withdraw(self, ticket: Ticket) -> None:
        self._backlog = [one for one in self._backlog if one.ticket is not ticket]
        for slot in self.slots:
            for attempt in [one for one in slot.attempts.values() if one.ticket is ticket]:
                slot.drop(attempt)
            slot.guest = None if slot.guest is ticket else slot.guest
        self._dispatch()

    def _dispatch(self) -> None:
        """Give workers what waits for one."""
        waiting, self._backlog = self._backlog, []
        for attempt in waiting:
            slot = self._place(attempt)
            if slot is None:
                self._backlog.append(attempt)
            else:
                slot.send(attempt)

    def _place(self, attempt: Attempt) -> WorkerSlot | None:
        """Return who is to do something; None if it waits.

        A request under which workers ended as often as may be has its last one for itself: so another one that was
        beside it each time is not taken for the reason, and costs nobody else a try.
        """
        ticket, most = attempt.ticket, self.settings.retries
        open_ = [one for one in self.slots if one.ready and one.worker is not None and not one.closed]
        free = [slot for slot in open_ if slot.guest is None]
        if not ticket.lost or ticket.lost < most:
            return chosen(free, attempt, self.settings.batch_size // 2)
        own = next((slot for slot in open_ if slot.guest is ticket), None)
        own = own or min(free, key=lambda slot: slot.texts, default=None)
        if own is None:
            return None
        own.guest = ticket
        return own if all(one.ticket is ticket for one in own.attempts.values()) else None

    @property
    def _hopeful(self) -> bool:
        """Whether a worker is there or on its way."""
        return any(slot.ready or not slot.known.is_set() for slot in self.slots)

    def _soon(self, *called: Any) -> None:
        """Have something done by the loop, from whatever thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(*called)

    def _settled(self, slot: WorkerSlot) -> None:
        """Note that it is known whether a worker can load the model."""
        slot.known.set()
        if slot.broken or sum(one.known.is_set() for one in self.slots) >= self._least:
            self._known.set()

    def _say(self, slot: WorkerSlot, event: Event) -> None:
        if event.kind == WARNED:
            log("warning", level=logging.WARNING, message=event.said["message"])
            return
        if event.kind == LESSON:
            if self.learner is not None:
                self.learner.hear(event.said)
            return
        if event.kind == "ready" and self.learner is not None:
            self.learner.start()
            if self.learner.off and slot.worker is not None:
                slot.worker.tell(Unlearning())
        if event.kind == "closing":
            slot.closed = True
        if event.kind in ("ready", "broken"):
            slot.ready, slot.broken = event.kind == "ready", str(event.said.get("message", ""))
            self.told = event.said if slot.ready else self.told
            slot.failures = 0 if slot.ready else slot.failures
            self._settled(slot)
        if event.kind == "gone":
            slot.ready = False
            if not slot.known.is_set():
                slot.broken = "" if self.stopping else "The model's process ended while it was loading the model."
                self._settled(slot)
        self._soon(self._heard, slot, event)

    def _unlearn(self) -> None:
        """Let workers make no more lessons, since nobody learns from them."""
        for worker in [slot.worker for slot in self.slots if slot.worker is not None]:
            worker.tell(Unlearning())

    def _heard(self, slot: WorkerSlot, event: Event) -> None:
        if event.kind == "gone":
            self._lost(slot, event)
        elif event.kind == "ready":
            self._dispatch()
        elif event.kind == "stepped":
            self.metrics.see("iteration_tokens_total", event.said["tokens"])
        if event.kind in ("gone", "ready"):
            self.metrics.put("workers_ready", sum(one.ready for one in self.slots))
        attempt = slot.attempts.get(event.name)
        if attempt is None:
            return
        ticket, news = attempt.ticket, attempt.ticket.news(attempt, event)
        if isinstance(news, Attempt):  # another text than what was told: that one goes on
            slot.drop(attempt)
            self.metrics.add_by("request_resent", "law")
            self._backlog.insert(0, news)
            self._dispatch()
        elif news is not None:
            self._note(ticket, news)
            ticket.events.put_nowait(news)
        if event.kind in OVER or (event.kind == "gained" and not attempt.left):
            slot.attempts.pop(event.name, None)

    def _note(self, ticket: Ticket, event: Event) -> None:
        if event.kind == "begun":
            ticket.timing.begun(event.said)
        elif event.kind == "joined":
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
        if self.learner is not None:
            self.learner.note(busy=bool(held))
        self.metrics.put("num_requests_waiting", self.outstanding - len(held))
        slots = self.settings.batch_size * len(self.slots) * int(self.told.get("context") or 1)
        self.metrics.put("kv_cache_usage_perc", sum(held) / slots)

    def _lost(self, slot: WorkerSlot, event: Event) -> None:
        """Ask again for what a worker had to do that is gone, and start another one."""
        if self._closed or not self.told:  # whoever waits for the first ones is told
            return
        left, failed = slot.emptied(), list[Ticket]()
        code, stalled = event.said.get("code"), event.said.get("stalled")
        if not slot.closed or event.said.get("lost"):
            requests = len({id(one.ticket) for one in left})
            log("worker gone", level=logging.ERROR, worker=slot.number, code=code, stalled=stalled, requests=requests)
            self.metrics.add("worker_lost")
            for ticket in dict.fromkeys(one.ticket for one in left if not one.waits):
                ticket.lost += 1
                if ticket.lost > self.settings.retries:
                    failed.append(ticket)
        again = [new for one in left if one.ticket not in failed for new in one.restarts()]
        for _ in again:
            self.metrics.add_by("request_resent", "seed")
        self._backlog[:0] = again
        for ticket in failed:
            self._fail(ticket, "hung and was killed" if stalled else "ended")
        if not slot.failures:
            slot.known.clear()  # another one is on its way
        task = asyncio.get_running_loop().create_task(self._again(slot))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)
        self._dispatch()

    def _fail(self, ticket: Ticket, what: str) -> None:
        """Tell a client that its request is lost: that it may try again, or that this will help nobody."""
        self._withdraw(ticket)
        message, code = f"The model's process {what}; the request is lost, try again.", "worker_gone"
        if ticket.lost > max(1, self.settings.retries):
            message = (
                f"The model's process {what} while it was at this request, after {ticket.lost - 1} others had ended at "
                "it, and had nothing else to do; it is not tried again."
            )
            code = "fatal_request"
        ticket.left = 0
        ticket.held.clear()
        ticket.events.put_nowait(Event("failed", ticket.ask.name, {"message": message, "code": code}))

    async def _again(self, slot: WorkerSlot) -> None:
        pause = min(MOST_PAUSE, slot.failures and 2.0**slot.failures)
        slot.failures += 1
        await asyncio.sleep(pause)
        begun = time.perf_counter()
        await asyncio.to_thread(self._launch, slot)
        await asyncio.to_thread(slot.known.wait)
        seconds, pid = round(time.perf_counter() - begun, 3), slot.worker and slot.worker.pid
        log("worker started", worker=slot.number, pid=pid, ready=slot.ready, seconds=seconds, error=slot.broken or None)
        if not self._hopeful:
            for ticket in dict.fromkeys(one.ticket for one in self._backlog):
                self._fail(ticket, "ended and cannot be started anew")
