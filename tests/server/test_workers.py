"""Several workers: who gets a request, and how one is asked for again whose worker is gone."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest

from polydraft.errors import PolydraftError
from polydraft.options.commands.serve_options import Settings
from polydraft.server.front import desk as desk_room
from polydraft.server.front.desk import Desk
from polydraft.server.front.metrics import LastMinute, Metrics, Timing
from polydraft.server.front.slots import LEAST_KNOWN, WorkerSlot, chosen, common_length, prompt_key
from polydraft.server.front.tickets import Attempt, Ticket, ToldText
from polydraft.server.wire.error_answers import Refused
from polydraft.server.worker import Ask, Cancel, Event, Spell
from polydraft.server.worker import workers as workers_room

LONG = "x" * LEAST_KNOWN
NOTHING = {"text": "", "drafted": 0, "accepted": 0, "finish": "", "stopped_by": None}


class ScriptedWorker:
    """A worker that says what a test wants it to say."""

    pid: int | None = None

    def __init__(self, settings: Settings, say: Callable[[Event], None]) -> None:
        self.say, self.told = say, list[Any]()
        self.say(Event("ready", said={"context": 100}))

    def tell(self, told: Any) -> None:
        """Note what it is told."""
        self.told.append(told)

    def end(self, seconds: float) -> None:
        """End."""
        self.say(Event("gone"))

    @property
    def asks(self) -> list[Any]:
        """What it is asked for."""
        return [one for one in self.told if not isinstance(one, Cancel)]

    def begin(self, ask: Ask) -> None:
        """Take a request."""
        told = {"verifier": "v", "lossless": True, "prompt_tokens": [1], "prediction_tokens": 0}
        self.say(Event("begun", ask.name, {**told, "seeds": [ask.seed_of(number) for number in range(ask.size)]}))

    def join(self, ask: Ask, number: int = 0) -> None:
        """Read a text."""
        self.say(Event("joined", ask.name, {"number": number, "cached": 0, "prompt": 1}))

    def gain(self, ask: Ask, *tokens: int, number: int = 0, finish: str = "") -> None:
        """Bring a text some tokens in a step."""
        said = {
            **NOTHING,
            "number": number,
            "tokens": list(tokens),
            "text": "".join(map(chr, tokens)),
            "finish": finish,
        }
        self.say(Event("gained", ask.name, said))


class Place:
    """A desk with such workers, in the order in which they were started."""

    def __init__(self, desk: Desk, made: list[ScriptedWorker]) -> None:
        self.desk, self.made = desk, made

    async def asked(self, **fields: Any) -> tuple[Ticket, ScriptedWorker, Ask]:
        """Submit a request that is taken and whose first text is read; return the worker that has it."""
        ask = Ask(**{"name": "a", "prompts": ("p",), "seed": 5, **fields})
        submitting = asyncio.ensure_future(self.desk.submit(ask))
        await settled()
        worker = next(one for one in self.made if any(each.name == ask.name for each in one.asks))
        worker.begin(ask)
        worker.join(ask)
        ticket, event = await submitting
        assert event.kind == "begun"
        await settled()
        return ticket, worker, ask

    async def lost(self, worker: ScriptedWorker) -> None:
        """Let a worker be gone, and another one be there."""
        count = len(self.made)
        worker.say(Event("gone", said={"code": -9}))
        while len(self.made) == count:
            await asyncio.sleep(0.001)
        await settled()

    def now(self, name: str) -> list[tuple[ScriptedWorker, Any]]:
        """Return who was asked for something of a request again."""
        return [(one, ask) for one in self.made for ask in one.asks if ask.name.startswith(f"{name}~")]


async def settled() -> None:
    """Let everything be done that is to be done at once."""
    for _ in range(5):
        await asyncio.sleep(0)


def heard(ticket: Ticket) -> list[Event]:
    """Return what a client is told."""
    found = list[Event]()
    while not ticket.events.empty():
        found.append(ticket.events.get_nowait())
    return found


def tokens_of(events: Sequence[Event], number: int = 0) -> list[int]:
    return [token for one in events if one.said.get("number") == number for token in one.said.get("tokens", ())]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a test's coroutine with a desk."""

    def begin(test: Callable[[Place], Coroutine[Any, Any, None]], **settings: Any) -> None:
        made = list[ScriptedWorker]()

        def new(*given: Any) -> ScriptedWorker:
            made.append(ScriptedWorker(*given))
            return made[-1]

        monkeypatch.setattr(desk_room, "new_worker", new)

        async def whole() -> None:
            desk = Desk(Settings(**settings), Metrics("m"))
            await desk.open()
            try:
                await asyncio.wait_for(test(Place(desk, made)), 30)
            finally:
                await desk.close()

        asyncio.run(whole())

    return begin


def test_a_lost_request_is_asked_again_and_told_once(run: Any) -> None:
    async def test(place: Place) -> None:
        ticket, worker, ask = await place.asked(n=2)
        worker.gain(ask, 1, 2)
        worker.gain(ask, 3, number=1, finish="eos")
        worker.gain(ask, 3)
        await place.lost(worker)
        ((other, again),) = place.now("a")
        assert other is not worker and again.n == 1 and again.seed == 5 and again.prompts == ("p",) and not again.told
        other.begin(again)
        other.join(again)
        for step in ((1, 2), (3,), (4, 5)):
            other.gain(again, *step)
        worker.gain(ask, 9)  # what a lost worker says late is nobody's
        other.gain(again, 6, finish="length")
        await settled()
        events = heard(ticket)
        assert [one.kind for one in events].count("joined") == 1 and {one.name for one in events} == {"a"}
        assert tokens_of(events) == [1, 2, 3, 4, 5, 6] and tokens_of(events, 1) == [3]
        assert not any("resumed" in one.said for one in events) and ticket.left == 0
        text = place.desk.metrics.text().decode()
        assert 'polydraft:generation_tokens_total{model_name="m"} 7.0' in text
        assert 'polydraft:request_resent_total{by="seed",model_name="m"} 1.0' in text

    run(test, workers=2)


@pytest.mark.parametrize(
    "steps",
    [[(1, 9)], [(1, 2), (4,)], [(1,), (2,)], [(1, 2, 3)], [(1, 2), (3, 4)], [(1, 2), ()]],
    ids=["other tokens", "other later", "other steps", "fewer steps", "beyond", "behind"],
)
def test_another_text_than_was_told_goes_on_from_its_tokens(run: Any, steps: list[tuple[int, ...]]) -> None:
    async def test(place: Place) -> None:
        ticket, worker, ask = await place.asked()
        worker.gain(ask, 1, 2)
        worker.gain(ask, 3)
        await place.lost(worker)
        ((other, again),) = place.now("a")
        other.begin(again)
        other.join(again)
        for step in steps:
            other.gain(again, *step)
        await settled()
        (first, second) = [one for _, one in place.now("a")]
        assert first is again and second.told == (1, 2, 3) and second.seed != 5
        assert any(isinstance(one, Cancel) and one.name == again.name for one in other.told)
        third = next(one for one in place.made if second in one.asks)
        third.begin(second)
        third.join(second)
        third.gain(second, 7, finish="eos")
        await settled()
        events = heard(ticket)
        assert tokens_of(events) == [1, 2, 3, 7]
        assert [one.said["resumed"] for one in events if "resumed" in one.said] == [
            {"index": 0, "tokens": 3, "seed": second.seed}
        ]

    run(test)


def test_a_text_that_goes_on_is_asked_again_from_there(run: Any) -> None:
    async def test(place: Place) -> None:
        ticket, worker, ask = await place.asked()
        worker.gain(ask, 1)
        await place.lost(worker)
        (_, again) = place.now("a")[0]
        place.made[-1].gain(again, 2)
        await settled()
        (_, other) = place.now("a")[-1]
        place.made[-1].join(other)
        place.made[-1].gain(other, 3)
        await settled()
        await place.lost(place.made[-1])
        (_, last) = place.now("a")[-1]
        assert last.told == (1,) and last.seed == other.seed and last.name != other.name
        place.made[-1].gain(last, 3)
        place.made[-1].gain(last, 4, finish="eos")
        await settled()
        assert tokens_of(heard(ticket)) == [1, 3, 4]

    run(test, retries=3)


def test_a_request_that_nobody_took_is_asked_again_whole(run: Any) -> None:
    async def test(place: Place) -> None:
        submitting = asyncio.ensure_future(place.desk.submit(Ask("a", ("p",), n=3)))
        spelling = asyncio.ensure_future(place.desk.submit(Spell("s", "p")))
        await settled()
        first = place.made[0].asks[0]
        await place.lost(place.made[0])
        ((worker, again),), ((_, spell),) = place.now("a"), place.now("s")
        assert again.n == 3 and again.seed == first.seed is not None and again.planned
        worker.begin(again)
        worker.say(Event("spelt", spell.name, {"text": "p"}))
        ticket, event = await submitting
        assert event.name == "a" and len(event.said["seeds"]) == 3 and (await spelling)[1].said["text"] == "p"
        place.desk.leave(ticket)
        assert [one.name for one in worker.told if isinstance(one, Cancel)] == [again.name]

    run(test)


def test_a_request_that_ends_its_workers_is_refused_and_costs_no_other(run: Any) -> None:
    async def test(place: Place) -> None:
        bad, worker, _ = await place.asked(name="bad")
        good, _, _ = await place.asked(name="good", seed=6)
        ended = 1
        await place.lost(worker)
        while bad.left:
            worker = place.made[-1]
            now = {ask.name.split("~")[0]: ask for ask in worker.asks}
            if ended == 2:
                assert len(now) == 1  # for the last time they are not beside each other
            for ask in now.values():
                worker.begin(ask)
                worker.join(ask)
            await settled()
            if "bad" in now:
                ended += 1
                await place.lost(worker)
            else:
                worker.gain(now["good"], 1, finish="eos")
                await settled()
                place.desk.leave(good)
        with pytest.raises(Refused) as found:
            while True:
                await bad.next()
        assert found.value.status == 500 and found.value.code == "fatal_request" and ended == 3
        place.desk.leave(bad)
        worker = place.made[-1]
        waiting = asyncio.ensure_future(place.desk.submit(Ask("later", ("p",))))
        await settled()
        if good.left:
            (ask,) = [one for one in worker.asks if one.name.startswith("good")]
            worker.begin(ask)
            worker.gain(ask, 1, finish="eos")
            await settled()
            place.desk.leave(good)
        assert tokens_of(heard(good)) == [1] and any(one.name == "later" for one in worker.asks)
        waiting.cancel()

    run(test)


def test_who_waits_is_no_reason_why_a_worker_ends(run: Any) -> None:
    async def test(place: Place) -> None:
        ticket, worker, _ = await place.asked()
        waiting = asyncio.ensure_future(place.desk.submit(Ask("b", ("p",), seed=1)))
        await settled()
        worker.begin(worker.asks[-1])
        other, _ = await waiting
        await place.lost(worker)
        assert (ticket.lost, other.lost) == (1, 0)

    run(test)


def test_without_retries_a_request_is_lost_with_its_worker(run: Any) -> None:
    async def test(place: Place) -> None:
        ticket, worker, _ = await place.asked()
        heard(ticket)
        await place.lost(worker)
        with pytest.raises(Refused) as found:
            await ticket.next()
        assert found.value.status == 503 and found.value.code == "worker_gone" and not place.now("a")

    run(test, retries=0)


def test_where_no_worker_can_be_started_those_who_wait_are_told(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(place: Place) -> None:
        ticket, worker, _ = await place.asked()
        heard(ticket)

        def fails(*_: object) -> None:
            raise OSError("no more processes")

        monkeypatch.setattr(desk_room, "new_worker", fails)
        worker.say(Event("gone"))
        with pytest.raises(Refused) as found:
            await ticket.next()
        assert found.value.code == "worker_gone" and "cannot be started anew" in found.value.message
        with pytest.raises(Refused) as found:
            await place.desk.submit(Ask("b", ("p",)))
        assert found.value.code == "not_ready"

    run(test)


def test_a_worker_that_cannot_load_the_model_is_told_of_though_others_can(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(ScriptedWorker):
        def __init__(self, settings: Settings, say: Callable[[Event], None]) -> None:
            super().__init__(settings, say if not made else lambda _: None)
            made.append(self)
            if len(made) == 2:
                say(Event("broken", said={"message": "There is no room for it."}))

    made = list[ScriptedWorker]()
    monkeypatch.setattr(desk_room, "new_worker", Broken)
    desk = Desk(Settings(workers=2), Metrics("m"))
    desk.launch()
    with pytest.raises(PolydraftError, match="no room"):
        desk.wait(5)


def test_threads_are_shared_among_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int | None]()
    monkeypatch.setattr(workers_room, "ProcessWorker", lambda settings, _: seen.append(settings.threads))
    for threads, count in ((None, 1), (6, 1), (6, 2), (6, 4), (2, 8)):
        workers_room.new_worker(Settings(threads=threads, workers=count), lambda _: None)
    assert seen == [None, 6, 3, 1, 1]


def test_workers_are_replaced_one_after_another(run: Any) -> None:
    async def test(place: Place) -> None:
        ticket, worker, ask = await place.asked()
        worker.gain(ask, 1)
        first = [*place.made]
        replacing = asyncio.ensure_future(place.desk.replace_workers())
        await asyncio.sleep(0.02)
        _, other, _ = await place.asked(name="b")
        assert other is not worker and len(place.made) == 2  # the first one has a text, and gets no other
        await replacing
        assert len(place.made) == 4 and not {slot.worker for slot in place.desk.slots} & {*first}
        assert ticket.lost == 0 and ticket.resent  # its time was over
        assert not any(slot.closed for slot in place.desk.slots)

    run(test, workers=2, grace=0.1)


def slots(*prompts: Sequence[str]) -> list[WorkerSlot]:
    """Return places whose workers were given these prompts."""
    found = [WorkerSlot(number, 8) for number in range(len(prompts))]
    for slot, own in zip(found, prompts, strict=True):
        slot.worker, slot.ready = ScriptedWorker(Settings(), lambda _: None), True
        for number, prompt in enumerate(own):
            slot.send(attempt(prompt, f"{slot.number} {number}"))
    return found


def attempt(prompt: Any, name: str = "a", **fields: Any) -> Attempt:
    ask = Ask(name, (prompt,), **fields)
    return Attempt(ask, Ticket(ask, Timing(Metrics("m")), 0.0))


def test_a_request_goes_to_who_knows_its_prompt_else_to_who_has_least_to_do() -> None:
    some = slots([LONG + "a", "y"], ["z"], [LONG + "ab", "u", "v"])
    assert chosen(some, attempt("new"), 4) is some[1]
    assert chosen(some, attempt(LONG + "abc"), 4) is some[2]
    assert chosen(some, attempt(LONG + "abc"), 2) is some[0]  # the other is too far ahead
    assert chosen(some, attempt(LONG + "abc", alone=True), 4) is some[1]
    assert chosen(some, attempt(LONG[:-1]), 4) is some[1]
    assert chosen([], attempt("new"), 4) is None and chosen(some[:1], attempt("new"), 4) is some[0]
    some[1].drop(next(iter(some[1].attempts.values())))
    assert some[1].texts == 0 and isinstance(some[1].worker.told[-1], Cancel)  # pyright: ignore


def test_prompts_of_all_kinds_are_compared() -> None:
    turn = {"role": "user", "content": "hello"}
    one, two = (prompt_key(Ask("a", (messages,))) for messages in ((turn,), (turn, turn)))
    assert two.startswith(one) and common_length(one, two) == len(one)
    assert common_length(prompt_key(Ask("a", ((1, 2, 3),))), prompt_key(Ask("a", ((1, 2, 2**40),)))) == 2
    assert prompt_key(Spell("s", "p")) == ""
    for pair in itertools.product(("", "a", LONG, LONG + "a", LONG + "bc", "b" + LONG), repeat=2):
        alike = itertools.takewhile(lambda both: both[0] == both[1], zip(*pair, strict=False))
        assert common_length(*pair) == len(list(alike))


# The law of a text that went on elsewhere. A toy server writes texts of LENGTH tokens of {0, 1} by the law P. Every
# step has random numbers of its own, each one of NUMBERS: the first for its first token, the second for another one.
# Variants stand for the rounding of a batch, which makes other tokens of the same numbers, and for trees that a clock
# chose, by which a step brings two tokens. Each variant has the law P.
LENGTH = 3
NUMBERS = range(4)
SEEDS = [((one, two), (three,), (four,)) for one, two, three, four in itertools.product(NUMBERS, repeat=4)]
CASES = [(first, second, dies) for first in range(3) for second in range(3) for dies in range(LENGTH)]


def chance(text: Sequence[int]) -> Fraction:
    """Return the probability of a text: 1/4 or 3/4 for each token."""
    found = Fraction(1)
    for place, own in enumerate(text):
        one = Fraction(1 + 2 * ((sum(text[:place]) + place) % 2), 4)
        found *= one if own else 1 - one
    return found


def drawn(before: Sequence[int], number: int, variant: int) -> int:
    """Return the next token by a number."""
    ones = 1 + 2 * ((sum(before) + len(before)) % 2)
    return int((number + (variant == 1) * len(before)) % len(NUMBERS) < ones)


def written(seed: Sequence[Sequence[int]], variant: int, told: Sequence[int] = ()) -> Iterator[list[int]]:
    """Yield the tokens of each step; with variant 2 the first step brings two."""
    text = [*told]
    for step in range(LENGTH):
        new = list[int]()
        for number in seed[step][: 2 if variant == 2 else 1]:
            if len(text) < LENGTH:
                new.append(drawn(text, number, variant))
                text.append(new[-1])
        if new:
            yield new


def final(first: Sequence[list[int]], dies: int, second: Sequence[list[int]]) -> Iterator[tuple[list[int], Fraction]]:
    """Yield what a client is told where the first writer is lost behind so many steps, and how likely that is."""
    text, count = ToldText(Ask("a", ("p",), seed=1)), 0
    for step in first[:dies]:
        text.hear({"tokens": step, "finish": ""})
    text.restart()
    for step in second:
        count += len(step)
        if text.hear({"tokens": step, "finish": "length" if count == LENGTH else ""}) is None:
            told = text.go_on(0, 7).told
            for fresh in SEEDS:
                yield [*told, *(one for new in written(fresh, 1, told) for one in new)], Fraction(1, len(SEEDS))
            return
    yield text.tokens, Fraction(1)


def law(first: int, second: int, dies: int) -> dict[tuple[int, ...], Fraction]:
    """Return the law of what is told, over all seeds."""
    found = dict.fromkeys(itertools.product(range(2), repeat=LENGTH), Fraction(0))
    for seed in SEEDS:
        steps = list(written(seed, first))
        for tokens, share in final(steps, min(dies, len(steps) - 1), list(written(seed, second))):
            found[tuple(tokens)] += share / len(SEEDS)
    return found


@pytest.mark.parametrize(("first", "second", "dies"), CASES)
def test_the_law_of_a_text_that_went_on_elsewhere(first: int, second: int, dies: int) -> None:
    """Where a worker is lost at a time that has nothing to do with the text."""
    assert law(first, second, dies) == {text: chance(text) for text in itertools.product(range(2), repeat=LENGTH)}


def test_the_same_tokens_in_other_steps_are_not_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers by which told tokens were drawn would be used again: that is another law, and the proof above sees it."""
    strict = ToldText.hear

    def careless(self: ToldText, said: Any) -> bool | None:
        if self.place < len(self.tokens) and self.again:
            begin, self.place = self.place, self.place + len(said["tokens"])
            return False if self.tokens[begin : self.place] == said["tokens"] else None
        self.again = 0
        return strict(self, said)

    monkeypatch.setattr(ToldText, "hear", careless)
    assert law(0, 2, 2) != {text: chance(text) for text in itertools.product(range(2), repeat=LENGTH)}


def test_tokens_per_call_are_those_of_the_last_minute() -> None:
    now = [0.0]
    calls = LastMinute(lambda: now[0])
    assert calls.mean() != calls.mean()
    for count in (1, 3):
        calls.note(count)
    now[0] = 59.0
    calls.note(8)
    assert calls.mean() == 4
    now[0] = 61.0
    assert calls.mean() == 8
    now[0] = 200.0
    assert calls.mean() != calls.mean()


def test_acceptance_is_told_by_request() -> None:
    metrics = Metrics("m")
    timing = Timing(metrics)
    timing.begun({"prompt_tokens": [1], "seeds": [1, 2], "verifier": "v", "lossless": True})
    for number, accepted in ((0, 1), (1, 2)):
        said = {**NOTHING, "number": number, "tokens": [1, 2], "drafted": 4, "accepted": accepted, "finish": "eos"}
        timing.gained(said)
    text = metrics.text().decode()
    assert 'polydraft:request_spec_decode_acceptance_rate_sum{model_name="m"} 0.375' in text
    assert 'polydraft:request_spec_decode_acceptance_rate_count{model_name="m"} 1.0' in text
    assert 'polydraft:tokens_per_call{model_name="m"} 2.0' in text
