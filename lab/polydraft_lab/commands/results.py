"""What the subjects of `polydraft bench` share: loading, a bar and Ctrl-C, JSON lines, tables and conditions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

from rich.console import Console
from torch import Tensor, nn

from polydraft.bench import Table, read_prompt_sets
from polydraft.bench.environment import described, load, machine, versions
from polydraft.bench.prompts.prompt import encode
from polydraft.bench.speed import SpeedSettings, prompts_that_fit
from polydraft.cli.benchmark.bench import print_lines, print_table, say_busy
from polydraft.cli.clashes import LONE_MODEL, refuse_clashes
from polydraft.cli.conformance import progress
from polydraft.cli.generation.one_text import load_pair_of
from polydraft.cli.printing import console as new_console
from polydraft.cli.process import INTERRUPTED, stopped
from polydraft.engine import load_models
from polydraft.models import Pair
from polydraft.options.commands.option_groups import ModelOptions
from polydraft_lab.commands.options import SourceOptions
from polydraft_lab.subjects import (
    LatticeResult,
    OptimumTime,
    PassTime,
    PipelineTime,
    PlannerSpeed,
    Progress,
    RuleLaw,
    RuleShare,
)

TARGET, DRAFT = "target", "draft"
"""What a pair's models are called in results; draft models beside them have their own names."""
KINDS = {
    PassTime: "pass",
    RuleLaw: "law",
    RuleShare: "share",
    OptimumTime: "optimum",
    PlannerSpeed: "planner",
    LatticeResult: "lattice",
    PipelineTime: "simulated pipeline",
}
"""What a result is called in JSON lines."""
Result = TypeVar("Result")


def refuse_lone_model(options: ModelOptions) -> None:
    """Refuse a target without a draft model, and a draft model without a target.

    Raises:
        InvalidParameter: one of them is missing.
    """
    alone = bool(options.target) != bool(options.draft)
    refuse_clashes((alone, LONE_MODEL))


def load_source(options: ModelOptions, notes: Console) -> Pair:
    """Load the pair that options name; without a target the embedded one.

    Raises:
        PolydraftError: it cannot be loaded; see `polydraft.load`.
    """
    with notes.status("Loading the models ..."):
        return load_pair_of(options, load_models)


def token_ids(options: SourceOptions, pair: Pair, new_tokens: int, notes: Console) -> list[Tensor]:
    """Return the prompts that leave room for so many new tokens, as token ids.

    Raises:
        ContextOverflow: none does.
        PromptFileError: a set cannot be read.
    """
    settings, prompts = SpeedSettings(max_new_tokens=new_tokens), read_prompt_sets(options.prompts, options.limit)
    fit = prompts_that_fit(pair, prompts, settings)
    if len(fit) < len(prompts):
        left = len(prompts) - len(fit)
        notes.print(f"{left} of {len(prompts)} prompts leave no room for the new tokens; left out.")
    return [encode(pair, one, settings.excerpt_tokens) for one in fit]


def gathered(results: Callable[[Progress], Iterable[Result]], notes: Console) -> tuple[list[Result], bool]:
    """Gather results with a bar on standard error; return those that were finished, and whether Ctrl-C came."""
    found = list[Result]()
    with progress(notes) as step, suppress(KeyboardInterrupt):
        found.extend(results(step))
        return found, False
    stopped("what was finished is printed, the rest is lost" if found else "nothing was finished")
    return found, True


def conditions_of(
    subject: str, pair: Pair, settings: dict[str, Any], others: Mapping[str, nn.Module] | None = None
) -> dict[str, Any]:
    """Return all that results depend on: models, settings, machine, versions, and how busy the machine was."""
    models = {TARGET: pair.target, **({} if pair.draft is None else {DRAFT: pair.draft}), **(others or {})}
    return {
        "subject": subject,
        "models": {name: described(model) for name, model in models.items()},
        **settings,
        **versions(),
        "machine": machine(pair.target.device),
        "load": load(),
    }


def show(
    conditions: dict[str, Any],
    results: Sequence[Any],
    tables: Sequence[Table],
    notes: Sequence[str],
    *,
    as_json: bool,
    interrupted: bool,
) -> int:
    """Print results as JSON lines or as tables with notes; return the exit code: 0, or 130 after Ctrl-C."""
    if as_json:
        rows = ({"kind": KINDS[type(one)], **asdict(one)} for one in results)
        print_lines(conditions, rows, interrupted=interrupted)
    else:
        console = new_console()
        for table in tables:
            print_table(console, table)
        print_end(console, conditions, notes)
    return INTERRUPTED if interrupted else 0


def print_end(console: Console, conditions: dict[str, Any], notes: Sequence[str]) -> None:
    """Print what holds for all tables: notes, the machine, and whether it was busy."""
    place, dtype = conditions["machine"], conditions["models"][TARGET]["dtype"]
    where = place["accelerator"] or f"{place['processor']}, cores: {place['cores']}, threads: {place['threads']}"
    for note in (*notes, f"{where}; {dtype}, torch {conditions['torch']}."):
        console.print(note, soft_wrap=True)
    say_busy(console, conditions["load"], place)
