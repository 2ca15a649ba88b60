"""What the tests of the server share: the embedded pair behind an app, and clients of it."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
