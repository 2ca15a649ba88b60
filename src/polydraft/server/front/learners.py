"""The learner's place: it starts with the first worker, is fed without waiting, and starts again where it ends."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from polydraft.options.commands.serve_options import Settings
from polydraft.server.front.logs import log
from polydraft.server.front.metrics import Metrics
from polydraft.server.worker.asks import Event, Stop
from polydraft.server.worker.learning import LEARNING, LOOKED, READS, run_learner
from polydraft.server.worker.workers import process_context

RESTARTS = 3
"""How often a learner is started anew; then there is none."""
MOST_TOLD = 64
"""Lessons that wait for the learner; what comes then is not learnt from."""


class LearnerPlace:
    """Keep a learner going, whatever becomes of it: no request waits for it or is lost with it.

    Args:
        settings: the server's.
        metrics: where it is counted.
        over: called when there is none any more.

    Attributes:
        off: whether there is none any more: it ended too often, or another server learns in the folder.
        pid: its process, if it has one of its own.
    """

    def __init__(self, settings: Settings, metrics: Metrics, over: Callable[[], None]) -> None:
        self._settings, self._metrics, self._over = settings, metrics, over
        self._told: queue.Queue[Any] = queue.Queue(MOST_TOLD)
        self._begun, self._ended, self._busy = threading.Lock(), threading.Event(), False
        self._process: Any = None
        self.off, self.pid = False, None

    def start(self) -> None:
        """Start it, unless it was: several workers may be ready at once, and what begins it is held for ever."""
        if self._begun.acquire(blocking=False):
            threading.Thread(target=self._run, name="learner", daemon=True).start()

    def hear(self, lesson: Mapping[str, Any]) -> None:
        """Take a lesson, unless too many wait."""
        if not self.off:
            with contextlib.suppress(queue.Full):
                self._told.put_nowait(lesson)

    def note(self, *, busy: bool) -> None:
        """Take note whether texts are written."""
        if busy is not self._busy and self._begun.locked() and not self.off:
            with contextlib.suppress(queue.Full):
                self._told.put_nowait(busy)
                self._busy = busy  # else it is told the next time

    def end(self, seconds: float) -> None:
        """Let it stop; by force after so many seconds."""
        self._ended.set()
        self._clear()
        self._told.put(Stop())
        process = self._process
        if process is not None:
            process.join(seconds)
            if process.is_alive() and self._settings.apart:
                process.kill()
                process.join()

    def _clear(self) -> None:
        """Drop what nobody is to be told any more."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._told.get_nowait()

    def _run(self) -> None:
        why = ""
        for number in range(1 + RESTARTS):
            if number:
                self._metrics.add("learn_restarts")
            self._busy = False  # as far as a new one knows
            ours, theirs = Pipe()
            self._start(theirs)
            why = self._listen(ours)
            if self._ended.is_set():
                return
            if why == READS:
                said = "another server learns in the folder, so this one uses its versions and learns nothing"
                log("reading versions", folder=self._settings.learn, message=said)
                break
            log("learner gone", level=logging.INFO, message=why or None)
        else:
            said = f"the learner ended {1 + RESTARTS} times, the last time for this reason, and is off: {why}"
            log("warning", level=logging.WARNING, message=said)
        self.off = True
        self._clear()
        self._over()

    def _start(self, pipe: Connection) -> None:
        if not self._settings.apart:
            self._process = threading.Thread(target=run_learner, args=(self._settings, pipe), daemon=True)
            self._process.start()
            return
        self._process = process_context().Process(target=run_learner, args=(self._settings, pipe), daemon=True)
        self._process.start()
        self.pid = self._process.pid
        pipe.close()

    def _listen(self, pipe: Connection) -> str:
        """Hear what a learner says, until it is gone; return why, as far as it said so."""
        over = threading.Event()
        speaking = threading.Thread(target=self._speak, args=(pipe, over), daemon=True)
        speaking.start()
        why = ""
        try:
            while True:
                event: Event = pipe.recv()
                if event.kind == LEARNING:
                    for name, value in event.said["counts"].items():
                        self._metrics.add(name, value)
                    for name, value in event.said["state"].items():
                        self._metrics.put(name, value)
                elif event.kind == LOOKED:
                    unwritten = event.said["outcome"] == "unwritten"
                    log("looked at weights", level=logging.WARNING if unwritten else logging.INFO, **event.said)
                else:
                    why = READS if event.kind == READS else str(event.said["message"])
        except (EOFError, OSError):
            over.set()
            speaking.join()
            self._process.join()
            pipe.close()
        return why or ("its process was killed" if self._settings.apart else "")

    def _speak(self, pipe: Connection, over: threading.Event) -> None:
        with contextlib.suppress(OSError, ValueError):
            while not over.is_set():
                with contextlib.suppress(queue.Empty):
                    pipe.send(self._told.get(timeout=0.2))
