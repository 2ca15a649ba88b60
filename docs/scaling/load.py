"""Load servers with one and two workers in bursts, and append what came of it to docs/scaling/record.jsonl.

    python docs/scaling/load.py one plain two open:one:0.6 open:two:0.8 turns killed --pause 60
    python docs/scaling/load.py turns:before --before FOLDER

A word is a burst: `one`, `two` and `plain` let 1, 2, 4 and 8 clients for each worker ask again and again, for the fit;
`open:SERVER:SHARE` sends requests by a Poisson process, so many of what the fit says that the server can take; `turns`
loads servers with one worker and two in turns, `turns:before` one worker of this source and of another checkout's;
`ray` asks one worker and one replica of a Ray cluster of this machine in turns, one request at a time; `killed` ends
one of two workers by kill -9; `choice` times how a front chooses among many workers.

All servers, with the embedded pair and one thread a worker, are started first. A burst takes less than a minute of the
clock; `--real-time 20` gives servers and client that priority meanwhile (Linux), workers less, so that what else the
machine does is not measured too.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import torch

from polydraft.bench.environment import load, machine, versions
from polydraft.bench.prompts import read_prompts
from polydraft.server.front.slots import WorkerSlot, chosen
from polydraft.server.worker import Ask

FOLDER = Path(__file__).parent
RECORD = FOLDER / "record.jsonl"
SETS, EXCERPT = ("humaneval", "python"), 600
LENGTHS = 16, 96
"""Tokens of answers: any number between these."""
SERVERS = {
    "one": (1, ()),
    "two": (2, ()),
    "plain": (1, ("--drafter", "none")),
    "before": (1, ()),
    "ray": (1, ("--ray",)),
}
"""Workers and options of each server."""
CLIENTS = (1, 2, 4, 8)
SECONDS, SETTLED, WARM = 12.0, 1.0, 1.5
"""Those of a closed load, those at its beginning that do not count, and those in which a server meets what comes."""
OPEN, TURNS, KILL = 40.0, 44.0, 6.0
"""Seconds of an open load, of all turns, and of load before the kill."""
RAY_TURNS, RAY_SECONDS = 2, 6.0
"""How often both are asked there and back, and seconds of each."""
PACED, PACING = 4, 9.0
"""Clients for each worker, and seconds, of the closed load before an open one."""
TOGETHER = 0.005
"""Seconds between two events of one step at most; a step takes longer."""
SLOTS, CHOICES = (2, 16, 128, 1024, 4096), 20
READY = 2400.0
Line = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """A request: its text, how many tokens it wants, and its seed."""

    prompt: str
    tokens: int
    seed: int


@dataclass
class Told:
    """What came of a request.

    Attributes:
        begun: when it was sent.
        events: when something of the text came.
        prompt, tokens, calls: tokens of prompt and answer, and steps of the text.
    """

    begun: float
    events: list[float] = field(default_factory=list[float])
    prompt: int = 0
    tokens: int = 0
    calls: int = 0


def requests(stream: random.Random) -> Iterator[Asked]:
    """Yield requests without end."""
    texts = [one.text[:EXCERPT] if one.excerpt else one.text for name in SETS for one in read_prompts(name)]
    while True:
        yield Asked(stream.choice(texts), stream.randint(*LENGTHS), stream.getrandbits(30))


@dataclass(frozen=True)
class Server:
    """A server: its address and its process."""

    address: str
    pid: int

    @property
    def worker(self) -> int:
        """A process that holds a model: the one with the most memory."""
        return max(_below(self.pid), key=_resident)


@contextlib.contextmanager
def serving(names: Sequence[str], before: Path | None) -> Iterator[dict[str, Server]]:
    """Run servers until the block is over; all must be ready before."""
    with contextlib.ExitStack() as stack:
        made = {name: stack.enter_context(_started(name, before if name == "before" else None)) for name in names}
        end = time.monotonic() + READY
        for name, one in made.items():
            while not _healthy(one.address):
                if time.monotonic() > end:
                    raise SystemExit(f"The server {name} did not become ready.")
                time.sleep(0.5)
            print(f"{name} is ready.", flush=True)
        yield made


@contextlib.contextmanager
def _started(name: str, source: Path | None) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers, options = SERVERS[name]
    known = source is None and "--ray" not in options  # there may be a source that does not know workers
    many = ("--workers", str(workers)) if known else ()
    start = [sys.executable, "-c", "from polydraft_command import main; main()", "serve", "--port", str(port), *many]
    limits = ("--threads", str(workers), "--batch-size", "8", "--kept-texts", "0", "--max-queue", "2048")
    given = {"PYTHONPATH": str(source / "src")} if source else {}
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*start, *limits, *options], env={**os.environ, **given}, **quiet) as own:
        try:
            yield Server(f"http://127.0.0.1:{port}", own.pid)
        finally:
            own.terminate()
            own.wait(60)


def _healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False


def _below(pid: int) -> list[int]:
    found = list[int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, parent = int(path.parent.name), int(path.read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                found += [number, *_below(number)]
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


def busy(pid: int) -> float:
    """Return the seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def real_time(priority: int, servers: Sequence[Server]) -> Iterator[None]:
    """Give servers and this process a real-time priority until the block is over; 0 for none.

    Workers have less, since they wait for nothing while they have texts and would keep the others from a core, and of
    their threads the one that takes steps has the least, since the other one makes prompts into tokens beside it.
    """

    def put(policy: int, value: int) -> None:
        below = {pid for server in servers for pid in _below(server.pid)}
        for pid in (os.getpid(), *(server.pid for server in servers), *below):
            for path in Path(f"/proc/{pid}/task").glob("*"):
                less = (1 + (path.name == str(pid))) if pid in below and value else 0
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setscheduler(int(path.name), policy, os.sched_param(value - less))

    if priority:
        put(os.SCHED_FIFO, priority)
    try:
        yield
    finally:
        if priority:
            put(os.SCHED_OTHER, 0)


async def ask(line: httpx.AsyncClient, one: Asked, *, ids: bool = True) -> Told:
    """Stream one text to its end, with its tokens, since a step may bring some without a text."""
    body = {"prompt": one.prompt, "max_tokens": one.tokens, "seed": one.seed, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, **({"return_token_ids": True} if ids else {})}
    told = Told(time.perf_counter())
    async with line.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for event in answer.aiter_lines():
            if not event.startswith("data: {"):
                continue
            now, said = time.perf_counter(), json.loads(event.removeprefix("data: "))
            if any(choice.get("token_ids" if ids else "text") for choice in said.get("choices", ())):
                told.events.append(now)
            if usage := said.get("usage"):
                told.prompt, told.tokens = usage["prompt_tokens"], usage["completion_tokens"]
            if counts := (said.get("metrics") or {}).get("speculative_decoding"):
                told.calls = counts["target_calls"]
    told.calls = told.calls or len(told.events)
    return told


def line_to(server: Server) -> httpx.AsyncClient:
    """Return a client with as many connections as it takes."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    return httpx.AsyncClient(base_url=server.address, timeout=300, limits=limits)


async def closed(
    server: Server, clients: int, seconds: float, stream: random.Random, *, ids: bool = True
) -> list[Told]:
    """Let so many clients ask again and again; return what they were told, whole texts alone."""
    own, found, end = requests(stream), list[Told](), time.perf_counter() + seconds
    async with line_to(server) as line:

        async def client() -> None:
            while time.perf_counter() < end:
                found.append(await ask(line, next(own), ids=ids))

        await asyncio.gather(*(client() for _ in range(clients)))
    return found


async def opened(server: Server, rate: float, seconds: float, stream: random.Random) -> list[Told]:
    """Send requests by a Poisson process."""
    own, asking = requests(stream), list[asyncio.Task[Told]]()
    async with line_to(server) as line:
        at = begun = time.perf_counter()
        while (at := at + stream.expovariate(rate)) < begun + seconds:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            asking.append(asyncio.create_task(ask(line, next(own))))
        return [await one for one in asking]


def windows(found: Sequence[Told], after: float) -> list[list[float]]:
    """Return what a worker did between new texts: seconds, new texts, their prompts' tokens, steps by texts.

    A text has one event in every step, and those of a step come close behind each other, so another step begins where
    a text has its next event or nothing comes for a while. A window ends with the first event of a step in which a text
    has its first one, since a long prompt is read in parts beside the steps before it, or where a worker becomes idle.
    """
    events = sorted((when, number, place) for number, one in enumerate(found) for place, when in enumerate(one.events))
    steps, seen = list[list[tuple[float, int, int]]](), set[int]()
    for one in events:
        if not steps or one[1] in seen or one[0] - steps[-1][-1][0] > TOGETHER:
            steps.append([])
            seen = set()
        steps[-1].append(one)
        seen.add(one[1])
    made = [Window()]
    for before, now in itertools.pairwise(steps):
        if before[0][0] <= after or not {number for _, number, _ in before} & {number for _, number, _ in now}:
            made.append(Window())
            continue
        new = [found[number].prompt for _, number, place in now if place == 0]
        made[-1].add(now[0][0] - before[0][0], len(now), new)
        if new:
            made.append(Window())
    return [one.told for one in made if one.seconds]


@dataclass
class Window:
    """Some steps of a worker that was never idle."""

    seconds: float = 0.0
    prompts: list[int] = field(default_factory=list[int])
    steps: list[int] = field(default_factory=lambda: [0] * 8)

    def add(self, seconds: float, texts: int, new: Sequence[int]) -> None:
        """Add a step."""
        self.seconds += seconds
        self.steps[min(texts, len(self.steps)) - 1] += 1
        self.prompts.extend(new)

    @property
    def told(self) -> list[float]:
        """As a line."""
        return [round(self.seconds, 5), len(self.prompts), sum(self.prompts), *self.steps]


def told_of(found: Sequence[Told], begun: float) -> list[list[float]]:
    """Return requests as lines: when sent, first token, end (milliseconds after), prompt, tokens, steps."""
    rows = ((one, one.events[0] - one.begun, one.events[-1] - one.begun) for one in found)
    return [
        [round(one.begun - begun, 4), round(1e3 * first, 1), round(1e3 * end, 1), one.prompt, one.tokens, one.calls]
        for one, first, end in rows
    ]


def append(line: Line) -> None:
    """Append a line to the record, with the machine."""
    own = machine(torch.device("cpu"))
    about = {"machine": own["processor"], "cores": own["cores"], "torch": versions()["torch"], "load": load()}
    with RECORD.open("a") as file:
        file.write(json.dumps({**line, **about}) + "\n")


def measured(server: Server, found: Sequence[Told], begun: float, cpu: float) -> Line:
    """Return what stands in every line of a load."""
    steps = sum(len(one.events) for one in found)
    return {"requests": told_of(found, begun), "events": steps, "front_cpu": round(busy(server.pid) - cpu, 3)}


def run_closed(name: str, server: Server) -> Iterator[Line]:
    """Load a server with more and more clients, for the fit."""
    workers, options = SERVERS[name]
    warm(server)
    for clients in (one * workers for one in CLIENTS):
        cpu, begun = busy(server.pid), time.perf_counter()
        found = asyncio.run(closed(server, clients, SECONDS, random.Random(clients)))
        steps = windows(found, begun + SETTLED) if workers == 1 else []
        about = {"kind": "closed", "workers": workers, "drafts": not options, "clients": clients, "steps": steps}
        yield about | measured(server, found, begun, cpu)


def run_open(name: str, server: Server, share: float, rate: float, seed: int) -> Iterator[Line]:
    """Send a server so many requests a second, behind a short closed load, which tells how fast the machine is now."""
    warm(server)
    workers, options = SERVERS[name]
    before = asyncio.run(closed(server, PACED * workers, PACING, random.Random(seed)))
    cpu, begun = busy(server.pid), time.perf_counter()
    found = asyncio.run(opened(server, rate, OPEN, random.Random(seed)))
    about = {"kind": "open", "workers": workers, "drafts": not options, "share": share, "rate": round(rate, 4)}
    pace = sum(one.events[-1] - one.events[0] for one in before) / sum(len(one.events) - 1 for one in before)
    yield about | {"pace": round(pace, 6)} | measured(server, found, begun, cpu)


def run_turns(servers: dict[str, Server], loads: Sequence[int]) -> Iterator[Line]:
    """Load two servers in turns: the first, the second, the second, the first."""
    for server in servers.values():
        warm(server)
    order = [(clients, name) for clients in loads for name in (*servers, *reversed(servers))]
    for number, (clients, name) in enumerate(order):
        begun, stream = time.perf_counter(), random.Random(100 * clients + number // 2)
        found = asyncio.run(
            closed(servers[name], clients, TURNS / len(order), stream, ids=False)
        )  # as any source knows
        took = max(told.events[-1] for told in found) - begun
        tokens = sum(told.tokens for told in found)
        yield {"kind": "turns", "server": name, "clients": clients, "tokens": tokens, "seconds": round(took, 3)}


def run_ray(servers: dict[str, Server]) -> Iterator[Line]:
    """Ask two servers in turns, one request at a time; tell what requests and events took, and the CPU of all."""
    for server in servers.values():
        warm(server)
    order = [name for _ in range(RAY_TURNS) for name in (*servers, *reversed(servers))]
    for number, name in enumerate(order):
        every = [servers[name].pid, *_below(servers[name].pid)]
        before, own = {pid: busy(pid) for pid in every}, random.Random(number // 2)
        found = asyncio.run(closed(servers[name], 1, RAY_SECONDS, own))
        spent = sum(busy(pid) - known for pid, known in before.items())
        told = [[row[1], row[2], len(one.events)] for row, one in zip(told_of(found, 0.0), found, strict=True)]
        yield {"kind": "ray", "server": name, "cpu": round(spent, 3), "told": told}


def run_killed(server: Server, clients: int = 16) -> Iterator[Line]:
    """Measure the longest pause of texts in progress where one of two workers is killed."""
    warm(server)
    before = _resent(server)
    found, when = asyncio.run(_killed(server, clients))
    told = list[tuple[int, float]]()
    for one in (one for one in found if one.begun < when < one.events[-1]):
        times = [one.begun, *one.events]  # what was on its way still comes behind the kill, then the pause
        pause = max(later - before for before, later in itertools.pairwise(times) if later > when)
        told.append((sum(event < when for event in one.events), round(1e3 * pause, 1)))
    yield {"kind": "killed", "clients": clients, "resent": _resent(server) - before, "told": sorted(told)}


def _resent(server: Server) -> float:
    lines = httpx.get(f"{server.address}/metrics").text.splitlines()
    return sum(float(one.split()[-1]) for one in lines if one.startswith("polydraft:request_resent_total{"))


async def _killed(server: Server, clients: int) -> tuple[list[Told], float]:
    async def kill() -> float:
        await asyncio.sleep(KILL)
        os.kill(server.worker, signal.SIGKILL)
        return time.perf_counter()

    return await asyncio.gather(closed(server, clients, 2 * KILL, random.Random(clients)), kill())


def run_choice() -> Iterator[Line]:
    """Time how a front chooses among workers each of which knows sixteen prompts that begin otherwise."""
    texts = [one.prompt for one in itertools.islice(requests(random.Random(0)), 16)]
    attempt: Any = SimpleNamespace(ask=Ask("", (texts[0],), seed=0))
    for count in SLOTS:
        slots = [WorkerSlot(number, 16) for number in range(count)]
        for slot in slots:
            slot._prompts.extend(texts)  # as `send` would
        begun = time.perf_counter()
        for _ in range(CHOICES):
            chosen(slots, attempt, 4)
        yield {"kind": "choice", "workers": count, "seconds": round((time.perf_counter() - begun) / CHOICES, 7)}


def warm(server: Server) -> None:
    """Let every worker meet what comes."""
    asyncio.run(closed(server, 16, WARM, random.Random(0), ids=False))


def burst(word: str, servers: dict[str, Server]) -> Iterator[Line]:
    """Return what a burst measures, as it is measured."""
    kind, *rest = word.split(":")
    if kind in ("one", "two", "plain"):
        return run_closed(kind, servers[kind])
    if kind == "open":
        from fleet_page import capacity

        name, share = rest[0], float(rest[1])
        workers, options = SERVERS[name]
        seed = sum(1 for _ in RECORD.open())
        return run_open(name, servers[name], share, share * capacity(workers, drafts=not options), seed)
    if kind == "turns":
        other = "before" if rest else "two"
        return run_turns({name: servers[name] for name in ("one", other)}, [1, 16] if rest else [16])
    if kind == "ray":
        return run_ray({name: servers[name] for name in ("one", "ray")})
    return run_killed(servers["two"]) if kind == "killed" else run_choice()


def needed(words: Sequence[str]) -> list[str]:
    """Return the servers that bursts load."""
    own = {
        "turns": ["one", "two"],
        "turns:before": ["one", "before"],
        "ray": ["one", "ray"],
        "killed": ["two"],
        "choice": [],
    }
    found = [name for word in words for name in own.get(word, [one for one in word.split(":") if one in SERVERS])]
    return [*dict.fromkeys(found)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bursts", nargs="+")
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between bursts")
    parser.add_argument("--wait", type=Path, help="begin when this file is there")
    parser.add_argument("--real-time", type=int, default=0, metavar="PRIORITY")
    given = parser.parse_args()
    with serving(needed(given.bursts), given.before) as running:
        while given.wait and not given.wait.exists():
            time.sleep(1)
        for number, word in enumerate(given.bursts):
            if number:
                time.sleep(given.pause)
            with real_time(given.real_time, [*running.values()]):
                began, found = time.monotonic(), [*burst(word, running)]
                took = time.monotonic() - began
            for line in found:
                append(line)
            print(f"{word}: {took:.1f} s", flush=True)
