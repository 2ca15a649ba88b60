"""A worker in this process, on a thread of its own: for tests, and for those who embed the server."""

import queue
import threading
from typing import Any

from polydraft.options.commands.serve_options import Settings
from polydraft.server.worker.asks import Event, Stop
from polydraft.server.worker.working import work
from polydraft.server.worker.writing import Say


class ThreadWorker:
    """Run a worker on a thread.

    Args:
        settings: the server's.
        say: takes what it says, on that thread.
    """

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
