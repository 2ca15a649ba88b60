"""`polydraft bench planner`: the planner beside plain decoding and fixed trees."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median

from torch import Tensor

from polydraft.bench.table import Table, grouped
from polydraft.cli.benchmark.bench import settings_of
from polydraft.cli.printing import notes_beside
from polydraft.models import Pair
from polydraft_lab.commands.options import BenchPlannerOptions
from polydraft_lab.commands.results import (
    conditions_of,
    gathered,
    load_source,
    refuse_lone_model,
    show,
    token_ids,
)
from polydraft_lab.subjects import (
    PlannerOptions,
    PlannerSetting,
    PlannerSpeed,
    Progress,
    measure_planner,
    settings_named,
)


def run_planner(options: BenchPlannerOptions) -> int:
    """Measure and print; return the exit code: 0, or 130 after Ctrl-C with no finished setting lost."""
    lanes = settings_of(PlannerOptions, options)
    notes = notes_beside(options)
    refuse_lone_model(options)
    chosen = settings_named(options.settings)
    pair = load_source(options, notes)
    prompts = token_ids(options, pair, options.max_new_tokens, notes)
    results, interrupted = gathered(partial(measured, chosen, lanes, pair, prompts), notes)
    conditions = conditions_of("planner", pair, {**asdict(lanes), "prompts": len(prompts)})
    return show(
        conditions,
        results,
        [planner_table(results)] if results else [],
        notes_on(lanes, results),
        as_json=options.as_json,
        interrupted=interrupted,
    )


def measured(
    chosen: Sequence[PlannerSetting],
    options: PlannerOptions,
    pair: Pair,
    prompts: Sequence[Tensor],
    on_progress: Progress,
) -> Iterator[PlannerSpeed]:
    """Measure the settings one after the other."""
    for setting in chosen:
        yield from measure_planner(pair, prompts, setting, options, on_progress)


def planner_table(results: list[PlannerSpeed]) -> Table:
    """Return every arm's speed beside plain decoding's and the fastest fixed tree's, below each setting."""

    def cells(one: PlannerSpeed) -> tuple[str, ...]:
        plain, best = one.against_plain, one.against_best
        speeds = (f"{one.tokens_per_second:.1f}", f"{median(plain):.2f}x", f"{min(plain):.2f} to {max(plain):.2f}")
        return one.arm, *speeds, f"{median(best):.2f}x" if best else ""

    groups = grouped(results, lambda one: one.setting).items()
    head = ("arm", "tokens/s", "over plain", "range", "best tree")
    title = "The planner and other arms, side by side: medians over texts"
    return Table.of_groups(title, head, (([setting], map(cells, group)) for setting, group in groups))


def notes_on(options: PlannerOptions, results: Sequence[PlannerSpeed]) -> list[str]:
    """Return what the table does not say by itself."""
    planners = "a new planner for every text" if options.fresh else "one planner for all texts of a setting"
    counts = sorted({len(one.against_plain) for one in results})
    texts = f" Texts or batches of a setting: {', '.join(map(str, counts))}." if counts else ""
    return [f"{options.max_new_tokens} new tokens each, {planners}.{texts} Best tree: over the fastest of the trees."]
