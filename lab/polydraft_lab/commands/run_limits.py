"""`polydraft limits`: measure how far every rule is from the optimum on real text, and show it."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from polydraft.bench import Prompt
from polydraft.bench.environment import RayActor, actors_in_words
from polydraft.catalogue import drafter_line, node_rules, rule_line, tree_rules
from polydraft.cli.benchmark.bench import as_rich, keep_all, kept, print_lines, settings_of
from polydraft.cli.benchmark.measured_on_ray import check_measured_on_ray, measuring
from polydraft.cli.clashes import read_asked, refuse_clashes
from polydraft.cli.printing import console as new_console
from polydraft.cli.process import INTERRUPTED, stopped
from polydraft.cluster import placed, store_of
from polydraft.conformance import cases, matrix, tree_matrix
from polydraft.engine import as_drafter
from polydraft.errors import InvalidParameter, ResultsError
from polydraft.extras import FIGURES
from polydraft.models import Pair
from polydraft.verifiers import NodeVerifier, PathVerifier
from polydraft_lab.commands.options import LimitsOptions, parse_numbers
from polydraft_lab.commands.results import load_source, refuse_lone_model
from polydraft_lab.limits import (
    LimitsSettings,
    Models,
    NodeResult,
    Record,
    Results,
    TreeResult,
    all_tables,
    as_document,
    as_lines,
    conditions_of,
    draw_figures,
    fitting,
    footnotes,
    keys_of,
    measure,
    summarise,
)


def run_limits(options: LimitsOptions) -> int:
    """Measure and print; return the exit code: 0, or 130 after Ctrl-C with nothing finished lost."""
    settings = settings_of(LimitsSettings, options, drafts=parse_numbers(options.numbers))
    notes, prompts = new_console(errors=True, quiet=options.as_json), checked(options)
    names = (options.target or "embedded pair's target", options.draft or "embedded pair's draft")
    sent, actors = placed(options) if options.ray else options, set[RayActor | None]()
    job, reads = (sent, settings, names, prompts), [sent.target, sent.draft, store_of(sent.drafter or "none")[0]]
    with measuring(options, LoadedLimits, job, reads, notes) as (conditions, (settings, chosen), measure):
        results = Results(conditions, options.out, settings)
        if left := len(prompts) - len(chosen):
            notes.print(f"{left} of {len(prompts)} prompts do not fit into the context; left out.")
        keys, there = keys_of(chosen, settings), {(one.task, one.name): one for one in chosen}
        due = [(there[key[:2]], key[2]) for key in keys if key not in results.records]
        bar = ("texts", len(keys) - len(due), len(keys))
        interrupted = keep_all(measure(due), lambda one: (results.add(one[0]), actors.add(one[1])), bar, notes)
    records, cluster = [results.records[key] for key in keys if key in results.records], actors_in_words(actors)
    if interrupted:
        stopped(kept("texts", len(records), options.out))
    nodes, trees = summarise(records)
    if options.out is not None and records:
        write_report(options.out, results.conditions, records, nodes, trees, figures=options.figures)
    if options.as_json:
        told = {**results.conditions, "prompts": texts_by_task(records), **({"actors": cluster} if cluster else {})}
        print_lines(told, as_lines(nodes, trees), interrupted=interrupted)
    else:
        print_tables(new_console(), records, nodes, trees, out=options.out, cluster=cluster)
    return INTERRUPTED if interrupted else 0


class LoadedLimits:
    """What is measured, with its models."""

    def __init__(self, job: tuple[LimitsOptions, LimitsSettings, tuple[str, str], list[Prompt]]) -> None:
        options, settings, names, self.prompts = job
        self.pair = load_source(options, new_console(quiet=True))
        self.models = with_drafter(self.pair, options.drafter)
        self.settings = settings if self.models.drafter is None else settings.suited(self.models.drafter)
        self.conditions = conditions_of(self.models, self.settings, names, options.chat_template, options.drafter)

    def plan(self) -> tuple[LimitsSettings, list[Prompt]]:
        """Return the settings, with the rules that suit the drafter, and the prompts that fit."""
        return self.settings, fitting(self.models, self.prompts, self.settings)

    def measured(self, due: tuple[Prompt, float]) -> Record:
        """Measure one text, of a prompt at a temperature."""
        return next(measure(self.models, due[:1], replace(self.settings, temperatures=due[1:])))


def with_drafter(pair: Pair, word: str | None) -> Models:
    """Return the pair's models, with the drafter of a word if its drafts are to be measured."""
    if word is None:
        return Models.of(pair)
    line = drafter_line(word)
    if line.models:
        return Models.of(pair, line.of(as_drafter(pair.draft)))
    return Models.of(replace(pair, draft=None), line.named(word))


def checked(options: LimitsOptions) -> list[Prompt]:
    """Check what can be checked before models are loaded, and return the prompts.

    Raises:
        InvalidParameter: options that do not go together.
        MissingExtra: figures are wanted and matplotlib is not installed.
        PromptFileError: a prompt file cannot be read.
    """
    by_model = options.drafter is None or drafter_line(options.drafter).models > 0
    if by_model:
        refuse_lone_model(options)
    own_heat = options.drafter is not None and options.draft_temperature is not None
    refuse_clashes(
        (options.draft and not by_model, f"--drafter {options.drafter} takes no draft model: leave --draft out."),
        (own_heat, "--draft-temperature is of a draft model's rows, and a drafter makes its own: leave one out."),
        (options.figures and options.out is None, "--figures needs --out: the folder that they are written to."),
    )
    check_measured_on_ray(options, [*options.verifiers, options.drafter], [options.drafter])
    for word in options.verifiers:
        _prove(word)
    if options.figures:
        FIGURES.check()
    return read_asked(options.prompts, options.limit, options.chat_template, options.excerpt_tokens)


def _prove(word: str) -> None:
    """Check that a user's own rule may stand beside the optimum, which bounds exact rules alone.

    Raises:
        InvalidParameter: it may not.
    """
    line = rule_line(word)
    rule = line.usual
    if not rule.lossless or not isinstance(rule, NodeVerifier | PathVerifier):
        told = "has no path_law" if rule.lossless else "says that it is lossy"
        raise InvalidParameter(f"{word} {told}: beside the optimum stand lossless rules whose laws are known.")
    reports = (*matrix(node_rules([line]), k=2, rows=cases(random=4)), *tree_matrix(tree_rules([line])))
    off = max((one.deviation for one in reports if one.failed), default=0.0)
    if off:
        raise InvalidParameter(
            f"{word} is not exact, its law deviates by {off:.2g}: beside the optimum stand exact rules alone; "
            f"`polydraft conformance --verifier {word}` shows where."
        )


def write_report(
    out: Path,
    conditions: dict[str, Any],
    records: Sequence[Record],
    nodes: Sequence[NodeResult],
    trees: Sequence[TreeResult],
    *,
    figures: bool,
) -> None:
    """Write summary.jsonl, tables.md and, if wanted, the figures into the folder.

    Raises:
        ResultsError: a file cannot be written.
    """
    try:
        drawn = [path.name for path in draw_figures(nodes, out)] if figures else []
        lines = [json.dumps(line) + "\n" for line in as_lines(nodes, trees)]
        (out / "summary.jsonl").write_text("".join(lines), encoding="utf-8")
        page = as_document(conditions, texts_by_task(records), all_tables(nodes, trees, brief=False), drawn)
        (out / "tables.md").write_text(page, encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{out}: the results cannot be written there: {error.strerror}.") from error


def texts_by_task(records: Sequence[Record]) -> dict[str, int]:
    """Return the number of prompts of each task that have a record."""
    return dict(Counter(task for task, _ in dict.fromkeys((one.task, one.prompt) for one in records)))


def print_tables(
    console: Console,
    records: Sequence[Record],
    nodes: Sequence[NodeResult],
    trees: Sequence[TreeResult],
    *,
    out: Path | None,
    cluster: str = "",
) -> None:
    """Print the tables, and where the rest is."""
    tables = all_tables(nodes, trees, brief=True)
    for table in tables:
        for part in table.split(console.width):
            console.print(part.title, style="bold", soft_wrap=True)
            console.print(as_rich(part))
    if records:
        texts = ", ".join(f"{count} {task}" for task, count in texts_by_task(records).items())
        console.print(
            f"{len(records)} texts of prompts: {texts}. A scheme's row is its optimum. Under it are its rules, with "
            "their acceptance in % and how many points it differs from the optimum. ± is half the 95 % bootstrap "
            "interval over prompts. In the tables of trees * marks the largest mean; the page of --out has the "
            "differences from it, with intervals.",
            soft_wrap=True,
        )
        for note in filter(None, (*footnotes(tables), cluster)):
            console.print(note, soft_wrap=True)
    if out is not None:
        console.print(f"Records, summary and tables are in {out}; the same call goes on from there.", soft_wrap=True)
