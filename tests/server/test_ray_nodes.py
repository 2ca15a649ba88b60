"""A Ray cluster of two nodes, one of which is killed under load; what a cluster refuses; its copies started anew."""

import asyncio
import json
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="make test-ray installs Ray")

import httpx
import ray
from ray.cluster_utils import Cluster
from serving import alone, until
from test_load import GRAMMARS
from test_lost_workers import COUNT, TinyPair, body, number_of, tiny

from polydraft.cluster import check_nodes, joined
from polydraft.errors import ClusterError, InvalidParameter, MissingExtra
from polydraft.server import Settings
from polydraft.server.worker.asks import SEED_STEP

with warnings.catch_warnings():  # of pydantic, about Ray's own classes, as they are imported
    warnings.simplefilter("ignore")
    from polydraft.server.ray.deploying import RayServer

__all__ = ["tiny"]
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]
STORE = 80 << 20
"""Bytes of a node's object store, of which 75 MiB are the least."""


@contextmanager
def two_nodes(**second: Any) -> Iterator[Cluster]:
    """Run a cluster of two nodes of one CPU each in this machine, and join it."""
    small = {"num_cpus": 1, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        cluster.add_node(**small, **second)
        with pytest.MonkeyPatch.context() as changed:
            changed.setenv("RAY_USAGE_STATS_ENABLED", "0")
            with joined(cluster.address):
                yield cluster
    finally:
        cluster.shutdown()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def served_on_ray(**settings: Any) -> Iterator[tuple[str, RayServer]]:
    """Serve from the cluster that was joined."""
    port = free_port()
    server = RayServer(ray, Settings(ray=True, port=port, **settings))
    try:
        server.check()
        server.start()
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.stop()


@dataclass
class Told:
    """What came of a request: the texts of its choices, and when something of it came."""

    texts: list[str]
    times: list[float]


def asked(number: int) -> dict[str, Any]:
    """Return one of many requests: half are streams, and every tenth has two choices."""
    usual = {"stream": number % 2 == 0, "n": 2 if number % 10 == 5 else 1}
    found = {**body(number), **usual, "temperature": (0.0, 0.8, 1.0)[number % 3]}
    if not found["stream"]:
        del found["stream_options"]
    return found


def expected(tiny: TinyPair, number: int) -> list[str]:
    """Return the texts of a request's seeds, each alone."""
    own, found = asked(number), list[str]()
    for choice in range(own["n"]):
        options = {"temperature": own["temperature"], "max_new_tokens": own["max_tokens"]}
        options["seed"] = own["seed"] + SEED_STEP * choice
        if number % 8 == 7:
            options |= {"grammar": GRAMMARS[0](), "tokenizer": tiny.pair.tokenizer}
        text = alone(tiny.pair, own["prompt"], **options)
        found.append(text.partition("th")[0] if number % 4 == 2 else text)
    return found


async def sent(client: httpx.AsyncClient, number: int) -> Told:
    """Send a request once, and read its answer."""
    own = asked(number)
    if not own["stream"]:
        answer = await client.post("/v1/completions", json=own)
        assert answer.status_code == 200, answer.text
        return Told([one["text"] for one in answer.json()["choices"]], [time.monotonic()])
    told = Told([""] * own["n"], [])
    async with client.stream("POST", "/v1/completions", json=own) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                told.times.append(time.monotonic())
                for one in chunk["choices"]:
                    told.texts[one["index"]] += one["text"]
    return told


async def all_sent(address: str, count: int, harm: Any, at_once: int = 16) -> list[Told]:
    """Send requests, so many at once, and do harm when a quarter has ended."""
    gate, ended, begun = asyncio.Semaphore(at_once), [0], asyncio.Event()
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:

        async def gated(number: int) -> Told:
            async with gate:
                told = await sent(client, number)
            ended[0] += 1
            if ended[0] >= count // 4:
                begun.set()
            return told

        sending = asyncio.gather(*map(gated, range(count)))
        await asyncio.wait({asyncio.ensure_future(begun.wait()), sending}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(harm)
        return await sending


def check_all(tiny: TinyPair, told: list[Told]) -> None:
    wrong = [number for number, one in enumerate(told) if one.texts != expected(tiny, number)]
    assert not wrong, [(number, told[number].texts, expected(tiny, number)) for number in wrong[:2]]


def exact(tiny: TinyPair) -> dict[str, Any]:
    return {"target": tiny.target, "draft": tiny.draft, "dtype": "float64", "replicas": "2"}


def test_a_killed_node_costs_no_request(tiny: TinyPair) -> None:
    with two_nodes() as cluster, served_on_ray(**exact(tiny)) as (address, _):
        assert number_of(address, "workers_ready") == 2
        killed = [0.0]

        def kill() -> None:
            (second,) = cluster.worker_nodes
            killed[0] = time.monotonic()
            cluster.remove_node(second, allow_graceful=False)

        told = asyncio.run(all_sent(address, COUNT, kill))
        assert number_of(address, "request_resent_total") > 0 and number_of(address, "worker_lost_total") >= 1
        assert number_of(address, 'request_resent_total{by="law"') == 0
        assert number_of(address, "request_success_total") == sum(asked(number)["n"] for number in range(COUNT))
        assert number_of(address, "workers_ready") == 1
    check_all(tiny, told)
    waits = [later - sooner for one in told for sooner, later in zip(one.times, one.times[1:], strict=False)]
    sys.stdout.write(f"\nlongest wait of a stream {max(waits):.1f} s\n")


def test_copies_are_started_anew_under_load(tiny: TinyPair) -> None:
    with two_nodes() as _, served_on_ray(**exact(tiny)) as (address, server):
        told = asyncio.run(all_sent(address, COUNT // 4, server.restart))
        until(lambda: number_of(address, "workers_ready") == 2, 300)
    check_all(tiny, told)


def test_a_copy_that_cannot_load_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with two_nodes(), pytest.raises(ClusterError) as refused:
        with served_on_ray(target=str(tmp_path / "empty")):
            pass
    assert str(refused.value).startswith("Node ") and "cannot load the model: " in str(refused.value)
    assert str(tmp_path / "empty") in str(refused.value) and "\n" not in str(refused.value)


def test_what_nodes_lack_is_said(tmp_path: Path) -> None:
    """One node has another package of our name, as one where none is installed; folders and stores are looked for."""
    (tmp_path / "polydraft").mkdir()
    lacking = "raise ModuleNotFoundError(\"No module named 'polydraft'\", name='polydraft')"
    (tmp_path / "polydraft" / "__init__.py").write_text(lacking)
    with two_nodes(resources={"second": 1}) as cluster:
        wanted: dict[str, Any] = {"cpus": 1, "gpus": 0}
        check_nodes(ray, **wanted, models=[str(tmp_path), None], store=str(tmp_path / "store"))
        with pytest.raises(ClusterError, match="has no /nowhere/model: the model must lie at the same place on every"):
            check_nodes(ray, **wanted, models=["/nowhere/model"])
        with pytest.raises(ClusterError, match="No node of the Ray cluster has the 64 CPUs that a copy of the model"):
            check_nodes(ray, cpus=64, gpus=0, models=[])
        with pytest.raises(ClusterError, match="has the 1 CPUs and 1 GPUs that a copy"):
            check_nodes(ray, cpus=1, gpus=1, models=[])
        cluster.add_node(num_cpus=1, object_store_memory=STORE, env_vars={"PYTHONPATH": str(tmp_path)})
        with pytest.raises(ClusterError, match="has no polydraft: install the same polydraft with its extra `ray`"):
            check_nodes(ray, **wanted, models=[])


def test_an_address_without_a_cluster_is_said() -> None:
    place = f"127.0.0.1:{free_port()}"
    with pytest.raises(ClusterError, match=f"There is no Ray cluster at {place}"), joined(place):
        pass
    with pytest.raises(ClusterError, match="The Ray cluster at auto cannot be joined"), joined("auto"):
        pass
    for wrong in ("ray://head:10001", "head", "head:x", ":6379"):
        with pytest.raises(InvalidParameter, match="--address must be HOST:PORT"), joined(wrong):
            pass


def test_an_object_store_that_is_too_small_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray._private.ray_constants, "DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", 1 << 20)
    with pytest.raises(ClusterError, match="Ray cannot start a cluster of this machine: free memory and /dev/shm"):
        with joined("local"):
            pass


def test_a_proxy_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(**_: Any) -> None:
        raise RuntimeError("Failed to bind to 10.0.0.1:80. It is taken.")

    server = RayServer(ray, Settings(ray=True, device="cpu"))
    monkeypatch.setattr(server, "_serve", SimpleNamespace(start=taken))
    with pytest.raises(ClusterError, match=r"Ray cannot serve the model: Failed to bind to 10\.0\.0\.1:80"):
        server.start()


def test_a_part_of_ray_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(MissingExtra, match="A part of Ray cannot be imported"):
        RayServer(ray, Settings(ray=True))
