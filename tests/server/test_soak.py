"""A server under mixed, slow, leaving and hostile clients for a long time, and its model's process killed once.

`make soak` runs it for half an hour, `make soak MINUTES=2` shorter; it prints a summary with what was counted.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter
from serving import alone, healthy, resident, running, until, worker_of

from polydraft.models import load_pair
from polydraft.server.wire.answer_types import ErrorBody
from polydraft.server.wire.error_answers import STATUSES

MINUTES = float(os.environ.get("POLYDRAFT_SOAK_MINUTES", "30"))
GROWTH = 0.05
"""Memory may grow by so much after the warm-up."""
WARM_UP = 0.2
"""This share of the time, after each start of a process, its memory may grow."""
RECOVERY = 10.0
"""Seconds after the kill in which the model is loaded again."""
PATH = "/v1/completions"
PROMPTS = ("def fib(n):\n", "import os\nclass A:\n", "for i in range(10):\n    print(", "x = [1, 2, 3]\n" * 8, "a")
MIXED: list[dict[str, Any]] = [
    {},
    {"guided_regex": "[a-z ]{4,30}"},
    {"prediction": {"type": "content", "content": "    return fib(n - 1) + fib(n - 2)\n"}},
    {"n": 3},
    {"logprobs": 3, "n": 2},
    {"response_format": {"type": "json_object"}},
    {"speculative": {"drafter": "ngram"}},
    {"speculative": {"drafter": "model", "tree": "3,2", "detailed": True}},
    {"speculative": {"enabled": False}},
    {"presence_penalty": 0.5, "stop": ["return"]},
]
MALFORMED = (
    b"",
    b"{",
    b"[" * 50_000,
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": [[]]}',
    b'{"prompt": "a", "n": 100000}',
    b'{"prompt": "a", "guided_grammar": "no grammar ("}',
    b'{"prompt": "a", "logit_bias": {"9": 1000}}',
    b'{"prompt": "' + b"a" * 200_000 + b'"}',
    b"\xff" * 10_000,
)
LENGTH = 24


def body(number: int) -> dict[str, Any]:
    """Return one of many requests; each has one text, whenever it is asked for."""
    mixed = MIXED[number % len(MIXED)]
    heat = (0.0, 0.6, 1.0)[number % 3]
    return {"prompt": PROMPTS[number % len(PROMPTS)], "seed": number, "temperature": heat, "max_tokens": LENGTH} | mixed


@dataclass
class Seen:
    """What came of a request."""

    kind: str
    begun: float
    over: float
    status: int
    code: str | None = None


@dataclass
class Soak:
    """A run: what is asked, until when, and all that was seen."""

    address: str
    end: float
    seen: list[Seen] = field(default_factory=list[Seen])
    texts: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    wrong: list[int] = field(default_factory=list[int])
    lost: list[str] = field(default_factory=list[str])
    tokens: int = 0

    def note(self, kind: str, begun: float, status: int, code: str | None = None) -> None:
        """Note what came of a request."""
        self.seen.append(Seen(kind, begun, time.monotonic(), status, code))

    def compare(self, number: int, texts: tuple[str, ...]) -> None:
        """Check that a request has the text that it had before."""
        if self.texts.setdefault(number, texts) != texts:
            self.wrong.append(number)

    async def repeat(self, client: Callable[[random.Random], Awaitable[None]], seed: int) -> None:
        """Be a client again and again."""
        drawn = random.Random(seed)
        while time.monotonic() < self.end:
            try:
                await client(drawn)
            except httpx.TransportError as error:
                self.lost.append(f"{type(error).__name__}: {error}")
            if self.seen and self.seen[-1].status in (429, 503):
                await asyncio.sleep(0.2)

    async def whole(self, line: httpx.AsyncClient, drawn: random.Random) -> None:
        """Ask for a whole answer."""
        number, begun = drawn.randrange(90), time.monotonic()
        answer = await line.post(PATH, json=body(number))
        told = answer.json()
        self.note("whole", begun, answer.status_code, told.get("error", {}).get("code"))
        if answer.status_code == 200:
            self.tokens += told["usage"]["completion_tokens"]
            self.compare(number, tuple(one["text"] for one in told["choices"]))

    async def stream(self, line: httpx.AsyncClient, drawn: random.Random, pause: float = 0.0) -> None:
        """Read a stream, with a pause behind each event."""
        number, begun, code = drawn.randrange(90), time.monotonic(), None
        texts, kind = [""] * body(number).get("n", 1), "slow reader" if pause else "stream"
        async with line.stream("POST", PATH, json={**body(number), "stream": True}) as answer:
            async for event in answer.aiter_lines():
                told = json.loads(event.removeprefix("data: ")) if event and "[DONE]" not in event else {}
                code = told.get("error", {}).get("code", code)
                for one in told.get("choices", ()):
                    texts[one["index"]] += one["text"]
                await asyncio.sleep(pause)
        self.note(kind, begun, answer.status_code if code is None else STATUSES.get(code, 500), code)
        if code is None and answer.status_code == 200:
            self.compare(number, tuple(texts))

    async def leave(self, line: httpx.AsyncClient, drawn: random.Random) -> None:
        """Leave in the middle of a stream, or before its beginning."""
        begun, long = time.monotonic(), {**body(drawn.randrange(90)), "max_tokens": 100, "stream": True}
        if drawn.random() < 0.3:
            with contextlib.suppress(httpx.TimeoutException):
                await line.post(PATH, json=long, timeout=drawn.random() * 0.3 + 0.01)
            self.note("left early", begun, 0)
            return
        async with line.stream("POST", PATH, json=long) as answer:
            lines, told = answer.aiter_lines(), ""
            for _ in range(drawn.randrange(1, 8)):
                told = await anext(lines, told)
        self.note("left midway", begun, answer.status_code, None if answer.status_code == 200 else _code(told))

    async def bother(self, line: httpx.AsyncClient, drawn: random.Random) -> None:
        """Send what is no request."""
        begun, head = time.monotonic(), {"content-type": "application/json"}
        answer = await line.post(PATH, content=drawn.choice(MALFORMED), headers=head)
        self.note("malformed", begun, answer.status_code, answer.json()["error"]["code"])
        await asyncio.sleep(0.05)

    def by_description(self) -> None:
        """Send what the server's own description allows, and in every other turn bodies that it forbids."""
        schemathesis = pytest.importorskip("schemathesis")
        schema = schemathesis.openapi.from_url(f"{self.address}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        takers = [one for one in operations if one.method.upper() == "POST"]
        number = 0
        while time.monotonic() < self.end:
            mode, among = ("negative", takers) if number % 2 else ("positive", operations)
            strategy = among[number // 2 % len(among)].as_strategy(generation_mode=schemathesis.GenerationMode(mode))
            self.send_cases(strategy, "forbidden" if number % 2 else "described", number)
            number += 1

    def send_cases(self, strategy: Any, kind: str, number: int) -> None:
        """Send some of what a strategy makes."""
        from hypothesis import HealthCheck, Phase, given, seed, settings

        health = [*HealthCheck]

        @seed(number)
        @given(case=strategy)
        @settings(max_examples=10, deadline=None, suppress_health_check=health, database=None, phases=[Phase.generate])
        def send(case: Any) -> None:
            if time.monotonic() < self.end:
                begun, answer = time.monotonic(), case.call(base_url=self.address, timeout=240)
                self.note(kind, begun, answer.status_code, _code(answer.text))
                if answer.status_code >= 400:
                    TypeAdapter(ErrorBody).validate_json(answer.text, strict=True)
                time.sleep(0.05)

        send()


def _code(told: str) -> str | None:
    """Return the code of an error, if there is one."""
    return json.loads(told)["error"]["code"] if told.startswith('{"error"') else None


@dataclass
class Memory:
    """Samples of a process's memory, in MiB, with their times."""

    name: str
    pid: int
    begun: float
    samples: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def sample(self) -> None:
        """Take a sample, if the process is there."""
        with contextlib.suppress(OSError):
            self.samples.append((time.monotonic(), resident(self.pid) * os.sysconf("SC_PAGESIZE") / 2**20))

    def flat(self, warm_up: float) -> tuple[float, float, float]:
        """Return the memory in the first and the last quarter after the warm-up, and by how much it grew."""
        own = [value for when, value in self.samples if when > self.begun + warm_up]
        quarter = max(1, len(own) // 4)
        first, last = median(own[:quarter]), median(own[-quarter:])
        return first, last, last / first - 1


async def clients(soak: Soak) -> None:
    """Be all clients until the end."""
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=soak.address, timeout=240, limits=limits) as line:
        kinds: list[Callable[[random.Random], Awaitable[None]]] = [
            *[lambda drawn: soak.whole(line, drawn)] * 3,
            *[lambda drawn: soak.stream(line, drawn)] * 3,
            *[lambda drawn: soak.stream(line, drawn, 0.3)] * 2,
            *[lambda drawn: soak.leave(line, drawn)] * 2,
            lambda drawn: soak.bother(line, drawn),
        ]
        await asyncio.gather(*(soak.repeat(one, number) for number, one in enumerate(kinds)))


def watched(
    process: subprocess.Popen[str], soak: Soak, seconds: float, log: list[str]
) -> tuple[list[Memory], float, float]:
    """Sample memory until the end, and kill the worker in the middle; return the samples, and when it went and came."""
    begun = time.monotonic()
    memories = [Memory("front", process.pid, begun), Memory("first worker", worker_of(process), begun)]
    killed = cured = 0.0
    while time.monotonic() < soak.end:
        if not killed and time.monotonic() > begun + seconds / 2:
            before, killed = len(log), time.monotonic()
            os.kill(memories[1].pid, signal.SIGKILL)
            until(lambda before=before: any('"worker gone"' in line for line in log[before:]), RECOVERY)
            until(lambda: healthy(soak.address), 3 * RECOVERY)
            cured = time.monotonic()
            memories.append(Memory("second worker", worker_of(process), cured))
        for one in memories:
            one.sample()
        time.sleep(0.5)
    return memories, killed, cured


@dataclass
class Ended:
    """What a run came to."""

    soak: Soak
    killed: float
    cured: float
    growth: dict[str, tuple[float, float, float]]

    @property
    def bad(self) -> list[Seen]:
        """The errors of ours; the kill explains none."""
        return [one for one in self.soak.seen if one.status >= 500]

    def summary(self) -> str:
        """Return everything that was counted."""
        soak, counted = self.soak, Counter((one.kind, one.status) for one in self.soak.seen)
        return "\n".join(
            [
                f"\n{MINUTES:g} minutes, {len(soak.seen)} requests, {soak.tokens} tokens of whole answers:",
                *(f"  {kind}, {status or 'not read'}: {count}" for (kind, status), count in sorted(counted.items())),
                f"{len(soak.texts)} different texts, {len(soak.wrong)} told otherwise later; {len(soak.lost)} lost.",
                f"Kill: back in {self.cured - self.killed:.2f} s.",
                *(
                    f"  {name}: {before:.0f} to {after:.0f} MiB, {grown:+.1%}"
                    for name, (before, after, grown) in self.growth.items()
                ),
                "",
            ]
        )


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_a_server_lasts() -> None:
    seconds, log = 60 * MINUTES, list[str]()
    with running("--dtype", "float64", "--max-length", "200", "--max-queue", "256", log=log) as (process, address):
        soak = Soak(address, time.monotonic() + seconds)
        with ThreadPoolExecutor(2) as pool:
            asking = [pool.submit(lambda: asyncio.run(clients(soak))), pool.submit(soak.by_description)]
            memories, killed, cured = watched(process, soak, seconds, log)
            for one in asking:
                one.result(300)
        idle = 'num_requests_running{model_name="polydraft-embedded"} 0.0'
        until(lambda: idle in httpx.get(f"{address}/metrics").text)
        own = {"prompt": PROMPTS[0], "seed": 3, "temperature": 0.8, "max_tokens": LENGTH}
        last = httpx.post(f"{address}{PATH}", json=own, timeout=60).json()["choices"][0]["text"]
    ended = Ended(soak, killed, cured, {one.name: one.flat(WARM_UP * seconds) for one in memories})
    sys.stdout.write(ended.summary())
    assert not ended.bad and not soak.lost, (ended.bad[:5], soak.lost[:5])
    assert not [line for line in log if '"request failed"' in line]
    assert len(soak.texts) > 10 and not soak.wrong
    assert all(grown <= GROWTH for _, _, grown in ended.growth.values())
    assert last == alone(load_pair(dtype="float64"), PROMPTS[0], seed=3, temperature=0.8, max_new_tokens=LENGTH)
    assert cured - killed < RECOVERY
