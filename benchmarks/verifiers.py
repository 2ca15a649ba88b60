"""Measure what node rules cost and accept, on rows of the embedded pair.

    python benchmarks/verifiers.py
    python benchmarks/verifiers.py --rules optimal race --drafts 4 --temperatures 1 --json
    python benchmarks/verifiers.py --bottom-up --temperatures 1 --trees 3,2

Laws: processor time of this process on one thread, so that other programs disturb it little: the median over single
nodes, and that of a batch of 64; 64 shortlisted tokens and the tail. Acceptance and optimum are computed and averaged
over the same rows. Share: what verifying takes of a step of `polydraft.generate`, prompt left out, one text at a time,
with the trees of `--trees` cut to what the rule verifies: widths such as 3,2, or `default`, the tree that the engine
takes for the temperature when none is named; wall-clock seconds of the run's own statistics.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import polydraft
from polydraft.bench.limits.positions import Models, generate_sample, rows_on_atoms
from polydraft.cli.demo import demo_prompts, describe_machine
from polydraft.engine.block import summed
from polydraft.engine.defaults import as_drafter, default_policy
from polydraft.probs import SamplingParams
from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Product,
    SpecHub,
    TopK,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
)
from polydraft.theory import optimal_set
from polydraft.trees import Chain, TreePolicy, Widths
from polydraft.verifiers import (
    BottomUp,
    ImportanceWeighted,
    KSeq,
    NaiveMatch,
    NodeVerifier,
    Optimal,
    Race,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    ScalableVerifier,
    SpecHubRule,
    SpeculativeSampling,
    TopDown,
    TopThenSampleRule,
    TraversalVerification,
    TreeVerifier,
)

RULES: tuple[NodeVerifier, ...] = (
    SpeculativeSampling(),
    NaiveMatch(IID()),
    RecursiveRejection(),
    KSeq(),
    ImportanceWeighted(),
    Race(),
    Optimal(IID()),
    NaiveMatch(WithoutReplacement()),
    RecursiveRejectionWithoutReplacement(),
    Optimal(WithoutReplacement()),
    NaiveMatch(ConditionalPoisson()),
    Optimal(ConditionalPoisson()),
    NaiveMatch(TopThenSample()),
    TopThenSampleRule(),
    Race(TopThenSample()),
    Optimal(TopThenSample()),
    NaiveMatch(SpecHub()),
    SpecHubRule(),
    Race(SpecHub()),
    Optimal(SpecHub()),
    NaiveMatch(TopThenIID(1)),
    Race(TopThenIID(1)),
    Optimal(TopThenIID(1)),
    NaiveMatch(TopK()),
    NaiveMatch(Product()),
    RecursiveRejection(Product()),
    ImportanceWeighted(Product()),
    Race(Product()),
)
"""All lossless rules that have rows here, which an n-gram's tokens (`Given`) have not; those of a scheme together."""
FOR_TREES: tuple[TreeVerifier, ...] = (
    *(BottomUp(rule) for rule in RULES if isinstance(rule, ScalableVerifier)),
    TraversalVerification(IID()),
    TraversalVerification(WithoutReplacement()),
)
"""The lifts of all rules that have one, and the rule for whole trees with branches."""
NODES = 64
DEFAULT = "default"
Rule = TypeVar("Rule", NodeVerifier, TreeVerifier)


@dataclass(frozen=True)
class Result:
    """One line of the table: a rule, a number of drafts and a temperature; milliseconds and probabilities."""

    rule: str
    scheme: str
    drafts: int
    temperature: float
    node_ms: float
    slowest_ms: float
    batch_ms: float
    acceptance: float
    optimum: float


@dataclass(frozen=True)
class Share:
    """What verifying takes of a step of `generate`."""

    rule: str
    scheme: str
    tree: str
    temperature: float
    verify_ms: float
    step_ms: float
    share: float
    block_efficiency: float


def most_drafts(rule: NodeVerifier | TreeVerifier) -> int:
    """Return how many drafts of a node the rule verifies."""
    if isinstance(getattr(rule, "rule", rule), SpeculativeSampling):
        return 1
    return 2 if isinstance(rule.scheme, SpecHub) else 8


def rows_of(models: Models, temperature: float, prompts: int) -> tuple[Tensor, Tensor]:
    """Return draft and target rows at the positions of generated texts, spread over them."""
    both: list[tuple[Tensor, Tensor]] = []
    for seed, ids in enumerate(encoded(models.pair)[:prompts]):
        sample = generate_sample(models, ids, temperature, NODES, seed, 0)
        both.append(rows_on_atoms(sample, temperature, temperature, 64))
    draft, target = (torch.cat(rows) for rows in zip(*both, strict=True))
    chosen = torch.linspace(0, len(draft) - 1, NODES).long()
    return draft[chosen], target[chosen]


def encoded(pair: polydraft.Pair) -> list[Tensor]:
    return [torch.tensor([pair.tokenizer(text)["input_ids"]]) for text in demo_prompts()]


def rows_for(rule: NodeVerifier, draft: Tensor) -> Tensor:
    """Give a scheme of several rows a second one, of half the temperature."""
    if not isinstance(rule.scheme, Product):
        return draft
    sharp = draft.double() ** 2
    return torch.stack([draft, (sharp / sharp.sum(dim=-1, keepdim=True)).to(draft)], dim=1)


def milliseconds(function: Callable[[], object]) -> float:
    begin = time.process_time()
    function()
    return 1e3 * (time.process_time() - begin)


@torch.inference_mode()  # as laws are computed while generating
def measure_law(rule: NodeVerifier, k: int, temperature: float, draft: Tensor, target: Tensor) -> Result:
    rows, counts = rows_for(rule, draft), torch.full((len(draft),), k)
    uniforms = torch.rand(len(draft), 64, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    drafts = rule.scheme.sample(rows[..., :-1], counts, uniforms, k)
    rule.law(drafts, rows, target)
    batch = median(milliseconds(lambda: rule.law(drafts, rows, target)) for _ in range(5))
    nodes = [(drafts[i : i + 1], rows[i : i + 1], target[i : i + 1]) for i in range(len(drafts))]
    single = [median(milliseconds(lambda node=node: rule.law(*node)) for _ in range(3)) for node in nodes]
    accepted = rule.acceptance(rows, target, counts).double().mean()
    optimum = optimal_set(rule.scheme, rows, target, counts).acceptance.mean()
    times = (median(single), max(single), batch)
    return Result(rule.name, rule.scheme.name, k, temperature, *times, float(accepted), float(optimum))


def policy_for(rule: TreeVerifier, tree: str, pair: polydraft.Pair, temperature: float) -> TreePolicy:
    """Return the named tree, with no more children per node than the rule verifies."""
    most = most_drafts(rule)
    if tree != DEFAULT:
        return Widths(tuple(min(int(width), most) for width in tree.split(",")))
    policy = default_policy(as_drafter(pair.draft), SamplingParams(temperature))
    return policy if policy.shape.max_children <= most else Chain(policy.shape.depth)


def measure_share(
    rule: TreeVerifier, pair: polydraft.Pair, temperature: float, tree: str, tokens: int, prompts: int
) -> Share:
    policy = policy_for(rule, tree, pair, temperature)
    options = {"temperature": temperature, "top_k": 0, "drafter": pair.draft, "policy": policy}
    runs = [
        polydraft.generate(pair.target, ids, verifier=rule, seed=seed, max_new_tokens=tokens, **options)
        for seed, ids in enumerate([encoded(pair)[0], *encoded(pair)[:prompts]])
    ]
    total = summed([run.statistics for run in runs[1:]])  # the first one warms up
    steps = total.seconds["total"] - total.seconds["prefill"]
    verify = total.seconds["verify"]
    per_step = 1e3 / total.steps
    return Share(
        rule.name,
        rule.scheme.name,
        "+".join(str(sum(level)) for level in policy.shape.counts),
        temperature,
        verify * per_step,
        steps * per_step,
        verify / steps,
        total.block_efficiency,
    )


def tree_of(text: str) -> str:
    """Check an entry of `--trees`."""
    if text != DEFAULT and not all(width.isdigit() and int(width) for width in text.split(",")):
        raise argparse.ArgumentTypeError(f"a tree is written as widths such as 3,2, or {DEFAULT}, not {text!r}")
    return text


def chosen(rules: Sequence[Rule], words: Sequence[str]) -> list[Rule]:
    return [rule for rule in rules if not words or any(word in rule.name for word in words)]


def results(given: argparse.Namespace, console: Console) -> Iterator[Result | Share]:
    """Measure everything, with a progress bar."""
    pair, rules = polydraft.load_pair(), chosen(RULES, given.rules)
    heats, trees = given.temperatures, given.trees if given.tokens else ()
    if given.bottom_up:
        for rule in track(chosen(FOR_TREES, given.rules), "rules for trees", transient=True, console=console):
            yield from (measure_share(rule, pair, *each, given.tokens, given.prompts) for each in product(heats, trees))
        return
    rows = {heat: rows_of(Models.of(pair), heat, given.prompts) for heat in heats}
    for rule in track(rules, "node rules", transient=True, console=console):
        for heat in heats:
            for k in sorted({min(k, most_drafts(rule)) for k in given.drafts}):
                yield measure_law(rule, k, heat, *rows[heat])
            for tree in trees:
                yield measure_share(TopDown(rule), pair, heat, tree, given.tokens, given.prompts)


def table_of(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in ("rule", "scheme") else "right")
    for line in lines:
        table.add_row(*line)
    return table


def show(console: Console, found: Sequence[Result | Share]) -> None:
    laws = [one for one in found if isinstance(one, Result)]
    columns = ("rule", "scheme", "k", "T", "node ms", "slowest", "64 nodes ms", "accepts", "optimum")
    lines = [
        (
            one.rule,
            one.scheme,
            str(one.drafts),
            f"{one.temperature:g}",
            *(f"{value:.2f}" for value in (one.node_ms, one.slowest_ms, one.batch_ms)),
            f"{one.acceptance:.4f}",
            f"{one.optimum:.4f}",
        )
        for one in laws
    ]
    if laws:
        console.print(table_of("laws: processor time on one thread; acceptance, computed", columns, lines))
    shares = [one for one in found if isinstance(one, Share)]
    columns = ("rule", "scheme", "nodes by depth", "T", "verify ms", "step ms", "share", "tokens per call")
    lines = [
        (
            one.rule,
            one.scheme,
            one.tree,
            f"{one.temperature:g}",
            f"{one.verify_ms:.2f}",
            f"{one.step_ms:.1f}",
            f"{100 * one.share:.1f} %",
            f"{one.block_efficiency:.2f}",
        )
        for one in shares
    ]
    if shares:
        console.print(table_of(f"steps of generate, {describe_machine()}", columns, lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="*", default=[], help="only rules whose name contains one of these")
    parser.add_argument("--drafts", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument(
        "--trees", type=tree_of, nargs="+", default=["3,2", DEFAULT], help="for the share: widths, or default"
    )
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per text for the share; 0: leave it out")
    parser.add_argument("--bottom-up", action="store_true", help="the shares of lifts and of rules for whole trees")
    parser.add_argument("--json", action="store_true", help="print JSON lines and nothing else")
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(highlight=False, width=120, stderr=given.json)
    found = list(results(given, console))
    if given.json:
        for one in found:
            sys.stdout.write(json.dumps({"kind": type(one).__name__.lower(), **asdict(one)}) + "\n")
    else:
        show(console, found)


if __name__ == "__main__":
    main()
