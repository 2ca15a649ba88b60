"""`polydraft bench`: measure arms side by side, keep every run, and show the speed-ups."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from polydraft.bench import USUAL, Prompt, Table, read_prompt_sets, require_matplotlib
from polydraft.bench.speed import (
    PLAIN,
    Arm,
    ArmResult,
    SpeedRecord,
    SpeedResults,
    SpeedSettings,
    check_arms,
    check_known,
    difference_table,
    differences_in,
    equality_in_words,
    kind_table,
    left_out,
    lossy_arms,
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
from polydraft.cli.benchmark.arm_spelling import PREDICTION, build_arms, drafting_arms, spell_arm
from polydraft.cli.clashes import LONE_DRAFT, both_outputs, idle_excerpts, idle_template, refuse_clashes
from polydraft.cli.generation.one_text import named_draft
from polydraft.cli.printing import console as new_console
from polydraft.cli.printing import progress_bar, styled
from polydraft.cli.process import INTERRUPTED, stopped
from polydraft.engine import load
from polydraft.models import Pair, load_pair
from polydraft.options.commands.bench_options import BenchOptions, ReportOptions

WHOLE = 4096
"""The usual most tokens of a replayed text, which ends by itself."""
REPLAYED = "Replayed: every arm wrote the edited file that stands in the row, not what the target would write. "
BUSY = 1.5
"""More threads than this that want to run, per thread of ours, disturb times."""


def run_bench(request: BenchOptions) -> int:
    """Carry out the request and print.

    Returns the exit code: 0, 1 if a lossless arm's text at temperature 0 differs by more than rounding, or 130 after
    Ctrl-C with no finished round lost.
    """
    as_json, quiet, settings = request.as_json, request.quiet, settings_of(request)
    notes = new_console(errors=True, quiet=as_json or quiet)
    refuse_clashes(both_outputs(as_json, quiet))
    spellings = [spell_arm(text) for text in request.arms]
    prompts = _checked(request, drafting_arms(spellings))
    predicts = any(one.kind == PREDICTION for one in spellings)
    check_known(prompts, replay=settings.replay, predicts=predicts)
    with notes.status("Loading the models ..."):
        pair = _load(request)
    arms = build_arms(pair, spellings, settings)
    check_arms(arms, settings)
    fit = prompts_that_fit(pair, prompts, settings)
    _say_what_is_left_out(notes, fit, len(prompts), settings)
    names = (request.target or "embedded pair", named_draft(request.target, request.draft))
    conditions = speed_conditions(pair, arms, settings, names, request.chat_template)
    results = SpeedResults(conditions, request.out)
    interrupted = measure_all(pair, arms, fit, settings, results, notes)
    if interrupted:
        stopped(kept("rounds", len(results.records), request.out))
    if as_json:
        print_json(results.conditions, results.records, interrupted=interrupted)
    else:
        print_results(results.conditions, results.records, out=None if quiet else request.out)
    wrong = [one for one in differences_in(results.records) if one.arm not in lossy_arms(results.conditions)]
    return INTERRUPTED if interrupted else int(any(not one.difference.rounding for one in wrong))


def settings_of(request: BenchOptions) -> SpeedSettings:
    """Return how the arms are measured.

    Raises:
        InvalidParameter: a value outside its range.
    """
    given = {
        "temperatures": request.temperatures,
        "batch_sizes": request.batch_sizes,
        "max_new_tokens": request.max_new_tokens or (WHOLE if request.replay else None),
        "excerpt_tokens": request.excerpt_tokens,
        "until_end": request.until_end,
        "replay": request.replay,
    }
    usual: dict[str, Any] = {name: value for name, value in given.items() if value}
    return SpeedSettings(repeats=request.repeats, seed=request.seed, **usual)


def _checked(request: BenchOptions, drafting: bool) -> list[Prompt]:
    """Check what can be checked before models are loaded, and return the prompts."""
    alone, idle = request.draft and not request.target, request.draft and not drafting
    refuse_clashes(
        (alone, LONE_DRAFT),
        (idle, "None of the arms uses the draft of --draft: leave it out, or name an arm that does."),
    )
    prompts = read_prompt_sets(request.prompts or USUAL, request.limit, request.chat_template)
    refuse_clashes(
        idle_excerpts(prompts, request.excerpt_tokens is not None), idle_template(prompts, request.chat_template)
    )
    return prompts


def _load(request: BenchOptions) -> Pair:
    if request.target is None:
        return load_pair(dtype=request.dtype, device=request.device)
    return load(request.target, request.draft, dtype=request.dtype, device=request.device)


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
    with progress_bar(notes) as progress:
        task = progress.add_task(f"rounds of {len(arms)} arms", total=len(all_rounds), completed=len(done))
        try:
            for records in measure_speed(pair, arms, prompts, settings, done):
                results.add(records)
                progress.advance(task)
        except KeyboardInterrupt:
            return True
    return False


def print_json(conditions: dict[str, Any], records: Sequence[SpeedRecord], *, interrupted: bool) -> None:
    """Print JSON lines: the conditions, every run, every result, every difference between texts."""
    results = summarise_speed(records, list(conditions["arms"]), conditions["seed"])
    lines = [{"kind": "conditions", **conditions, "interrupted": interrupted}]
    for line in [*lines, *(one.as_row() for one in [*records, *results, *differences_in(records)])]:
        sys.stdout.write(json.dumps(line) + "\n")


def print_results(conditions: dict[str, Any], records: Sequence[SpeedRecord], *, out: Path | None) -> None:
    """Print the main table, whether the texts are equal, and where the runs are."""
    console = new_console()
    results = summarise_speed(records, list(conditions["arms"]), conditions["seed"])
    if results:
        for part in speed_table(results, brief=True).split(console.width):
            console.print(as_rich(part))
        _print_kinds(console, results)
        found = differences_in(records)
        console.print(equality_in_words(results, found, lossy_arms(conditions)), soft_wrap=True)
        if found:
            console.print(as_rich(difference_table(found)))
        console.print(_how(conditions, records), soft_wrap=True)
        say_busy(console, typical_load(records), conditions["machine"])
    if out is not None and records:
        there = f'Every run is in {out}: the same call goes on from there; "polydraft report {out}" shows more.'
        console.print(there, soft_wrap=True)


def _print_kinds(console: Console, results: Sequence[ArmResult]) -> None:
    """Print what every task brought, if there are several."""
    table = kind_table(results)
    for number, part in enumerate(table.split(console.width) if table else ()):
        if number == 0:
            console.print(part.title, style="bold", soft_wrap=True)
        console.print(as_rich(part))


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
    threads = place["threads"]
    if busy is not None and busy > BUSY * threads and not place["accelerator"]:
        said = f"Load average {busy:.1f} on {threads} threads: other programs were busy, so do not trust it."
        console.print(styled(said, "yellow"), soft_wrap=True)


def run_report(options: ReportOptions) -> int:
    """Write the page and say what is in it.

    Raises:
        MissingExtra: matplotlib is not installed.
        ResultsError: the runs cannot be read, or the report cannot be written.
    """
    require_matplotlib()
    conditions, records = read_speed_results(options.runs)
    page, *figures = write_report(conditions, records, options.out)
    results = summarise_speed(records, list(conditions["arms"]), conditions["seed"])
    console = new_console()
    for line in verdicts(results):
        console.print(line.replace("**", ""), soft_wrap=True)
    console.print(equality_in_words(results, differences_in(records), lossy_arms(conditions)), soft_wrap=True)
    console.print(f"{page}, with {len(figures)} figures beside it.", soft_wrap=True)
    return 0
