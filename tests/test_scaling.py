"""The simulation behind docs/scaling.md: closed forms of queueing theory, conservation, and the page itself.

Means are compared with closed forms over replicas that do not know of each other; where so many standard errors are
allowed, a right simulation fails by chance with a probability below 1e-4, and a standard error is below three per cent.
"""

import json
import random
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "scaling"
sys.path.insert(0, str(FOLDER))

import fleet_page  # noqa: E402
import load  # noqa: E402
import queueing  # noqa: E402
from queueing import ROUTERS, Faults, Job, Lengths, Outcome, Simulation, Speed, simulate  # noqa: E402

ALLOWED, SHARPEST = 5, 0.03
RUNS, COUNT, EARLY = 25, 1500, 300
SHARED = Speed((1e-3, 2e-3), (1.0,), most=10**9, waits=(0.0,))
"""Steps as long as they have texts: all texts together gain 1,000 tokens a second."""
ALONE = Speed((1e-3,), (1.0,), most=1, waits=(0.0,))
"""One text at a time, the others in their order."""


def drawn(rate: float, count: int, seed: int, sizes: str = "exponential") -> list[Job]:
    """Return requests whose texts have 1,000 tokens on average."""
    stream, now, made = random.Random(seed), 0.0, list[Job]()
    for _ in range(count):
        now += stream.expovariate(rate)
        made.append(Job(now, 0, 1000.0 if sizes == "equal" else stream.expovariate(1e-3)))
    return made


def means(speed: Speed, rate: float, sizes: str = "exponential") -> tuple[float, float]:
    """Return the mean time of requests over runs, after a warm-up, and its standard error."""
    found = list[float]()
    for run in range(RUNS):
        jobs = drawn(rate, COUNT, run, sizes)
        found.append(fmean(simulate(jobs, speed, queueing.at_random, 1, random.Random(run)).wholes[EARLY:]))
    return fmean(found), stdev(found) / RUNS**0.5


@pytest.mark.parametrize("sizes", ["exponential", "equal"])
def test_a_shared_processor_has_the_mean_time_of_the_closed_form_whatever_the_sizes(sizes: str) -> None:
    """M/G/1-PS: E T = E S / (1 - rho)."""
    mean, error = means(SHARED, 0.5, sizes)
    assert error / mean < SHARPEST and abs(mean - 1 / (1 - 0.5)) < ALLOWED * error


def test_a_text_takes_a_time_proportional_to_its_size() -> None:
    """M/M/1-PS: E[T | S = s] = s / (1 - rho)."""
    found = list[float]()
    for run in range(RUNS):
        jobs = drawn(0.5, COUNT, run)
        outcome = simulate(jobs, SHARED, queueing.at_random, 1, random.Random(run))
        late = [*zip(jobs, outcome.wholes, strict=True)][EARLY:]
        long = [whole / (one.tokens / 1000) for one, whole in late if 2000 < one.tokens < 2500]
        found.append(fmean(long))
    error = stdev(found) / len(found) ** 0.5
    assert error / 2 < SHARPEST and abs(fmean(found) - 1 / (1 - 0.5)) < ALLOWED * error


@pytest.mark.parametrize(("sizes", "wanted"), [("exponential", 1 / (1 - 0.5)), ("equal", 1 + 0.5 / (2 * (1 - 0.5)))])
def test_one_text_at_a_time_is_the_queue_of_pollaczek_and_khinchine(sizes: str, wanted: float) -> None:
    mean, error = means(ALONE, 0.5, sizes)
    assert error / mean < SHARPEST and abs(mean - wanted) < ALLOWED * error


def test_prompts_are_read_one_after_another() -> None:
    """One text at a time, of one short step behind a prompt of a second: M/D/1."""
    speed = Speed((1e-9,), (1.0,), (0.0, 1e-3), most=1, waits=(0.0,))
    found = list[float]()
    for run in range(RUNS):
        jobs = [Job(one.at, 1000, 1.0) for one in drawn(0.5, COUNT, run)]
        found.append(fmean(simulate(jobs, speed, queueing.at_random, 1, random.Random(run)).firsts[EARLY:]))
    error = stdev(found) / len(found) ** 0.5
    assert error / fmean(found) < SHARPEST and abs(fmean(found) - 1.5) < ALLOWED * error


def test_steps_that_take_no_longer_with_more_texts_make_nobody_wait() -> None:
    speed = Speed((1e-3, 1e-3), (1.0,), most=10**9, waits=(0.0,))
    jobs = drawn(20, 500, 1)
    outcome = simulate(jobs, speed, queueing.at_random, 1, random.Random(1))
    assert outcome.wholes == pytest.approx([max(one.tokens, 1) / 1000 for one in jobs])
    assert outcome.firsts == pytest.approx([1e-3] * len(jobs))


def test_a_text_beside_others_is_what_can_be_worked_out_by_hand() -> None:
    """Steps of .1 and .16 s with two tokens each, prompts of .05 s beside which nothing moves, room for two texts."""
    speed = Speed((0.1, 0.16), (2.0,), (0.03, 0.001), most=2)
    jobs = [Job(0.0, 20, 8.0), Job(0.17, 20, 4.0), Job(0.18, 20, 2.0)]
    outcome = simulate(jobs, speed, queueing.at_random, 1, random.Random(0))
    # the second is read until .22, when the first has 2.4 of its 8 tokens, and comes half a step late
    assert outcome.firsts[:2] == pytest.approx([0.15, 0.05 + 1.5 * 0.16])
    assert outcome.wholes[1] == pytest.approx(0.05 + 2.5 * 0.16)
    # the third is read from .62 to .67, when the first has .6 tokens to go, and then has 1.2 of its 1.5 steps alone
    assert outcome.wholes[0] == pytest.approx(0.67 + 0.3 * 0.16)
    assert outcome.wholes[2] == outcome.firsts[2] == pytest.approx(0.67 + 0.3 * 0.16 + 1.2 * 0.1 - 0.18)


def test_long_prompts_let_texts_have_a_step_in_every_two_steps_of_reading() -> None:
    speed = Speed((0.1, 0.1), (1.0,), (0.0, 0.001), waits=(0.0,))
    jobs = [Job(0.0, 0, 100.0), Job(1.05, 1000, 1.0)]
    outcome = simulate(jobs, speed, queueing.at_random, 1, random.Random(0))
    assert outcome.firsts[1] == pytest.approx(1.0 + 5 * 0.1 + 0.1)
    assert outcome.wholes[0] == pytest.approx(10.0 + 1.0)


def test_the_shorter_of_two_has_the_tail_of_its_closed_form() -> None:
    """Power of two choices, many replicas: a share rho^(2^k - 1) of them has k texts or more (Mitzenmacher 1996)."""
    replicas, rho = 200, 0.8
    jobs = drawn(rho * replicas, 20_000, 3)
    outcome = simulate(jobs, SHARED, queueing.power_of_two, replicas, random.Random(7))
    wanted = sum(rho ** (2**k - 1) for k in range(1, 8)) / rho
    assert fmean(outcome.wholes[4_000:17_000]) == pytest.approx(wanted, rel=0.05)
    alone = simulate(jobs, SHARED, queueing.at_random, replicas, random.Random(7))
    assert fmean(alone.wholes[4_000:17_000]) > 1.5 * wanted


def checked(outcome: Outcome, jobs: list[Job]) -> None:
    """Check what holds of every run."""
    assert all(0 < first <= whole for first, whole in zip(outcome.firsts, outcome.wholes, strict=True))
    assert outcome.area == pytest.approx(sum(outcome.wholes)), "Little: what is inside over time is all their times"
    assert min(outcome.tries) >= 1 and len(outcome.wholes) == len(jobs)


MIXED = Speed((0.01, 0.015, 0.02), (2.0, 1.8), (0.005, 1e-4), most=4)


@pytest.mark.parametrize("name", ROUTERS)
def test_nothing_is_lost_or_done_twice(name: str) -> None:
    stream = random.Random(5)
    like = [Job(0, stream.randint(5, 900), stream.randint(1, 90), stream.uniform(0.5, 2), 0, 0.5) for _ in range(50)]
    jobs = [*queueing.arrivals(60, 1000, like, stream, families=20)]
    simulation = Simulation(jobs, MIXED, ROUTERS[name], 10, stream)
    outcome = simulation.run()
    checked(outcome, jobs)
    assert outcome.tries == [1] * len(jobs) and outcome.failures == 0
    late = [one for one in jobs if one.tokens / one.pace > 4]
    least = sum(one.tokens / one.pace for one in late)
    assert least < outcome.tokens < least + 2 * 2.5 * len(jobs), "tokens and late steps, and no more"
    assert simulation.lengths.now == [0] * 10 and not any(one.texts or one.waiting for one in simulation.fleet)


def test_tokens_are_those_that_were_asked_for() -> None:
    jobs = drawn(0.5, 300, 1)
    outcome = simulate(jobs, SHARED, queueing.round_robin, 3, random.Random(1))
    assert outcome.tokens == pytest.approx(sum(max(one.tokens, 1) for one in jobs))


@pytest.mark.parametrize("name", ROUTERS)
def test_replicas_that_fail_cost_time_and_no_request(name: str) -> None:
    stream = random.Random(7)
    like = [Job(0, 100, 40, 1.0, 0, 0.5)]
    jobs = [*queueing.arrivals(30, 1500, like, stream, families=20)]
    faults = Faults(every=40, noticed=2, back=6)
    outcome = simulate(jobs, MIXED, ROUTERS[name], 10, random.Random(8), faults)
    checked(outcome, jobs)
    without = simulate(jobs, MIXED, ROUTERS[name], 10, random.Random(8))
    assert outcome.failures > 5 and max(outcome.tries) > 1
    again = [whole for whole, tries in zip(outcome.wholes, outcome.tries, strict=True) if tries > 1]
    assert fmean(again) > 1 and sum(outcome.wholes) > sum(without.wholes) and outcome.tokens > without.tokens


def test_all_replicas_may_fail_at_once() -> None:
    jobs = drawn(0.1, 100, 1)
    outcome = simulate(jobs, SHARED, queueing.fewest_texts, 2, random.Random(1), Faults(every=10, noticed=0.5, back=30))
    checked(outcome, jobs)


def test_prefixes_are_known_where_they_were_and_nobody_waits_for_them() -> None:
    jobs = [Job(10.0 * number, 1000, 2.0, 1.0, number % 3, 0.5) for number in range(30)]
    for name, share in (("prefix affinity", 0.9), ("fewest texts", 0.7)):
        outcome = simulate(jobs, MIXED, ROUTERS[name], 50, random.Random(2))
        assert (outcome.known >= share) == (name == "prefix affinity")
    crowd = [Job(0.0, 1000, 2.0, 1.0, 1, 0.5) for _ in range(30)]
    lengths = Lengths(5, random.Random(0))
    route = queueing.prefix_affinity(lengths, random.Random(0), ahead=2)
    for one in crowd:
        lengths.change(route(0.0, one), 1)
    assert max(lengths.now) - min(lengths.now) <= 2


def test_lengths_name_one_that_has_the_fewest() -> None:
    stream = random.Random(4)
    lengths = Lengths(6, stream)
    closed = set[int]()
    for _ in range(2000):
        number = stream.randrange(6)
        if number in closed or (stream.random() < 0.1 and len(closed) < 5):
            (lengths.open if number in closed else lengths.close)(number)
            closed ^= {number}
        else:
            lengths.change(number, 1 if stream.random() < 0.5 or not lengths.now[number] else -1)
        takes = {one: lengths.now[one] for one in range(6) if one not in closed}
        assert takes[lengths.fewest()] == min(takes.values())
    for number in {*range(6)} - closed:
        lengths.close(number)
    assert lengths.fewest() == -1


def test_the_tables_of_the_page_are_those_of_its_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = fleet_page.PAGE.read_text()
    assert fleet_page.with_tables(page) == page and fleet_page.PICTURE.is_file()
    (tmp_path / "curves.jsonl").write_text(fleet_page.CURVES.read_text().replace('"99": ', '"99": 1'))
    monkeypatch.setattr(fleet_page, "CURVES", tmp_path / "curves.jsonl")
    assert fleet_page.with_tables(page) != page


def closed_load(speed: Speed, workers: int, clients: int) -> dict[str, Any]:
    """Return what the record says of a closed load of replicas that are as fast as that."""
    stream = random.Random(clients)
    jobs = [Job(0.0, stream.choice((100, 300)), 27.0) for _ in range(60)]
    asked = {"clients": clients * workers, "thinking": 0.003}
    made = Simulation(jobs, speed, queueing.fewest_texts, workers, random.Random(clients), **asked).run()
    rows = zip(jobs, made.firsts, made.wholes, strict=True)
    requests = [[0.0, 1e3 * (first + 0.003), 1e3 * (whole + 0.003), job.prompt, 27, 9] for job, first, whole in rows]
    counts, step = [5 if texts == clients else 0 for texts in range(1, 9)], speed.step(clients)
    steps = [[5 * step + 0.03, 1, 100, *counts], [5 * step + 0.05, 1, 300, *counts], [5 * step, 0, 0, *counts]]
    about = {"kind": "closed", "workers": workers, "drafts": True, "clients": clients * workers}
    return {**about, "steps": steps if workers == 1 else [], "requests": requests}


def test_the_fit_finds_what_loads_were_made_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = [10e-3, 20e-3, 25e-3, 30e-3, 35e-3, 40e-3, 45e-3, 50e-3]
    one = Speed(tuple(times), (3.0,), (0.02, 0.0001), 8, (1.0,))
    two = Speed(tuple(1.5 * time for time in times), (3.0,), (0.03, 0.00015), 8, (1.0,))
    loads = [
        closed_load(speed, workers, texts) for workers, speed in ((1, one), (2, two)) for texts in fleet_page.KNOTS
    ]
    (tmp_path / "record.jsonl").write_text("\n".join(map(json.dumps, loads)))
    monkeypatch.setattr(fleet_page, "RECORD", tmp_path / "record.jsonl")
    fleet_page.fitted.cache_clear()
    try:
        found = [fleet_page.fitted(workers, True) for workers in (1, 2)]
    finally:
        fleet_page.fitted.cache_clear()
    (alone, beside), (both, _) = found
    assert alone.steps == pytest.approx(one.steps, rel=0.02) and alone.gains == (3.0,)
    assert alone.prompt == pytest.approx(one.prompt) and beside == pytest.approx(0.003)
    assert alone.waits == pytest.approx([1.0] * 8, abs=0.1)
    assert both.steps == pytest.approx(two.steps, rel=0.1), "prompts are scaled by the mean of all"


def test_steps_are_told_apart_by_texts_that_come_again() -> None:
    """Two texts in step, one of which joins later: its first event ends a step with a new prompt; one comes behind."""
    long = load.Told(0.0, [1.0, 2.0, 3.5, 4.5], 10, 8, 4)
    late = load.Told(2.1, [3.501, 4.501], 30, 4, 2)
    alone = load.Told(4.6, [6.0, 7.0], 20, 4, 2)
    one, two = [1, *[0] * 7], [0, 1, *[0] * 6]
    assert load.windows([long, late, alone], 0.5) == [
        [2.5, 1, 30, *map(sum, zip(one, two, strict=True))],
        [1.0, 0, 0, *two],
        [1.0, 0, 0, *one],
    ]
