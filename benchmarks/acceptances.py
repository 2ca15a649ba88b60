"""Print what every rule accepts beside its scheme's optimum, as a Markdown table, on rows of the embedded pair.

    python benchmarks/acceptances.py
    python benchmarks/acceptances.py --drafts 1 2 3 --temperature 0.6 --prompts 4

The target continues the demo's prompts by itself; at every position draft and target rows are cut to the draft's 64
likeliest tokens and the tail. Acceptances are computed, not sampled, and averaged over the positions. The second row of
`product` drafts is the draft's at half the temperature. The seeds are fixed, so the table is the same on every run of
one machine.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from verifiers import RULES, encoded, rows_for

import polydraft
from polydraft.bench.limits.positions import Models, generate_sample, rows_on_atoms
from polydraft.schemes import SpecHub
from polydraft.theory import optimal_set
from polydraft.verifiers import NodeVerifier, Optimal, SpeculativeSampling


def drafts_of(rule: NodeVerifier, drafts: Sequence[int]) -> list[int]:
    """Return for how many drafts the rule is computed: all that it verifies; one, if it verifies no more."""
    if isinstance(rule, SpeculativeSampling):
        return [1]
    return [k for k in drafts if k <= 2] if isinstance(rule.scheme, SpecHub) else list(drafts)


def rows_of(models: Models, temperature: float, prompts: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return draft and target rows at every position of the generated texts, in float64."""
    both: list[tuple[Tensor, Tensor]] = []
    for seed, ids in enumerate(encoded(models.pair)[:prompts]):
        sample = generate_sample(models, ids, temperature, tokens, seed, 0)
        both.append(rows_on_atoms(sample, temperature, temperature, 64))
    draft, target = (torch.cat(rows).double() for rows in zip(*both, strict=True))
    return draft / draft.sum(dim=-1, keepdim=True), target / target.sum(dim=-1, keepdim=True)


def accepted(rule: NodeVerifier, draft: Tensor, target: Tensor, k: int) -> Tensor:
    """Return the acceptance of every row; for `Optimal` what its marginals add up to, not the formula it aims at."""
    rows, counts = rows_for(rule, draft), torch.full((len(draft),), k)
    if isinstance(rule, Optimal):
        return rule.marginal(rows, target, counts).sum(dim=-1)
    return rule.acceptance(rows, target, counts)


def optimum(rule: NodeVerifier, draft: Tensor, target: Tensor, k: int) -> Tensor:
    """Return the scheme's optimum at every row."""
    return optimal_set(rule.scheme, rows_for(rule, draft), target, torch.full((len(draft),), k)).acceptance


def lines(draft: Tensor, target: Tensor, drafts: Sequence[int], console: Console) -> list[tuple[str, ...]]:
    """Return a line for each scheme's optimum and each of its rules: name, rule, a cell per number of drafts."""
    columns = sorted({1, *drafts})
    result: list[tuple[str, ...]] = []
    schemes = [(scheme, list(rules)) for scheme, rules in groupby(RULES, lambda rule: rule.scheme)]
    for scheme, rules in track(schemes, "schemes", transient=True, console=console):
        numbers = sorted({k for rule in rules for k in drafts_of(rule, drafts)})
        best = {k: optimum(rules[-1], draft, target, k) for k in numbers}
        result.append((scheme.name, "*optimum*", *(cell(best.get(k)) for k in columns)))
        for rule in rules:
            found = {k: accepted(rule, draft, target, k) for k in drafts_of(rule, drafts)}
            result.append(("", rule.name, *(cell(found.get(k)) for k in columns)))
    return result


def cell(values: Tensor | None) -> str:
    return "" if values is None else f"{float(values.mean()):.4f}"


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table whose numbers are aligned to the right."""
    align = ["---", "---", *["---:"] * (len(head) - 2)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, align, *body))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="generated per prompt")
    given = parser.parse_args()
    torch.set_num_threads(1)
    draft, target = rows_of(Models.of(polydraft.load_pair()), given.temperature, given.prompts, given.tokens)
    console = Console(stderr=True)
    head = ("drafts", "rule", *(f"k = {k}" for k in sorted({1, *given.drafts})))
    console.print(f"{len(draft)} positions of {given.prompts} prompts, temperature {given.temperature:g}")
    sys.stdout.write(markdown(head, lines(draft, target, given.drafts, console)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
