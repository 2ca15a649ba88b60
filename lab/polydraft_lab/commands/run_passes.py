"""`polydraft bench passes`: what a pass of the target and of its drafts costs."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

from polydraft.bench.table import Table, grouped
from polydraft.cli.benchmark.bench import settings_of
from polydraft.cli.clashes import LONE_DRAFT, refuse_clashes
from polydraft.cli.printing import notes_beside
from polydraft.fetched import is_derived
from polydraft.models import HuggingFaceModel, LanguageModel, draft_model, load_draft
from polydraft.models.derived import check_word
from polydraft.options.commands.option_groups import ModelOptions
from polydraft_lab.commands.options import BenchPassesOptions
from polydraft_lab.commands.results import (
    DRAFT,
    TARGET,
    conditions_of,
    gathered,
    load_source,
    show,
)
from polydraft_lab.subjects import PassSettings, PassTime, check_room, time_passes


def run_passes(options: BenchPassesOptions) -> int:
    """Time the target and draft models by their names, and print; return the exit code: 0, or 130 after Ctrl-C."""
    settings, named = settings_of(PassSettings, options), options.drafts
    twice = len({*named}) < len(named) or TARGET in named
    notes = notes_beside(options)
    refuse_clashes(
        (bool(named) and not options.target, LONE_DRAFT),
        (twice, "Two models would have one name in the results: give each draft model once, and none called target."),
    )
    for name in filter(is_derived, named):
        check_word(name)
    models_named = ModelOptions(target=options.target, dtype=options.dtype, device=options.device)
    pair = load_source(models_named, notes)
    others = {name: load_draft(name, pair.target) for name in named}
    drafts = {**({} if pair.draft is None else {DRAFT: pair.draft}), **others}
    models: dict[str, LanguageModel] = {
        TARGET: HuggingFaceModel(pair.target),
        **{name: draft_model(one) for name, one in drafts.items()},
    }
    check_room(models, settings)
    results, interrupted = gathered(partial(time_passes, models, settings), notes)
    conditions = conditions_of("passes", pair, asdict(settings), others)
    tables = [pass_table(results)] if results else []
    return show(conditions, results, tables, [], as_json=options.as_json, interrupted=interrupted)


def pass_table(results: list[PassTime]) -> Table:
    """Return the medians, with models as rows, below the number of tokens that they had read."""
    widths = sorted({one.width for one in results})
    title = f"Milliseconds of a pass, by the tokens that it scores; medians of {results[0].passes}"
    groups = grouped(results, lambda one: one.known).items()
    named = (([f"after {known:,} tokens"], _lines(group, widths)) for known, group in groups)
    return Table.of_groups(title, ("model", *map(str, widths)), named)


def _lines(results: list[PassTime], widths: list[int]) -> Iterator[tuple[str, ...]]:
    for name, group in grouped(results, lambda one: one.model).items():
        times = {one.width: one.milliseconds for one in group}
        yield name, *(f"{times[width]:.1f}" for width in widths)
