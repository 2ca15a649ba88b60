"""`polydraft serve` as a process: its port, its worker that may be killed, and how it stops."""

import asyncio
import json
import logging
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement
from serving import COMMAND, healthy, running, served, until, worker_of

from polydraft.cli import main
from polydraft.cli import serving as running_room
from polydraft.cli.serving import bound, run_serve
from polydraft.errors import ClusterError, InvalidParameter, MissingExtra
from polydraft.extras import SERVE
from polydraft.server import Settings
from polydraft.server.front import logs
from polydraft.server.front.metrics import Metrics
from polydraft.server.worker import WARNED, Event, workers

PACKAGES = [Requirement(one).name for one in SERVE.requirements]
LONG = {"prompt": "def fib(n):\n", "max_tokens": 900, "ignore_eos": True, "stream": True}


def test_copies_that_cannot_be_started_anew_end_no_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that are there go on, and the next signal is heard."""

    class Failing:
        tries = 0

        def restart(self) -> None:
            self.tries += 1
            if self.tries == 1:
                raise ClusterError("Ray cannot serve the model: no room.")

    monkeypatch.setattr(running_room.signal, "signal", lambda *_: None)
    server, told = Failing(), [signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM]
    running_room._obey(server, list[int](told))
    said = capsys.readouterr().err
    assert server.tries == 2 and said.index("started anew: Ray cannot serve the model: no room.") < said.index(
        "All copies"
    )


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(InvalidParameter, match="Nobody can listen at 127"):
            bound("127.0.0.1", other.getsockname()[1])
    with pytest.raises(InvalidParameter, match="Nobody can listen at no"):
        bound("no.such.host.invalid", 0)
    bound("127.0.0.1", 0).close()


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a package be missing, and everything that may have imported it be imported anew."""
    for name in [*sys.modules]:
        if name.startswith("polydraft.server") or name.split(".")[0] == package.replace("-", "_"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_extra_is_said(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(package, monkeypatch)
    with pytest.raises(MissingExtra, match=f' {package}, which is not installed: pip install "{package}>'):
        run_serve(Settings())


@pytest.mark.parametrize(
    "package", [name for name in PACKAGES if name != "pydantic"]
)  # which the command line needs too
def test_the_command_ends_with_a_sentence_where_the_extra_is_missing(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(package, monkeypatch)
    monkeypatch.setattr("sys.argv", ["polydraft", "serve", "--host", "no.such.host.invalid"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert f" {package}, " in said and f'pip install "{package}>' in said


@pytest.mark.parametrize("word", ["none", "detailed", "all"])
def test_how_much_is_told_of_drafts_is_an_option(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = list[Settings]()
    monkeypatch.setattr(running_room, "run_serve", lambda settings, *_: seen.append(settings) or 0)
    monkeypatch.setattr("sys.argv", ["polydraft", "serve", "--per-request-spec-decode-metrics", word])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == (2 if word == "all" else 0)
    assert [one.draft_metrics for one in seen] == ([] if word == "all" else [word])
    assert ("all" in said and "summary" in said) == (word == "all")


def told_of(lines: Iterator[str]) -> list[dict[str, Any]]:
    """Return the rest of a stream."""
    events = [line.removeprefix("data: ") for line in lines if line]
    return [json.loads(event) for event in events if event != "[DONE]"]


@pytest.mark.slow
@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_worker_that_ends_costs_no_request(harm: signal.Signals) -> None:
    log = list[str]()
    with running("--stall", "2", log=log) as (process, address), httpx.Client(base_url=address, timeout=90) as found:
        with found.stream("POST", "/v1/completions", json={**LONG, "seed": 3}) as answer:
            lines = answer.iter_lines()
            first = json.loads(next(lines).removeprefix("data: "))
            os.kill(worker_of(process), harm)
            rest = told_of(lines)
        text = "".join(one["choices"][0]["text"] for one in [first, *rest])
        assert not [one for one in rest if "error" in one] and rest[-1]["choices"][0]["finish_reason"] == "length"
        again = found.post("/v1/completions", json={**LONG, "seed": 3, "stream": False}).json()
        assert "resumed" in rest[-1]["polydraft"] or again["choices"][0]["text"] == text
        assert again["usage"]["completion_tokens"] == LONG["max_tokens"]
    (lost,) = [json.loads(line) for line in log if '"worker gone"' in line]
    assert lost.get("stalled") is (True if harm == signal.SIGSTOP else None)


@pytest.mark.slow
def test_without_retries_a_worker_costs_its_requests() -> None:
    with running("--stall", "2", "--retries", "0") as (process, address):
        with httpx.stream("POST", f"{address}/v1/completions", json=LONG, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(worker_of(process), signal.SIGSTOP)
            begun = time.monotonic()
            rest = "".join(lines)
        assert "worker_gone" in rest and "hung" in rest and 1 < time.monotonic() - begun < 20
        until(lambda: healthy(address), 60)
        told = httpx.post(f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60)
        assert told.status_code == 200


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="there is no such signal here")
def test_a_signal_starts_the_workers_anew() -> None:
    log = list[str]()
    with running("--workers", "2", log=log) as (process, address), httpx.Client(base_url=address, timeout=60) as found:
        with found.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 300}) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGUSR1)
            rest = told_of(lines)
        assert not [one for one in rest if "error" in one] and rest[-1]["choices"][0]["finish_reason"] == "length"
        until(lambda: sum('"worker started"' in line for line in log) == 2, 120)
        assert not [line for line in log if '"worker gone"' in line]
        assert found.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.long(1)
@pytest.mark.parametrize(
    "hangs",
    [stopped, lambda: time.sleep(100)],
    ids=["no sign of life", "in a step for ever"],
)
def test_the_watch_sees_what_hangs(monkeypatch: pytest.MonkeyPatch, hangs: Any) -> None:
    def work(settings: Settings, hear: Any, say: Any) -> None:
        say(Event("ready"))
        for told in iter(lambda: hear(None), None):
            say(Event(told))
            time.sleep(0.3)  # a step that takes less than the limit
            say(Event("done"))
            if told == "hang":
                hear(0.0)
                hangs()

    monkeypatch.setattr(workers, "work", work)
    monkeypatch.setattr(workers, "BEAT", 0.05)
    monkeypatch.setattr(workers, "process_context", lambda: multiprocessing.get_context("fork"))
    heard: queue.Queue[Event] = queue.Queue()
    worker = workers.ProcessWorker(Settings(stall=1), heard.put)
    assert heard.get(timeout=10).kind == "ready"
    time.sleep(1.5)  # who has nothing to do is not killed
    for told in ("go on", "hang"):
        worker.tell(told)
        assert [heard.get(timeout=10).kind for _ in range(2)] == [told, "done"]
    begun, event = time.monotonic(), heard.get(timeout=10)
    assert event.kind == "gone" and event.said["stalled"] and 0.5 < time.monotonic() - begun < 5


def two_events_of(work: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> tuple[Event, Event]:
    """Let a process do this work, and return the first two things that it says."""
    monkeypatch.setattr(workers, "work", work)
    monkeypatch.setattr(workers, "process_context", lambda: multiprocessing.get_context("fork"))
    heard: queue.Queue[Event] = queue.Queue()
    workers.ProcessWorker(Settings(), heard.put)
    return heard.get(timeout=10), heard.get(timeout=10)


def broken(*_: object) -> None:
    raise KeyError("lost")


def test_an_error_in_the_depths_of_a_worker_is_for_the_log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told, gone = two_events_of(broken, monkeypatch)
    assert told.kind == WARNED and "KeyError: 'lost'" in told.said["message"]
    assert gone.kind == "gone" and gone.said["code"] == 1 and capfd.readouterr().err == ""


def talkative(settings: Settings, hear: Any, say: Any) -> None:
    theirs = logging.getLogger("transformers")
    assert not theirs.handlers and theirs.propagate
    theirs.getChild("models").warning("a flag is %s", "unknown")
    logging.getLogger("other").info("nobody asked for it")


def test_what_libraries_of_a_worker_log_is_for_the_log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told, gone = two_events_of(talkative, monkeypatch)
    assert told.kind == WARNED and told.said == {"message": "transformers.models: a flag is unknown"}
    assert gone.kind == "gone" and gone.said["code"] == 0 and capfd.readouterr().err == ""


@pytest.fixture
def loggers() -> Iterator[None]:
    """Put back what writes logs, which the command changes."""
    changed = (logs.LOG, logging.getLogger())
    before = [(one, one.handlers[:], one.level, one.propagate) for one in changed]
    yield
    for one, handlers, level, propagate in before:
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)


@pytest.mark.usefixtures("loggers")
def test_all_logs_are_lines_of_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    logs.write_logs()
    with served() as address:
        monkeypatch.setattr(Metrics, "text", broken)
        assert httpx.get(f"{address}/metrics").status_code == 500
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    told = {one["event"]: one for one in map(json.loads, capsys.readouterr().err.splitlines())}
    assert told["request failed"]["level"] == "error" and told["Invalid HTTP request received."]["level"] == "warning"
    own = told["Exception in ASGI application"]
    assert own["logger"] == "uvicorn.error" and own["traceback"].endswith("KeyError: 'lost'\n")


@pytest.mark.slow
def test_a_server_that_is_told_to_stop_ends_what_it_has_begun() -> None:
    with running() as (process, address), httpx.Client(base_url=address, timeout=60) as found:
        with found.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 200}) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            refused = found.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "stopping"
            rest: Any = "".join(lines)
        assert '"finish_reason":"length"' in rest and process.wait(15) == 0


MAKES_PROCESSES = """
import atexit, os, socket, sys
from multiprocessing.forkserver import main

atexit.register(print, "freed", flush=True)
listener, (alive, held) = socket.socket(socket.AF_UNIX), os.pipe()
os.close(held)  # the server and all its workers have ended
main(listener.detach(), alive, sys.argv[1:])
"""


@pytest.mark.skipif("forkserver" not in multiprocessing.get_all_start_methods(), reason="there is no such process")
def test_the_process_that_makes_workers_ends_at_once() -> None:
    """It frees nothing of what it has imported for them, which takes seconds: `atexit` comes before that."""
    for imported, said in (([], "freed\n"), ([workers.work.__module__], "")):
        command = [sys.executable, "-c", MAKES_PROCESSES, *imported]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        assert (ended.stdout, ended.stderr) == (said, "")


@pytest.mark.slow
def test_too_many_connections_and_strange_names_are_refused() -> None:
    with running("--max-connections", "2") as (_, address), ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=address, timeout=30)) for _ in range(3)]
        found = [one.get("/health").status_code for one in clients]
        assert found == [200, 200, 503]
        clients[0].close()
        time.sleep(0.2)
        assert clients[1].get("/health").status_code == 200
        assert clients[1].get("/health", headers={"host": "evil.example"}).status_code == 400


@pytest.mark.parametrize(("host", "keys", "warned"), [("0.0.0.0", (), 1), ("0.0.0.0", ("k",), 0), ("127.0.0.1", (), 0)])
def test_a_public_address_without_a_key_is_warned_of(
    host: str, keys: tuple[str, ...], warned: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(apart=False, keys=keys, host=host, port=0, max_connections=7)
    seen = list[Any]()
    monkeypatch.setattr(running_room, "_serving", lambda uvicorn, config, desk: seen.append((config, desk)) or Idle())
    monkeypatch.setattr(logs, "write_logs", lambda: None)
    assert run_serve(settings) == 0
    (config, desk), said = seen[0], capsys.readouterr().err
    assert said.count("--api-key") == warned and config.limit_concurrency == 8
    assert desk.settings.hosts == (() if warned or keys else ("localhost",))
    asyncio.run(desk.close())


class Idle:
    """A server that has nothing to do."""

    def run(self, **_: Any) -> None:
        """Do nothing."""


@pytest.mark.slow
def test_a_server_that_cannot_begin_says_why_in_a_sentence() -> None:
    run = subprocess.run([*COMMAND, "--target", "/no/such/model"], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.count("\n") <= 2 and "/no/such/model" in run.stderr.splitlines()[-1]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        run = subprocess.run([*COMMAND, "--port", str(other.getsockname()[1])], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "choose another --port" in run.stderr
