"""Where a worker runs: in a process of its own, where an error in its depths ends no server, or on a thread."""

import atexit
import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from polydraft.machine_code import COMPILING, told_first
from polydraft.options.commands.serve_options import Settings
from polydraft.server.worker.asks import Event, Stop
from polydraft.server.worker.working import work
from polydraft.server.worker.writing import Say

WARNED = "warned"
"""An event that is for the log alone."""
ALIVE = "alive"
"""An event that is for the watch alone: how long the step in progress takes."""
MOST_TOLD = 4000
"""Characters of a traceback in the log: its end, where it says what happened."""
BEAT = 1.0
"""A worker gives a sign of life after so many seconds, and is looked after as often."""


class Worker(Protocol):
    """Who writes texts, wherever it runs; what it says goes to whoever made it, last of all "gone".

    Attributes:
        pid: its process, if it has one of its own.
    """

    pid: int | None

    def tell(self, told: Any) -> None:
        """Tell it something, without waiting; nothing if it is gone."""
        ...

    def end(self, seconds: float) -> None:
        """Let it stop; after so many seconds by force, where that is possible."""
        ...


Hire = Callable[[Settings, Say], Worker]
"""Make a worker, which loads the model and then says so."""


def new_worker(settings: Settings, say: Say) -> Worker:
    """Start one of a server's workers, with its share of the threads."""
    if settings.workers > 1:
        threads = settings.threads or torch.get_num_threads()
        settings = replace(settings, threads=max(1, threads // settings.workers))
    return (ProcessWorker if settings.apart else ThreadWorker)(settings, say)


class ProcessWorker:
    """Run a worker in a child process, to which plain values go through a pipe; one that hangs is killed.

    On a thread `say` takes what it says; "gone" when the process has ended, for whatever reason.
    """

    def __init__(self, settings: Settings, say: Say) -> None:
        context = process_context()
        self._pipe, theirs = context.Pipe()
        self._say, self._stall = say, settings.stall
        self._silent: float | None = None  # seconds, as the watch counts them; None as long as the model is loaded
        self._over = threading.Event()
        self._told: queue.Queue[Any] = queue.Queue()
        self._process = context.Process(target=run, args=(settings, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.pid: int | None = self._process.pid
        for task in (self._listen, self._speak, self._watch):
            threading.Thread(target=task, daemon=True).start()

    def tell(self, told: Any) -> None:
        """Tell the worker something; nothing if it is gone, which is said elsewhere. It does not wait for a step."""
        self._told.put(told)

    def end(self, seconds: float) -> None:
        """Tell the worker to stop, wait for it, and kill it if it does not."""
        self.tell(Stop())
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _speak(self) -> None:
        """Send what is to be told: a pipe that is full waits until the worker listens."""
        with contextlib.suppress(OSError, ValueError):
            while True:
                told = self._told.get()
                self._pipe.send(told)
                if isinstance(told, Stop):
                    return

    def _listen(self) -> None:
        try:
            while True:
                for event in self._pipe.recv():
                    if event.kind == "ready" or self._silent is not None:
                        self._silent = float(event.said["busy"]) if event.kind == ALIVE else 0.0
                    if event.kind != ALIVE:
                        self._say(event)
        except (EOFError, OSError):
            self._over.set()
            self._process.join()
            stalled = self._silent is not None and self._silent > self._stall
            self._say(Event("gone", said={"code": self._process.exitcode, "stalled": stalled or None}))

    def _watch(self) -> None:
        """Kill a process that gives no sign of life, or has been in one step for too long.

        Time is counted by the rounds of this loop: where all processes stood still, nobody is to blame.
        """
        while not self._over.wait(BEAT):
            if self._silent is not None:
                self._silent += BEAT
                if self._silent > self._stall:
                    self._process.kill()
                    return


def process_context() -> Any:
    """Return how processes are made: where that is possible by one that has imported everything, which saves seconds.

    It never touches the model or a device, so that what it makes is as good as new.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    return context


if getattr(getattr(sys.modules["__main__"], "main", None), "__module__", "") == "multiprocessing.forkserver":
    # This process makes the others and does nothing else. When the server and its workers have ended it ends, too, and
    # to free all that it has imported would take it seconds.
    atexit.register(os._exit, 0)


def run(settings: Settings, pipe: Connection) -> None:
    """Be the child process. Ctrl-C is the parent's to hear, and where the parent is gone there is nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    said, speaking, begun = list[Event](), threading.Lock(), [0.0]

    def send(events: list[Event]) -> None:
        with speaking:
            pipe.send(events)

    def hear(seconds: float | None) -> Any:
        if said:
            send(said)
            said.clear()
        if seconds != 0:  # there is nothing to be done
            begun[0] = 0.0
        told = pipe.recv() if pipe.poll(seconds) else None
        begun[0] = time.monotonic()
        return told

    def warn(message: object, *_: object, **__: object) -> None:
        with contextlib.suppress(OSError):
            send([Event(WARNED, said={"message": str(message)})])

    def live() -> None:
        with contextlib.suppress(OSError):
            while True:
                time.sleep(BEAT)
                busy = time.monotonic() - begun[0] if begun[0] else 0.0
                send([Event(ALIVE, said={"busy": busy})])

    threading.Thread(target=live, daemon=True).start()
    warnings.showwarning = warn
    tell_records(warn)
    try:
        with told_first(partial(warn, COMPILING)):
            work(settings, hear, said.append)
        if said:
            send(said)
    except (EOFError, OSError):
        return
    except Exception as error:  # noqa: BLE001  the log is the parent's to write
        warn(traced(error))
        raise SystemExit(1) from None


def traced(error: BaseException) -> str:
    """Return where an error happened, and how it came to that."""
    return "".join(traceback.format_exception(error))[-MOST_TOLD:]


class _Telling(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._tell(self.format(record))
        except Exception:  # noqa: BLE001  as `logging` has it: a record that cannot be written is nobody's error
            self.handleError(record)


def tell_records(tell: Callable[[str], None]) -> None:
    """Tell of warnings and errors of all loggers, with their tracebacks; the handlers that libraries gave them go."""
    for one in list(logging.root.manager.loggerDict.values()):
        if isinstance(one, logging.Logger) and one.handlers:
            one.handlers.clear()
            one.propagate = True
    logging.root.handlers[:] = [_Telling(tell)]


class ThreadWorker:
    """Run a worker on a thread of this process: for tests, and for those who embed the server."""

    pid: int | None = None

    def __init__(self, settings: Settings, say: Say) -> None:
        self._told: queue.Queue[Any] = queue.Queue()
        self._say = say
        self._thread = threading.Thread(target=self._run, args=(settings,), daemon=True)
        self._thread.start()

    def tell(self, told: Any) -> None:
        """Tell the worker something."""
        self._told.put(told)

    def end(self, seconds: float) -> None:
        """Tell the worker to stop, and wait for it."""
        self._told.put(Stop())
        self._thread.join(seconds)

    def _run(self, settings: Settings) -> None:
        try:
            work(settings, self._hear, self._say)
        finally:
            self._say(Event("gone"))

    def _hear(self, seconds: float | None) -> Any:
        try:
            return self._told.get(timeout=seconds) if seconds != 0 else self._told.get_nowait()
        except queue.Empty:
            return None
