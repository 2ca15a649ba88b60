"""A Markdown page of a benchmark: how it was measured, what came of it, tables and figures."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from polydraft.bench.bootstrap import Estimate
from polydraft.bench.environment import actors_in_words, is_busy
from polydraft.bench.prompts import template_in_words
from polydraft.bench.speed.arms import PLAIN
from polydraft.bench.speed.figures import draw_speed_figures
from polydraft.bench.speed.records import SpeedRecord
from polydraft.bench.speed.summary import (
    TIMED,
    ArmResult,
    TextDifference,
    actors_of,
    differences_in,
    judged_machine,
    milliseconds,
    overall,
    summarise_speed,
    typical_load,
)
from polydraft.bench.table import Table, grouped, spread
from polydraft.errors import ResultsError

NOTHING = "-"
Cells = Callable[[ArmResult], Sequence[str]]
Lines = Callable[[Sequence[ArmResult]], Iterable[Sequence[str]]]


def speed_table(results: Sequence[ArmResult], *, brief: bool) -> Table:
    """Return the main table: speed, speed-up, tokens per target call, equality; brief, what fits a terminal."""
    header = ["tokens/s", "speed-up", "95 % interval", "tokens/call", "same text"]
    extra = (
        [] if brief else ["mean of pairs", "slowest prompt", "fastest", "acceptance by depth", "memory, MiB", "runs"]
    )

    def cells(one: ArmResult) -> list[str]:
        short = [
            f"{one.tokens_per_second:.1f}",
            f"{one.speed_up.total.mean:.2f}x",
            NOTHING if one.arm == PLAIN else interval(one.speed_up.total),
            NOTHING if one.block_efficiency is None else f"{one.block_efficiency.mean:.2f}",
            NOTHING if one.equal is None or one.arm == PLAIN else f"{one.equal}/{one.runs}",
        ]
        return short if brief else [*short, *_more(one)]

    return _by_arm("Speed" if brief else "Speed, all tasks", [*header, *extra], overall(results), cells)


def _more(one: ArmResult) -> list[str]:
    rates = one.statistics.acceptance_by_depth if one.statistics else []
    return [
        NOTHING if one.arm == PLAIN else with_interval(one.speed_up.paired),
        NOTHING if one.arm == PLAIN else f"{min(one.speed_up.by_prompt):.2f}x",
        NOTHING if one.arm == PLAIN else f"{max(one.speed_up.by_prompt):.2f}x",
        _first(rates, 8) or NOTHING,
        NOTHING if one.memory is None else f"{one.memory:.0f}",
        str(one.runs),
    ]


def _first(rates: Sequence[float], most: int) -> str:
    shown = " ".join(f"{rate:.2f}" for rate in rates[:most])
    return f"{shown} ..." if len(rates) > most else shown


def interval(one: Estimate) -> str:
    """Return an interval in words; a dash where there is none."""
    return NOTHING if one.low is None or one.high is None else f"{one.low:.2f} to {one.high:.2f}"


def with_interval(one: Estimate) -> str:
    """Return a ratio in words, with its interval if there is one."""
    return f"{one.mean:.2f}x ({interval(one)})".removesuffix(f" ({NOTHING})")


def task_tables(results: Sequence[ArmResult]) -> list[Table]:
    """Return speed-up and block efficiency with arms as rows and tasks as columns; plain decoding has 1 in both."""

    def efficiency(one: ArmResult) -> str:
        found = one.block_efficiency
        return NOTHING if found is None else spread(found, 1, 2, brief=False)

    drafting = [one for one in results if one.arm != PLAIN]
    cells: dict[str, Callable[[ArmResult], str]] = {
        "Speed-up by task (95 % interval)": lambda one: with_interval(one.speed_up.total),
        "Block efficiency by task: tokens per target call ± half the interval": efficiency,
    }
    tasks = list(dict.fromkeys(one.task for one in drafting))
    return [_crossed(title, "arm", "task", tasks, drafting, cell) for title, cell in cells.items()]


def kind_table(results: Sequence[ArmResult]) -> Table | None:
    """Return speed-up and tokens per target call with tasks as rows and arms as columns; None if there is one task."""
    arms = list(dict.fromkeys(one.arm for one in results if one.arm != PLAIN))
    if len({one.task for one in results}) < 2 or not arms:
        return None

    def cell(one: ArmResult) -> str:
        calls = "" if one.block_efficiency is None else f" ({one.block_efficiency.mean:.2f})"
        return f"{one.speed_up.total.mean:.2f}x{calls}"

    return _crossed("Speed-up by task (tokens per target call)", "task", "arm", arms, results, cell)


def time_table(results: Sequence[ArmResult]) -> Table:
    """Return where the time went, in milliseconds per new token."""

    def cells(one: ArmResult) -> list[str]:
        if one.statistics is None:
            return [f"{1000 / one.tokens_per_second:.2f}", *[NOTHING] * len(TIMED)]
        return [f"{1000 / one.tokens_per_second:.2f}", *(f"{part:.2f}" for part in milliseconds(one).values())]

    return _by_arm("Time per new token, ms", ["all", *TIMED], overall(results), cells)


def bound_table(results: Sequence[ArmResult]) -> Table:
    """Return what bounds each speed-up: tokens per call, costs in plain target passes, closed forms, the measured."""
    header = ["tokens/call", "draft", "target", "other", "formula", "passes", "steps", "measured"]

    def cells(one: ArmResult) -> list[str]:
        bound = one.bound
        if bound is None:
            return [*[NOTHING] * 7, f"{one.speed_up.total.mean:.2f}x"]
        costs = (f"{value:.2f}" for value in (bound.tokens, bound.draft, bound.target, bound.other))
        ratios = (bound.chain, bound.passes, bound.steps, one.speed_up.total.mean)
        return [*costs, *(NOTHING if ratio is None else f"{ratio:.2f}x" for ratio in ratios)]

    return _by_arm("Costs of a step in plain target passes, and speed-ups", header, overall(results), cells)


def setup_table(results: Sequence[ArmResult]) -> Table:
    """Return what each of polydraft's arms did at each setting."""
    names = ("drafter", "scheme", "verifier", "tree")
    own = [one for one in overall(results) if one.setup]
    title = "What the arms of polydraft did"
    return _by_arm(title, names, own, lambda one: [one.setup.get(name, "") for name in names])


def difference_table(found: Sequence[TextDifference]) -> Table:
    """Return where greedy texts differ from the plain ones, and by how much."""
    rows = [
        (
            f" {one.arm}",
            f"{one.task}: {one.prompt}",
            str(one.batch_size),
            str(one.repeat + 1),
            str(one.difference.position),
            f"{one.difference.expected} / {one.difference.found}",
            NOTHING if one.difference.margin is None else f"{one.difference.margin:.3g}",
            "yes" if one.difference.rounding else "NO",
        )
        for one in found
    ]
    header = ("arm", "prompt", "batch", "repeat", "position", "plain / arm", "logit margin", "rounding")
    return Table("Texts at temperature 0 that differ from plain decoding", header, tuple(rows))


def setting_in_words(setting: tuple[float, int], *, short: bool = False) -> str:
    """Return a temperature and a batch size in words."""
    temperature, batch_size = setting
    return f"T = {temperature:g}, batch {batch_size}" if short else f"temperature {temperature:g}, batch {batch_size}"


def _by_setting(title: str, header: Sequence[str], results: Sequence[ArmResult], lines: Lines) -> Table:
    groups = grouped(results, attrgetter("setting")).items()
    return Table.of_groups(
        title, header, (([setting_in_words(one, short=True)], lines(group)) for one, group in groups)
    )


def _by_arm(title: str, header: Sequence[str], results: Sequence[ArmResult], cells: Cells) -> Table:
    return _by_setting(title, ["arm", *header], results, lambda here: [(one.arm, *cells(one)) for one in here])


def _crossed(
    title: str,
    row: str,
    column: str,
    names: Sequence[str],
    results: Sequence[ArmResult],
    cell: Callable[[ArmResult], str],
) -> Table:
    """Return one field's values as rows and another's as columns, of which those with these names."""
    row_of, column_of = attrgetter(row), attrgetter(column)

    def lines(here: Sequence[ArmResult]) -> Iterator[Sequence[str]]:
        for value, group in grouped(here, row_of).items():
            found = {column_of(one): cell(one) for one in group}
            yield value, *(found.get(name, NOTHING) for name in names)

    return _by_setting(title, (row, *names), results, lines)


PAGE = "report.md"
BOUNDS = (
    "A speed-up is made of how many tokens a target call gives and of what a step costs. Costs are in target passes of "
    "plain decoding, which are 1. *Formula* is the classic closed form (Leviathan et al., arXiv 2211.17192, theorem "
    "3.8): the measured acceptance taken as equal at all depths, the measured cost of drafting, and nothing else. "
    "*Passes* takes acceptance by depth and the target's pass as they were measured; *steps* adds verification and "
    "everything else; *measured* also has the prompt's pass in it, and rows of a batch that wait for the slowest. "
    "The drop from one to the next says what to mend."
)
FIGURES = {"speed_up": "Speed-up", "block_efficiency": "Block efficiency by task", "time": "Where the time goes"}


def write_report(conditions: dict[str, Any], records: Sequence[SpeedRecord], folder: Path) -> list[Path]:
    """Write the page and its figures into a folder and return the files.

    Raises:
        ResultsError: there is nothing to report, or a file cannot be written.
        MissingExtra: matplotlib is not installed.
    """
    results = summarise_speed(records, list(conditions["arms"]), conditions["seed"])
    if not results:
        raise ResultsError("There are no runs of plain decoding to compare with; measure more and report again.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figures = draw_speed_figures(results, folder)
        page = folder / PAGE
        page.write_text(as_page(conditions, records, results, [one.name for one in figures]), encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{folder}: the report cannot be written there: {error.strerror}.") from error
    return [page, *figures]


def as_page(
    conditions: dict[str, Any], records: Sequence[SpeedRecord], results: Sequence[ArmResult], figures: Sequence[str]
) -> str:
    """Return the page's Markdown."""
    found = differences_in(records)
    parts = [
        "# Benchmark",
        *verdicts(results),
        equality_in_words(results, found, lossy_arms(conditions)),
        "## Speed",
        speed_table(results, brief=False).as_markdown(),
        *_pictures(figures, "speed_up"),
        *(table.as_markdown() for table in task_tables(results)),
        *_pictures(figures, "block_efficiency"),
        "## Where the time goes",
        time_table(results).as_markdown(),
        *_pictures(figures, "time"),
        "## What bounds the speed-up",
        BOUNDS,
        bound_table(results).as_markdown(),
        "## How it was measured",
        "\n".join(f"* {sentence}" for sentence in conditions_in_words(conditions, records)),
        setup_table(results).as_markdown(),
    ]
    if found:
        parts += ["## Texts that differ", difference_table(found).as_markdown()]
    return "\n\n".join(parts) + "\n"


def verdicts(results: Sequence[ArmResult]) -> list[str]:
    """Say for each setting which arm was fastest, if the run shows that one is faster than plain decoding at all."""
    drafting = grouped((one for one in overall(results) if one.arm != PLAIN), attrgetter("setting"))
    settings = (one for one in dict.fromkeys(one.setting for one in results) if one in drafting)
    return [f"{setting_in_words(one).capitalize()}: {_verdict(drafting[one])}" for one in settings]


def _verdict(arms: Sequence[ArmResult]) -> str:
    """Name the fastest arm, unless it has no interval, or one that includes 1: then no arm is called fastest."""
    best = max(arms, key=lambda one: one.speed_up.total.mean)
    surely = [one for one in arms if one.speed_up.total.above(1)]
    if best in surely:
        return f"**{best.arm}** was fastest, {_times_plain(best)}."
    if surely:
        sure = max(surely, key=lambda one: one.speed_up.total.mean)
        return (
            f"**{sure.arm}** was faster, {_times_plain(sure)}; **{best.arm}**, {_times_plain(best)}, is not told apart "
            "from it."
        )
    none = "faster" if best.speed_up.total.mean <= 1 else "shown to be faster"
    apart = "slower than" if best.speed_up.total.below(1) else "not told apart from"
    return (
        f"no arm was {none} than plain decoding; the best of them, **{best.arm}**, {_times_plain(best)}, is {apart} it."
    )


def _times_plain(one: ArmResult) -> str:
    found = one.speed_up.total
    return f"{found.mean:.2f} times plain decoding ({interval(found).replace(NOTHING, 'one prompt gives no interval')})"


def equality_in_words(results: Sequence[ArmResult], found: Sequence[TextDifference], lossy: Sequence[str]) -> str:
    """Say whether greedy texts were equal, and if not, whether rounding may be the reason; lossy arms need not be."""
    bound = [one for one in overall(results) if one.equal is not None and one.arm not in (PLAIN, *lossy)]
    checked, wrong = sum(one.runs for one in bound), [one for one in found if one.arm not in lossy]
    if all(one.temperature for one in results):
        return "Texts were not compared: nothing was measured at temperature 0, where they have to be equal."
    if not checked:
        return "No texts had to be equal: at temperature 0 nothing was measured but plain decoding and lossy arms."
    if not wrong:
        return f"At temperature 0 all {checked} runs gave the text of plain decoding, token for token."
    real = sum(not one.difference.rounding for one in wrong)
    said = f"At temperature 0 {len(wrong)} text(s) of {checked} runs differ from plain decoding"
    return (
        f"{said}, {real} of them by more than rounding explains."
        if real
        else (f"{said}; the logits of the two tokens are so close that the order of arithmetic decides.")
    )


def lossy_arms(conditions: dict[str, Any]) -> list[str]:
    """Return the names of the arms whose output law is not the target's."""
    return [name for name, arm in conditions["arms"].items() if not arm["lossless"]]


def cluster_in_words(conditions: dict[str, Any], records: Sequence[SpeedRecord]) -> str:
    """Say which actors of a Ray cluster measured and what may be compared; empty where no cluster did."""
    actors = actors_of(records)
    if not actors:
        return ""
    threads = conditions["machine"]["threads"]
    each = f"{threads} CPU thread{'s' * (threads != 1)} each"
    return (
        f"{actors_in_words(actors)} They had {each}. One of them ran all arms of a prompt, and timings of several "
        "machines are compared within a prompt alone."
    )


def conditions_in_words(conditions: dict[str, Any], records: Sequence[SpeedRecord]) -> list[str]:
    """Return how it was measured, one sentence each."""
    target, draft, machine = conditions["target"], conditions["draft"], conditions["machine"]
    prompts = {
        one.task: {name for other in records if other.task == one.task for name in other.prompts} for one in records
    }
    counts = ", ".join(f"{task} {len(names)}" for task, names in prompts.items())
    repeats = max(one.repeat for one in records) + 1
    often = "once" if repeats == 1 else f"{repeats} times"
    load, threads, cluster = typical_load(records), machine["threads"], cluster_in_words(conditions, records)
    versions = ", ".join(f"{name} {number}" for name, number in conditions["versions"].items())
    place = machine["accelerator"] or f"{machine['processor']}, {threads} of {machine['cores'] or 'their'} cores"
    sentences = [
        f"Target: {_model(target)}." + (f" Draft model: {_model(draft)}." if draft else " There is no draft model."),
        f"Prompts: {counts}. {_lengths(conditions)}, {often}.",
        template_in_words(conditions.get("chat_template")),
        "The arms took turns on the same prompts in one process, in a random order of each round, after a warm-up of "
        f"{conditions['warm_up_tokens']} tokens. Seed {conditions['seed']}.",
        "Speed is all new tokens over all seconds of the whole call, the prompt's pass included. A speed-up is the "
        f"ratio to the arm {PLAIN}, polydraft's loop without drafts, on the same prompts, temperature, batch and "
        "repeat.",
        "Intervals are 95 % bootstrap intervals over prompts, each with all its repeats, and widened by Student's "
        "factor where there are few.",
        "All arms ran on the same model objects; on a CPU polydraft packs the linear layers of small models, and "
        "Hugging Face's loops run on the packed layers as well. Sampling is from the whole distribution, without top-k "
        "or top-p.",
        f"Machine: {place}; {versions}.",
        *([cluster] if cluster else []),
    ]
    if load is not None:
        said = f"Load average before the runs: {load:.1f} (median)."
        doubt = " **Other programs were busy: these times are not to be trusted.**"
        sentences.append(said + doubt if is_busy(load, judged_machine(conditions, records)) else said)
    fallen = sorted({one.arm for one in records if one.statistics and one.statistics.fallback})
    if fallen:
        sentences.append(f"**The drafter failed in {', '.join(fallen)}, which went on without drafts.**")
    if lossy_arms(conditions):
        sentences.append(f"Lossy, so their text may differ from the target's: {', '.join(lossy_arms(conditions))}.")
    return sentences


def _lengths(conditions: dict[str, Any]) -> str:
    most = conditions["max_new_tokens"]
    if conditions.get("replay"):
        return (
            f"The texts are **replayed**: every arm wrote the edited file that stands in the row, up to {most} tokens, "
            "whatever the target would have written"
        )
    if conditions.get("until_end"):
        return f"Every arm continued each until the model ended the text, by at most {most} tokens"
    return f"Every arm continued each by exactly {most} tokens, where the end-of-text token ended no text"


def _model(one: dict[str, Any]) -> str:
    return f"{one['name']}, {one['parameters']:,} parameters, {one['dtype']} on {one['device']}"


def _pictures(figures: Sequence[str], kind: str) -> list[str]:
    return [f"![{FIGURES[kind]}]({name})" for name in figures if name.startswith(kind)]
