"""What the tests of the server share: the embedded pair behind an app, and clients of it."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from fastapi.testclient import TestClient

import polydraft
from polydraft.models import Pair
from polydraft.server import Settings, build_app

PROMPT = "def fib(n):\n"
MODEL = "polydraft-embedded"


@contextmanager
def client(**settings: Any) -> Iterator[TestClient]:
    """Run an app in this process, its worker on a thread."""
    app = build_app(Settings(apart=False, **settings))
    with TestClient(app, raise_server_exceptions=False) as found:
        yield found


@contextmanager
def served(**settings: Any) -> Iterator[str]:
    """Run a server at a free port, its worker on a thread, and return its address."""
    server = uvicorn.Server(uvicorn.Config(build_app(Settings(apart=False, **settings)), port=0, log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


COMMAND = [sys.executable, "-c", "from polydraft_command import main; main()", "serve", "--threads", "1"]


@contextmanager
def running(
    *arguments: str, log: list[str] | None = None, command: Sequence[str] = COMMAND, **how: Any
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server as a process at a free port; its log's lines go to a list, if there is one.

    Args:
        command: what serves.
        how: more arguments of `Popen`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port), *arguments], stderr=subprocess.PIPE, text=True, **how)
    address, lines = f"http://127.0.0.1:{port}", [] if log is None else log
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if '"event": "serving"' in line:
                break
        reading = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
        reading.start()
        yield process, address
        process.kill()
        reading.join(10)
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def healthy(address: str) -> bool:
    """Tell whether a server takes requests."""
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False


def worker_of(process: subprocess.Popen[str]) -> int:
    """Return the process that holds the model: the one with the most memory below the server."""
    found, left = list[int](), [process.pid]
    while left:
        out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(left.pop())], capture_output=True, text=True).stdout
        left += list(map(int, out.split()))
        found += list(map(int, out.split()))
    return max(found, key=resident)


def resident(pid: int) -> int:
    """Return how many pages of memory a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def until(true: Any, seconds: float = 20) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def ask(found: TestClient, **fields: Any) -> dict[str, Any]:
    """Return the answer to a request for a completion; a few tokens if nothing else is said."""
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    answer = found.post(path, json={"max_tokens": 8, **({} if "messages" in fields else {"prompt": PROMPT}), **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(found: TestClient, **fields: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream."""
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    usual = {} if "messages" in fields else {"prompt": PROMPT}
    answer = found.post(path, json={"max_tokens": 8, "stream": True, **usual, **fields})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def error(found: TestClient, path: str = "/v1/completions", **fields: Any) -> tuple[int, dict[str, Any]]:
    """Return the status and the error of a request."""
    answer = found.post(path, json=fields)
    body = answer.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}, body
    return answer.status_code, body["error"]


def streamed(found: list[Mapping[str, Any]], number: int = 0) -> str:
    """Return the text of a choice from a stream's chunks."""
    choices = [choice for chunk in found for choice in chunk["choices"] if choice["index"] == number]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def alone(pair: Pair, prompt: str, **options: Any) -> str:
    """Return the text of a single run."""
    ids = pair.tokenizer(prompt, return_tensors="pt").input_ids
    options.setdefault("drafter", pair.draft)
    options.setdefault("max_new_tokens", 8)
    if options.get("temperature"):
        options.setdefault("top_k", 0)
    tokens = polydraft.generate(pair.target, ids, **options)
    new: torch.Tensor = tokens.sequences[0, ids.shape[1] :]
    return pair.tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
