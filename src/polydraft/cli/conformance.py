"""`polydraft conformance`: every verification rule proved on this machine, as a table."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polydraft.catalogue import meant_rule, names_file, node_rules, own_rule, tables, tree_rules
from polydraft.cli.benchmark.server_conformance import progress, refuse_server_options, run_server_conformance
from polydraft.cli.clashes import refuse_clashes
from polydraft.cli.printing import columns, print_json_line, styled
from polydraft.cli.printing import console as new_console
from polydraft.cli.process import stopped
from polydraft.conformance import (
    EXACT,
    RuleReport,
    TreeReport,
    cases,
    check,
    matrix,
    proved_rules,
    tiny_target,
    tree_matrix,
)
from polydraft.conformance.proved_rules import NodeRule, label
from polydraft.conformance.tree_rules import FALSE_ALARM
from polydraft.engine import stream
from polydraft.errors import InvalidParameter
from polydraft.options.commands.bench_options import ConformanceOptions
from polydraft.verifiers import TreeVerifier

WIDE = 110
SMALL, PROMPTS = 5, ((0, 1, 2, 1, 2, 1), (3, 4, 3, 0, 3, 4))
"""The tokens of the model that texts are tested with, and prompts in which lookups find something."""
Rule = TypeVar("Rule", NodeRule, TreeVerifier)


def run_conformance(options: ConformanceOptions) -> int:
    """Check the rules, or texts with a drafter, and print.

    Returns:
        the exit code: 0, 1 if a lossless rule or a text deviates, 130 after Ctrl-C.

    Raises:
        InvalidParameter: no rule has the text of --rule in its name.
    """
    all_pairs, as_json = options.all_pairs, options.as_json
    if options.url is not None or options.export is not None:
        return run_server_conformance(options)
    refuse_server_options(options)
    if options.drafter is not None:
        refuse_clashes((all_pairs, "--all-pairs is for rules, and --drafter tests texts: leave one out."))
        return check_drafter(options.drafter, options.rule, quick=options.quick, as_json=as_json)
    at_nodes, on_trees = chosen(options.rule)
    refuse_clashes(
        (all_pairs and not at_nodes, "--all-pairs is for node rules, and none is among those chosen: leave it out.")
    )
    rows, k = (cases(random=4), 2) if options.quick else (cases(), 3)
    try:
        with progress(new_console(errors=True, quiet=as_json)) as step:
            found = matrix(at_nodes, k=k, all_pairs=all_pairs, rows=rows, on_progress=partial(step, "node rules"))
            trees = tree_matrix(on_trees, on_progress=partial(step, "tree rules"))
    except KeyboardInterrupt:
        return stopped()
    culprits = [*(one for one in found if one.failed), *(one for one in trees if one.failed)]
    if as_json:
        report = {
            "passed": not culprits,
            "tolerance": EXACT,
            "node_rules": [one.as_dict() for one in found],
            "tree_rules": [one.as_dict() for one in trees],
        }
        print_json_line(report)
    else:
        show(found, trees, len(rows), k)
    return 1 if culprits else 0


def check_drafter(drafter: str, verifier: str | None, *, quick: bool, as_json: bool) -> int:
    """Test by sampling whether the texts of a tiny model with a drafter follow the model's law; return the exit code.

    Raises:
        InvalidParameter: the drafter cannot draft for such a model, or the rule cannot be had.
    """
    model, drafted, failures = tiny_target(vocabulary=SMALL), Counter[str](), Counter[str]()
    options: dict[str, Any] = {"drafter": drafter, "temperature": 1.0, "top_k": 0, "max_new_tokens": 3}
    options |= {} if verifier is None else {"verifier": verifier}

    def texts(prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        found = stream(model, ids, attention_mask=torch.ones_like(ids), seed=seeds[0], **options).exhaust()
        drafted.update(drafted=found.statistics.drafted, accepted=found.statistics.accepted)
        failures.update([found.statistics.fallback] if found.statistics.fallback else [])
        return found.new_tokens

    try:
        with progress(new_console(errors=True, quiet=as_json)) as step:
            most = 1_000 if quick else 10_000
            report = check(
                texts, model, PROMPTS, batch_size=250, most_samples=most, on_progress=partial(step, "texts written")
            )
    except KeyboardInterrupt:
        return stopped()
    passed = report.passed and not failures
    if as_json:
        told = {"drafter": drafter, "passed": passed, "failed": [*failures], **drafted, **asdict(report)}
        print_json_line(told)
    else:
        new_console().print(styled(f"{drafter}: {report}", "default"), soft_wrap=True)
        new_console().print(f"{drafted['accepted']} of {drafted['drafted']} drafts were kept.")
        for reason in failures:  # texts without its drafts say nothing of it
            said = f"The drafter failed: {reason.rstrip('.')}. The model has {SMALL} tokens (session.vocab_size)."
            new_console().print(styled(said, "red"), soft_wrap=True)
    return 0 if passed else 1


def chosen(wanted: str | None) -> tuple[list[NodeRule], list[TreeVerifier]]:
    """Return the node and tree rules of a word, or whose names contain it; None chooses all.

    Raises:
        InvalidParameter: there are none, or the text names a file without such a rule.
    """
    if wanted is not None and not wanted.strip():
        raise InvalidParameter("--rule is empty, and every name contains that: give a part of a name, or leave it out.")
    if wanted is not None and names_file(wanted):
        line = own_rule(wanted)
        return [*node_rules([line])], [*tree_rules([line])]
    lines = [line for line in tables.RULES if line.word == wanted]
    at_nodes = _merged(_named(proved_rules.node_rules(), wanted), node_rules(lines))
    on_trees = _merged(_named(proved_rules.tree_rules(), wanted), tree_rules(lines))
    if not at_nodes and not on_trees:
        names = dict.fromkeys(f'"{label(rule)}"' for rule in (*proved_rules.node_rules(), *proved_rules.tree_rules()))
        meant = meant_rule(str(wanted))
        there = f" (did you mean {meant}?)." if meant else f"; there are {'; '.join(names)}."
        raise InvalidParameter(f"There is no rule with {wanted!r} in its name{there}")
    return at_nodes, on_trees


def _named(rules: Sequence[Rule], wanted: str | None) -> list[Rule]:
    return [rule for rule in rules if (wanted or "").lower() in label(rule).lower()]


def _merged(found: Sequence[Rule], more: Sequence[Rule]) -> list[Rule]:
    return [*found, *(rule for rule in more if rule not in found)]


def show(found: Sequence[RuleReport], trees: Sequence[TreeReport], rows: int, k: int) -> None:
    """Print the matrix, the acceptance rates, the tree rules and the verdict."""
    console = new_console()
    console = console if console.width >= WIDE else new_console(width=WIDE)
    if found:
        pairs = f"{rows} pairs of rows, 1 to {k} drafts, all listed"
        _section(console, f"Largest deviation of the output law from the target's ({pairs})", _matrix(found))
        console.print("-  not made for each other; yellow: deviates, as a lossy rule or unsuitable drafts do\n")
        _section(
            console, "Acceptance rate on random rows, and the best of any rule for the scheme", _acceptances(found)
        )
    if trees:
        _section(console, "\nTree rules: three tokens, trees of depth two, four small worlds", _tree_table(trees))
    if any(one.samples for one in trees):
        console.print(f"*  sampled: evidence against the target's law; it deviates from {1 / FALSE_ALARM:.0e} on")
    console.print()
    console.print(verdict(found, trees), soft_wrap=True)


def _section(console: Console, title: str, table: Table) -> None:
    console.print(styled(title, "bold"), soft_wrap=True)
    console.print(table)


def verdict(found: Sequence[RuleReport], trees: Sequence[TreeReport]) -> Text:
    """Say in one line whether all lossless rules are exact, and if not which one deviates most and where."""
    culprits = [
        *((one.deviation, f"{one.rule} with {one.scheme} drafts ({_where(one)})") for one in found if one.failed),
        *((one.deviation, f"{one.rule} on trees ({one.worst})") for one in trees if one.failed),
    ]
    if culprits:
        named = "; ".join(f"{name} deviates by {size:.2g}" for size, name in sorted(culprits, reverse=True))
        return Text.assemble(("✗", "red"), f" Not lossless: {named}.")
    lossless = sum(one.paired and one.lossless for one in found) + sum(one.lossless for one in trees)
    if not lossless:
        return Text("None of these rules claims to be lossless.")
    sampled = ", or as far as samples tell" if any(one.samples for one in trees) else ""
    return Text.assemble(
        ("✓", "green"), f" All {lossless} lossless rules keep the target's law (to {EXACT:g}{sampled})."
    )


def _where(report: RuleReport) -> str:
    worst = report.worst[0]
    return f"{worst.drafts} drafts, row '{worst.case}'"


def _matrix(found: Sequence[RuleReport]) -> Table:
    schemes = list(dict.fromkeys(one.scheme for one in found))
    table = Table(padding=(0, 1, 0, 0), box=None)
    table.add_column("verifier", min_width=24)
    for scheme in schemes:
        table.add_column(scheme.replace(" ", "\n"), justify="right", no_wrap=True)
    cells = {(one.rule, one.scheme): _cell(one) for one in found}
    for rule in dict.fromkeys(one.rule for one in found):
        lossy = any(one.rule == rule and not one.lossless for one in found)
        name = f"{rule} (lossy)" if lossy else rule
        table.add_row(name, *(cells.get((rule, scheme), Text("-", "dim")) for scheme in schemes))
    return table


def _cell(report: RuleReport) -> Text:
    if report.refusal:
        return Text("refused", "dim")
    size = f"{report.deviation:.0e}" if report.exact else f"{report.deviation:.2g}"
    return Text(size, "bold red" if report.failed else "green" if report.exact else "yellow")


def _acceptances(found: Sequence[RuleReport]) -> Table:
    table = columns(("scheme", "verifier"), ("drafts", "accepted", "optimum", "largest gap"))
    own = [one for one in found if one.paired]
    for scheme in dict.fromkeys(one.scheme for one in own):
        for place, one in enumerate(report for report in own if report.scheme == scheme):
            gap = "optimal" if one.gap < EXACT else f"{one.gap:.4f}" if one.exact else "lossy"
            numbers = (str(one.drafts), f"{one.acceptance[-1]:.4f}", f"{one.optimum[-1]:.4f}", gap)
            table.add_row("" if place else scheme, one.rule, *numbers)
    return table


def _tree_table(trees: Sequence[TreeReport]) -> Table:
    table = columns(("verifier", "scheme", "tree"), ("deviation", "drafts accepted"))
    for one in trees:
        size = f"e-value {one.e_value:.2g} *" if one.samples else f"{one.deviation:.0e}"
        style = "bold red" if one.failed else "green" if one.exact else "yellow"
        mean = sum(one.accepted) / len(one.accepted)
        widths = ",".join(map(str, one.widths))
        table.add_row(one.rule, one.scheme, widths, Text(size, style), f"{mean:.3f}")
    return table
