"""A server with the shape of the real one and no model: it streams a written text with trees, and fails on demand.

`python tests/server_page/fake_server.py PORT` serves the page for a look by eye. What a prompt contains decides what
happens: see `texts.SCRIPTS`, `refusal` and `stream`.
"""

import asyncio
import json
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from server_page.texts import SCRIPTS, STORY, other_text  # noqa: E402 - this file is run as a script

PAGE = HERE.parents[1] / "src" / "polydraft" / "server" / "page"
POLICY = {"Content-Security-Policy": "default-src 'self'"}

OPTIONS = {
    "models": ["pair-small"],
    "target": "pair-small",
    "drafters": [
        {"word": "model", "meaning": "the small model of the pair, four tokens deep"},
        {"word": "ngram", "meaning": "what followed the last words before"},
    ],
    "verifiers": [
        {"word": "recursive-wo", "meaning": "recursive rejection without replacement, exact"},
        {"word": "block", "meaning": "block verification of a chain, exact"},
    ],
    "trees": ["auto", "chain", "wide"],
    "chat": True,
    "context": 2048,
    "defaults": {"max_tokens": 256, "temperature": 0.7},
    "version": "0.1.0",
}


def words(text: str) -> list[str]:
    """The text as tokens of a realistic size; an emoji is two halves."""
    tokens = re.findall(r" ?[A-Za-z']{1,7}|\s+|[^\sA-Za-z]", text)
    return [half for token in tokens for half in (["\ufffd", "\ufffd"] if ord(token[0]) > 0xFFFF else [token])]


def pieces(text: str, tokens: list[str]) -> list[str]:
    """The delta that belongs to each token: nothing for the first half of a character, all of it for the second."""
    deltas, place, half = [], 0, False
    for token in tokens:
        if token == "\ufffd":
            deltas.append(text[place] if half else "")
            place += half
            half = not half
        else:
            deltas.append(token)
            place += len(token)
    return deltas


@dataclass
class Step:
    """What one pass of the target brought: tokens, their deltas, and the tree."""

    tokens: list[dict]
    delta: str
    tree: dict | None
    source: str


def grown(root: str, path: list[str], after: str, numbers: random.Random) -> dict:
    """A tree in which `path` is accepted, with wrong guesses beside it and below its end."""
    tree = {
        "tokens": [root],
        "ids": [1],
        "parents": [-1],
        "depth": [0],
        "valid": [True],
        "accepted": [0],
        "next": after,
    }
    wrong = [" the", " a", " of", " more", " it", "\n", " small", " is", " that", ",", " tokens"]

    def node(text: str, parent: int) -> int:
        tree["tokens"].append(text)
        tree["ids"].append(numbers.randrange(3, 8000))
        tree["parents"].append(parent)
        tree["depth"].append(tree["depth"][parent] + 1)
        tree["valid"].append(True)
        return len(tree["tokens"]) - 1

    at = 0
    for text in path:
        others = [node(numbers.choice(wrong), at) for _ in range(numbers.randrange(0, 3))]
        for other in others[:1]:
            if tree["depth"][other] < 4 and numbers.random() < 0.5:
                node(numbers.choice(wrong), other)
        at = node(text, at)
        tree["accepted"].append(at)
    for _ in range(numbers.randrange(1, 3)):
        if tree["depth"][at] < 4:
            child = node(numbers.choice(wrong), at)
            if tree["depth"][child] < 4 and numbers.random() < 0.5:
                node(numbers.choice(wrong), child)
    return tree


def steps(text: str, most: int, drafted: bool, bushy: bool = False) -> Iterator[Step]:
    numbers = random.Random(3)
    tokens = words(text)
    deltas = pieces(text, tokens)
    tokens = tokens[:most]
    place, root = 0, "."
    while place < len(tokens):
        kept = numbers.choices([0, 1, 2, 3, 4], [18, 22, 24, 20, 16])[0] if drafted else 0
        kept = min(kept, len(tokens) - place - 1)
        path, after = tokens[place : place + kept], tokens[place + kept]
        source = numbers.choice(["model", "model", "ngram"]) if drafted else ""
        marked = [{"id": 7, "text": word, "origin": source} for word in path]
        marked.append({"id": 9, "text": after, "origin": "target"})
        delta = "".join(deltas[place : place + kept + 1])
        tree = grown(root, path, after, numbers) if drafted else None
        if tree and bushy:
            for parent in [0] * 20 + list(range(1, 40)):
                tree["tokens"].append(" elsewhere")
                tree["ids"].append(11)
                tree["parents"].append(parent)
                tree["depth"].append(tree["depth"][parent] + 1)
                tree["valid"].append(True)
        yield Step(marked, delta, tree, source)
        place, root = place + kept + 1, after


@dataclass
class Totals:
    """The counts of an answer, as the trace tells them."""

    tokens: int = 0
    calls: int = 0
    drafted: int = 0
    depths: list[int] = field(default_factory=lambda: [0] * 4)
    began: float = field(default_factory=time.perf_counter)

    def add(self, step: Step) -> dict:
        kept = len(step.tokens) - 1
        self.tokens += len(step.tokens)
        self.calls += 1
        if step.tree:
            self.drafted += len(step.tree["tokens"]) - 1
            for depth in range(kept):
                self.depths[depth] += 1
        elapsed = time.perf_counter() - self.began
        return {
            "index": 0,
            "step": self.calls,
            "source": step.source,
            "tokens": step.tokens,
            "tree": step.tree,
            "elapsed": elapsed,
            "tokens_per_second": self.tokens / max(elapsed, 1e-3),
            "tokens_per_call": self.tokens / self.calls,
            "drafted": self.drafted,
            "accepted": sum(self.depths),
            "acceptance_by_depth": [count / self.calls for count in self.depths] if self.drafted else [],
        }


def wrong(
    message: str, param: str | None, status: int = 400, kind: str = "invalid_request_error", **headers
) -> Response:
    error = {"message": message, "type": kind, "param": param, "code": None}
    return JSONResponse(
        {"error": error}, status, headers={key.replace("_", "-"): value for key, value in headers.items()}
    )


def refusal(request: Request, body: dict, prompt: str) -> Response | None:
    if "locked" in prompt and request.headers.get("Authorization") != "Bearer right":
        return wrong("No such key.", None, 401)
    if not 0 <= body.get("temperature", 1) <= 2:
        return wrong("temperature is wrong: it must be between 0 and 2.", "temperature")
    if "busy" in prompt:
        return wrong("The queue is full.", None, 429, "rate_limit_error", Retry_After="3")
    if "unnamed" in prompt:
        return wrong("No drafter of that name.", "speculative.drafter")
    return None


async def answer(request: Request) -> Response:
    body = await request.json()
    chat = "messages" in body
    prompt = body["messages"][-1]["content"] if chat else body["prompt"]
    request.app.state.bodies.append(body)
    no = refusal(request, body, prompt)
    if no:
        return no
    return StreamingResponse(stream(body, prompt, chat), media_type="text/event-stream")


async def stream(body: dict, prompt: str, chat: bool) -> AsyncIterator[str]:
    """All choices in turns, a chunk of each; then the usage."""
    totals = [Totals() for _ in range(body.get("n", 1))]
    left = [written(body, prompt, chat, number, total) for number, total in enumerate(totals)]
    while left:
        for one in [*left]:
            said = await anext(one, None)
            if said is None:
                left.remove(one)
                continue
            yield said
            if '"error"' in said:
                return
    count = sum(total.tokens for total in totals)
    usage = {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": count + 5}
    yield f"data: {json.dumps({'id': 'x', 'choices': [], 'usage': usage, 'metrics': {'speculative_decoding': {}}})}\n\n"
    yield "data: [DONE]\n\n"


async def written(body: dict, prompt: str, chat: bool, number: int, totals: Totals) -> AsyncIterator[str]:
    """The chunks of a choice; later ones are other texts than the first, and shorter."""
    text = next((text for word, text in SCRIPTS.items() if word in prompt), STORY)
    text = text if not number else other_text(text, number)
    most = body.get("max_tokens", 256)
    if "long" in prompt:
        text, most = "\n\n".join([STORY] * 20), 2000
    drafted = body["speculative"]["enabled"]
    pause = 0.25 if "slow" in prompt else 0.0005 if "long" in prompt else 0.03 if "pace" in prompt else 0.012
    held, gone = "", ""

    def chunk(delta: str, finish: str | None = None, **more: object) -> str:
        choice = {"index": number, "finish_reason": finish} | (
            {"delta": {"content": delta}} if chat else {"text": delta}
        )
        return f"data: {json.dumps({'id': 'x', 'choices': [choice], **more})}\r\n\r\n"

    await asyncio.sleep(0.05)
    for step in steps(text, most, drafted, "bushy" in prompt):
        await asyncio.sleep(pause)
        trace = totals.add(step) | {"index": number}
        if "broken" in prompt and totals.calls > 5:
            yield f"data: {json.dumps({'error': {'message': 'The worker died.', 'type': 'server_error'}})}\n\n"
            return
        # Deltas lag by a few characters, as they do behind stop strings.
        held += step.delta
        delta, held = (held[:-6], held[-6:]) if len(held) > 6 else ("", held)
        stops = [place for stop in body.get("stop", []) if (place := (gone + delta + held).find(stop)) >= 0]
        if stops:
            yield chunk((gone + delta + held)[len(gone) : min(stops)], polydraft=trace)
            held = ""
            break
        gone += delta
        yield chunk(delta, polydraft=trace)
    yield chunk(held)
    yield chunk("", "length" if totals.tokens >= most else "stop")


def page_file(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    path = PAGE / name
    return FileResponse(path, headers=POLICY) if path.is_file() and path.parent == PAGE else Response(status_code=404)


def bodies(request: Request) -> Response:
    return JSONResponse(request.app.state.bodies)


def application() -> Starlette:
    app = Starlette(
        routes=[
            Route("/", page_file),
            Route("/page/{name}", page_file),
            Route("/health", lambda _: JSONResponse({"status": "ok"})),
            Route("/bodies", bodies),
            Route("/polydraft/options", lambda _: JSONResponse(OPTIONS)),
            Route("/v1/chat/completions", answer, methods=["POST"]),
            Route("/v1/completions", answer, methods=["POST"]),
        ]
    )
    app.state.bodies = []
    return app


if __name__ == "__main__":
    uvicorn.run(application(), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
