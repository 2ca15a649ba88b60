"""`polydraft bench passes`: what a pass of the target and of its drafts costs."""

from dataclasses import asdict, dataclass
from functools import partial

from polydraft.bench import Table
from polydraft.bench.subjects import PassSettings, PassTime, check_room, time_passes
from polydraft.cli.arguments import LONE_DRAFT, both_outputs, refuse_clashes
from polydraft.cli.benchmark.subjects import (
    DRAFT,
    TARGET,
    conditions_of,
    gathered,
    loaded,
    print_end,
    print_lines,
    print_tables,
)
from polydraft.cli.printing import console as new_console
from polydraft.cli.process import INTERRUPTED
from polydraft.fetched import is_derived
from polydraft.models import HuggingFaceModel, LanguageModel, draft_model, load_draft
from polydraft.models.derived import check_word


@dataclass(frozen=True)
class PassesRequest:
    """One call of `polydraft bench passes`: the options as given."""

    settings: PassSettings
    target: str | None = None
    drafts: tuple[str, ...] = ()
    dtype: str = "auto"
    device: str = "auto"


def run_passes(request: PassesRequest, *, as_json: bool, quiet: bool) -> int:
    """Carry out the request and print; return the exit code: 0, or 130 after Ctrl-C."""
    named = request.drafts
    twice = len({*named}) < len(named) or TARGET in named
    refuse_clashes(
        both_outputs(as_json, quiet),
        (named and not request.target, LONE_DRAFT),
        (twice, "Two models would have one name in the results: give each draft model once, and none called target."),
    )
    for name in filter(is_derived, named):
        check_word(name)
    notes = new_console(errors=True, quiet=as_json or quiet)
    pair = loaded(request.target, None, request.dtype, request.device, notes)
    others = {name: load_draft(name, pair.target) for name in named}
    drafts = {**({} if pair.draft is None else {DRAFT: pair.draft}), **others}
    models: dict[str, LanguageModel] = {
        TARGET: HuggingFaceModel(pair.target),
        **{name: draft_model(one) for name, one in drafts.items()},
    }
    check_room(models, request.settings)
    results, interrupted = gathered(partial(time_passes, models, request.settings), notes)
    conditions = conditions_of("passes", pair, asdict(request.settings), others)
    if as_json:
        print_lines(conditions, results, interrupted=interrupted)
    else:
        console = new_console()
        print_tables(console, [pass_table(results)] if results else [])
        print_end(console, conditions, [])
    return INTERRUPTED if interrupted else 0


def pass_table(results: list[PassTime]) -> Table:
    """Return the medians, with models as rows, below the number of tokens that they had read."""
    widths = sorted({one.width for one in results})
    rows = list[tuple[str, ...]]()
    for known in dict.fromkeys(one.known for one in results):
        times = {(one.model, one.width): one.milliseconds for one in results if one.known == known}
        rows += [()] if rows else []
        rows.append((f"after {known:,} tokens", *[""] * len(widths)))
        for name in dict.fromkeys(name for name, _ in times):
            rows.append((f" {name}", *(f"{times[name, width]:.1f}" for width in widths)))
    title = f"Milliseconds of a pass, by the tokens that it scores; medians of {results[0].passes}"
    return Table(title, ("model", *map(str, widths)), tuple(rows))
