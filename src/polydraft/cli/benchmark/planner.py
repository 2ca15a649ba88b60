"""`polydraft bench planner`: the planner beside plain decoding and fixed trees."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

from torch import Tensor

from polydraft.bench import Table
from polydraft.bench.subjects import (
    PlannerOptions,
    PlannerSetting,
    PlannerSpeed,
    Progress,
    measure_planner,
    settings_named,
)
from polydraft.cli.arguments import both_outputs, refuse_clashes
from polydraft.cli.benchmark.subjects import (
    conditions_of,
    gathered,
    loaded,
    print_end,
    print_lines,
    print_tables,
    prompts_of,
    refuse_lone_model,
)
from polydraft.cli.printing import console as new_console
from polydraft.cli.process import INTERRUPTED
from polydraft.models import Pair


@dataclass(frozen=True)
class PlannerRequest:
    """One call of `polydraft bench planner`: the options as given; no parts of names are all settings."""

    options: PlannerOptions
    settings: tuple[str, ...] = ()
    target: str | None = None
    draft: str | None = None
    prompts: tuple[str, ...] = ("python",)
    limit: int = 8
    dtype: str = "auto"
    device: str = "auto"


def run_planner(request: PlannerRequest, *, as_json: bool, quiet: bool) -> int:
    """Carry out the request and print; return the exit code: 0, or 130 after Ctrl-C with no finished setting lost."""
    refuse_clashes(both_outputs(as_json, quiet))
    refuse_lone_model(request.target, request.draft)
    chosen = settings_named(request.settings)
    notes = new_console(errors=True, quiet=as_json or quiet)
    pair = loaded(request.target, request.draft, request.dtype, request.device, notes)
    prompts = prompts_of(pair, request.prompts, request.limit, request.options.max_new_tokens, notes)
    results, interrupted = gathered(partial(measured, chosen, request.options, pair, prompts), notes)
    conditions = conditions_of("planner", pair, {**asdict(request.options), "prompts": len(prompts)})
    if as_json:
        print_lines(conditions, results, interrupted=interrupted)
    else:
        console = new_console()
        print_tables(console, [planner_table(results)] if results else [])
        print_end(console, conditions, notes_on(request.options, results))
    return INTERRUPTED if interrupted else 0


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
    rows = list[tuple[str, ...]]()
    for setting in dict.fromkeys(one.setting for one in results):
        rows += [(), (setting, *[""] * 4)]
        for one in (one for one in results if one.setting == setting):
            plain, best = one.against_plain, one.against_best
            cells = (f"{one.tokens_per_second:.1f}", f"{median(plain):.2f}x", f"{min(plain):.2f} to {max(plain):.2f}")
            rows.append((f" {one.arm}", *cells, f"{median(best):.2f}x" if best else ""))
    head = ("arm", "tokens/s", "over plain", "range", "best tree")
    return Table("The planner and other arms, side by side: medians over texts", head, tuple(rows[1:]))


def notes_on(options: PlannerOptions, results: Sequence[PlannerSpeed]) -> list[str]:
    """Return what the table does not say by itself."""
    planners = "a new planner for every text" if options.fresh else "one planner for all texts of a setting"
    counts = sorted({len(one.against_plain) for one in results})
    texts = f" Texts or batches of a setting: {', '.join(map(str, counts))}." if counts else ""
    return [f"{options.max_new_tokens} new tokens each, {planners}.{texts} Best tree: over the fastest of the trees."]
