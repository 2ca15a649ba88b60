"""Fit the simulation to the record, check it where it was not fitted, and write tables and figure of docs/scaling.md.

    python docs/scaling/fleet_page.py --curves    # to 4,000 replicas, minutes; kept in docs/scaling/curves.jsonl
    python docs/scaling/fleet_page.py             # tables and figure alone

Fitted is on closed loads: the time of a step with 1, 2, 4 and 8 texts and of a prompt, by least squares over all that
one worker did; how much slower they are where two workers are busy; and what a request takes beside them. Then steps
are moved to where simulated closed loads have texts as fast as the measured ones, and what newcomers wait to where
their first tokens come as late. Checked is on open loads: the requests of a burst, with their arrivals, prompts and
numbers of steps, are simulated, by a machine as fast as it was in the short closed load before.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import ceil, floor
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

from queueing import ROUTERS, Faults, Job, Outcome, Simulation, Speed, arrivals, fewest_texts, simulate  # noqa: E402

RECORD, CURVES = FOLDER / "record.jsonl", FOLDER / "curves.jsonl"
PAGE, PICTURE = FOLDER.parent / "scaling.md", FOLDER.parent / "pictures" / "scaling.svg"
KNOTS = (1, 2, 4, 8)
"""Texts for which the time of a step is fitted; between them it is a line."""
ROUNDS = 5
"""How often steps and waits are moved to where simulated closed loads are as fast as the measured ones."""
PACED = 4
"""Clients for each worker of the closed load before an open one."""
MEASURED, SIMULATED, QUOTED = "#0072b2", "#d55e00", "#009e73"
SIGNS = {"measured": "🟦", "simulated": "🟧", "quoted": "🟩"}
FLEETS = (1, 4, 16, 64, 256, 1000, 4000)
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9)
USUAL, MANY = 0.7, 1000
EACH, LEAST = 30, 6_000
"""Requests of each replica in a simulation, and at least so many; the first third does not count."""
COMMON, FAMILIES = 0.7, 4
"""In the curves so much of a prompt is that of its family, and there are so many families for each replica."""
FAULTS = {"none": None, "each every hour": Faults(3600.0), "each every 10 min": Faults(600.0)}
FULLEST = 0.95
"""Above this share of the capacity nothing is simulated: queues grow as long as one looks."""
FAILING, LASTS = 200, 60.0
"""Replicas and seconds of a simulation with failures."""
RAY_EVENT = 0.6e-3
"""Seconds of an event of a stream through a handle of Ray Serve 2.60, by an earlier measurement of ours."""
Line = dict[str, Any]


def lines(path: Path, kind: str = "", **wanted: Any) -> list[Line]:
    """Return the lines of a record of one kind."""
    found = [json.loads(one) for one in path.read_text().splitlines()] if path.exists() else []
    return [one for one in found if kind in ("", one["kind"]) and all(one[key] == is_ for key, is_ in wanted.items())]


@cache
def fitted(workers: int, drafts: bool) -> tuple[Speed, float]:
    """Return how fast each of so many busy workers is, and the seconds of a request beside its model."""
    alone = lines(RECORD, "closed", workers=1, drafts=drafts)
    rows, wanted = list[list[float]](), list[float]()
    for seconds, new, prompt, *steps in (window for one in alone for window in one["steps"]):
        shares = [np.interp(range(1, 9), KNOTS, np.eye(len(KNOTS))[place]) @ steps for place in range(len(KNOTS))]
        weight = sum(steps) ** -0.5
        rows.append([weight * one for one in (*shares, new, prompt)])
        wanted.append(weight * seconds)
    found = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0]
    found = [float(f"{one:.9g}") for one in found]  # processors round differently, and a simulation makes much of it
    steps, prompt = found[:4], (found[4], found[5])
    own = lines(RECORD, "closed", workers=workers, drafts=drafts)
    if workers > 1:
        slower = [_pace(own, knot * workers) / _pace(alone, knot) for knot in KNOTS]
        steps = [one * factor for one, factor in zip(steps, slower, strict=True)]
        prompt = (prompt[0] * fmean(slower), prompt[1] * fmean(slower))
    every = [one for line in own for one in line["requests"]]
    gains = sum(one[4] for one in every) / sum(one[5] for one in every)
    single = [one for line in own if line["clients"] == workers for one in line["requests"]]
    reading = fmean(prompt[0] + prompt[1] * one[3] for one in single)
    beside = max(0.0, fmean(one[1] for one in single) / 1e3 - reading - steps[0])
    waits = [0.5] * (len(KNOTS) - 1)
    for _ in range(ROUNDS):
        speed = _speed(steps, gains, prompt, waits)
        made = [simulated(own, speed, workers, knot, beside) for knot in KNOTS]
        waits = [
            max(0.0, wait + (_first(own, knot * workers) - first) / step)
            for wait, knot, step, (_, first) in zip(waits, KNOTS[1:], steps[1:], made[1:], strict=True)
        ]
        steps = [
            one * _pace(own, knot * workers) / pace for one, knot, (pace, _) in zip(steps, KNOTS, made, strict=True)
        ]
    return _speed(steps, gains, prompt, waits), beside


def _speed(steps: Sequence[float], gain: float, prompt: tuple[float, float], waits: Sequence[float]) -> Speed:
    every = range(1, KNOTS[-1] + 1)
    between = tuple(float(np.interp(texts, KNOTS, steps)) for texts in every)
    beside = tuple(float(np.interp(texts, [knot - 1 for knot in KNOTS[1:]], waits)) for texts in every)
    return Speed(between, (gain,), prompt, KNOTS[-1], beside)


def simulated(loads: Sequence[Line], speed: Speed, workers: int, each: int, beside: float) -> tuple[float, float]:
    """Return the seconds between two steps of a text, and to the first token, of a simulated closed load."""
    jobs = [job for one in loads if one["clients"] == each * workers for job in jobs_of(one["requests"], speed)]
    stream = random.Random(each)
    made = Simulation(jobs, speed, fewest_texts, workers, stream, clients=each * workers, thinking=beside).run()
    steps = sum(one.tokens / one.pace / speed.gain(1) - 1 for one in jobs)
    pace = sum(whole - first for first, whole in zip(made.firsts, made.wholes, strict=True)) / steps
    return pace, fmean(made.firsts) + beside


def _first(loads: Sequence[Line], clients: int) -> float:
    """Return the mean seconds to the first token under a closed load."""
    return fmean(one[1] for line in loads if line["clients"] == clients for one in line["requests"]) / 1e3


def _pace(loads: Sequence[Line], clients: int) -> float:
    """Return the mean seconds between two steps of a text under a closed load."""
    own = [one for line in loads if line["clients"] == clients for one in line["requests"] if one[5] > 1]
    return sum(one[2] - one[1] for one in own) / sum(one[5] - 1 for one in own) / 1e3


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which so large a share of them lies, between the two nearest ones."""
    found = sorted(values)
    place = share * (len(found) - 1)
    low = floor(place)
    return found[low] + (found[min(low + 1, len(found) - 1)] - found[low]) * (place - low)


def jobs_of(requests: Sequence[Sequence[float]], speed: Speed) -> list[Job]:
    """Return measured requests as the simulation takes them: each text with as many steps as it had."""
    gain = speed.gain(1)
    return [Job(at, int(prompt), tokens, tokens / (calls * gain)) for at, _, _, prompt, tokens, calls in requests]


def paced(burst: Line) -> Speed:
    """Return the fitted speed, scaled by how fast the machine was in the closed load before an open one."""
    workers, drafts = burst["workers"], burst["drafts"]
    speed = fitted(workers, drafts)[0]
    scale = burst["pace"] / _pace(lines(RECORD, "closed", workers=workers, drafts=drafts), PACED * workers)
    prompt = scale * speed.prompt[0], scale * speed.prompt[1]
    return replace(speed, steps=tuple(scale * one for one in speed.steps), prompt=prompt)


def capacity(workers: int, *, drafts: bool = True) -> float:
    """Return how many requests like those of the closed loads so many workers answer in a second when they are full."""
    speed, _ = fitted(workers, drafts)
    own = [one for line in lines(RECORD, "closed", workers=workers, drafts=drafts) for one in line["requests"]]
    return workers * speed.capacity(jobs_of(own, speed))


@cache
def checks() -> tuple[Line, ...]:
    """Return for every open load its percentiles as they were measured and simulated."""
    return tuple(_checks())


def _checks() -> Iterator[Line]:
    bursts = lines(RECORD, "open")
    for drafts, workers, share in sorted({(not one["drafts"], one["workers"], one["share"]) for one in bursts}):
        beside = fitted(workers, not drafts)[1]
        own = [one for one in bursts if (one["drafts"], one["workers"], one["share"]) == (not drafts, workers, share)]
        measured, simulated = ([], []), ([], [])
        for burst in own:
            speed = paced(burst)
            outcome = simulate(
                jobs_of(burst["requests"], speed), speed, fewest_texts, workers, random.Random(len(burst["requests"]))
            )
            for place, values in enumerate((outcome.firsts, outcome.wholes)):
                measured[place].extend(one[1 + place] / 1e3 for one in burst["requests"])
                simulated[place].extend(one + beside for one in values)
        found = {
            f"{name} p{percent}": (percentile(real, percent / 100), percentile(made, percent / 100))
            for name, real, made in zip(("first", "whole"), measured, simulated, strict=True)
            for percent in (50, 99)
        }
        yield {"drafts": not drafts, "workers": workers, "share": share, "requests": len(measured[0]), **found}


def front_event() -> float:
    """Return the seconds of CPU that the front takes for an event, requests included, where batches are full.

    With fewer texts it takes more for each, since several events of a step wake it once.
    """
    own = [one for one in lines(RECORD, "closed", drafts=True) if one["clients"] == KNOTS[-1] * one["workers"]]
    return sum(one["front_cpu"] for one in own) / sum(one["events"] for one in own)


def model_requests(drafts: bool) -> tuple[Speed, list[Job]]:
    """Return the speed of a replica that has its machine to itself, and requests like those that were measured."""
    speed, _ = fitted(1, drafts)
    own = [one for line in lines(RECORD, "closed", workers=1, drafts=drafts) for one in line["requests"]]
    return speed, [replace(one, family=0, common=COMMON) for one in jobs_of(own, speed)]


def curve(
    replicas: int, rate: float, router: str, *, drafts: bool = True, faults: str = "none", count: int = 0
) -> Line:
    """Simulate a fleet, to each of whose replicas so many requests come in a second."""
    speed, like = model_requests(drafts)
    stream = random.Random(1)
    count = count or max(LEAST, EACH * replicas)
    jobs = [*arrivals(rate * replicas, count, like, stream, FAMILIES * replicas)]
    found = simulate(jobs, speed, ROUTERS[router], replicas, stream, FAULTS[faults])
    about = {"replicas": replicas, "rate": round(rate, 4), "router": router, "drafts": drafts, "faults": faults}
    return about | told(found, count // 3)


def told(found: Outcome, skipped: int) -> Line:
    """Return what is kept of a simulation."""
    firsts, wholes = found.firsts[skipped:], found.wholes[skipped:]
    shares = {"50": 0.5, "99": 0.99, "99.9": 0.999}
    return {
        "first": {name: round(percentile(firsts, share), 5) for name, share in shares.items()},
        "whole": {name: round(percentile(wholes, share), 5) for name, share in shares.items()},
        "known": round(found.known, 4),
        "again": round(sum(one > 1 for one in found.tries) / len(found.tries), 6),
        "failures": found.failures,
    }


def all_curves(only: str = "") -> Iterator[Line]:
    """Simulate all curves, or those of one kind."""
    for kind, calls in KINDS.items():
        for share, options in calls() if only in ("", kind) else ():
            yield {"kind": kind, "share": share, **curve(**options)}


def _fleets() -> Iterator[tuple[float, Line]]:
    for replicas in FLEETS:
        for router in ROUTERS:
            yield USUAL, {"replicas": replicas, "rate": USUAL * _full(True), "router": router}


def _loads() -> Iterator[tuple[float, Line]]:
    for share in LOADS:
        for router in ROUTERS:
            yield share, {"replicas": MANY, "rate": share * _full(True), "router": router}


def _with_and_without() -> Iterator[tuple[float, Line]]:
    for share in LOADS:
        for drafts in (True, False):
            rate = share * _full(True)
            if rate < FULLEST * _full(drafts):
                yield share, {"replicas": MANY, "rate": rate, "router": "fewest texts", "drafts": drafts}


def _failing() -> Iterator[tuple[float, Line]]:
    for faults in FAULTS:
        for router in ("random", "fewest texts"):
            rate = USUAL * _full(True)
            own = {"faults": faults, "count": ceil(LASTS * rate * FAILING)}
            yield USUAL, {"replicas": FAILING, "rate": rate, "router": router, **own}


KINDS = {"fleet": _fleets, "load": _loads, "drafts": _with_and_without, "faults": _failing}


def _full(drafts: bool) -> float:
    speed, like = model_requests(drafts)
    return speed.capacity(like)


def marks(name: str) -> tuple[str, str]:
    """Return what stands around a table of the page."""
    return f"<!-- table: {name} -->\n", f"<!-- end of {name} -->"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    cells = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n" + "\n".join(f"| {' | '.join(row)} |" for row in cells) + "\n"


def ms(seconds: float) -> str:
    """Return a time in milliseconds, or in seconds from ten on."""
    return f"{seconds:.1f} s" if seconds >= 10 else f"{1e3 * seconds:,.0f} ms"


def fit_table() -> str:
    """Return what was fitted."""
    rows = list[list[str]]()
    for workers, drafts in ((1, True), (2, True), (1, False)):
        if lines(RECORD, "closed", workers=workers, drafts=drafts):
            speed, beside = fitted(workers, drafts)
            steps = (f"{1e3 * speed.step(texts):.1f}" for texts in KNOTS)
            a, b = speed.prompt
            rows.append(
                [
                    f"{workers}, {'with' if drafts else 'without'} drafts",
                    *steps,
                    f"{speed.gain(1):.2f}",
                    f"{1e3 * a:.1f} + {1e3 * b:.3f} n",
                    f"{1e3 * beside:.1f}",
                    f"{capacity(workers, drafts=drafts):.1f}",
                ]
            )
    sign = SIGNS["measured"]
    head = ["workers", *(f"{sign} t({texts}), ms" for texts in KNOTS), f"{sign} E", f"{sign} p(n), ms"]
    return table([*head, f"{sign} beside, ms", "requests/s when full"], rows)


def check_table() -> str:
    """Return what was measured beside what was simulated."""
    rows = list[list[str]]()
    for one in checks():
        about = f"{one['workers']}{'' if one['drafts'] else ', without drafts'}"
        cells = [
            f"{ms(real)}, {ms(made)} ({100 * (made / real - 1):+.0f} %)"
            for real, made in (one[f"{name} p{percent}"] for name in ("first", "whole") for percent in (50, 99))
        ]
        rows.append([about, f"{100 * one['share']:.0f} %", f"{one['requests']:,}", *cells])
    both = f"{SIGNS['measured']}, {SIGNS['simulated']}"
    names = ("first token, median", "p99", "whole request, median", "p99")
    return table(["workers", "load", "requests", *(f"{name}: {both}" for name in names)], rows)


def turns_table() -> str:
    """Return what two servers wrote in turns, burst by burst."""
    found = lines(RECORD, "turns")
    rows = list[list[str]]()
    for place in range(0, len(found), 4):
        four = found[place : place + 4]
        names = list(dict.fromkeys(one["server"] for one in four))
        speeds = [
            sum(one["tokens"] for one in four if one["server"] == name)
            / sum(one["seconds"] for one in four if one["server"] == name)
            for name in names
        ]
        what, ratio = "one worker; two workers", f"{speeds[1] / speeds[0]:.2f}x"
        if names[1] == "before":
            what, ratio = "one worker; the server before workers", f"{speeds[0] / speeds[1]:.3f}x"
        rows.append([what, str(four[0]["clients"]), *(f"{one:.0f}" for one in speeds), ratio])
    sign = SIGNS["measured"]
    return table(
        ["servers, in turns", "clients", f"{sign} tokens/s of the first", f"{sign} of the second", "ratio"], rows
    )


def killed_table() -> str:
    """Return the longest pauses of texts that were in progress when one of two workers was killed."""
    rows = list[list[str]]()
    for one in lines(RECORD, "killed"):
        new = [seconds / 1e3 for told, seconds in one["told"] if not told]
        every = [seconds / 1e3 for _, seconds in one["told"]]
        cells = [f"{ms(percentile(own, 0.5))}, {ms(max(own))}" if own else "none" for own in (every, new)]
        rows.append([f"{len(every)}", f"{one['resent']:.0f}", *cells])
    sign = SIGNS["measured"]
    head = ["texts in progress", "asked again", f"{sign} longest pause: median, longest"]
    return table([*head, f"{sign} first token of those that had none: median, longest"], rows)


def fleet_table() -> str:
    """Return the curves over the size of a fleet and its load."""
    own = lines(CURVES, "fleet")
    head = ["replicas", *(f"{SIGNS['simulated']} {name}" for name in ROUTERS)]
    rows = [[f"{count:,}, {100 * USUAL:.0f} %", *_cells(own, replicas=count)] for count in FLEETS]
    rows += [[f"{MANY:,}, {100 * share:.0f} %", *_cells(lines(CURVES, "load"), share=share)] for share in LOADS]
    return table(head, rows)


def _cells(own: Sequence[Line], **wanted: Any) -> Iterator[str]:
    for router in ROUTERS:
        for one in own:
            if one["router"] == router and all(one[key] == is_ for key, is_ in wanted.items()):
                yield f"{ms(one['first']['99'])}, {ms(one['whole']['99'])}"


def drafts_table() -> str:
    """Return what drafts do to a loaded fleet."""
    own = {(one["share"], one["drafts"]): one for one in lines(CURVES, "drafts")}
    rows = list[list[str]]()
    for share in LOADS:
        with_, without = own[share, True], own.get((share, False))
        rows.append([f"{with_['rate']:.1f}"])
        for name in ("50", "99"):
            other = (
                f"{ms(without['whole'][name])}, {without['whole'][name] / with_['whole'][name]:.1f}x"
                if without
                else "grows without end"
            )
            rows[-1] += [ms(with_["whole"][name]), other]
    sign = SIGNS["simulated"]
    head = ["requests/s to a replica", f"{sign} median with", f"{sign} without", f"{sign} p99 with", f"{sign} without"]
    return table(head, rows)


def fault_table() -> str:
    """Return what failures do."""
    rows = [
        [
            one["faults"],
            one["router"],
            one["failures"],
            f"{100 * one['again']:.2f} %",
            *(f"{ms(one[kind]['99'])}, {ms(one[kind]['99.9'])}" for kind in ("first", "whole")),
        ]
        for one in lines(CURVES, "faults")
    ]
    sign = SIGNS["simulated"]
    head = ["replicas fail", "router", f"{sign} failures in {LASTS:.0f} s", f"{sign} requests asked again"]
    return table([*head, f"{sign} first token, p99 and p99.9", f"{sign} whole request, p99 and p99.9"], rows)


def front_table() -> str:
    """Return how many replicas one front can serve, by what it does for each of them."""
    each, (speed, like) = events_of_a_replica(), model_requests(drafts=True)
    requests = USUAL * speed.capacity(like)
    chosen = max(lines(RECORD, "choice"), key=lambda one: one["workers"])
    choice = chosen["seconds"] / chosen["workers"]
    rows = [
        ["CPU of a front for an event of a stream", f"{SIGNS['measured']} {1e3 * front_event():.2f} ms", ""],
        ["events of a replica in a second, at 70 %", f"{SIGNS['simulated']} {each:.0f}", ""],
        ["replicas whose events fill one front", "", f"{1 / front_event() / each:.0f}"],
        [
            "the same of a handle of Ray Serve 2.60",
            f"{SIGNS['quoted']} {1e3 * RAY_EVENT:.1f} ms",
            f"{1 / RAY_EVENT / each:.0f}",
        ],
        ["CPU of a front for a look at one worker's prompts", f"{SIGNS['measured']} {1e6 * choice:.1f} µs", ""],
        ["replicas whose requests fill one front with looks", "", f"{(1 / choice / requests) ** 0.5:.0f}"],
    ]
    return table(["", "seconds and events", "replicas"], rows)


def ray_table() -> str:
    """Return what a request and an event take on one worker and on a replica of Ray Serve, asked in turns."""
    found = list(lines(RECORD, "ray"))
    names = {"one": "one worker", "ray": "one replica of Ray Serve"}
    costs = {name: request_costs([one for one in found if one["server"] == name]) for name in names}
    rows = [[names[name], *(f"{SIGNS['measured']} {value:.2f} ms" for value in own)] for name, own in costs.items()]
    shares = [after - before for before, after in zip(costs["one"], costs["ray"], strict=True)]
    rows.append(["Ray's share", *(f"{value:.2f} ms" for value in shares)])
    return table(
        ["one request at a time", "first token", "each further event", "CPU of all processes for an event"], rows
    )


def request_costs(found: Sequence[Line]) -> tuple[float, float, float]:
    """Return milliseconds: the median first token, the median of further events, and CPU by events."""
    told = [row for one in found for row in one["told"]]
    further = [(whole - first) / (events - 1) for first, whole, events in told if events > 1]
    cpu = 1e3 * sum(one["cpu"] for one in found) / sum(row[2] for row in told)
    return median(row[0] for row in told), median(further), cpu


TABLES = {
    "ray": ray_table,
    "turns": turns_table,
    "killed": killed_table,
    "fit": fit_table,
    "check": check_table,
    "fleet": fleet_table,
    "drafts": drafts_table,
    "faults": fault_table,
    "front": front_table,
}


def with_tables(page: str) -> str:
    """Return the page with the tables of record and curves."""
    for name, made in TABLES.items():
        begin, end = marks(name)
        head, rest = page.split(begin)
        page = head + begin + made() + end + rest.split(end)[1]
    return page


def events_of_a_replica() -> float:
    """Return how many events a replica sends in a second at the usual load: one for each step of a text."""
    speed, like = model_requests(drafts=True)
    return USUAL * speed.capacity(like) * fmean(one.tokens / one.pace / speed.gain(1) for one in like)


def picture() -> Any:
    """Draw measured values beside simulated ones, routers over the size of a fleet, drafts, and what breaks first."""
    from polydraft.bench.style import panels

    titles = ["first token, one and two workers", "p99 of the first token, load 70 %", "median whole request", "events"]
    figure, (left, routers, drafts, front) = panels(titles, 3.4)
    _draw_check(left)
    for router, style in zip(ROUTERS, ("o:", "v-.", "s--", "D-", "^-"), strict=True):
        own = [(one["replicas"], one["first"]["99"]) for one in lines(CURVES, "fleet") if one["router"] == router]
        routers.plot(*zip(*own, strict=True), style, color=SIMULATED, markersize=4, linewidth=1, label=router)
    _logarithmic(routers, x=True)
    routers.set_xlabel("replicas")
    routers.set_ylabel("seconds")
    routers.set_ylim(top=12)
    routers.legend(loc="upper right", ncols=2, fontsize=7)
    for with_, style in ((True, "o-"), (False, "s--")):
        own = [(one["rate"], one["whole"]["50"]) for one in lines(CURVES, "drafts") if one["drafts"] == with_]
        label = f"{'with' if with_ else 'without'} drafts"
        drafts.plot(*zip(*own, strict=True), style, color=SIMULATED, markersize=4, label=label)
    drafts.set_xlabel("requests a second to each replica")
    drafts.set_ylim(bottom=0)
    drafts.legend()
    _draw_front(front)
    from matplotlib.patches import Patch

    kinds = {"measured": MEASURED, "simulated": SIMULATED, "quoted": QUOTED}
    handles = [Patch(color=colour, label=name) for name, colour in kinds.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _logarithmic(axis: Any, *, x: bool = False) -> None:
    """Give an axis a logarithmic scale, with numbers as they are read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for one in (axis.xaxis, axis.yaxis) if x else (axis.yaxis,):
        one.axes.set(**{f"{one.axis_name}scale": "log"})
        one.set_major_locator(LogLocator(subs=(1.0,) if x else (1.0, 2.0, 5.0)))
        one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        one.set_minor_formatter(NullFormatter())


def _draw_check(axis: Any) -> None:
    own = [one for one in checks() if one["drafts"]]
    for place, one in enumerate(own):
        for name, mark in (("first p50", "o"), ("first p99", "^")):
            real, made = one[name]
            axis.plot(place - 0.1, real, mark, color=MEASURED, markersize=5)
            axis.plot(place + 0.1, made, mark, color=SIMULATED, markersize=5)
    _logarithmic(axis)
    axis.set_xticks(range(len(own)), [f"{one['workers']}\n{100 * one['share']:.0f} %" for one in own])
    axis.set_xlabel("workers, load; circles medians, triangles p99")
    axis.set_ylabel("seconds")


def _draw_front(axis: Any) -> None:
    each = events_of_a_replica()
    axis.plot(FLEETS, [each * count for count in FLEETS], "D-", color=SIMULATED, markersize=4, label="of all replicas")
    axis.axhline(1 / front_event(), color=MEASURED, label="the most of one front")
    axis.axhline(1 / RAY_EVENT, color=QUOTED, label="of one Ray Serve handle")
    _logarithmic(axis, x=True)
    axis.set_xlabel("replicas")
    axis.set_ylabel("events a second")
    axis.legend(loc="lower right", fontsize=7)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", action="store_true")
    if parser.parse_args().curves:
        with CURVES.open("w") as file:
            for made in all_curves():
                file.write(json.dumps(made) + "\n")
                file.flush()
    PAGE.write_text(with_tables(PAGE.read_text()))
    from polydraft.bench.style import save

    save(picture, PICTURE)
