"""Simulate replicas of a server under load: who is sent where, and how long requests wait for their tokens.

A replica with b texts in progress takes a step in t(b) seconds, which brings every text E(b) tokens on average; a text
whose drafts are kept more often than others gets `pace` times as many. So between two events every text has the rate
E(b) / t(b): processor sharing, and nothing happens but where a request arrives, a prompt is read, a text has its first
token or its last one, or a replica fails. A prompt of n tokens is read in p(n) seconds, during which the texts beside
it stand still but for one step in every two steps' time of reading, as in the server (`engine/many/prompt_reading.py`).
A request that comes to texts in progress waits w(b) steps for its turn.

Times are in seconds. Everything random comes from a stream that is passed in.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import floor, inf, nan

READING = 2.0
"""Texts in progress have a step after so many steps' time of reading prompts."""


@dataclass(frozen=True)
class Speed:
    """How fast a replica is.

    Args:
        steps: t(1), t(2), ...: seconds of a step with so many texts; of more texts what the last two make of it.
        gains: E(1), E(2), ...: tokens that a text gains in it; of more texts the last.
        prompt: a and b of the seconds a + b n in which a prompt of n tokens is read.
        most: texts in progress; others wait.
        waits: how many steps a request waits for its turn where 1, 2, ... texts are in progress; of more the last.
    """

    steps: tuple[float, ...]
    gains: tuple[float, ...]
    prompt: tuple[float, float] = (0.0, 0.0)
    most: int = 8
    waits: tuple[float, ...] = (0.5,)

    def step(self, texts: int) -> float:
        """Return the seconds of a step."""
        if texts <= len(self.steps):
            return self.steps[texts - 1]
        more = self.steps[-1] - self.steps[-2] if len(self.steps) > 1 else self.steps[-1]
        return self.steps[-1] + more * (texts - len(self.steps))

    def gain(self, texts: int) -> float:
        """Return the tokens of a step for each text."""
        return self.gains[min(texts, len(self.gains)) - 1]

    def wait(self, texts: int) -> float:
        """Return how many steps a request waits that comes to so many texts."""
        return self.waits[min(texts, len(self.waits)) - 1] if texts else 0.0

    def capacity(self, jobs: Sequence["Job"]) -> float:
        """Return how many requests like these a replica answers in a second when it is full."""
        read = sum(self.prompt[0] + self.prompt[1] * one.prompt for one in jobs) / len(jobs)
        steps = sum(one.tokens / one.pace for one in jobs) / len(jobs) / self.gain(self.most)
        return 1 / (read + steps * self.step(self.most) / self.most)


@dataclass(frozen=True, slots=True)
class Job:
    """A request.

    Args:
        at: when it arrives.
        prompt: tokens of its prompt.
        tokens: those of its answer.
        pace: of E(b) tokens its text gains so many times as many; its drafts are kept more or less often than others'.
        family: requests of one family begin with the same tokens; -1 for none.
        common: which share of the prompt these are.
    """

    at: float
    prompt: int
    tokens: float
    pace: float = 1.0
    family: int = -1
    common: float = 0.0


@dataclass(frozen=True)
class Faults:
    """How replicas fail.

    Args:
        every: mean seconds between two failures of a replica.
        noticed: seconds after which its texts are asked for again elsewhere; until then it is still sent requests.
        back: seconds after which it is there again.
    """

    every: float
    noticed: float = 5.0
    back: float = 15.0


@dataclass(frozen=True)
class Outcome:
    """What came of requests, in their order.

    Args:
        firsts: seconds until the first token of each.
        wholes: seconds until the last.
        tries: how often each was sent to a replica.
        area: the integral of the number of requests in the fleet over time.
        tokens: what all texts gained, lost ones too.
        known: which share of requests found the beginning of their prompt.
        failures: how many replicas failed.
    """

    firsts: list[float]
    wholes: list[float]
    tries: list[int]
    area: float
    tokens: float
    known: float
    failures: int


class Lengths:
    """How many requests each replica has, and who of those that take any has the fewest.

    Attributes:
        now: of each replica.
    """

    def __init__(self, replicas: int, stream: random.Random) -> None:
        self.now, self._stream = [0] * replicas, stream
        self._levels: list[list[int]] = [[*range(replicas)]]
        self._place = [*range(replicas)]
        self._least = 0

    def __len__(self) -> int:
        """Return how many replicas there are."""
        return len(self.now)

    def takes(self, replica: int) -> bool:
        """Tell whether a replica is sent requests."""
        return self._place[replica] >= 0

    def change(self, replica: int, by: int) -> None:
        """Note that a replica has more or fewer."""
        if takes := self.takes(replica):
            self.close(replica)
        self.now[replica] += by
        if takes:
            self.open(replica)

    def close(self, replica: int) -> None:
        """Send a replica nothing."""
        level, place = self._levels[self.now[replica]], self._place[replica]
        level[place] = level[-1]
        self._place[level[-1]] = place
        level.pop()
        self._place[replica] = -1

    def open(self, replica: int) -> None:
        """Send a replica requests again."""
        length = self.now[replica]
        while length >= len(self._levels):
            self._levels.append([])
        self._place[replica] = len(self._levels[length])
        self._levels[length].append(replica)
        self._least = min(self._least, length)

    def fewest(self) -> int:
        """Return one of those that have the fewest; -1 if nobody takes any."""
        while self._least < len(self._levels) and not self._levels[self._least]:
            self._least += 1
        if self._least == len(self._levels):
            self._least = 0
            return -1
        level = self._levels[self._least]
        return level[floor(self._stream.random() * len(level))]


Router = Callable[[float, Job], int]
"""Choose a replica at a time; -1 where none takes requests."""


def at_random(lengths: Lengths, stream: random.Random) -> Router:
    """Send each request to any replica."""

    def route(_: float, __: Job) -> int:
        for _ in range(1000):
            found = floor(stream.random() * len(lengths))
            if lengths.takes(found):
                return found
        return lengths.fewest()

    return route


def round_robin(lengths: Lengths, _: random.Random) -> Router:
    """Send requests to all replicas in turn."""
    last = -1

    def route(_: float, __: Job) -> int:
        nonlocal last
        for _ in range(len(lengths)):
            last = (last + 1) % len(lengths)
            if lengths.takes(last):
                return last
        return -1

    return route


def power_of_two(lengths: Lengths, stream: random.Random, delay: float = 0.0) -> Router:
    """Send each request to the shorter of two replicas, whose lengths are known as they were up to `delay` before."""
    any_, seen, when = at_random(lengths, stream), lengths.now, -inf

    def route(now: float, job: Job) -> int:
        nonlocal seen, when
        if delay and now - when >= delay:
            seen, when = lengths.now[:], now
        one, other = any_(now, job), any_(now, job)
        return other if seen[other] < seen[one] else one

    return route


def fewest_texts(lengths: Lengths, _: random.Random) -> Router:
    """Send each request to one of the replicas that have the fewest; their lengths are known at once."""

    def route(_: float, __: Job) -> int:
        return lengths.fewest()

    return route


def prefix_affinity(lengths: Lengths, _: random.Random, ahead: int = 4) -> Router:
    """Send a request where its family was last, unless `ahead` more wait there than elsewhere; else to the fewest."""
    homes: dict[int, int] = {}

    def route(_: float, job: Job) -> int:
        least, home = lengths.fewest(), homes.get(job.family, -1)
        if home >= 0 and least >= 0 and lengths.takes(home) and lengths.now[home] < lengths.now[least] + ahead:
            return home
        if job.family >= 0:
            homes[job.family] = least
        return least

    return route


Maker = Callable[[Lengths, random.Random], Router]
DELAY = 0.5
"""Seconds for which lengths are old in power of two."""
ROUTERS: dict[str, Maker] = {
    "random": at_random,
    "round robin": round_robin,
    "power of two": lambda lengths, stream: power_of_two(lengths, stream, DELAY),
    "fewest texts": fewest_texts,
    "prefix affinity": prefix_affinity,
}


@dataclass(slots=True)
class Replica:
    """A replica: the texts in progress share it, and those that wait are read one after another.

    Attributes:
        clock: the tokens that a text of pace 1 would have gained since the beginning.
        since: when that was so.
        rate: by how much it grows in a second.
        ends: where on this clock a text has its first token (`first`) or its last, and which.
        debt: seconds of reading since the last step.
    """

    kept: deque[int]
    clock: float = 0.0
    since: float = 0.0
    rate: float = 0.0
    texts: int = 0
    ends: list[tuple[float, int, bool]] = field(default_factory=list[tuple[float, int, bool]])
    waiting: deque[int] = field(default_factory=deque[int])
    reading: int = -1
    read_at: float = inf
    debt: float = 0.0
    version: int = 0
    fails: int = 0


ARRIVES, TURNS, FAILS, NOTICED, RETURNS = range(5)
KEPT = 16
"""A replica knows the beginnings of so many of its last prompts."""


class Simulation:
    """A fleet of replicas, and all that happens to it.

    Args:
        jobs: requests, in the order in which they arrive.
        speed: of every replica.
        router: makes what chooses replicas.
        replicas: how many there are.
        stream: of random numbers.
        faults: how replicas fail; None for never.
        clients: so many clients ask one after the other, and requests do not come when they say; None for an open load.
        thinking: seconds between a client's answer and its next request.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        speed: Speed,
        router: Maker,
        replicas: int,
        stream: random.Random,
        faults: Faults | None = None,
        clients: int | None = None,
        thinking: float = 0.0,
    ) -> None:
        self.jobs, self.speed, self.stream, self.faults = jobs, speed, stream, faults
        self.clients, self.thinking, self.begun = clients, thinking, [one.at for one in jobs]
        self.coming = iter(range(len(jobs)))
        self.lengths = Lengths(replicas, stream)
        self.route = router(self.lengths, stream)
        self.fleet = [Replica(deque(maxlen=KEPT)) for _ in range(replicas)]
        self.events: list[tuple[float, int, int, int]] = []
        self.homeless: list[int] = []  # requests for which no replica is there
        self.firsts, self.wholes = [nan] * len(jobs), [nan] * len(jobs)
        self.tries = [0] * len(jobs)
        self.left, self.inside, self.when = len(jobs), 0, 0.0
        self.area = self.tokens = 0.0
        self.found = self.failures = 0

    def run(self) -> Outcome:
        """Let everything happen until all requests have their answers."""
        for _ in range(self.clients or 1):
            self._ask_next(0.0)
        if self.faults:
            for number in range(len(self.fleet)):
                self._push(self.stream.expovariate(1 / self.faults.every), FAILS, number)
        while self.left:
            now, kind, number, version = heappop(self.events)
            if kind == TURNS and version != self.fleet[number].version:
                continue
            self._at(now)
            self._happens(now, kind, number)
        return Outcome(
            self.firsts,
            self.wholes,
            self.tries,
            self.area,
            self.tokens,
            self.found / max(1, sum(self.tries)),
            self.failures,
        )

    def _ask_next(self, now: float) -> None:
        number = next(self.coming, None)
        if number is not None:
            self.begun[number] = self.jobs[number].at if self.clients is None else now
            self._push(self.begun[number], ARRIVES, number)

    def _at(self, now: float) -> None:
        self.area += self.inside * (now - self.when)
        self.when = now

    def _push(self, when: float, kind: int, number: int, version: int = 0) -> None:
        heappush(self.events, (when, kind, number, version))

    def _send(self, now: float, job: int) -> None:
        number = self.route(now, self.jobs[job])
        if number < 0:
            self.homeless.append(job)
            return
        self.tries[job] += 1
        self.lengths.change(number, 1)
        replica = self.fleet[number]
        replica.waiting.append(job)
        if not replica.fails:
            self._advance(replica, now)
            self._go_on(replica, number, now)

    def _happens(self, now: float, kind: int, number: int) -> None:
        if kind == ARRIVES:
            self.inside += 1
            self._send(now, number)
            if self.clients is None:
                self._ask_next(now)
            return
        replica = self.fleet[number]
        if kind == TURNS:
            self._advance(replica, now)
            self._turn(replica, number, now)
            self._go_on(replica, number, now)
        elif kind == FAILS:
            self._fail(replica, number, now)
        elif kind == NOTICED:
            for job in self._emptied(replica, number):
                self._send(now, job)
        else:
            replica.fails = 0
            replica.since = now
            self.lengths.open(number)
            self._resend(now)

    def _resend(self, now: float) -> None:
        jobs, self.homeless = self.homeless, []
        for job in jobs:
            self._send(now, job)

    def _advance(self, replica: Replica, now: float) -> None:
        gained = replica.rate * (now - replica.since)
        replica.clock += gained
        replica.since = now
        self.tokens += gained * replica.texts

    def _turn(self, replica: Replica, number: int, now: float) -> None:
        """Let a prompt be read to its end, or texts have their first or last token."""
        if replica.read_at <= now:
            job, replica.reading, replica.read_at = replica.reading, -1, inf
            late = self.speed.wait(replica.texts)
            replica.texts += 1
            gain = self.speed.gain(replica.texts)
            need = max(self.jobs[job].tokens / self.jobs[job].pace, gain)
            heappush(replica.ends, (replica.clock + (1 + late) * gain, job, True))
            heappush(replica.ends, (replica.clock + need + late * gain, job, False))
        else:  # it is time for the first of these, whatever the clock was rounded to
            replica.clock = max(replica.clock, replica.ends[0][0])
        while replica.ends and replica.ends[0][0] <= replica.clock + 1e-9:
            _, job, first = heappop(replica.ends)
            if first:
                if self.firsts[job] != self.firsts[job]:  # a text that is asked for again was told its own already
                    self.firsts[job] = now - self.begun[job]
                continue
            self.wholes[job] = now - self.begun[job]
            replica.texts -= 1
            self.left, self.inside = self.left - 1, self.inside - 1
            self.lengths.change(number, -1)
            if self.clients is not None:
                self._ask_next(now + self.thinking)

    def _go_on(self, replica: Replica, number: int, now: float) -> None:
        """Begin to read the next prompt if there is room, and note when something happens next."""
        speed = self.speed
        if not replica.texts:
            replica.clock = 0.0  # which keeps it exact
        if replica.reading < 0 and replica.waiting and replica.texts < speed.most:
            self._read(replica, replica.waiting.popleft(), now)
        elif replica.reading < 0:
            replica.debt = 0.0
            replica.rate = speed.gain(replica.texts) / speed.step(replica.texts) if replica.texts else 0.0
        then = replica.read_at
        if replica.ends and replica.rate:
            then = min(then, now + max(0.0, replica.ends[0][0] - replica.clock) / replica.rate)
        replica.version += 1
        if then < inf:
            self._push(then, TURNS, number, replica.version)

    def _read(self, replica: Replica, number: int, now: float) -> None:
        job, (fixed, each) = self.jobs[number], self.speed.prompt
        known = job.family >= 0 and job.family in replica.kept
        self.found += known
        if known:
            replica.kept.remove(job.family)
        if job.family >= 0:
            replica.kept.append(job.family)
        takes = fixed + each * job.prompt * (1 - job.common * known)
        replica.reading, replica.rate = number, 0.0
        if replica.texts and takes:
            step = self.speed.step(replica.texts)
            replica.debt += takes
            steps = floor(replica.debt / (READING * step))
            replica.debt -= steps * READING * step
            takes += steps * step
            replica.rate = steps * self.speed.gain(replica.texts) / takes
        replica.read_at = now + takes

    def _fail(self, replica: Replica, number: int, now: float) -> None:
        assert self.faults is not None
        self._advance(replica, now)
        self.failures += 1
        replica.version += 1
        replica.fails, replica.rate = 1, 0.0
        back = now + max(self.faults.noticed, self.faults.back)
        self._push(now + self.faults.noticed, NOTICED, number)
        self._push(back, RETURNS, number)
        self._push(back + self.stream.expovariate(1 / self.faults.every), FAILS, number)

    def _emptied(self, replica: Replica, number: int) -> list[int]:
        """Return the requests of a replica that failed, in their order; it is sent no more."""
        jobs = {job for _, job, _ in replica.ends} | {*replica.waiting} | ({replica.reading} - {-1})
        self.lengths.close(number)
        self.lengths.now[number] = 0
        self.fleet[number] = Replica(deque(maxlen=KEPT), since=self.when, version=replica.version + 1, fails=1)
        return sorted(jobs)


def simulate(
    jobs: Sequence[Job],
    speed: Speed,
    router: Maker,
    replicas: int,
    stream: random.Random,
    faults: Faults | None = None,
) -> Outcome:
    """Return what comes of requests, as `Simulation` has them happen."""
    return Simulation(jobs, speed, router, replicas, stream, faults).run()


def arrivals(rate: float, count: int, like: Sequence[Job], stream: random.Random, families: int = 0) -> Iterator[Job]:
    """Yield requests that arrive by a Poisson process, each like one of others, and of one of so many families."""
    now = 0.0
    for _ in range(count):
        now += stream.expovariate(rate)
        one = like[floor(stream.random() * len(like))]
        family = floor(stream.random() * families) if families else one.family
        yield Job(now, one.prompt, one.tokens, one.pace, family, one.common)
