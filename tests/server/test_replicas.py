"""Copies of the model that come and go, as Ray has it: who has a place, who loses it, and what becomes of requests."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from serving import until
from test_lost_workers import TinyPair, check_texts, number_of, running_app, tiny, under_load

from polydraft.errors import InvalidParameter, PolydraftError
from polydraft.options.commands.option_groups import replica_range
from polydraft.server import Settings
from polydraft.server.ray import replica_worker
from polydraft.server.ray.replica import ModelReplica, TimedWorker
from polydraft.server.ray.replica_worker import ReplicaBoard, ReplicaPool
from polydraft.server.worker import Event

__all__ = ["tiny"]


class Call:
    """What a call of a deployment returns: to be awaited, or gone through."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __await__(self) -> Any:
        return self._answer.__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._answer

    def cancel(self) -> None:
        """Cancel it; whoever goes through it was cancelled as well, which ends the stream."""


class Deployment:
    """A deployment whose copies are objects of this process; a call names its copy last."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self.board = settings, ReplicaBoard()
        self.copies: dict[str, ModelReplica] = {}
        self.known, self.write = self, self
        self._stream = False
        self.asked: list[str] = []

    def add(self, *names: str) -> None:
        """Start copies."""
        for name in names:
            self.copies[name] = ModelReplica(self._settings)
        self.board.put(self.copies)

    def kill(self, name: str) -> None:
        """End a copy without a word: whoever has a stream of it gets an error, and it still is on the board."""
        self.copies[name]._worker.end(0.0)

    def drop(self, name: str) -> None:
        """Let a copy take nothing else; what it has begun it ends."""
        self.board.put(one for one in self.copies if one != name)

    def options(self, *, stream: bool) -> Any:
        """Return the same for calls that are streams."""
        assert stream
        return _Streams(self)

    def remote(self, place: str | None) -> Call:
        """Ask a copy whether it is there."""
        self.asked.append(str(place))
        return Call(self.copies[place or next(iter(self.copies))].known(place))


class _Streams:
    def __init__(self, deployment: Deployment) -> None:
        self._deployment, self.write = deployment, self

    def remote(self, asked: Any, place: str) -> Call:
        return Call(self._deployment.copies[place].write(asked, place))


@pytest.fixture
def deployment(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Deployment]]:
    """Return a function that makes a deployment of a pair in double precision; its copies end with the test."""
    made = list[Deployment]()
    monkeypatch.setattr(replica_worker, "PAUSE", 0.1)

    def new(**settings: Any) -> Deployment:
        made.append(Deployment(Settings(**exact(tiny), **settings)))
        return made[-1]

    yield new
    for one in made:
        for copy in one.copies.values():
            copy._worker.end(10)


def exact(tiny: TinyPair) -> dict[str, Any]:
    return {"target": tiny.target, "draft": tiny.draft, "dtype": "float64", "ray": True}


@pytest.mark.parametrize("known", [False, True])
def test_a_lost_copy_costs_no_request(known: bool, tiny: TinyPair, deployment: Any) -> None:
    """Whether Ray lists it for a while, as where a node has lost its power, or drops it before its streams break."""
    copies = deployment(replicas="2")
    copies.add("a", "b")
    pool = ReplicaPool(copies, copies.board)
    with running_app(pool.hire, **exact(tiny), replicas="2") as (address, desk):
        assert desk.ready

        async def kill() -> None:
            if known:
                copies.drop("b")
            copies.kill("b")

        texts = asyncio.run(under_load(address, 24, kill))
        assert number_of(address, "worker_lost_total") == 1 and number_of(address, "request_resent_total") > 0
        assert number_of(address, "workers_ready") == 1
        copies.drop("b")
        asked = copies.asked.count("b")
        time.sleep(0.5)
        assert (
            asked > (not known) and copies.asked.count("b") <= asked + 1
        )  # it was asked again until it was not there any more
        copies.add("c")
        until(lambda: number_of(address, "workers_ready") == 2, 60)
    check_texts(tiny, texts)


def test_a_copy_that_is_replaced_ends_what_it_has(tiny: TinyPair, deployment: Any) -> None:
    copies = deployment(replicas="2")
    copies.add("a", "b")
    pool = ReplicaPool(copies, copies.board)
    with running_app(pool.hire, **exact(tiny), replicas="2") as (address, desk):

        async def replace() -> None:
            copies.add("c")  # a new one comes first, and there is no place for it until an old one goes
            copies.drop("a")

        texts = asyncio.run(under_load(address, 24, replace))
        assert number_of(address, "worker_lost_total") == 0 and number_of(address, "request_resent_total") == 0
        until(lambda: number_of(address, "workers_ready") == 2, 60)
        assert {slot.worker.place for slot in desk.slots} == {"b", "c"}
    check_texts(tiny, texts)


def test_copies_come_with_the_load(tiny: TinyPair, deployment: Any) -> None:
    copies = deployment(replicas="1:3")
    copies.add("a")
    pool = ReplicaPool(copies, copies.board)
    with running_app(pool.hire, **exact(tiny), replicas="1:3") as (address, desk):
        assert len(desk.slots) == 3 and number_of(address, "workers_ready") == 1
        copies.add("b")
        until(lambda: number_of(address, "workers_ready") == 2, 60)


def test_a_copy_that_cannot_load_says_so_once(tmp_path: Any) -> None:
    copies = Deployment(Settings(target=str(tmp_path / "nothing"), ray=True))
    copies.add("a")
    pool, said = ReplicaPool(copies, copies.board), list[Event]()
    pool.hire(copies._settings, said.append)
    until(lambda: len(said) == 2)
    assert [one.kind for one in said] == ["broken", "gone"]
    assert said[0].said["message"].startswith("Node ") and str(tmp_path) in said[0].said["message"]
    copies.copies["a"].check_health()  # so Ray does not start it again and again


def test_a_copy_that_hangs_is_not_healthy() -> None:
    released, settings = threading.Event(), Settings(stall=1)
    copy = object.__new__(ModelReplica)
    copy._gone, copy._stall = False, settings.stall

    class Hanging(TimedWorker):
        def _run(self, settings: Settings) -> None:
            self._hear(0.0)  # it was told something, and is at it
            released.wait(20)

    copy._worker = Hanging(settings, lambda _: None)
    try:
        copy.check_health()
        time.sleep(1.1)
        with pytest.raises(RuntimeError, match="in one step for more than 1 seconds"):
            copy.check_health()
    finally:
        released.set()


@pytest.mark.parametrize(
    ("text", "found"), [(None, (1, 1)), ("1", (1, 1)), ("4", (4, 4)), ("1:3", (1, 3)), ("2:2", (2, 2))]
)
def test_numbers_of_copies(text: str | None, found: tuple[int, int]) -> None:
    assert replica_range(text) == found


@pytest.mark.parametrize("text", ["0", "", ":", "3:1", "-1", "1:", ":2", "a", "1:2:3", "0:2", "1.5", "999999"])
def test_no_numbers_of_copies(text: str) -> None:
    with pytest.raises(InvalidParameter, match="--replicas must be a number"):
        replica_range(text)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"replicas": "2"}, "--replicas is about a Ray cluster: give --ray too, or leave it out."),
        ({"address": "a:1"}, "--address is about a Ray cluster: give --ray too, or leave it out."),
        ({"ray": True, "workers": 2}, "--workers counts processes of one machine: with --ray give --replicas."),
        ({"ray": True, "parallel": "2"}, "With --ray every copy of the model is whole, on one device"),
        ({"ray": True, "device": "cuda:1"}, "With --ray the cluster chooses the GPU, not --device cuda:1: write cuda."),
        ({"ray": True, "draft_device": "cuda:0"}, "not --draft-device cuda:0: write cuda."),
    ],
)
def test_what_is_not_for_a_cluster_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PolydraftError) as refused:
        Settings(**given)
    assert sentence in str(refused.value)
