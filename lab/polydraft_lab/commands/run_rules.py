"""`polydraft bench rules`: what verification rules cost, and what they accept beside the optimum."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

from torch import Tensor

from polydraft.bench.table import Table, grouped
from polydraft.catalogue import rule_line, scheme_by_name
from polydraft.cli.benchmark.bench import settings_of
from polydraft.cli.clashes import refuse_clashes
from polydraft.cli.printing import notes_beside
from polydraft.engine import as_drafter
from polydraft.errors import InvalidParameter
from polydraft.models import Pair
from polydraft.schemes import Scheme
from polydraft.verifiers import NodeVerifier, TreeVerifier, require_greedy
from polydraft_lab.commands.options import LAWS, OPTIMUM, PARTS, SHARES, BenchRulesOptions, parse_numbers
from polydraft_lab.commands.results import (
    conditions_of,
    gathered,
    load_source,
    refuse_lone_model,
    show,
    token_ids,
)
from polydraft_lab.limits import Models
from polydraft_lab.subjects import (
    OptimumTime,
    Progress,
    Rows,
    RuleLaw,
    RuleShare,
    RulesSettings,
    measure_laws,
    measure_optima,
    measure_shares,
    node_rules_for,
    rows_of_texts,
    tree_rules_for,
)

Found = RuleLaw | RuleShare | OptimumTime
Kind = TypeVar("Kind", RuleLaw, RuleShare, OptimumTime)


@dataclass(frozen=True)
class Measured:
    """The rules that options mean: at nodes, on trees, and the schemes of all of them."""

    nodes: list[NodeVerifier]
    trees: list[TreeVerifier]
    schemes: list[Scheme]


def refuse_idle_options(options: BenchRulesOptions) -> None:
    """Refuse options of a part that was not asked for, and rules for other temperatures.

    Raises:
        InvalidParameter: one was given.
    """
    for word in options.verifiers:
        require_greedy(rule_line(word).usual, max(options.temperatures or (1.0,)))
    wanted = options.parts or PARTS
    shares, optimum = SHARES in wanted, OPTIMUM in wanted
    refuse_clashes(
        (options.bottom_up and not shares, "--bottom-up is for the part shares: leave it out, or add that part."),
        (options.trees and not shares, "--tree is for the part shares: leave it out, or add that part."),
        (options.vocabulary and not optimum, "--vocabulary is for the part optimum: leave it out, or add that part."),
    )


def run_rules(options: BenchRulesOptions) -> int:
    """Measure and print; return the exit code: 0, or 130 after Ctrl-C."""
    refuse_idle_options(options)
    settings = settings_of(RulesSettings, options, drafts=parse_numbers(options.numbers))
    notes = notes_beside(options)
    refuse_lone_model(options)
    pair = load_source(options, notes)
    rules = chosen_rules(options, pair)
    prompts = token_ids(options, pair, options.max_tokens, notes)
    parts = options.parts or PARTS
    results, interrupted = gathered(partial(measured, parts, settings, rules, pair, prompts), notes)
    conditions = conditions_of("rules", pair, {**asdict(settings), "prompts": len(prompts)})
    tables, notes_below = tables_of(results), notes_on(results)
    return show(conditions, results, tables, notes_below, as_json=options.as_json, interrupted=interrupted)


def chosen_rules(options: BenchRulesOptions, pair: Pair) -> Measured:
    """Return the rules that options mean.

    Raises:
        InvalidParameter: there are none, or none for a part that was asked for.
    """
    drafter, schemes = as_drafter(pair.draft), [scheme_by_name(word) for word in options.schemes]
    nodes = node_rules_for(drafter, options.verifiers, schemes)
    trees = tree_rules_for(drafter, options.verifiers, schemes, bottom_up=options.bottom_up)
    given = {LAWS: nodes, SHARES: trees}
    empty = [part for part in given if part in options.parts and not given[part]]
    if empty or not (nodes or trees):
        raise InvalidParameter(
            f"There is nothing to measure for {' and '.join(empty) or 'these rules'}: none of the rules that "
            "--verifier and --scheme name is of the kind, or a draft model does not draw by the scheme."
        )
    own = [rule.scheme for rule in (*nodes, *trees)]
    return Measured(nodes, trees, list(dict.fromkeys(own)))


def measured(
    parts: Sequence[str],
    settings: RulesSettings,
    rules: Measured,
    pair: Pair,
    prompts: Sequence[Tensor],
    on_progress: Progress,
) -> Iterator[Found]:
    """Measure the parts that were asked for, one after the other."""
    if LAWS in parts:
        models = Models.of(pair)
        rows = list[Rows]()
        for heat in settings.temperatures:
            rows.append(rows_of_texts(models, prompts, heat, settings))
            on_progress("texts", len(rows), len(settings.temperatures))
        yield from measure_laws(rules.nodes, rows, settings, on_progress)
    if SHARES in parts:
        yield from measure_shares(rules.trees, pair, prompts, settings, on_progress)
    if OPTIMUM in parts:
        yield from measure_optima(rules.schemes, settings, on_progress)


def tables_of(results: Sequence[Found]) -> list[Table]:
    """Return a table for each part that has results."""
    laws, shares, optima = _of(results, RuleLaw), _of(results, RuleShare), _of(results, OptimumTime)
    return [
        *([law_table(laws)] if laws else []),
        *([share_table(shares)] if shares else []),
        *([optimum_table(optima)] if optima else []),
    ]


def _of(results: Sequence[Found], kind: type[Kind]) -> list[Kind]:
    return [one for one in results if isinstance(one, kind)]


def law_table(results: list[RuleLaw]) -> Table:
    """Return what rules accept and cost at a node, below the optimum of their scheme and number of drafts."""
    schemes = list(dict.fromkeys(one.scheme for one in results))
    found = sorted(results, key=lambda one: (schemes.index(one.scheme), one.temperature, one.drafts))
    groups = grouped(found, lambda one: f"{one.scheme}, k = {one.drafts}, T = {one.temperature:g}").items()

    def cells(one: RuleLaw) -> list[str]:
        return [_named(one), _percent(one.acceptance), *_times(one.node_ms, one.slowest_ms, one.batch_ms)]

    title = "Laws: acceptance and its optimum in %; milliseconds with one thread"
    head = ("scheme, rule", "accepts", "node", "slowest", f"{results[0].nodes} nodes")
    return Table.of_groups(
        title, head, (([name, _percent(group[0].optimum)], map(cells, group)) for name, group in groups)
    )


def share_table(results: list[RuleShare]) -> Table:
    """Return what verifying takes of a step, below each scheme, tree and temperature."""

    def cells(one: RuleShare) -> list[str]:
        shares = (f"{100 * one.share:.1f} %", f"{one.block_efficiency:.2f}")
        return [_named(one), *shares, *_times(one.verify_ms, one.step_ms)]

    groups = grouped(results, lambda one: f"{one.scheme}, tree {one.tree}, T = {one.temperature:g}").items()
    title = "Shares: what verifying takes of a step, with one thread"
    head = ("scheme, rule", "share", "tokens/call", "verify, ms", "step, ms")
    return Table.of_groups(title, head, (([name], map(cells, group)) for name, group in groups))


def optimum_table(results: list[OptimumTime]) -> Table:
    """Return what computing the optimum takes, below the size of the rows."""

    def cells(one: OptimumTime) -> list[str]:
        accuracy = ("", "") if one.error is None else (str(one.quadrature), f"{one.error:.0e}")
        return [one.scheme, str(one.drafts), *_times(one.milliseconds, one.fastest, one.slowest), *accuracy]

    def size(one: OptimumTime) -> str:
        return f"{one.rows} {'node' if one.rows == 1 else 'nodes'}, {one.tokens:,} tokens"

    head = ("scheme", "k", "median", "fastest", "slowest", "quadrature", "error")
    title, groups = "The optimum on random rows: milliseconds with one thread", grouped(results, size).items()
    return Table.of_groups(title, head, (([name], map(cells, group)) for name, group in groups))


def notes_on(results: Sequence[Found]) -> list[str]:
    """Return what the tables do not say by themselves."""
    laws = _of(results, RuleLaw)
    if not laws:
        return []
    note = f"Acceptance is computed, the mean over {laws[0].positions} positions; a scheme's row is its optimum."
    dear = any(one.acceptance is None for one in laws)
    return [note, *(["What a rule without a number accepts is too dear to compute."] if dear else [])]


def _named(one: RuleLaw | RuleShare) -> str:
    return one.rule if one.lossless else f"{one.rule} (LOSSY)"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def _times(*milliseconds: float) -> list[str]:
    return [f"{one:.2f}" for one in milliseconds]
