"""`polydraft bench`: measure arms side by side, keep every run, and show the speed-ups."""

from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from polydraft.bench import USUAL, Prompt, Table
from polydraft.bench.environment import is_busy
from polydraft.bench.speed import (
    PLAIN,
    Arm,
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
from polydraft.cli.benchmark.arm_spelling import PREDICTION, build_arms, check_temperatures, drafting_arms, spell_arm
from polydraft.cli.clashes import LONE_DRAFT, read_asked, refuse_clashes
from polydraft.cli.generation.one_text import load_pair_of, named_draft
from polydraft.cli.printing import console as new_console
from polydraft.cli.printing import notes_beside, print_json_line, progress_bar, styled
from polydraft.cli.process import INTERRUPTED, stopped
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
    prompts = _checked(request, drafting_arms(spellings))
    predicts = any(one.kind == PREDICTION for one in spellings)
    check_known(prompts, replay=settings.replay, predicts=predicts)
    with notes.status("Loading the models ..."):
        pair = load_pair_of(request)
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
    if request.as_json:
        print_json(results.conditions, results.records, interrupted=interrupted)
    else:
        print_results(results.conditions, results.records, out=None if request.quiet else request.out)
    wrong = [one for one in differences_in(results.records) if one.arm not in lossy_arms(results.conditions)]
    return INTERRUPTED if interrupted else int(any(not one.difference.rounding for one in wrong))


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


def keep_all(new: Iterable[Made], keep: Callable[[Made], None], bar: tuple[str, int, int], notes: Console) -> bool:
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
        console.print(_how(conditions, records), soft_wrap=True)
        say_busy(console, typical_load(records), conditions["machine"])
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
