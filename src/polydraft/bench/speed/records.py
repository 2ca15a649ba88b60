"""One measured run of an arm, and a file of them: conditions first, then one line per run."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from polydraft.bench.environment import RayActor, described, machine, versions
from polydraft.bench.result_lines import from_fields, keep_lines, open_lines, read_lines
from polydraft.bench.speed.arms import Arm
from polydraft.bench.speed.equality import Difference
from polydraft.bench.speed.schedule import RoundKey, SpeedSettings
from polydraft.engine import Statistics
from polydraft.errors import ResultsError
from polydraft.models import Pair

MOST = 1e9
"""More seconds, MiB or repeats than any run has."""


@dataclass(frozen=True)
class SpeedRecord:
    """One run: an arm, a batch of prompts, a temperature, a repeat.

    Args:
        arm: the arm's name.
        task: the prompts' task.
        prompts: their names.
        temperature: of sampling.
        repeat: from 0.
        turn: the arm's place in the order of the round.
        seconds: wall-clock time of the whole call, the prompt's pass included.
        tokens: the new tokens of every row.
        statistics: the engine's counts and times by part; None if the arm does not tell.
        setup: what the arm did, in words.
        memory: the largest amount of memory in use during the call, in MiB; None where unknown.
        load: programs' threads that wanted to run in the minute before, on average; None where unknown.
        same_text: at temperature 0, whether every row's text is the plain arm's; None above.
        differences: where it is not.
        place: who measured in a Ray cluster; None for the machine of the conditions.
    """

    arm: str
    task: str
    prompts: tuple[str, ...]
    temperature: float
    repeat: int
    turn: int
    seconds: float
    tokens: tuple[tuple[int, ...], ...]
    statistics: Statistics | None
    setup: dict[str, str]
    memory: float | None
    load: float | None
    same_text: bool | None
    differences: tuple[Difference, ...]
    place: RayActor | None = None

    @property
    def round(self) -> RoundKey:
        """What runs that are compared with each other have in common."""
        return self.task, self.prompts, self.temperature, len(self.prompts), self.repeat

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return len(self.prompts)

    @property
    def new_tokens(self) -> int:
        """The new tokens of all rows."""
        return sum(map(len, self.tokens))

    def as_row(self) -> dict[str, Any]:
        """Return everything for a line of JSON."""
        row = {"kind": "run", **asdict(self)}
        return row if self.place else {name: value for name, value in row.items() if name != "place"}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "SpeedRecord":
        """Return the record of a line; a ValueError says that it is none, and why."""
        record = from_fields(cls, {name: value for name, value in row.items() if name != "kind"})
        check_record(record)
        return record


def check_record(record: SpeedRecord) -> None:
    """Check what types do not say: a run could have been measured so.

    Raises:
        ValueError: a field has a value that no run has.
    """
    rows, statistics = len(record.prompts), record.statistics
    least = {"seconds": 1e-9, "temperature": 0, "repeat": 0, "turn": 0, "memory": 0, "load": 0}
    for name, bound in least.items():
        value = getattr(record, name)
        if value is not None and not bound <= value < MOST:
            raise ValueError(f"{name} is {value}, which no run has")
    if not rows or len(record.tokens) != rows or not all(record.tokens):
        raise ValueError(f"there are tokens of {len(record.tokens)} texts for {rows} prompts, or an empty text")
    if any(not 0 <= one.row < rows for one in record.differences):
        raise ValueError("a difference is in a row that there is not")
    if statistics is not None:
        _check_statistics(statistics)


def _check_statistics(one: Statistics) -> None:
    counts = {"new_tokens": (one.new_tokens, 1), "target_calls": (one.target_calls, 1), "steps": (one.steps, 0)}
    counts |= {"drafted": (one.drafted, 0), "accepted": (one.accepted, 0)}
    for name, (count, bound) in counts.items():
        if count < bound:
            raise ValueError(f"{name} is {count}, which no run has")
    kept = [*one.accepted_at, *[0] * (len(one.offered_at) - len(one.accepted_at))]
    if len(kept) > len(one.offered_at) or any(
        not 0 <= few <= many or not many for few, many in zip(kept, one.offered_at, strict=True)
    ):
        raise ValueError("more drafts were accepted than there were, at some depth")
    if any(not 0 <= value < MOST for value in one.seconds.values()):
        raise ValueError("a part of the time is negative, or longer than any run")


@dataclass(frozen=True)
class ModelConditions:
    """A model that runs were measured with."""

    name: str
    parameters: int
    dtype: str
    device: str
    weights: str


@dataclass(frozen=True)
class ArmConditions:
    """An arm that was measured."""

    lossless: bool
    description: str


@dataclass(frozen=True)
class MachineConditions:
    """Where it was measured."""

    processor: str
    cores: int | None
    threads: int
    accelerator: str | None
    system: str


@dataclass(frozen=True)
class HeadConditions:
    """What a measured head is and learnt.

    Args:
        parameters: how many numbers it has.
        tokens: how many it learnt from.
        seconds: how long it learnt.
        overlap: with the target's law on held-out text, by draft.
        law: what its rows know: the path, or their slot.
        divergence: KL(original || tuned) per token, of a target that learnt with it; None where it stayed.
        agreement: how often both have the same likeliest token, likewise.
    """

    parameters: int
    tokens: int
    seconds: float
    overlap: tuple[float, ...]
    law: str
    divergence: float | None = None
    agreement: float | None = None


@dataclass(frozen=True)
class SpeedConditions:
    """What stands in the first line of a file of runs; `speed_conditions` makes it."""

    target: ModelConditions
    draft: ModelConditions | None
    arms: dict[str, ArmConditions]
    max_new_tokens: int
    excerpt_tokens: int
    warm_up_tokens: int
    seed: int
    machine: MachineConditions
    versions: dict[str, str]
    chat_template: bool | None = None
    until_end: bool = False
    replay: bool = False
    heads: dict[str, HeadConditions] = field(default_factory=dict)


def speed_conditions(
    pair: Pair,
    arms: Sequence[Arm],
    settings: SpeedSettings,
    names: tuple[str, str | None],
    chat_template: bool | None = None,
) -> dict[str, Any]:
    """Return all that determines runs but prompts, temperature, batch and repeat; names are of target and draft."""
    return {
        "target": {"name": names[0], **described(pair.target)},
        "draft": {"name": names[1], **described(pair.draft)} if pair.draft is not None else None,
        "arms": {arm.name: {"lossless": arm.lossless, "description": arm.description} for arm in arms},
        **settings.conditions(),
        **({} if chat_template is None else {"chat_template": chat_template}),
        "machine": machine(pair.target.device),
        "versions": {**versions(), "transformers": version("transformers")},
    }


class SpeedResults:
    """The runs of a benchmark, in memory and, with a path, in a file; the runs of a round are written together.

    Raises:
        ResultsError: the file cannot be used, is damaged, or its runs are of other conditions.
    """

    def __init__(self, conditions: dict[str, Any], path: Path | None = None) -> None:
        self.conditions = json.loads(json.dumps(conditions))
        self.path = path
        kept = [] if path is None else open_lines(path, self.conditions, SpeedRecord.from_row)
        self._runs = {(one.round, one.arm): one for one in kept}

    @property
    def records(self) -> list[SpeedRecord]:
        """All runs."""
        return list(self._runs.values())

    def done(self, arms: Sequence[Arm]) -> set[RoundKey]:
        """Return the rounds of which every arm that can take part has a run."""
        found: dict[RoundKey, set[str]] = {}
        for key, arm in self._runs:
            found.setdefault(key, set()).add(arm)
        wanted = {size: {arm.name for arm in taking_part(arms, size)} for size in {key[3] for key in found}}
        return {key for key, names in found.items() if names >= wanted[key[3]]}

    def put_in_order(self, keys: Sequence[RoundKey]) -> None:
        """Put runs in the order of their rounds, in memory: a file has them as they came. Others come last."""
        places = {key: place for place, key in enumerate(keys)}
        self._runs = dict(sorted(self._runs.items(), key=lambda one: places.get(one[0][0], len(places))))

    def add(self, records: Sequence[SpeedRecord]) -> None:
        """Keep the runs of a round, in the file first."""
        if self.path is not None:
            keep_lines(self.path, [one.as_row() for one in records])
        self._runs |= {(one.round, one.arm): one for one in records}


def taking_part(arms: Sequence[Arm], batch_size: int) -> list[Arm]:
    """Return the arms that can do batches of this size."""
    return [arm for arm in arms if arm.most_rows is None or batch_size <= arm.most_rows]


def read_speed_results(path: Path) -> tuple[dict[str, Any], list[SpeedRecord]]:
    """Return the conditions and runs of a file.

    Raises:
        ResultsError: the file cannot be read or is none of `polydraft bench`.
    """
    conditions, records = read_lines(path, SpeedRecord.from_row)
    if not isinstance(conditions, dict) or "arms" not in conditions:
        raise ResultsError(f"{path}: these are no runs of `polydraft bench`.")
    try:
        known = from_fields(SpeedConditions, conditions)
        if known.seed < 0 or known.machine.threads < 1:
            raise ValueError("seed or threads is negative")
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{path}, line 1: these are no settings of `polydraft bench`: {error}.") from error
    return conditions, list({(one.round, one.arm): one for one in records}.values())
