"""Load servers in turns, and print how fast each writes: `python docs/measure_server.py`, with the extra `serve`.

Every arm is a server of its own, at a port of its own. In each round all of them get the same requests, one after the
other, so that what else runs on the machine comes to all: ratios of one round are to be trusted, speeds are not.

The arm `engine` is no server: a process that writes the same texts by direct calls, one after the other, with the
drafts of the arm `default`. So it takes part where there is one client, and tells what the server itself costs; no
server keeps prompts for later ones then, since direct calls do not:

    python docs/measure_server.py --arms engine default --clients 1
    python docs/measure_server.py --arms engine default --clients 1 --server-option=--target=smollm2

Below the table stands how much memory each server and the processes that it started hold behind each round, pages that
they share counted once. `--json` prints the same for machines.

The arm `learning` is a server whose draft learns from finished texts; its folder is gone afterwards. Of it the table
tells, too, how much memory the texts take, and how often other weights were used by then. A server that is never idle
keeps few texts; with rests it keeps them all, and its buffer fills:

    python docs/measure_server.py --arms default learning --clients 4 --temperature 1 --tokens 48 --least 200 \
        --rounds 10
    python docs/measure_server.py --arms learning --clients 1 --temperature 1 --tokens 48 --least 200 --rounds 20 \
        --rest 0.4
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import httpx
import numpy as np
import psutil
import torch

import polydraft
from polydraft.bench.environment import load, machine, versions
from polydraft.bench.prompts import read_prompts

ENGINE, USUAL, FOLDER = "engine", "default", "a folder of its own"
SERVERS = {"plain": ("--drafter", "none"), USUAL: (), "plan auto": ("--plan", "auto")}
SERVERS["learning"] = ("--learn", FOLDER, "--learn-bytes", "107000000")
"""What each server is told beside its port."""
LEARNER = "polydraft:learn_bytes", "polydraft:learn_swaps_total"
SETS = ("humaneval", "python")
START = "from polydraft_command import main; main()"
EXCERPT = 600
"""So many characters of an excerpt are a prompt: it is meant to be begun with."""
READY, LONGEST = 180, 900
"""Seconds in which a server must be ready, and those of a request."""


@dataclass(frozen=True)
class Told:
    """One request: the seconds to the first token, the tokens, and the text."""

    first: float
    tokens: int
    text: str


@dataclass(frozen=True)
class Load:
    """What one arm did in one round: tokens per second, the times to first tokens, the texts by their number, how many
    MB each of its processes holds then, and what its learner says: bytes of the texts that it keeps, and swaps.
    """

    speed: float
    firsts: tuple[float, ...]
    texts: tuple[str, ...]
    memory: tuple[int, ...] = ()
    learner: tuple[float, ...] = ()


@dataclass(frozen=True)
class Server:
    """An arm that is a server: its port, whether a planner chooses its trees, for which it must get no seed, and its
    process.
    """

    port: int
    plans: bool
    process: psutil.Process

    def loaded(self, clients: int, texts: Sequence[str], asked: argparse.Namespace) -> Load:
        """Let clients send texts."""
        found = asyncio.run(loaded(self, clients, texts, asked))
        every = (self.process, *self.process.children(recursive=True))
        memory = tuple(one.memory_full_info().pss // 2**20 for one in every)
        lines = httpx.get(f"http://127.0.0.1:{self.port}/metrics").text.splitlines()
        told = [line.split()[-1] for name in LEARNER for line in lines if line.startswith(name)]
        return replace(found, memory=memory, learner=tuple(map(float, told)))


@dataclass(frozen=True)
class Engine:
    """The arm without a server: a process that is sent texts."""

    pipe: Connection

    def loaded(self, clients: int, texts: Sequence[str], asked: argparse.Namespace) -> Load | None:
        """Write the texts, one after the other; nothing where there are several clients."""
        if clients > 1:
            return None
        self.pipe.send(list(texts))
        took, told = self.pipe.recv()
        return _load(told, took)


def main() -> None:
    """Measure what is asked for, and print it as Markdown."""
    asked = _arguments()
    options = ("--batch-size", str(asked.batch_size), "--threads", str(asked.threads), "--max-queue", "1024")
    options += (*(("--kept-texts", "0") if ENGINE in asked.arms else ()), *asked.server_option)
    before = load()
    with ExitStack() as stack:
        arms = list[Server | Engine]()
        for number, name in enumerate(asked.arms):
            if name == ENGINE:
                arms.append(stack.enter_context(engine(asked)))
                continue
            process = stack.enter_context(served(asked.port + number, (*SERVERS[name], *options)))
            arms.append(Server(asked.port + number, "--plan" in SERVERS[name], process))
        for clients in asked.clients:  # every kind of batch is met once before the clock runs
            for arm in arms if asked.warm else ():
                arm.loaded(clients, _texts(clients, asked.warm * clients, 0), asked)
        found = {clients: measured(asked, arms, clients) for clients in asked.clients}
    print((as_json if asked.json else table)(asked, found, (before, load())))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=[ENGINE, *SERVERS],
        default=[*SERVERS][:3],
        help="the first is what others are over",
    )
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--texts", type=int, default=2, help="of each client in a round")
    parser.add_argument("--least", type=int, default=8, help="texts of a round, however few clients there are")
    parser.add_argument("--warm", type=int, default=2, help="texts of each client before the first round")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds that a client waits behind each text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--port", type=int, default=8220, help="of the first server; the others have the next ones")
    parser.add_argument(
        "--server-option", action="append", default=[], help="for all servers, such as --target=smollm2"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    asked = parser.parse_args()
    if asked.arms[0] == ENGINE and {*asked.clients} != {1}:
        raise SystemExit(f"The arm {ENGINE} writes for one client: name it behind others, or --clients 1.")
    return asked


@contextmanager
def engine(asked: argparse.Namespace) -> Iterator[Engine]:
    """Run the process of the arm without a server; it must be ready before."""
    known = argparse.ArgumentParser()
    for name in ("--target", "--draft", "--dtype"):
        known.add_argument(name, default="auto" if name == "--dtype" else None)
    named, strange = known.parse_known_args(asked.server_option)
    if strange:
        raise SystemExit(f"The arm {ENGINE} knows --target, --draft and --dtype, but not {strange[0]}: leave one out.")
    ours, theirs = (context := multiprocessing.get_context("spawn")).Pipe()
    process = context.Process(target=write, args=(theirs, vars(named), asked), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(READY):
            raise SystemExit(f"The arm {ENGINE} did not become ready.")
        ours.recv()
        yield Engine(ours)
    finally:
        process.terminate()
        process.join(60)


def write(pipe: Connection, named: dict[str, str], asked: argparse.Namespace) -> None:
    """Be the process of the arm without a server: write the texts that are sent."""
    torch.set_num_threads(asked.threads)
    pair = polydraft.load(
        named["target"] or "pair", named["draft"] or (None if named["target"] else "pair-draft"), dtype=named["dtype"]
    )
    pair.target.generation_config.eos_token_id = None  # as `ignore_eos` has it
    pipe.send("ready")
    while True:
        texts, begin = pipe.recv(), time.perf_counter()
        told = [directly(pair, prompt, number, asked) for number, prompt in enumerate(texts)]
        pipe.send((time.perf_counter() - begin, told))


def directly(pair: Any, prompt: str, seed: int, asked: argparse.Namespace) -> Told:
    """Write one text as `polydraft.generate` does, by its stream, which tells when the first token is there."""
    begin, first, tokens = time.perf_counter(), 0.0, list[int]()
    ids = pair.tokenizer(prompt, return_tensors="pt")
    options: dict[str, Any] = {"temperature": asked.temperature, **({"top_k": 0} if asked.temperature else {})}
    for block in polydraft.stream(
        pair.target, ids, drafter=pair.draft, seed=seed, max_new_tokens=asked.tokens, **options
    ):
        first = first or time.perf_counter() - begin
        tokens += block.rows[0].tokens
    return Told(
        first, len(tokens), pair.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


@contextmanager
def served(port: int, options: Sequence[str]) -> Iterator[psutil.Process]:
    """Run a server until the block is over; it must be ready before."""
    with socket.socket() as probe:
        if not probe.connect_ex(("127.0.0.1", port)):
            raise SystemExit(f"Something listens at port {port} already; name another --port.")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        told = [folder if one == FOLDER else one for one in options]
        command = [sys.executable, "-c", START, "serve", "--port", str(port), *told]
        output = subprocess.DEVNULL
        process = stack.enter_context(subprocess.Popen(command, stdout=output, stderr=output))
        try:
            _await(process, f"http://127.0.0.1:{port}/health")
            yield psutil.Process(process.pid)
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


def measured(asked: argparse.Namespace, arms: Sequence[Server | Engine], clients: int) -> list[list[Load | None]]:
    """Return by round what every arm did; every other round begins with the last arm."""
    rounds = list[list[Load | None]]()
    for number in range(asked.rounds):
        texts = _texts(clients, max(asked.least, asked.texts * clients), number + 1)
        order = [*enumerate(arms)][:: 1 if number % 2 else -1]
        own = {place: arm.loaded(clients, texts, asked) for place, arm in order}
        rounds.append([one for _, one in sorted(own.items())])
        speeds = (f"{one.speed:.0f}" if one else "-" for one in rounds[-1])
        print(f"{clients} clients, round {number + 1}:", *speeds, file=sys.stderr)
    return rounds


async def loaded(server: Server, clients: int, texts: Sequence[str], asked: argparse.Namespace) -> Load:
    """Let clients send texts, each one after the other; the clock runs until the last is written."""
    waiting, found = [*enumerate(texts)][::-1], dict[int, Told]()
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=LONGEST, limits=limits) as session:

        async def client() -> None:
            while waiting:
                number, prompt = waiting.pop()
                found[number] = await written(session, prompt, None if server.plans else number, asked)
                if waiting:
                    await asyncio.sleep(asked.rest)

        begin = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        took = time.perf_counter() - begin
    return _load([one for _, one in sorted(found.items())], took)


def _load(told: Sequence[Told], took: float) -> Load:
    return Load(
        sum(one.tokens for one in told) / took, tuple(one.first for one in told), tuple(one.text for one in told)
    )


async def written(session: httpx.AsyncClient, prompt: str, seed: int | None, asked: argparse.Namespace) -> Told:
    """Stream one text to its end."""
    fields = {"prompt": prompt, "max_tokens": asked.tokens, "temperature": asked.temperature, "ignore_eos": True}
    fields |= {"stream": True, "stream_options": {"include_usage": True}, "seed": seed}
    begin, first, tokens, text = time.perf_counter(), 0.0, 0, ""
    async with session.stream("POST", "/v1/completions", json=fields) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            said = json.loads(line.removeprefix("data: "))
            first = first or (time.perf_counter() - begin if said.get("choices") else 0.0)
            text += "".join(one["text"] for one in said.get("choices", ()))
            tokens = (said.get("usage") or {}).get("completion_tokens", tokens)
    return Told(first, tokens, text)


def as_json(
    asked: argparse.Namespace, found: dict[int, list[list[Load | None]]], loads: tuple[float | None, ...]
) -> str:
    """Return what was asked and found, but for the texts, as JSON."""
    torch.set_num_threads(asked.threads)
    rounds = [
        {"clients": clients, "arm": name, "round": number, **vars(replace(one, texts=()))}
        for clients, every in found.items()
        for number, own in enumerate(every, 1)
        for name, one in zip(asked.arms, own, strict=True)
        if one
    ]
    own = {"machine": machine(torch.device("cpu")), "versions": versions(), "load": loads}
    return json.dumps({"asked": vars(asked), **own, "rounds": rounds})


def table(asked: argparse.Namespace, found: dict[int, list[list[Load | None]]], loads: tuple[float | None, ...]) -> str:
    """Return what was found as Markdown: each arm's tokens per second, and what the others' are over the first's."""
    names = [
        f"{name}: tokens/s" + (f", over {asked.arms[0]}" if place else "") for place, name in enumerate(asked.arms)
    ]
    head = ["clients", *names, *(f"first token of {name}: median, p99" for name in asked.arms)]
    lines = [head, ["---"] * len(head)]
    for clients, rounds in found.items():
        arms = [*zip(*rounds, strict=True)]
        lines.append([str(clients), *(_speeds(arms[0], arm) for arm in arms), *map(_firsts, arms)])
    torch.set_num_threads(asked.threads)
    own, made = machine(torch.device("cpu")), " ".join(f"{name} {one}" for name, one in versions().items())
    note = (
        f"Temperature {asked.temperature:g}, {asked.tokens} tokens a text, {asked.batch_size} texts in progress, "
        f"{asked.rounds} rounds of {asked.texts} texts a client and at least {asked.least}, {asked.rest:g} s of rest "
        f"between, which speeds have in them. {own['processor']}, "
        f"{own['cores']} cores, {asked.threads} threads a server, {made}; load average {loads[0]} before, {loads[1]} "
        f"after. {os.uname().sysname}."
    )
    return "\n".join(
        [
            *(f"| {' | '.join(line)} |" for line in lines),
            *("", note),
            *_overhead(asked.arms, found.get(1, [])),
            *(_memory(name, place, found) for place, name in enumerate(asked.arms) if name != ENGINE),
        ]
    )


def _memory(name: str, place: int, found: dict[int, list[list[Load | None]]]) -> str:
    """Say what an arm's processes hold behind each round."""
    behind = list[str]()
    for one in (each[place] for own in found.values() for each in own):
        assert one is not None
        texts = f" (texts {one.learner[0] / 2**20:.0f}, {one.learner[1]:.0f} swaps)" if one.learner else ""
        behind.append(f"{' + '.join(map(str, one.memory))} = {sum(one.memory)}{texts}")
    return (
        f"MB of the arm {name} behind each round, of the server and the processes that it started: {', '.join(behind)}."
    )


def _overhead(names: Sequence[str], rounds: Sequence[Sequence[Load | None]]) -> list[str]:
    """Return what the server takes over direct calls at one client, if both were measured."""
    if not {ENGINE, USUAL} <= {*names}:
        return []
    pairs = [(one[names.index(ENGINE)], one[names.index(USUAL)]) for one in rounds]
    both = [(one, other) for one, other in pairs if one and other]
    if not both:
        return []
    texts = [one == other for direct, server in both for one, other in zip(direct.texts, server.texts, strict=True)]
    ratios = [direct.speed / server.speed for direct, server in both]
    return [
        f"At 1 client the server takes {_spread(ratios)} of the time of direct calls; {sum(texts)} of {len(texts)} "
        "texts are the same."
    ]


def _speeds(usual: Sequence[Load | None], arm: Sequence[Load | None]) -> str:
    both = [(base, own) for base, own in zip(usual, arm, strict=True) if base and own]
    if not both:
        return "-"
    speed = f"{median(own.speed for _, own in both):.1f}"
    return speed if usual is arm else f"{speed}, {_spread([own.speed / base.speed for base, own in both])}"


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.3f}x ({min(ratios):.3f} to {max(ratios):.3f})"


def _firsts(arm: Sequence[Load | None]) -> str:
    every = [seconds for one in arm if one for seconds in one.firsts]
    return ", ".join(f"{1000 * one:.0f} ms" for one in np.percentile(every, (50, 99))) if every else "-"


if __name__ == "__main__":
    main()
