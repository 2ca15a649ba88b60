"""A server with a store that grows: its clients' texts are on disk when it has stopped, or has nothing to do."""

import signal
from pathlib import Path

import httpx
import pytest
from serving import ask, client, until
from test_process import running

from polydraft.drafters import TextStore
from polydraft.drafters.text.occurrences import SENTINEL
from polydraft.models import Pair
from polydraft.server.worker import working


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
