"""`polydraft limits`: measure how far every rule is from the optimum on real text, and show it."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from polydraft.bench import Prompt, read_prompt_sets, require_matplotlib
from polydraft.catalogue import node_rules, rule_line, tree_rules
from polydraft.cli.arguments import idle_excerpts, idle_template, refuse_clashes
from polydraft.cli.benchmark.bench import as_rich, kept
from polydraft.cli.printing import console as new_console
from polydraft.cli.printing import progress_bar
from polydraft.cli.process import INTERRUPTED, stopped
from polydraft.conformance import cases, matrix, tree_matrix
from polydraft.errors import InvalidParameter, ResultsError
from polydraft.verifiers import NodeVerifier, PathVerifier
from polydraft_lab.commands.results import Source
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

DEFAULT_PROMPTS = ("humaneval", "gsm8k")


@dataclass(frozen=True)
class LimitsRequest:
    """One call of `polydraft limits`: the options as given; `excerpts` tells whether the length of excerpts was.

    `verifiers` are the words of the user's own rules, whose lines are in the catalogue.
    """

    settings: LimitsSettings
    source: Source
    out: Path | None = None
    figures: bool = False
    excerpts: bool = False
    chat_template: bool | None = None
    verifiers: tuple[str, ...] = ()


def run_limits(request: LimitsRequest, *, as_json: bool) -> int:
    """Carry out the request and print; return the exit code: 0, or 130 after Ctrl-C with nothing finished lost."""
    notes = new_console(errors=True, quiet=as_json)
    prompts = checked(request)
    models = Models.of(request.source.load(notes))
    names = (request.source.target or "embedded pair's target", request.source.draft or "embedded pair's draft")
    chosen = fitting(models, prompts, request.settings)
    conditions = conditions_of(models, request.settings, names, request.chat_template)
    results = Results(conditions, request.out, request.settings)
    if len(chosen) < len(prompts):
        notes.print(f"{len(prompts) - len(chosen)} of {len(prompts)} prompts do not fit into the context; left out.")
    interrupted = measure_all(models, chosen, request.settings, results, notes)
    records = [results.records[key] for key in keys_of(chosen, request.settings) if key in results.records]
    if interrupted:
        stopped(kept("texts", len(records), request.out))
    nodes, trees = summarise(records)
    if request.out is not None and records:
        write_report(request.out, results.conditions, records, nodes, trees, figures=request.figures)
    if as_json:
        print_json(results.conditions, records, nodes, trees, interrupted=interrupted)
    else:
        print_tables(new_console(), records, nodes, trees, out=request.out)
    return INTERRUPTED if interrupted else 0


def checked(request: LimitsRequest) -> list[Prompt]:
    """Check what can be checked before models are loaded, and return the prompts.

    Raises:
        InvalidParameter: options that do not go together.
        MissingExtra: figures are wanted and matplotlib is not installed.
        PromptFileError: a prompt file cannot be read.
    """
    source = request.source
    source.refuse_lone_model()
    refuse_clashes(
        (request.figures and request.out is None, "--figures needs --out: the folder that they are written to.")
    )
    for word in request.verifiers:
        _prove(word)
    if request.figures:
        require_matplotlib()
    prompts = read_prompt_sets(source.prompts, source.limit, request.chat_template)
    refuse_clashes(idle_excerpts(prompts, request.excerpts), idle_template(prompts, request.chat_template))
    return prompts


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


def measure_all(
    models: Models, prompts: Sequence[Prompt], settings: LimitsSettings, results: Results, notes: Console
) -> bool:
    """Measure what is missing, with a progress bar; return whether the user interrupted it."""
    keys = keys_of(prompts, settings)
    with progress_bar(notes) as progress:
        task = progress.add_task("texts", total=len(keys), completed=sum(key in results.records for key in keys))
        try:
            for record in measure(models, prompts, settings, {*results.records}):
                results.add(record)
                progress.advance(task)
        except KeyboardInterrupt:
            return True
    return False


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


def print_json(
    conditions: dict[str, Any],
    records: Sequence[Record],
    nodes: Sequence[NodeResult],
    trees: Sequence[TreeResult],
    *,
    interrupted: bool,
) -> None:
    """Print the conditions and every result as JSON lines."""
    head = {
        "kind": "conditions",
        **conditions,
        "prompts": texts_by_task(records),
        "interrupted": interrupted,
    }
    for line in [head, *as_lines(nodes, trees)]:
        sys.stdout.write(json.dumps(line) + "\n")


def print_tables(
    console: Console,
    records: Sequence[Record],
    nodes: Sequence[NodeResult],
    trees: Sequence[TreeResult],
    *,
    out: Path | None,
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
        for note in footnotes(tables):
            console.print(note, soft_wrap=True)
    if out is not None:
        console.print(f"Records, summary and tables are in {out}; the same call goes on from there.", soft_wrap=True)
