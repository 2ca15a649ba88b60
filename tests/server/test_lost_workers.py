"""Workers that are killed under load: no request is lost, none is answered twice, each has the text of its seed."""

import asyncio
import os
import queue
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from doubles import perturbed, tiny_model, tiny_tokenizer
from serving import alone, until
from test_load import GRAMMARS, loaded, request

from polydraft.engine import load
from polydraft.models import Pair
from polydraft.server import Settings, build_app
from polydraft.server.front.desk import Desk
from polydraft.server.worker import Hire, workers

COUNT = 200


@dataclass
class TinyPair:
    """A tiny model of double precision and its draft model, in folders."""

    target: str
    draft: str
    pair: Pair


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """Return the pair."""
    folder, tokenizer = tmp_path_factory.mktemp("tiny"), tiny_tokenizer()
    target = tiny_model(vocab=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=512)
    for name, model in {"target": target, "draft": perturbed(target, 0.02)}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    named = str(folder / "target"), str(folder / "draft")
    return TinyPair(*named, load(*named, dtype="float64"))


@contextmanager
def running_app(hire: Hire | None = None, **settings: Any) -> Iterator[tuple[str, Desk]]:
    """Run a server with processes as workers at a free port, or with whoever is hired."""
    app = build_app(Settings(**settings), hire=hire)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, 900)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", app.state.desk
    finally:
        server.should_exit = True
        thread.join(30)


def body(number: int) -> dict[str, Any]:
    """Return one of many requests; every fourth has a stop string, and every eighth a grammar."""
    found = request(number) | {"max_tokens": 24 + number % 30}
    for name in ("guided_regex", "response_format", "guided_grammar"):
        found.pop(name, None)
    if number % 8 == 7:
        found["guided_regex"] = "[a-z ]{4,30}"
    if number % 4 == 2:
        found["stop"] = ["th"]
    return found


def expected(pair: Pair, number: int) -> str:
    """Return the text of a request's seed, alone."""
    own = body(number)
    options = {"seed": own["seed"], "temperature": own["temperature"], "max_new_tokens": own["max_tokens"]}
    if number % 8 == 7:
        options |= {"grammar": GRAMMARS[0](), "tokenizer": pair.tokenizer}
    text = alone(pair, own["prompt"], **options)
    return text.partition("th")[0] if number % 4 == 2 else text


async def under_load(address: str, count: int, harm: Any) -> list[str]:
    """Send requests, sixteen at once, and do harm while they are answered; return the texts."""
    sending = asyncio.ensure_future(loaded(address, [body(number) for number in range(count)], 16))
    async with httpx.AsyncClient(base_url=address, timeout=600) as line:

        async def ended() -> float:
            text = (await line.get("/metrics")).text
            return sum(float(row.split()[-1]) for row in text.splitlines() if "request_success_total{" in row)

        while not sending.done() and await ended() < count // 4:
            await asyncio.sleep(0.02)
        await harm()
        return [answer.text for answer in await sending]


def number_of(address: str, name: str) -> float:
    rows = httpx.get(f"{address}/metrics", timeout=600).text.splitlines()
    return sum(float(row.split()[-1]) for row in rows if row.startswith(f"polydraft:{name}"))


def check_texts(tiny: TinyPair, texts: Sequence[str]) -> None:
    wrong = [number for number, text in enumerate(texts) if text != expected(tiny.pair, number)]
    assert not wrong, [(texts[number], expected(tiny.pair, number)) for number in wrong[:2]]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_process_costs_no_request(tiny: TinyPair, count: int) -> None:
    exact = {"target": tiny.target, "draft": tiny.draft, "dtype": "float64", "threads": 2, "workers": count}
    with running_app(**exact) as (address, desk):

        async def kill() -> None:
            os.kill(desk.pids[-1], signal.SIGKILL)

        texts = asyncio.run(under_load(address, COUNT, kill))
        assert number_of(address, "worker_lost_total") == 1 and number_of(address, "request_resent_total") > 0
        assert number_of(address, "request_success_total") == COUNT
        assert number_of(address, 'request_resent_total{by="law"') == 0
        until(lambda: number_of(address, "workers_ready") == count, 600)
    check_texts(tiny, texts)


@pytest.mark.slow
def test_workers_are_replaced_under_load(tiny: TinyPair) -> None:
    exact = {"target": tiny.target, "draft": tiny.draft, "dtype": "float64", "threads": 2, "workers": 2}
    with running_app(**exact, grace=0.2) as (address, desk):
        before = set(desk.pids)

        async def replace() -> None:
            assert desk._loop is not None
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(desk.replace_workers(), desk._loop))

        texts = asyncio.run(under_load(address, COUNT, replace))
        assert len(desk.pids) == 2 and not before & set(desk.pids) and number_of(address, "worker_lost_total") == 0
    check_texts(tiny, texts)


def test_a_lost_worker_costs_no_request(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with threads, one of which ends in the middle: without a word, as a process that is killed."""
    made, step = list[workers.ThreadWorker](), threading.Event()
    usual, hear = workers.ThreadWorker.__init__, workers.ThreadWorker._hear

    def noted(self: workers.ThreadWorker, *given: Any) -> None:
        made.append(self)
        usual(self, *given)

    def heard(self: workers.ThreadWorker, seconds: float | None) -> Any:
        if step.is_set() and self is made[0]:
            raise queue.Empty
        return hear(self, seconds)

    monkeypatch.setattr(workers.ThreadWorker, "__init__", noted)
    monkeypatch.setattr(workers.ThreadWorker, "_hear", heard)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    exact = {"target": tiny.target, "draft": tiny.draft, "dtype": "float64"}
    with running_app(**exact, workers=2, apart=False) as (address, _):

        async def end() -> None:
            step.set()

        texts = asyncio.run(under_load(address, 24, end))
        assert number_of(address, "worker_lost_total") == 1 and number_of(address, "request_resent_total") > 0
    check_texts(tiny, texts)
    assert len(made) == 3
