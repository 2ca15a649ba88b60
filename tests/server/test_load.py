"""Many clients at once: no answer is lost or another one's.

In double precision: of a thousand texts in single precision one or two differ from their single runs by rounding, where
a random number falls between two sums that a batch's arithmetic makes in another order.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import httpx
import pytest
from serving import alone, served

import polydraft
from polydraft.models import Pair, load_pair

EXACT = {"dtype": "float64"}
PROMPTS = ("def fib(n):\n", "import os\nclass A:\n", "for i in range(10):\n    print(", "x = [1, 2, 3]\n" * 12, "a")
HEATS = (0.0, 0.6, 1.0)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
RULES = 'start: "x" op NUMBER\nop: " + " | " - "\nNUMBER: /[0-9]{1,4}/\n'
FIELDS: tuple[dict[str, Any], ...] = (
    {"guided_regex": "[a-z ]{4,30}"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    {"guided_grammar": RULES},
)
"""What every eighth text must match, in turns; `GRAMMARS` are the same for single runs."""
GRAMMARS: tuple[Callable[[], polydraft.Grammar], ...] = (
    lambda: polydraft.Grammar.regex("[a-z ]{4,30}"),
    lambda: polydraft.Grammar.json_schema(SCHEMA),
    lambda: polydraft.Grammar.lark(RULES),
)


@pytest.fixture(scope="module")
def exact() -> Pair:
    """Return the embedded pair in double precision."""
    return load_pair(**EXACT)


@dataclass
class Answer:
    """What came of a request: its text, when its first token came, and how long it took."""

    text: str
    first: float
    whole: float
    tokens: int


def matched(number: int) -> int | None:
    """Return which of the grammars a request has; None for none."""
    return number // 8 % len(FIELDS) if number % 8 == 7 else None


def request(number: int) -> dict[str, Any]:
    """Return one of many different requests; each has its number as its seed."""
    own = matched(number)
    return {
        **({} if own is None else FIELDS[own]),
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": 2 + (7 * number) % 19,
        "temperature": HEATS[number % len(HEATS)],
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Send a request, again when the queue is full, and read its stream."""
    while True:
        begun, first, text, tokens = time.perf_counter(), 0.0, "", 0
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == 429:
                await asyncio.sleep(0.05)
                continue
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - begun
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    text += "".join(choice["text"] for choice in chunk["choices"])
                    tokens = chunk["usage"]["completion_tokens"] if chunk.get("usage") else tokens
        return Answer(text, first, time.perf_counter() - begun, tokens)


async def loaded(address: str, bodies: Sequence[dict[str, Any]], at_once: int) -> list[Answer]:
    """Send requests, so many at once."""
    gate = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:

        async def gated(body: dict[str, Any]) -> Answer:
            async with gate:
                return await one(client, body)

        return list(await asyncio.gather(*map(gated, bodies)))


def checked(pair: Pair, bodies: Sequence[dict[str, Any]], answers: Sequence[Answer]) -> None:
    """Compare texts with those of single runs with the same seeds."""
    for body, answer in zip(bodies, answers, strict=True):
        options = {"seed": body["seed"], "temperature": body["temperature"], "max_new_tokens": body["max_tokens"]}
        own = matched(body["seed"])
        if own is not None:
            options |= {"grammar": GRAMMARS[own](), "tokenizer": pair.tokenizer}
        assert answer.text == alone(pair, body["prompt"], **options)
        assert answer.tokens == body["max_tokens"] or answer.tokens > 0


def summary(answers: Sequence[Answer], took: float) -> str:
    """Return how fast texts came, and how long their clients waited: `pytest -s` shows it."""
    tokens, lines = sum(one.tokens for one in answers), list[str]()
    for name, seconds in {
        "first token": [one.first for one in answers],
        "whole": [one.whole for one in answers],
    }.items():
        middle, late = quantiles(seconds, n=100, method="inclusive")[49::49]
        lines.append(f"  {name}: median {middle:.2f} s, p99 {late:.2f} s")
    head = f"\n{len(answers)} texts, {tokens} tokens in {took:.1f} s: {tokens / took:.0f} tokens/s"
    return "\n".join([head, *lines, ""])


def test_what_is_said_of_a_load() -> None:
    told = summary([Answer("", 0.01 * number, 1 + 0.01 * number, 3) for number in range(101)], 10)
    assert "101 texts, 303 tokens in 10.0 s: 30 tokens/s" in told
    assert "first token: median 0.50 s, p99 0.99 s" in told and "whole: median 1.50 s, p99 1.99 s" in told


@pytest.mark.slow
def test_some_clients_at_once(exact: Pair) -> None:
    bodies = [request(number) for number in range(24)]
    assert {matched(number) for number in range(24)} == {None, 0, 1, 2}
    with served(batch_size=4, max_queue=4, **EXACT) as address:
        answers = asyncio.run(loaded(address, bodies, 16))
    checked(exact, bodies, answers)


@pytest.mark.slow
def test_a_thousand_requests_of_64_clients(exact: Pair) -> None:
    bodies = [request(number) for number in range(1000)]
    with served(batch_size=16, **EXACT) as address:
        begun = time.perf_counter()
        answers = asyncio.run(loaded(address, bodies, 64))
        took, metrics = time.perf_counter() - begun, httpx.get(f"{address}/metrics").text
    sys.stdout.write(summary(answers, took))
    checked(exact, bodies, answers)
    assert 'num_requests_running{model_name="polydraft-embedded"} 0.0' in metrics
