"""A server with a store that grows: its clients' texts are on disk when it has stopped, or has nothing to do."""

import logging
import multiprocessing
import queue
import signal
import warnings
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import ask, client, until
from test_process import running

from polydraft.drafters import TextStore
from polydraft.drafters.text.index import SENTINEL
from polydraft.models import Pair
from polydraft.server import Settings
from polydraft.server.front import logs
from polydraft.server.front.desk import Desk
from polydraft.server.front.metrics import Metrics
from polydraft.server.worker import Event, workers, working


def texts_of(folder: Path, pair: Pair) -> list[str]:
    """Return the texts of a store that was written once."""
    (one,) = TextStore(folder).segments
    found, text = list[str](), list[int]()
    for token in one.tokens[1:].tolist():
        if token == SENTINEL:
            found.append(pair.tokenizer.decode(text))
            text = []
        else:
            text.append(token)
    return found


def test_a_server_that_stops_keeps_its_clients_texts_and_no_others(tmp_path: Path, pair: Pair) -> None:
    with client(drafter=f"suffix:{tmp_path / 'store'}") as found:
        told = ask(found, prompt="def fib(n):\n", temperature=0)["choices"][0]["text"]
        assert not [*tmp_path.glob("store/*.segment")], "a text is not worth a file"
    assert texts_of(tmp_path / "store", pair) == [f"def fib(n):\n{told}"]


def test_a_server_without_work_writes_what_it_has(tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working, "QUIET", 0.05)
    with client(drafter=f"suffix:{tmp_path / 'store'}") as found:
        for number in range(2):
            ask(found, prompt=f"def fib{number}(n):\n")
            until(lambda many=number + 1: len([*tmp_path.glob("store/*.segment")]) == many)
        assert TextStore(tmp_path / "store").texts == 2


def warning(settings: Settings, hear: Any, say: Any) -> None:
    """Be a worker that warns."""
    warnings.warn("The disk is full.", RuntimeWarning, stacklevel=1)


def test_what_a_worker_warns_of_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "work", warning)
    monkeypatch.setattr(workers, "process_context", lambda: multiprocessing.get_context("fork"))
    heard: queue.Queue[Event] = queue.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        workers.ProcessWorker(Settings(), heard.put)
    event = heard.get(timeout=10)
    assert (event.kind, event.said) == (workers.WARNED, {"message": "The disk is full."})
    with caplog.at_level(logging.WARNING, logger="polydraft.server"):
        monkeypatch.setattr(logs.LOG, "propagate", True)
        desk = Desk(Settings(), Metrics("m"))
        desk._say(desk.slots[0], event)
    assert ("warning", event.said) in [(one.getMessage(), one.told) for one in caplog.records]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_restart_keeps_what_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    for number in (1, 2):
        with running("--drafter", f"suffix:{folder}") as (process, address):
            asked = {"prompt": f"def fib{number}(n):\n", "max_tokens": 8}
            assert httpx.post(f"{address}/v1/completions", json=asked, timeout=30).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        assert TextStore(folder).texts == number
