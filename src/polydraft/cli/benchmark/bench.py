"""`polydraft bench`: measure arms side by side, keep every run, and show the speed-ups."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from polydraft.bench import USUAL, Prompt, Table
from polydraft.bench.environment import RayActor, cluster_machine, is_busy
from polydraft.bench.speed import (
    PLAIN,
    Arm,
    Round,
    SpeedRecord,
    SpeedResults,
    SpeedSettings,
    check_arms,
    check_batches,
    check_known,
    cluster_in_words,
    difference_table,
    differences_in,
    equality_in_words,
    judged_machine,
    kind_table,
    left_out,
    lossy_arms,
    measure_rounds,
    measure_speed,
    prompts_that_fit,
    read_speed_results,
    rounds,
    speed_conditions,
    speed_table,
    summarise_speed,
    typical_load,
    verdicts,
    write_report,
)
from polydraft.cli.benchmark.arm_spelling import (
    PREDICTION,
    ArmSpelling,
    build_arms,
    check_temperatures,
    drafting_arms,
    spell_arm,
)
from polydraft.cli.benchmark.measured_on_ray import check_measured_on_ray, measuring
from polydraft.cli.clashes import LONE_DRAFT, read_asked, refuse_clashes
from polydraft.cli.generation.one_text import load_pair_of, named_draft
from polydraft.cli.printing import console as new_console
from polydraft.cli.printing import notes_beside, print_json_line, progress_bar, styled
from polydraft.cli.process import INTERRUPTED, stopped
from polydraft.cluster import at_its_place, placed, store_of
from polydraft.extras import FIGURES
from polydraft.models import Pair
from polydraft.options.commands.bench_options import BenchOptions, ReportOptions

Settings = TypeVar("Settings")
Made = TypeVar("Made")
WHOLE = 4096
"""The usual most tokens of a replayed text, which ends by itself."""
REPLAYED = "Replayed: every arm wrote the edited file that stands in the row, not what the target would write. "


def run_bench(request: BenchOptions) -> int:
    """Carry out the request and print.

    Returns the exit code: 0, 1 if a lossless arm's text at temperature 0 differs by more than rounding, or 130 after
    Ctrl-C with no finished round lost.
    """
    most = request.max_new_tokens or (WHOLE if request.replay else None)
    settings, notes = settings_of(SpeedSettings, request, max_new_tokens=most), notes_beside(request)
    spellings = [spell_arm(text) for text in request.arms]
    check_temperatures(spellings, settings.temperatures)
    words = [word for one in spellings for word in one.settings.values()]
    check_measured_on_ray(request, words, [one.settings.get("drafter") for one in spellings])
    prompts = _checked(request, drafting_arms(spellings))
    predicts = any(one.kind == PREDICTION for one in spellings)
    check_known(prompts, replay=settings.replay, predicts=predicts)
    names = (request.target or "embedded pair", named_draft(request.target, request.draft))
    job = BenchJob(request, settings, tuple(spellings), tuple(prompts), names)
    results, interrupted = _measured(job, notes)
    if interrupted:
        stopped(kept("rounds", len(results.records), request.out))
    if request.as_json:
        print_json(results.conditions, results.records, interrupted=interrupted)
    else:
        print_results(results.conditions, results.records, out=None if request.quiet else request.out)
    wrong = [one for one in differences_in(results.records) if one.arm not in lossy_arms(results.conditions)]
    return INTERRUPTED if interrupted else int(any(not one.difference.rounding for one in wrong))


@dataclass(frozen=True)
class BenchJob:
    """What is measured, as it can be sent to actors of a Ray cluster: no models yet; names are of target and draft."""

    request: BenchOptions
    settings: SpeedSettings
    spellings: tuple[ArmSpelling, ...]
    prompts: tuple[Prompt, ...]
    names: tuple[str, str | None]

    @property
    def placed(self) -> "BenchJob":
        """The same with folders named as processes elsewhere find them."""
        return replace(self, request=placed(self.request), spellings=tuple(map(_placed_arm, self.spellings)))

    @property
    def reads(self) -> list[str | None]:
        """What names models, heads and stores."""
        own = [one.settings.get("draft") for one in self.spellings]
        stores = [store_of(one.settings["drafter"])[0] for one in self.spellings if "drafter" in one.settings]
        return [self.request.target, self.request.draft, *own, *stores]


def _placed_arm(one: ArmSpelling) -> ArmSpelling:
    settings = {key: str(at_its_place(word)) for key, word in one.settings.items() if key in ("draft", "drafter")}
    return replace(one, settings={**one.settings, **settings})


class LoadedBench:
    """A job with its models."""

    def __init__(self, job: BenchJob) -> None:
        request, self.settings = job.request, job.settings
        self.pair = load_pair_of(request)
        self.arms = build_arms(self.pair, job.spellings, job.settings)
        check_arms(self.arms, job.settings)
        self.prompts = prompts_that_fit(self.pair, job.prompts, job.settings)
        self.conditions = speed_conditions(self.pair, self.arms, job.settings, job.names, request.chat_template)
        if request.ray:
            self.conditions["machine"] = cluster_machine(self.pair.target.device.type, request.threads or 1)
        self._warm = set[tuple[float, int]]()

    def plan(self) -> tuple[list[Arm], list[Prompt]]:
        """Return the arms, which run where their models are, and the prompts that fit."""
        check_batches(self.pair, rounds(self.prompts, self.settings), self.settings)
        return [replace(one, run=_elsewhere) for one in self.arms], self.prompts

    def measured(self, due: Round) -> list[SpeedRecord]:
        """Measure a round; the first of its kind is warmed up for."""
        return next(measure_rounds(self.pair, self.arms, [due], self.settings, self._warm))


def _elsewhere(*_: Any) -> NoReturn:
    raise RuntimeError("This arm runs where its models are.")


def _measured(job: BenchJob, notes: Console) -> tuple[SpeedResults, bool]:
    """Measure what is missing; return all there is, in the rounds' order, and whether the user interrupted it."""
    sent = job.placed if job.request.ray else job
    with measuring(job.request, LoadedBench, sent, sent.reads, notes) as (conditions, plan, measure):
        arms, prompts = plan
        _say_what_is_left_out(notes, prompts, len(job.prompts), job.settings)
        results, every = SpeedResults(conditions, job.request.out), rounds(prompts, job.settings)
        done = results.done(arms)
        due = [one for one in every if one.key not in done]

        def keep(found: tuple[list[SpeedRecord], RayActor | None]) -> None:
            results.add([replace(run, place=found[1]) for run in found[0]])

        bar = (f"rounds of {len(arms)} arms", len(every) - len(due), len(every))
        interrupted = keep_all(measure(due), keep, bar, notes)
    results.put_in_order([one.key for one in every])
    return results, interrupted


def settings_of(kind: Callable[..., Settings], options: Any, **others: Any) -> Settings:
    """Return the settings of what is measured, as options say them by the same names; None and () leave the defaults.

    Raises:
        InvalidParameter: a value outside its range.
    """
    given = {name: getattr(options, name, None) for name in signature(kind).parameters} | others
    return kind(**{name: value for name, value in given.items() if value not in ((), None)})


def _checked(request: BenchOptions, drafting: bool) -> list[Prompt]:
    alone, idle = request.draft and not request.target, request.draft and not drafting
    refuse_clashes(
        (alone, LONE_DRAFT),
        (idle, "None of the arms uses the draft of --draft: leave it out, or name an arm that does."),
    )
    return read_asked(request.prompts or USUAL, request.limit, request.chat_template, request.excerpt_tokens)


def _say_what_is_left_out(notes: Console, fit: Sequence[Prompt], given: int, settings: SpeedSettings) -> None:
    if len(fit) < given:
        notes.print(f"{given - len(fit)} of {given} prompts leave no room for the new tokens; left out.")
    for size, count in left_out(fit, settings).items():
        notes.print(f"Batches of {size}: {count} of {len(fit)} prompts fill no batch; left out.")


def measure_all(
    pair: Pair,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    settings: SpeedSettings,
    results: SpeedResults,
    notes: Console,
) -> bool:
    """Measure the rounds that are missing, with a progress bar; return whether the user interrupted it."""
    all_rounds = {one.key for one in rounds(prompts, settings)}
    done = results.done(arms) & all_rounds
    new = measure_speed(pair, arms, prompts, settings, done)
    return keep_all(new, results.add, (f"rounds of {len(arms)} arms", len(done), len(all_rounds)), notes)


def keep_all(new: Iterable[Made], keep: Callable[[Made], object], bar: tuple[str, int, int], notes: Console) -> bool:
    """Keep results as they are finished, with a bar of a title and how many of how many are there.

    Returns:
        whether the user interrupted it.
    """
    with progress_bar(notes) as progress:
        task = progress.add_task(bar[0], completed=bar[1], total=bar[2])
        try:
            for one in new:
                keep(one)
                progress.advance(task)
        except KeyboardInterrupt:
            return True
    return False


def print_json(conditions: dict[str, Any], records: Sequence[SpeedRecord], *, interrupted: bool) -> None:
    """Print JSON lines: the conditions, every run, every result, every difference between texts."""
    results = summarise_speed(records, list(conditions["arms"]), conditions["seed"])
    rows = (one.as_row() for one in [*records, *results, *differences_in(records)])
    print_lines(conditions, rows, interrupted=interrupted)


def print_lines(conditions: dict[str, Any], rows: Iterable[dict[str, Any]], *, interrupted: bool) -> None:
    """Print JSON lines: the conditions, then every result."""
    for line in ({"kind": "conditions", **conditions, "interrupted": interrupted}, *rows):
        print_json_line(line)


def print_results(conditions: dict[str, Any], records: Sequence[SpeedRecord], *, out: Path | None) -> None:
    """Print the main table, whether the texts are equal, and where the runs are."""
    console = new_console()
    results = summarise_speed(records, list(conditions["arms"]), conditions["seed"])
    if results:
        for part in speed_table(results, brief=True).split(console.width):
            console.print(as_rich(part))
        by_task = kind_table(results)
        if by_task is not None:
            print_table(console, by_task)
        found = differences_in(records)
        console.print(equality_in_words(results, found, lossy_arms(conditions)), soft_wrap=True)
        if found:
            console.print(as_rich(difference_table(found)))
        for said in filter(None, (_how(conditions, records), cluster_in_words(conditions, records))):
            console.print(said, soft_wrap=True)
        say_busy(console, typical_load(records), judged_machine(conditions, records))
    if out is not None and records:
        there = f'Every run is in {out}: the same call goes on from there; "polydraft report {out}" shows more.'
        console.print(there, soft_wrap=True)


def _how(conditions: dict[str, Any], records: Sequence[SpeedRecord]) -> str:
    """Return the conditions that nobody may overlook, in two sentences."""
    prompts = len({(one.task, name) for one in records for name in one.prompts})
    ends = conditions.get("until_end") or conditions.get("replay")
    new = f"{'at most ' if ends else ''}{conditions['max_new_tokens']} new tokens each"
    replayed = REPLAYED if conditions.get("replay") else ""
    return (
        f"{replayed}{prompts} prompts, {new}, {len(records)} runs. Speed-up: all tokens over all "
        f"seconds, over the same of {PLAIN}; bootstrap over prompts."
    )


def kept(what: str, count: int, out: Path | None) -> str:
    """Return what Ctrl-C leaves of so many finished rounds or texts, and how to go on."""
    if not count:
        return "nothing was finished"
    if out is None:
        return f"the finished {what} are printed and not kept; with --out the same command goes on from them"
    return f"the finished {what} are in {out}; the same command goes on from there"


def print_table(console: Console, table: Table) -> None:
    """Print a table below its title, in as many parts as the terminal's width asks for."""
    console.print(table.title, style="bold", soft_wrap=True)
    for part in table.split(console.width):
        console.print(as_rich(part))


def as_rich(table: Table) -> RichTable:
    """Return a table for the terminal."""
    result = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, name in enumerate(table.header):
        result.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in table.rows:
        result.add_row(*row, style=None if row and row[0].startswith(" ") else "italic")
    return result


def say_busy(console: Console, busy: float | None, place: dict[str, Any]) -> None:
    """Say that times are not to be trusted if other programs were busy."""
    if busy is not None and is_busy(busy, place):
        said = f"Load average {busy:.1f} on {place['threads']} threads: other programs were busy, so do not trust it."
        console.print(styled(said, "yellow"), soft_wrap=True)


def run_report(options: ReportOptions) -> int:
    """Write the page and say what is in it.

    Raises:
        MissingExtra: matplotlib is not installed.
        ResultsError: the runs cannot be read, or the report cannot be written.
    """
    FIGURES.check()
    conditions, records = read_speed_results(options.runs)
    page, *figures = write_report(conditions, records, options.out)
    results = summarise_speed(records, list(conditions["arms"]), conditions["seed"])
    console = new_console()
    for line in verdicts(results):
        console.print(line.replace("**", ""), soft_wrap=True)
    console.print(equality_in_words(results, differences_in(records), lossy_arms(conditions)), soft_wrap=True)
    console.print(f"{page}, with {len(figures)} figures beside it.", soft_wrap=True)
    return 0
