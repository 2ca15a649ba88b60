"""Totals of the runs by arm, task, temperature and batch size."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from polydraft.bench.bootstrap import Estimate, bootstrap_weights, estimate, widening_for_few
from polydraft.bench.environment import RayActor
from polydraft.bench.prompts import ALL
from polydraft.bench.speed.arms import PLAIN
from polydraft.bench.speed.equality import Difference
from polydraft.bench.speed.records import SpeedRecord
from polydraft.bench.speed.speed_ups import PairedRuns, SpeedUp, SpeedUpBound, bound_of, speed_up
from polydraft.bench.table import grouped
from polydraft.engine import Statistics, summed

TIMED = ("prefill", "draft", "target", "verify", "rest")
"""The parts of a call's time."""


@dataclass(frozen=True)
class ArmResult:
    """What one arm did at one setting.

    Args:
        arm: its name.
        task: the task, or "all".
        temperature: of sampling.
        batch_size: rows that were generated together.
        prompts: the number of different batches of prompts; intervals are over these.
        runs: the number of runs.
        tokens_per_second: all new tokens over all seconds.
        speed_up: over plain decoding.
        block_efficiency: tokens per target call, the next token included; None if the arm does not tell.
        statistics: counts and times of all runs together; "rest" is all that is no other part of the calls' time.
        setup: what the arm did, in words.
        memory: the largest amount of memory in use, in MiB; None where unknown.
        equal: at temperature 0, in how many runs every text was the plain one; None above.
        bound: what bounds the speed-up; None where it cannot be told.
    """

    arm: str
    task: str
    temperature: float
    batch_size: int
    prompts: int
    runs: int
    tokens_per_second: float
    speed_up: SpeedUp
    block_efficiency: Estimate | None
    statistics: Statistics | None
    setup: dict[str, str]
    memory: float | None
    equal: int | None
    bound: SpeedUpBound | None

    @property
    def setting(self) -> tuple[float, int]:
        """Temperature and batch size."""
        return self.temperature, self.batch_size

    def as_row(self) -> dict[str, Any]:
        """Return everything for a line of JSON, rounded to six digits; ratios of counts included."""
        own = {**asdict(self), "statistics": self.statistics.as_dict() if self.statistics else None}
        return {"kind": "result", **_rounded(own)}


@dataclass(frozen=True)
class TextDifference:
    """A difference between an arm's greedy text and the plain one, and where it was found."""

    arm: str
    task: str
    prompt: str
    batch_size: int
    repeat: int
    difference: Difference

    def as_row(self) -> dict[str, Any]:
        """Return everything for a line of JSON."""
        return {"kind": "difference", **asdict(self)}


def summarise_speed(records: Sequence[SpeedRecord], arms: Sequence[str], seed: int = 0) -> list[ArmResult]:
    """Summarise runs by temperature, batch size, task, and all tasks together if there are several."""
    plain = {one.round: one for one in records if one.arm == PLAIN}
    paired = [one for one in records if one.round in plain]
    return [
        _result(own, [plain[one.round] for one in own], task, seed)
        for setting in sorted({(one.temperature, one.batch_size) for one in paired})
        for task, group in _tasks([one for one in paired if (one.temperature, one.batch_size) == setting])
        for arm in arms
        if (own := [one for one in group if one.arm == arm])
    ]


def differences_in(records: Sequence[SpeedRecord]) -> list[TextDifference]:
    """Return all differences between greedy texts."""
    return [
        TextDifference(one.arm, one.task, one.prompts[difference.row], one.batch_size, one.repeat, difference)
        for one in records
        for difference in one.differences
    ]


def typical_load(records: Sequence[SpeedRecord]) -> float | None:
    """Return the median of the machine's load before the runs; None where it is unknown."""
    loads = [one.load for one in records if one.load is not None]
    return median(loads) if loads else None


def actors_of(records: Sequence[SpeedRecord]) -> list[RayActor]:
    """Return who measured in a Ray cluster; none where no cluster did."""
    return list(dict.fromkeys(one.place for one in records if one.place is not None))


def judged_machine(conditions: dict[str, Any], records: Sequence[SpeedRecord]) -> dict[str, Any]:
    """Return the machine by which the load is judged: actors share a node, so that all its cores may be busy."""
    cores = [one.cores for one in actors_of(records) if one.cores]
    return {**conditions["machine"], **({"threads": min(cores)} if cores else {})}


def overall(results: Sequence[ArmResult]) -> list[ArmResult]:
    """Return the results of all tasks together, or of the only task."""
    return [one for one in results if one.task == ALL] or list(results)


def milliseconds(one: ArmResult) -> dict[str, float]:
    """Return the time of each part per new token, in milliseconds; nothing if the arm does not tell."""
    if one.statistics is None:
        return {}
    found = one.statistics
    return {part: 1000 * found.seconds.get(part, 0.0) / found.new_tokens for part in TIMED}


def _tasks(records: Sequence[SpeedRecord]) -> Iterator[tuple[str, list[SpeedRecord]]]:
    tasks = list(dict.fromkeys(one.task for one in records))
    for task in [*tasks, ALL] if len(tasks) > 1 else tasks:
        yield task, [one for one in records if task in (one.task, ALL)]


def _result(own: Sequence[SpeedRecord], plain: Sequence[SpeedRecord], task: str, seed: int) -> ArmResult:
    """Summarise one arm's runs; `plain` are those that they are compared with, in the same order."""
    groups = list(grouped(range(len(own)), lambda number: (own[number].task, *own[number].prompts)).values())
    pairs = [[_pair(own[number], plain[number]) for number in group] for group in groups]
    parts = [one.statistics for one in own if one.statistics is not None]
    total = _timed(parts, own) if len(parts) == len(own) else None
    baseline = _timed([one.statistics for one in plain if one.statistics is not None], plain)
    first = own[0]
    return ArmResult(
        arm=first.arm,
        task=task,
        temperature=first.temperature,
        batch_size=first.batch_size,
        prompts=len(groups),
        runs=len(own),
        tokens_per_second=sum(one.new_tokens for one in own) / sum(one.seconds for one in own),
        speed_up=speed_up(pairs, seed),
        block_efficiency=None if total is None else _block_efficiency(own, groups, seed),
        statistics=total,
        setup=first.setup,
        memory=max((one.memory for one in own if one.memory is not None), default=None),
        equal=None if first.same_text is None else sum(one.same_text is True for one in own),
        bound=None if total is None else bound_of(total, baseline),
    )


def _pair(own: SpeedRecord, plain: SpeedRecord) -> PairedRuns:
    return PairedRuns(own.new_tokens, own.seconds, plain.new_tokens, plain.seconds)


def _timed(parts: Sequence[Statistics], records: Sequence[SpeedRecord]) -> Statistics:
    """Add up statistics; the time of the calls outside the decode loop goes to "rest"."""
    total, seconds = summed(parts), sum(one.seconds for one in records)
    known = sum(value for name, value in total.seconds.items() if name not in ("total", "rest"))
    total.seconds |= {"total": seconds, "rest": max(0.0, seconds - known)}
    return total


def _block_efficiency(own: Sequence[SpeedRecord], groups: Sequence[Sequence[int]], seed: int) -> Estimate:
    totals = [summed([part for number in group if (part := own[number].statistics)]) for group in groups]
    tokens = np.array([one.new_tokens for one in totals], dtype=float)
    calls = np.array([one.target_calls for one in totals], dtype=float)
    found = estimate(tokens, calls, bootstrap_weights(len(groups), seed), widening_for_few(len(groups)))
    return found if found.low is None else replace(found, low=max(1.0, found.low))  # a call gives a token at least


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
