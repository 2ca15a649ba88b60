"""The limits as tables, in the shape of the papers: methods by tasks, by temperatures, by numbers of drafts; trees."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from polydraft.bench.bootstrap import Estimate
from polydraft.bench.prompts import ALL, template_in_words
from polydraft.bench.table import Table, grouped, spread
from polydraft_lab.limits.cases import MANY, TOO_DEAR, UNDEFINED, node_cases
from polydraft_lab.limits.figures import TYPICAL_DRAFTS, TYPICAL_TEMPERATURE
from polydraft_lab.limits.summary import NodeResult, TreeResult, nearest

SIGNS = {
    UNDEFINED: "the rule, or the way of drafting, is not defined for so many drafts.",
    TOO_DEAR: "too dear to compute: there are too many drafts, or too many orders in which they may be rejected.",
}


def all_tables(nodes: Sequence[NodeResult], trees: Sequence[TreeResult], *, brief: bool) -> list[Table]:
    """Return the tables that the results allow.

    One value of a sweep is fixed in each, the one nearest to temperature 0.7 and three drafts, as in Hu et al., arXiv
    2502.18779: table 1 (by task), figure 1 (by temperature), figure 2 (by number of drafts).

    Args:
        nodes: what the node rules accept.
        trees: what the tree rules accept.
        brief: leave intervals out of the sweeps, so that they fit a terminal.
    """
    tables: list[Table] = []
    if nodes:
        temperature = nearest([one.temperature for one in nodes], TYPICAL_TEMPERATURE)
        k = int(nearest([one.k for one in nodes], TYPICAL_DRAFTS))
        whole = ALL if any(one.task == ALL for one in nodes) else nodes[0].task
        by_task = [one for one in nodes if one.temperature == temperature and one.k == k]
        by_heat = [one for one in nodes if one.task == whole and one.k == k]
        by_k = [one for one in nodes if one.task == whole and one.temperature == temperature]
        heat, many, at = f"temperature {temperature:g}", f"{k} draft{'s' * (k > 1)}", f"task: {whole}"
        tables.append(node_table(f"Acceptance by task, {heat}, {many}", by_task, lambda one: one.task, brief=False))
        if len({one.temperature for one in by_heat}) > 1:
            title = f"Acceptance by temperature, {many}, {at}"
            tables.append(node_table(title, by_heat, lambda one: f"T = {one.temperature:g}", brief=brief))
        if len({one.k for one in by_k}) > 1:
            title = f"Acceptance by number of drafts, {heat}, {at}"
            tables.append(node_table(title, by_k, lambda one: f"k = {one.k}", brief=brief))
        if not brief:
            tables += independent_drafts(nodes, temperature)
    return tables + tree_tables(trees, brief=brief)


def independent_drafts(nodes: Sequence[NodeResult], temperature: float) -> list[Table]:
    """Return the part of independent drafts by task and number of drafts, as in arXiv 2410.18234, table 3."""
    chosen = [one for one in nodes if one.scheme == "iid" and one.temperature == temperature]
    chosen = [one for one in chosen if one.task != ALL and 2 <= one.k <= 4]
    if not chosen:
        return []
    title = f"Acceptance of independent drafts by task and number of drafts, temperature {temperature:g}"
    return [node_table(title, chosen, lambda one: f"{one.task}, k = {one.k}", brief=False)]


def tree_tables(trees: Sequence[TreeResult], *, brief: bool) -> list[Table]:
    """Return one table per shape of trees: rules by temperatures, all tasks together."""
    whole = ALL if any(one.task == ALL for one in trees) else trees[0].task if trees else ""
    return [
        tree_table(f"Accepted drafts per tree of shape {shape}, task: {whole}", chosen, brief=brief)
        for shape in dict.fromkeys(one.shape for one in trees)
        for chosen in [[one for one in trees if one.shape == shape and one.task == whole]]
    ]


def node_table(title: str, results: Sequence[NodeResult], column: Callable[[NodeResult], str], *, brief: bool) -> Table:
    """Return schemes and rules by columns: a scheme's optimum in per cent, under it each rule's acceptance and gap."""
    columns = {column(one): one.k for one in results}

    def line(name: str, some: Sequence[NodeResult], cell: Callable[[NodeResult], str]) -> tuple[str, ...]:
        return name, *_cells(columns, gaps(columns, some) | {column(one): cell(one) for one in some})

    def group(scheme: str, some: Sequence[NodeResult]) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
        rules = grouped(some, lambda one: one.rule).items()
        best = line(scheme, some, lambda one: spread(one.optimum, 100, 1, brief=brief))
        return best, (line(rule, own, lambda one: _reached(one, brief=brief)) for rule, own in rules)

    groups = (group(*one) for one in grouped(results, lambda one: one.scheme).items())
    return Table.of_groups(title, ("scheme: optimum, %", *columns), groups)


def gaps(columns: dict[str, int], results: Sequence[NodeResult]) -> dict[str, str]:
    """Return the signs of the columns for whose numbers of drafts a rule has no results at all."""
    there, name = {one.k for one in results}, (results[0].scheme, results[0].rule)
    most = max((case.most for case in node_cases() if (case.scheme.name, case.label) == name), default=MANY)
    return {title: UNDEFINED if most < k <= MANY else TOO_DEAR for title, k in columns.items() if k not in there}


def footnotes(tables: Sequence[Table]) -> list[str]:
    """Explain the signs that stand in tables in place of numbers."""
    cells = {cell for table in tables for row in table.rows for cell in row}
    return [f"{sign}: {why}" for sign, why in SIGNS.items() if sign in cells]


def _reached(one: NodeResult, *, brief: bool) -> str:
    gap = Estimate(-one.gap.mean, one.gap.low, one.gap.high)
    return f"{100 * one.acceptance.mean:.1f} {spread(gap, 100, 1 if brief else 2, brief=brief)}"


def tree_table(title: str, results: Sequence[TreeResult], *, brief: bool) -> Table:
    """Return rules by temperatures: the expected number of accepted drafts; a star marks the best of a column."""
    columns = list(dict.fromkeys(f"T = {one.temperature:g}" for one in results))
    rows: list[tuple[str, ...]] = []
    for scheme in dict.fromkeys(one.scheme for one in results):
        rows.append((scheme,) + ("",) * len(columns))
        of_scheme = [one for one in results if one.scheme == scheme]
        for rule in dict.fromkeys(one.rule for one in of_scheme):
            cells = {f"T = {one.temperature:g}": _accepted(one, brief=brief) for one in of_scheme if one.rule == rule}
            rows.append((f" {rule}", *_cells(columns, cells)))
    return Table(title, ("scheme", *columns), tuple(rows))


def _accepted(one: TreeResult, *, brief: bool) -> str:
    mean = spread(one.accepted, 1, 2, brief=brief)
    if one.behind.mean <= 1e-9:
        return f"{mean}*"
    less = Estimate(-one.behind.mean, one.behind.low, one.behind.high)
    return f"{mean} " if brief else f"{mean} ({spread(less, 1, 3, brief=False)})"


def _cells(columns: Iterable[str], values: dict[str, str]) -> tuple[str, ...]:
    return tuple(values.get(name, "") for name in columns)


def conditions_in_words(conditions: dict[str, Any], prompts: dict[str, int]) -> list[str]:
    """Return the run's conditions, one sentence each."""
    target, versions = conditions["target"], conditions["versions"]
    counts = ", ".join(f"{count} of {task}" for task, count in prompts.items())
    return [
        f"Target: {target['name']}, {target['parameters']:,} parameters, {target['dtype']} on {target['device']}. "
        f"{_drafting(conditions)} {conditions['vocabulary']} tokens.",
        f"Prompts: {counts}. The target continues each alone, by {conditions['max_tokens']} tokens at most, at every "
        f"temperature; every generated token is a position. Seed {conditions['seed']}.",
        template_in_words(conditions.get("chat_template")),
        _rows(conditions),
        "Acceptance rates are computed from the probabilities of target and drafts at every position, not sampled. "
        "Means are over positions; intervals are 95 % bootstrap intervals over prompts.",
        f"Trees are drawn at one position in {conditions['tree_every']}; what a rule accepts of a tree is computed."
        if conditions["tree_every"]
        else "No trees were grown.",
        f"polydraft {versions['polydraft']}, torch {versions['torch']}.",
    ]


def _drafting(conditions: dict[str, Any]) -> str:
    """Say who drafts."""
    draft, drafter = conditions["draft"], conditions.get("drafter")
    model = "" if draft is None else f"Draft model: {draft['name']}, {draft['parameters']:,} parameters."
    return f"Drafter: {drafter}. {model}".strip() if drafter else model


def _rows(conditions: dict[str, Any]) -> str:
    """Say where the draft rows come from."""
    if conditions.get("drafter"):
        return (
            f"Drafts are the drafter's own, and its rows are cut to their {conditions['shortlist']} likeliest tokens. "
            "At every position it is told that none was kept; where it drafts nothing, nothing is accepted."
        )
    heat = "that of the target" if conditions["draft_temperature"] is None else conditions["draft_temperature"]
    return (
        f"The draft model's temperature is {heat}; temperature 0 is the limit from above. Drafts come from its "
        f"{conditions['shortlist']} likeliest tokens, renormalised."
    )


def as_document(
    conditions: dict[str, Any], prompts: dict[str, int], tables: Sequence[Table], figures: Sequence[str]
) -> str:
    """Return a Markdown page with the conditions, the tables and the figures."""
    parts = ["# Limits of drafting on real text", *conditions_in_words(conditions, prompts)]
    parts += [
        "Rows in italics are schemes, with the largest acceptance rate of any exact rule, in per cent ± half the "
        "interval. Under each are its rules, with their acceptance and how many points they differ from that optimum. "
        "In the tables of trees a star marks the largest of a column, the bound on exact rules where there is one; in "
        "brackets is the difference from it on the same texts. All rules of a scheme see the same trees.",
        *(table.as_markdown() for table in tables),
        *footnotes(tables),
        *(f"![{Path(name).stem}]({name})" for name in figures),
    ]
    return "\n\n".join(parts) + "\n"
