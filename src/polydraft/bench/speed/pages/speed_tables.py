"""The benchmark as tables: speed, speed-up and block efficiency by task, where time goes, what bounds the speed-up."""

from collections.abc import Callable, Sequence

from polydraft.bench.bootstrap import Estimate
from polydraft.bench.prompts import ALL
from polydraft.bench.speed.arms import PLAIN
from polydraft.bench.speed.summary import ArmResult, TextDifference
from polydraft.bench.table import Table, spread

NOTHING = "-"
PARTS = ("prefill", "draft", "target", "verify", "rest")
Cells = Callable[[ArmResult], Sequence[str]]


def overall(results: Sequence[ArmResult]) -> list[ArmResult]:
    """Return the results of all tasks together, or of the only task."""
    return [one for one in results if one.task == ALL] or list(results)


def speed_table(results: Sequence[ArmResult], *, brief: bool) -> Table:
    """Return the main table: tokens per second, speed-up, tokens per target call, equality at temperature 0.

    Args:
        results: of all tasks.
        brief: leave out what does not fit a terminal.
    """
    header = ["arm", "tokens/s", "speed-up", "95 % interval", "tokens/call", "same text"]
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

    return _by_setting("Speed" if brief else "Speed, all tasks", [*header, *extra], overall(results), cells)


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
    return [
        _by_task("Speed-up by task (95 % interval)", drafting, lambda one: with_interval(one.speed_up.total)),
        _by_task("Block efficiency by task: tokens per target call ± half the interval", drafting, efficiency),
    ]


def kind_table(results: Sequence[ArmResult]) -> Table | None:
    """Return speed-up and tokens per target call with tasks as rows and arms as columns; None if there is one task."""
    arms = list(dict.fromkeys(one.arm for one in results if one.arm != PLAIN))
    if len({one.task for one in results}) < 2 or not arms:
        return None

    def cell(one: ArmResult) -> str:
        calls = "" if one.block_efficiency is None else f" ({one.block_efficiency.mean:.2f})"
        return f"{one.speed_up.total.mean:.2f}x{calls}"

    rows: list[tuple[str, ...]] = []
    for setting in dict.fromkeys(one.setting for one in results):
        here = [one for one in results if one.setting == setting]
        rows += [()] if rows else []
        rows.append((setting_in_words(setting, short=True), *[""] * len(arms)))
        for task in dict.fromkeys(one.task for one in here):
            found = {one.arm: cell(one) for one in here if one.task == task}
            rows.append((f" {task}", *(found.get(arm, NOTHING) for arm in arms)))
    return Table("Speed-up by task (tokens per target call)", ("task", *arms), tuple(rows))


def time_table(results: Sequence[ArmResult]) -> Table:
    """Return where the time went, in milliseconds per new token."""

    def cells(one: ArmResult) -> list[str]:
        if one.statistics is None:
            return [f"{1000 / one.tokens_per_second:.2f}", *[NOTHING] * len(PARTS)]
        return [f"{1000 / one.tokens_per_second:.2f}", *(f"{part:.2f}" for part in milliseconds(one).values())]

    return _by_setting("Time per new token, ms", ["arm", "all", *PARTS], overall(results), cells)


def milliseconds(one: ArmResult) -> dict[str, float]:
    """Return the time of each part per new token, in milliseconds; nothing if the arm does not tell."""
    if one.statistics is None:
        return {}
    found = one.statistics
    return {part: 1000 * found.seconds.get(part, 0.0) / found.new_tokens for part in PARTS}


def bound_table(results: Sequence[ArmResult]) -> Table:
    """Return what bounds each speed-up: tokens per call, costs in plain target passes, closed forms, the measured."""
    header = ["arm", "tokens/call", "draft", "target", "other", "formula", "passes", "steps", "measured"]

    def cells(one: ArmResult) -> list[str]:
        bound = one.bound
        if bound is None:
            return [*[NOTHING] * 7, f"{one.speed_up.total.mean:.2f}x"]
        costs = (f"{value:.2f}" for value in (bound.tokens, bound.draft, bound.target, bound.other))
        ratios = (bound.chain, bound.passes, bound.steps, one.speed_up.total.mean)
        return [*costs, *(NOTHING if ratio is None else f"{ratio:.2f}x" for ratio in ratios)]

    return _by_setting("Costs of a step in plain target passes, and speed-ups", header, overall(results), cells)


def setup_table(results: Sequence[ArmResult]) -> Table:
    """Return what each of polydraft's arms did at each setting."""
    names = ("drafter", "scheme", "verifier", "tree")
    own = [one for one in overall(results) if one.setup]
    return _by_setting(
        "What the arms of polydraft did", ["arm", *names], own, lambda one: [one.setup.get(name, "") for name in names]
    )


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


def _by_setting(title: str, header: Sequence[str], results: Sequence[ArmResult], cells: Cells) -> Table:
    rows: list[tuple[str, ...]] = []
    for setting in dict.fromkeys(one.setting for one in results):
        rows += [()] if rows else []
        rows.append((setting_in_words(setting, short=True), *[""] * (len(header) - 1)))
        rows += [(f" {one.arm}", *cells(one)) for one in results if one.setting == setting]
    return Table(title, tuple(header), tuple(rows))


def _by_task(title: str, results: Sequence[ArmResult], cell: Callable[[ArmResult], str]) -> Table:
    tasks = list(dict.fromkeys(one.task for one in results))
    rows: list[tuple[str, ...]] = []
    for setting in dict.fromkeys(one.setting for one in results):
        here = [one for one in results if one.setting == setting]
        rows += [()] if rows else []
        rows.append((setting_in_words(setting, short=True), *[""] * len(tasks)))
        for arm in dict.fromkeys(one.arm for one in here):
            found = {one.task: cell(one) for one in here if one.arm == arm}
            rows.append((f" {arm}", *(found.get(task, NOTHING) for task in tasks)))
    return Table(title, ("arm", *tasks), tuple(rows))
