"""`polydraft bench lattice`: one draft head under many rules, at equal numbers of scored nodes."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from polydraft.bench.table import Table, grouped
from polydraft.cli.benchmark.bench import settings_of
from polydraft.cli.clashes import refuse_clashes
from polydraft.cli.printing import notes_beside
from polydraft.cli.process import INTERRUPTED
from polydraft.drafters.model import LISTED
from polydraft.engine import head_for
from polydraft.errors import InvalidParameter
from polydraft.models import embedded_head, shipped_head
from polydraft_lab.commands.options import BenchLatticeOptions
from polydraft_lab.commands.results import (
    conditions_of,
    gathered,
    load_source,
    show,
    token_ids,
)
from polydraft_lab.subjects import LatticeOptions, LatticeResult, measure_lattice


def run_lattice(options: BenchLatticeOptions) -> int:
    """Measure and print, or put the tables into a page; return the exit code: 0, or 130 after Ctrl-C.

    Raises:
        InvalidParameter: options clash, or the page has no such part.
    """
    settings, into = settings_of(LatticeOptions, options), options.into
    shipped = shipped_head(options.target)
    notes = notes_beside(options)
    refuse_clashes(
        (options.page and options.as_json, "--page and --json are two ways to print: leave one out."),
        (
            bool(into) and (options.page or options.as_json),
            "--into writes the tables into a page: leave --page and --json out.",
        ),
        (
            bool(options.target) != bool(options.draft or shipped),
            "--target and --draft go together here: a draft head belongs to one target, as pair-head to pair.",
        ),
    )
    if into:
        with_tables(into, options.target, "")  # says before the hours of work that there is no place for the tables
    pair = load_source(replace(options, draft=None), notes)
    head = head_for(options.draft or shipped or embedded_head(), pair.target)
    prompts = token_ids(options, pair, options.max_new_tokens, notes)
    results, interrupted = gathered(partial(measure_lattice, pair, head, prompts, settings), notes)
    more = {"head": options.draft or "shipped", "prompts": len(prompts)}
    conditions = conditions_of("lattice", pair, {**asdict(settings), **more})
    if into and not interrupted:
        tables = as_page(results, conditions, settings, interrupted=False)
        into.write_text(with_tables(into, options.target, tables))
    elif options.page or into:
        sys.stdout.write(as_page(results, conditions, settings, interrupted=interrupted))
    else:
        tables, notes_below = tables_of(results), notes_on(settings)
        return show(conditions, results, tables, notes_below, as_json=options.as_json, interrupted=interrupted)
    return INTERRUPTED if interrupted else 0


def with_tables(page: Path, target: str | None, tables: str) -> str:
    """Return a page's text with its part for a target put in anew.

    Raises:
        InvalidParameter: the page cannot be read, or has no such part, or several.
    """
    begin, end = marks_of(target)
    try:
        text = page.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter(f"The page {page} cannot be read: {error}.") from error
    if text.count(begin) != 1 or end not in text.partition(begin)[2]:
        raise InvalidParameter(
            f"The page {page} has no place for these tables: write {begin} and {end} once, in lines."
        )
    before, _, behind = text.partition(begin)
    return f"{before}{begin}\n\n{tables}\n{end}{behind.partition(end)[2]}"


def marks_of(target: str | None) -> tuple[str, str]:
    """Return what stands in a page before and behind the tables for a target; the embedded one has no name."""
    return f"<!-- table: lattice{f' of {target}' if target else ''} -->", "<!-- end of table -->"


def as_page(
    results: Sequence[LatticeResult], conditions: dict[str, Any], settings: LatticeOptions, *, interrupted: bool
) -> str:
    """Return the tables in Markdown, with what they depend on."""
    place, model = conditions["machine"], conditions["models"]["target"]
    where = place["accelerator"] or f"{place['processor']}, {place['threads']} threads"
    busy = conditions["load"] or 0
    said = [
        *(["Interrupted; this is what was finished."] if interrupted else []),
        f"A target of {model['parameters'] / 1e6:.1f} M parameters, {where}, {model['dtype']}, torch "
        f"{conditions['torch']}; {conditions['prompts']} prompts; load average at the end {busy:.1f}. "
        f"{notes_on(settings)[0]}",
    ]
    return "\n\n".join([*said, *(one.as_markdown() for one in tables_of(results))]) + "\n"


def tables_of(results: Sequence[LatticeResult]) -> list[Table]:
    """Return a table for every temperature and number of drafts."""
    groups = grouped(results, lambda one: (one.temperature, one.drafts)).items()
    return [_table(heat, drafts, group) for (heat, drafts), group in groups]


def _table(heat: float, drafts: int, results: Sequence[LatticeResult]) -> Table:

    def cells(one: LatticeResult) -> tuple[str, ...]:
        low, high = one.interval
        share = f"{100 * one.first / one.optimum:.1f} %" if one.optimum else ""
        rates = (f"{one.tokens_per_call:.2f}", f"{low:.2f} to {high:.2f}", f"{one.first:.3f}", share)
        return one.rule, *rates, "" if one.speed is None else f"{one.speed:.2f}x"

    def heading(trees: str, one: LatticeResult) -> tuple[str, ...]:
        return f"{trees} ({one.nodes:.1f} drafts)", "", "", f"at most {one.optimum:.3f}"

    groups = grouped(results, lambda one: one.trees).items()
    head = ("rule", "tokens/call", "95 % interval", "first kept", "of the optimum", "over plain")
    named = ((heading(trees, group[0]), map(cells, group)) for trees, group in groups)
    return Table.of_groups(f"T = {heat:g}, at most {drafts} drafts", head, named)


def notes_on(settings: LatticeOptions) -> list[str]:
    """Return what the tables do not say by themselves."""
    return [
        f"{settings.max_new_tokens} new tokens each. Tokens per call are expected ones, over all steps; rules of one "
        f"tree see the same trees. Drafts are drawn from the {LISTED} likeliest tokens of each row, except where whole "
        "rows are named. First kept: how often a call keeps a draft at all, computed for lifted rules and estimated "
        "for others, and what share that is of the largest chance that any exact rule has. Over plain: median over "
        "texts that all arms wrote side by side."
    ]
