"""Load servers in turns, and print how fast each writes: `python docs/measure_server.py`, with the extra `serve`.

Every arm is a server of its own, at a port of its own. In each round all of them get the same requests, one after the
other, so that what else runs on the machine comes to all: ratios of one round are to be trusted, speeds are not.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from statistics import median

import httpx
import numpy as np
import torch

from polydraft.bench.environment import load, machine, versions
from polydraft.bench.prompts import read_prompts

ARMS = {"plain": ("--drafter", "none"), "default": (), "plan auto": ("--plan", "auto")}
"""What each server is told beside its port."""
SETS = ("humaneval", "python")
START = "from polydraft_command import main; main()"
EXCERPT = 600
"""So many characters of an excerpt are a prompt: it is meant to be begun with."""
READY, LONGEST = 180, 900
"""Seconds in which a server must be ready, and those of a request."""


@dataclass(frozen=True)
class Told:
    """One request: the seconds to the first token, and the tokens."""

    first: float
    tokens: int


@dataclass(frozen=True)
class Load:
    """What one arm did in one round: tokens per second, and the times to first tokens."""

    speed: float
    firsts: tuple[float, ...]


def main() -> None:
    """Measure what is asked for, and print it as Markdown."""
    asked = _arguments()
    ports = [asked.port + number for number in range(len(asked.arms))]
    options = ("--batch-size", str(asked.batch_size), "--threads", str(asked.threads), "--max-queue", "1024")
    options += tuple(asked.server_option)
    before = load()
    with ExitStack() as stack:
        for name, port in zip(asked.arms, ports, strict=True):
            stack.enter_context(served(port, (*options, *ARMS[name])))
        for clients in asked.clients:  # every kind of batch is met once before the clock runs
            for port in ports:
                asyncio.run(loaded(port, clients, _texts(clients, asked.warm * clients, 0), asked))
        found = {clients: measured(asked, ports, clients) for clients in asked.clients}
    print(table(asked, found, (before, load())))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=[*ARMS], default=[*ARMS], help="the first is what others are over")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--texts", type=int, default=2, help="of each client in a round")
    parser.add_argument("--least", type=int, default=8, help="texts of a round, however few clients there are")
    parser.add_argument("--warm", type=int, default=2, help="texts of each client before the first round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--port", type=int, default=8220, help="of the first server; the others have the next ones")
    parser.add_argument(
        "--server-option", action="append", default=[], help="for all servers, such as --target=smollm2"
    )
    return parser.parse_args()


@contextmanager
def served(port: int, options: Sequence[str]) -> Iterator[None]:
    """Run a server until the block is over; it must be ready before."""
    with socket.socket() as probe:
        if not probe.connect_ex(("127.0.0.1", port)):
            raise SystemExit(f"Something listens at port {port} already; name another --port.")
    command = [sys.executable, "-c", START, "serve", "--port", str(port), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _await(process, f"http://127.0.0.1:{port}/health")
            yield
        finally:
            process.terminate()
            process.wait(60)


def _await(process: subprocess.Popen[bytes], address: str) -> None:
    end = time.monotonic() + READY
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(address).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"The server at {address} did not become ready: {' '.join(map(str, process.args))}")


def _texts(clients: int, count: int, number: int) -> list[str]:
    """Return prompts, the same ones for every arm of a round."""
    prompts = [one.text[:EXCERPT] if one.excerpt else one.text for name in SETS for one in read_prompts(name)]
    return random.Random(1000 * clients + number).choices(prompts, k=count)


def measured(asked: argparse.Namespace, ports: Sequence[int], clients: int) -> list[list[Load]]:
    """Return by round what every arm did; every other round begins with the last arm."""
    rounds = list[list[Load]]()
    for number in range(asked.rounds):
        texts = _texts(clients, max(asked.least, asked.texts * clients), number + 1)
        order = [*enumerate(ports)][:: 1 if number % 2 else -1]
        own = {place: asyncio.run(loaded(port, clients, texts, asked)) for place, port in order}
        rounds.append([one for _, one in sorted(own.items())])
        print(f"{clients} clients, round {number + 1}:", *(f"{one.speed:.0f}" for one in rounds[-1]), file=sys.stderr)
    return rounds


async def loaded(port: int, clients: int, texts: Sequence[str], asked: argparse.Namespace) -> Load:
    """Let clients send texts, each one after the other; the clock runs until the last is written."""
    waiting = [*texts][::-1]
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LONGEST, limits=limits) as session:

        async def client() -> list[Told]:
            found = list[Told]()
            while waiting:
                found.append(await written(session, waiting.pop(), asked))
            return found

        begin = time.perf_counter()
        told = [*chain.from_iterable(await asyncio.gather(*(client() for _ in range(clients))))]
        took = time.perf_counter() - begin
    return Load(sum(one.tokens for one in told) / took, tuple(one.first for one in told))


async def written(session: httpx.AsyncClient, prompt: str, asked: argparse.Namespace) -> Told:
    """Stream one text to its end."""
    fields = {"prompt": prompt, "max_tokens": asked.tokens, "temperature": asked.temperature, "ignore_eos": True}
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    begin, first, tokens = time.perf_counter(), 0.0, 0
    async with session.stream("POST", "/v1/completions", json=fields) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            said = json.loads(line.removeprefix("data: "))
            first = first or (time.perf_counter() - begin if said.get("choices") else 0.0)
            tokens = (said.get("usage") or {}).get("completion_tokens", tokens)
    return Told(first, tokens)


def table(asked: argparse.Namespace, found: dict[int, list[list[Load]]], loads: tuple[float | None, ...]) -> str:
    """Return what was found as Markdown: the first arm's tokens per second, and the others' over it."""
    names = [
        f"{name}: tokens/s" if not place else f"{name}, over {asked.arms[0]}" for place, name in enumerate(asked.arms)
    ]
    head = ["clients", *names, *(f"first token of {name}: median, p99" for name in asked.arms)]
    lines = [head, ["---"] * len(head)]
    for clients, rounds in found.items():
        arms = [*zip(*rounds, strict=True)]
        speeds = [f"{median(one.speed for one in arms[0]):.0f}", *(_ratios(arms[0], arm) for arm in arms[1:])]
        lines.append([str(clients), *speeds, *map(_firsts, arms)])
    torch.set_num_threads(asked.threads)
    own, made = machine(torch.device("cpu")), " ".join(f"{name} {one}" for name, one in versions().items())
    note = (
        f"Temperature {asked.temperature:g}, {asked.tokens} tokens a text, {asked.batch_size} texts in progress, "
        f"{asked.rounds} rounds of {asked.texts} texts a client and at least {asked.least}. {own['processor']}, "
        f"{own['cores']} cores, {asked.threads} threads a server, {made}; load average {loads[0]} before, {loads[1]} "
        f"after. {os.uname().sysname}."
    )
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", note])


def _ratios(usual: Sequence[Load], arm: Sequence[Load]) -> str:
    ratios = [own.speed / base.speed for base, own in zip(usual, arm, strict=True)]
    return f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def _firsts(arm: Sequence[Load]) -> str:
    every = [seconds for one in arm for seconds in one.firsts]
    return ", ".join(f"{1000 * one:.0f} ms" for one in (median(every), float(np.percentile(every, 99))))


if __name__ == "__main__":
    main()
