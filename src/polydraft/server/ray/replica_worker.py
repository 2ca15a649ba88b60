"""Copies of the model as workers of the front: each place of its desk has one, which comes and goes as Ray has it."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context
from typing import Any

from polydraft.options.commands.serve_options import Settings
from polydraft.server.worker import Cancel, Event
from polydraft.server.worker.writing import Say

PATIENCE = 10.0
"""Seconds within which a copy says that it is there."""
PAUSE = 1.0
"""After so many seconds a copy that did not is asked again, if it still is among those that there are."""


class ReplicaBoard:
    """The copies that are there, as Ray Serve has told this process, and who is to hear when they change."""

    def __init__(self) -> None:
        self._there: frozenset[str] = frozenset()
        self._listeners: list[Callable[[], None]] = []
        self._changing = threading.Lock()

    @property
    def there(self) -> frozenset[str]:
        """The names of the copies that take requests."""
        return self._there

    def put(self, names: Iterable[str]) -> None:
        """Note which copies there are, from whatever thread."""
        with self._changing:
            self._there = frozenset(names)
            for listener in self._listeners:
                listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Have something called at every change, on a thread of Ray's."""
        with self._changing:
            self._listeners.append(listener)


BOARD = ReplicaBoard()
"""Ray makes the router of a process itself, so that it and the pool meet here."""


class ReplicaPool:
    """The copies that there are, and the places that have one or wait for one; all of it on a loop of its own.

    A copy that does not answer loses its place, with all that it had to do, whether it has died or cannot be reached:
    what it says later is of attempts that are over. It is given a place again when it says that it is there.

    Args:
        handle: of the deployment.
        board: where it stands which copies there are.
    """

    def __init__(self, handle: Any, board: ReplicaBoard = BOARD) -> None:
        self.handle, self._board = handle, board
        self._waiting: list[ReplicaWorker] = []
        self._held: dict[str, ReplicaWorker] = {}
        self._aside: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        board.listen(lambda: self.call(self._match))
        self.start(self._wake())

    async def _wake(self) -> None:
        """Ask for something, so that Ray makes the router, which says what copies there are."""
        with contextlib.suppress(Exception):
            await self.handle.known.remote(None)
        self._match()

    def hire(self, _: Settings, say: Say) -> "ReplicaWorker":
        """Return a worker for a place, which says "ready" when there is a copy for it."""
        worker = ReplicaWorker(self, say)
        self.call(self._join, worker)
        return worker

    def call(self, do: Any, *given: Any) -> None:
        """Have something done on the loop, from whatever thread.

        In no context: calls of one HTTP request's would have that request's id all of them, and Ray's router, which
        tells them apart by it, would turn round and round when two are there at a time.
        """
        self._loop.call_soon_threadsafe(do, *given, context=Context())

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Have work done on the loop, from whatever thread."""
        self.call(self.begin, work)

    def begin(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Begin work, on the loop."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def free(self, worker: "ReplicaWorker") -> None:
        """Let a worker have no copy any more."""
        if worker in self._waiting:
            self._waiting.remove(worker)
        if worker.place is not None and self._held.get(worker.place) is worker:
            del self._held[worker.place]
            self._put_aside(worker.place)

    def _join(self, worker: "ReplicaWorker") -> None:
        self._waiting.append(worker)
        self._match()

    def _match(self) -> None:
        """Give those that wait the copies that nobody has; let those end whose copy is not there."""
        there = self._board.there
        for place, worker in [*self._held.items()]:
            if place not in there and worker.place is not None:
                worker.close()
        for place in sorted(there - self._held.keys() - self._aside):
            if self._waiting:
                worker = self._held[place] = self._waiting.pop(0)
                self.begin(self._ask(worker, place))

    async def _ask(self, worker: "ReplicaWorker", place: str) -> None:
        """Ask a copy whether it is there; a place whose copy does not answer waits for another."""
        try:
            first: Event | None = await asyncio.wait_for(_answered(self.handle.known.remote(place)), PATIENCE)
        except Exception:  # noqa: BLE001  Ray's errors, and those of a copy that ended meanwhile
            first = None
        if first is not None and not worker.over:
            worker.take(place, first)
        else:
            del self._held[place]
            self._put_aside(place)
            self._waiting[:0] = [] if worker.over else [worker]
        self._match()

    def _put_aside(self, place: str) -> None:
        self._aside.add(place)
        self._loop.call_later(PAUSE, self._look_again, place)

    def _look_again(self, place: str) -> None:
        self._aside.discard(place)
        self._match()


async def _answered(response: Any) -> Any:
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise


class ReplicaWorker:
    """One copy of the model, as a worker: what it is told goes to that copy, a stream for every request.

    Attributes:
        place: the copy's name; None as long as there is none.
        over: whether "gone" was said.
    """

    pid: int | None = None

    def __init__(self, pool: ReplicaPool, say: Say) -> None:
        self._pool, self._say = pool, say
        self.place: str | None = None
        self.over, self._closing = False, False
        self._streams: dict[str, asyncio.Task[None]] = {}

    def tell(self, told: Any) -> None:
        """Send the copy a request, or cancel one."""
        self._pool.call(self._tell, told)

    def end(self, seconds: float) -> None:
        """Leave the copy alone: it is Ray that ends it, after what it has begun."""
        self._pool.call(self._leave)

    def take(self, place: str, first: Event) -> None:
        """Have a copy, and take what it says first."""
        self.place = place
        self._say(first)
        if first.kind != "ready":
            self._leave()

    def close(self) -> None:
        """Take nothing else, since the copy is not among those that there are, and end with the last of its streams."""
        if not self._closing:
            self._closing = True
            self._say(Event("closing"))
        self._leave_if_over()

    def _leave_if_over(self) -> None:
        if self._closing and not self._streams:
            self._leave()

    def _tell(self, told: Any) -> None:
        if isinstance(told, Cancel):
            stream = self._streams.pop(told.name, None)
            if stream is not None:
                stream.cancel()
            self._leave_if_over()
        elif not self.over:
            self._streams[told.name] = self._pool.begin(self._stream(told))

    async def _stream(self, asked: Any) -> None:
        response = self._pool.handle.options(stream=True).write.remote(asked, self.place)
        try:
            async for events in response:
                for event in events:
                    self._say(event)
        except asyncio.CancelledError:
            response.cancel()
            raise
        except LookupError:  # it was not sent: the copy takes nothing any more, and no request is to blame
            self._say(Event("closing"))
            self._leave()
        except Exception:  # noqa: BLE001  the copy has died, cannot be reached, or its worker has ended
            self._leave(lost=True)
        finally:
            self._streams.pop(asked.name, None)
        self._leave_if_over()

    def _leave(self, *, lost: bool = False) -> None:
        """Be gone, with all that there was to do; `lost` if the copy ended while it was at it."""
        if self.over:
            return
        self.over = True
        for stream in [*self._streams.values()]:
            stream.cancel()
        self._pool.free(self)
        self._say(Event("gone", said={"lost": lost}))
