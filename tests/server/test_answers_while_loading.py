"""A server while its model is loaded: it answers at once that it is not there yet, and says when it is."""

import asyncio
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from serving import COMMAND, until

from polydraft.cli import serving as running_room
from polydraft.cli.serving import run_serve
from polydraft.errors import PolydraftError
from polydraft.server import Settings, build_app
from polydraft.server.front import logs
from polydraft.server.front.desk import Desk
from polydraft.server.front.metrics import Metrics
from polydraft.server.worker import workers

GET = ("/health", "/v1/models", "/v1/models/polydraft-embedded", "/polydraft/options", "/v1/nothing")
POST = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let models be loaded when this is set, and not before; what was not loaded by the end of a test never is."""
    held, over, work = threading.Event(), threading.Event(), workers.work

    def waiting(*given: Any) -> None:
        held.wait()
        if not over.is_set():
            work(*given)

    monkeypatch.setattr(workers, "work", waiting)
    yield held
    over.set()
    held.set()


def check_not_ready(answer: Any) -> None:
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    told = answer.json()["error"]
    assert told["code"] == "not_ready" and told["message"] == "The model is not loaded yet; try again soon."


def test_what_needs_the_model_is_refused_until_it_is_there(release: threading.Event) -> None:
    with TestClient(build_app(Settings(apart=False), waits=False)) as found:
        begun = time.monotonic()
        for path in GET:
            check_not_ready(found.get(path))
        for path in POST:
            check_not_ready(found.post(path, json={"nonsense": 1}))
            check_not_ready(found.post(path, content=b"{", headers={"content-type": "application/json"}))
        assert found.head("/health").status_code == 503
        for path in ("/version", "/metrics", "/openapi.json", "/", "/page/app.js"):
            assert found.get(path).status_code == 200, path
        assert time.monotonic() - begun < 10
        release.set()
        until(lambda: found.get("/health").status_code == 200, 60)
        assert found.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert found.get("/v1/models").json()["data"][0]["max_model_len"] == 1024


def test_keys_are_asked_for_before_anything_is_told(release: threading.Event) -> None:
    with TestClient(build_app(Settings(apart=False, keys=("k",)), waits=False)) as found:
        assert found.get("/v1/models").status_code == 401 and found.get("/health").status_code == 503


def test_a_model_that_cannot_be_loaded_is_told_to_who_waits() -> None:
    app = build_app(Settings(target="/no/such/model", apart=False), waits=False)
    with TestClient(app) as found:
        with pytest.raises(PolydraftError, match="/no/such/model"):
            app.state.desk.wait(60)
        assert found.get("/health").status_code == 503


def test_a_worker_that_cannot_be_started_is_told_to_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(workers.threading.Thread, "start", fails)
    desk = Desk(Settings(apart=False), Metrics("m"))
    desk.launch()
    with pytest.raises(PolydraftError, match="cannot be started: no more processes"):
        desk.wait(1)


def serving(settings: Settings, monkeypatch: pytest.MonkeyPatch, during: Any) -> int:
    """Run the command's server on this thread, while something is done on another; return its exit code."""
    monkeypatch.setattr(logs, "write_logs", lambda: None)
    thread: list[threading.Thread] = []
    usual = running_room._serving

    def with_client(uvicorn: Any, config: Any, desk: Any) -> Any:
        server = usual(uvicorn, config, desk)
        thread.append(threading.Thread(target=during, args=(server,), daemon=True))
        thread[0].start()
        return server

    monkeypatch.setattr(running_room, "_serving", with_client)
    code = run_serve(replace(settings, port=0, max_connections=10))
    thread[0].join(30)
    assert not thread[0].is_alive()
    return code


def address_of(server: Any) -> str:
    until(lambda: server.started, 30)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def test_the_command_answers_at_once_and_says_when_it_is_ready(
    release: threading.Event, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    def during(server: Any) -> None:
        address = address_of(server)
        seen.append(httpx.get(f"{address}/health").status_code)
        seen.append(capsys.readouterr().err.count("is served at"))
        release.set()
        until(lambda: httpx.get(f"{address}/health").status_code == 200, 60)
        until(lambda: seen.append(capsys.readouterr().err.count("is served at")) or seen[-1], 10)
        server.should_exit = True

    assert serving(Settings(apart=False), monkeypatch, during) == 0
    assert seen[:2] == [503, 0] and seen[-1] == 1


def test_the_command_ends_with_the_reason_where_the_model_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolydraftError, match="/no/such/model") as found:
        serving(Settings(target="/no/such/model", apart=False), monkeypatch, lambda server: None)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signals_end_it_while_the_model_is_loaded(
    release: threading.Event, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As they do without the server: Ctrl-C by an exception that leads to 130."""
    number = getattr(signal, name)

    def during(server: Any) -> None:
        address_of(server)
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, ended)
    try:
        with pytest.raises(KeyboardInterrupt):
            serving(Settings(apart=False), monkeypatch, during)
    finally:
        signal.signal(number, before)


def test_a_worker_whose_server_was_stopped_meanwhile_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, ended = Desk(Settings(apart=False), Metrics("m")), list[float]()
    monkeypatch.setattr(workers.ThreadWorker, "__init__", lambda *_: asyncio.run(desk.close()))
    monkeypatch.setattr(workers.ThreadWorker, "end", lambda _, seconds: ended.append(seconds))
    desk.launch()
    assert ended == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", -signal.SIGTERM)])
def test_the_process_ends_while_the_model_is_loaded(name: str, code: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*COMMAND, "--port", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None and "Loading the model" in process.stderr.readline()

        def answers() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 503
            except httpx.TransportError:
                return False

        until(answers, 60)
        process.send_signal(getattr(signal, name))
        assert process.wait(60) == code
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
