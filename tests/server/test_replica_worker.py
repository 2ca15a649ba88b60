"""Copies of the model as workers of the front, without Ray: a handle that is told what each copy does."""

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from serving import until

from polydraft.server import Settings
from polydraft.server.ray import replica
from polydraft.server.ray.replica_worker import ReplicaBoard, ReplicaPool, ReplicaWorker
from polydraft.server.worker import Ask, Cancel, Event


class Response:
    """What a copy says of a request, as it comes; an exception is raised, None ends it."""

    def __init__(self, place: str) -> None:
        self.place, self.cancelled = place, threading.Event()
        self._told: queue.Queue[Any] = queue.Queue()

    def put(self, told: Any) -> None:
        self._told.put(told)

    def cancel(self) -> None:
        self.cancelled.set()

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        while True:
            if self._told.empty():
                await asyncio.sleep(0.002)
                continue
            told = self._told.get()
            if told is None:
                return
            if isinstance(told, Exception):
                raise told
            yield told


class Handle:
    """A deployment whose copies are all ready."""

    def __init__(self) -> None:
        self.responses = defaultdict[str, list[Response]](list)
        self.known = self.write = self
        self.streams = False

    def options(self, *, stream: bool) -> "Handle":
        found = Handle()
        found.responses, found.streams = self.responses, stream
        return found

    def remote(self, *given: Any) -> Any:
        if not self.streams:
            return self._ready()
        asked, place = given
        self.responses[asked.name].append(Response(place))
        return self.responses[asked.name][-1]

    async def _ready(self) -> Event:
        return Event("ready")


class Place:
    """A place of the front: what its worker has said."""

    def __init__(self, pool: ReplicaPool) -> None:
        self.said = list[Event]()
        self.worker: ReplicaWorker = pool.hire(None, self.said.append)  # pyright: ignore[reportArgumentType]

    @property
    def kinds(self) -> list[str]:
        return [one.kind for one in self.said]


def pool_of(*names: str) -> tuple[Handle, ReplicaBoard, ReplicaPool]:
    handle, board = Handle(), ReplicaBoard()
    pool = ReplicaPool(handle, board)
    board.put(names)
    return handle, board, pool


def begun(handle: Handle, place: Place, name: str) -> Response:
    place.worker.tell(Ask(name, ("a",)))
    until(lambda: handle.responses[name], 5)
    return handle.responses[name][-1]


@pytest.mark.wrong_types
def test_places_get_the_copies_that_there_are_each_one_of_its_own() -> None:
    handle, board, pool = pool_of("a", "b")
    places = [Place(pool) for _ in range(3)]
    until(lambda: sum(one.kinds == ["ready"] for one in places) == 2, 5)
    assert sorted(str(one.worker.place) for one in places) == ["None", "a", "b"]
    board.put(("a", "b", "c"))
    until(lambda: all(one.kinds == ["ready"] for one in places), 5)
    first = begun(handle, places[0], "x")
    assert first.place == places[0].worker.place
    first.put([Event("begun", "x")])
    first.put([Event("gained", "x", {"finish": "eos"})])
    first.put(None)
    until(lambda: places[0].kinds == ["ready", "begun", "gained"], 5)


@pytest.mark.wrong_types
def test_a_copy_that_is_about_to_end_ends_what_it_has() -> None:
    handle, board, pool = pool_of("a")
    place = Place(pool)
    until(lambda: place.kinds == ["ready"], 5)
    response = begun(handle, place, "x")
    board.put(("b",))
    until(lambda: place.kinds == ["ready", "closing"], 5)
    response.put([Event("gained", "x", {"finish": "eos"})])
    response.put(None)
    until(lambda: place.kinds == ["ready", "closing", "gained", "gone"], 5)
    assert place.said[-1].said == {"lost": False} and not response.cancelled.is_set()


@pytest.mark.wrong_types
def test_a_copy_that_is_about_to_end_is_gone_when_its_last_request_is_cancelled() -> None:
    """Else its place would never get another copy."""
    handle, board, pool = pool_of("a")
    place = Place(pool)
    until(lambda: place.kinds == ["ready"], 5)
    response = begun(handle, place, "x")
    board.put(("b",))
    until(lambda: place.kinds == ["ready", "closing"], 5)
    place.worker.tell(Cancel("x"))
    until(lambda: place.kinds == ["ready", "closing", "gone"], 5)
    assert response.cancelled.wait(5)
    again = Place(pool)
    until(lambda: again.worker.place == "b", 5)


@pytest.mark.wrong_types
def test_a_copy_that_takes_nothing_more_is_no_loss_and_one_that_fails_is() -> None:
    """A loss counts against the requests that were there."""
    for error, kinds, lost in ((LookupError("a"), ["closing", "gone"], False), (OSError(), ["gone"], True)):
        handle, _, pool = pool_of("a")
        place = Place(pool)
        until(lambda place=place: place.kinds == ["ready"], 5)
        other = begun(handle, place, "y")
        begun(handle, place, "x").put(error)
        until(lambda place=place, kinds=kinds: place.kinds == ["ready", *kinds], 5)
        assert place.said[-1].said == {"lost": lost} and other.cancelled.wait(5)
        other.put([Event("gained", "y", {"finish": "eos"})])
        place.worker.tell(Ask("z", ("a",)))
        again = Place(pool)
        until(lambda again=again: again.kinds == ["ready"], 5)
        assert place.kinds == ["ready", *kinds] and "z" not in handle.responses


def test_a_copy_whose_worker_ended_before_anything_was_asked_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[Callable[[Event], None]]()

    class Ready:
        busy = 0.0

        def __init__(self, _: Settings, say: Callable[[Event], None]) -> None:
            said.append(say)
            say(Event("ready"))

    monkeypatch.setattr(replica, "TimedWorker", Ready)
    copy = replica.ModelReplica(Settings(ray=True))
    copy.check_health()
    said[0](Event("gone"))
    with pytest.raises(RuntimeError, match="The model's worker has ended"):
        copy.check_health()
