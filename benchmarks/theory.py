"""Measure what the theory costs on one core: the optimal acceptance over a whole vocabulary, and of a batch of nodes.

    python benchmarks/theory.py
    python benchmarks/theory.py --repeats 21 --vocabulary 32000

Medians of the processor time of this process, so that other programs disturb them little, with the smallest and the
largest. The last columns give the quadrature's nodes and its error, measured against four times as many nodes.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from polydraft.schemes import IID, ConditionalPoisson, Product, Scheme, TopThenIID, TopThenSample, WithoutReplacement
from polydraft.theory import SuccessiveLaw, inclusion, optimal_acceptance, optimal_set, time_nodes

CONSOLE = Console(highlight=False, width=120)
SPREAD = 3.0  # of the draft's logits; the target's are the draft's and standard normal noise
SHORTLIST = 64
NODES = 64


@dataclass(frozen=True)
class Case:
    """Something to time, and the milliseconds it may take."""

    name: str
    function: Callable[[], object]
    target_ms: float | None = None
    law: SuccessiveLaw | None = None


def rows(*shape: int) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    logits = SPREAD * torch.randn(*shape, generator=stream, dtype=torch.float64)
    noise = torch.randn(*shape, generator=stream, dtype=torch.float64)
    return logits.softmax(dim=-1), (logits + noise).softmax(dim=-1)


def whole_vocabulary(size: int) -> list[Case]:
    draft, target = rows(size)
    cases = [
        Case(
            f"{scheme.name}, V = {size}, k = 4", lambda scheme=scheme: optimal_acceptance(draft, target, scheme, 4), 30
        )
        for scheme in (IID(), TopThenSample())
    ]
    for k in (2, 4, 8):
        law = SuccessiveLaw.of(draft, torch.tensor(k))
        name = f"without replacement, V = {size}, k = {k}"
        run = lambda k=k: optimal_acceptance(draft, target, WithoutReplacement(), k)  # noqa: E731
        cases.append(Case(name, run, 1000, law))
    return cases


def batch_of_nodes(k: int) -> list[Case]:
    draft, target = rows(NODES, SHORTLIST + 1)
    draft = torch.cat([draft[:, :-1] / draft[:, :-1].sum(dim=-1, keepdim=True), torch.zeros(NODES, 1)], dim=-1)
    counts = torch.full((NODES,), k)
    law = SuccessiveLaw.of(draft, counts)
    order = (draft / target).argsort(dim=-1, descending=True)
    size = f"{NODES} nodes, {SHORTLIST + 1} atoms, k = {k}"

    def best(scheme: Scheme) -> Callable[[], object]:
        return lambda: optimal_set(scheme, draft, target, counts)

    schemes = (IID(), TopThenSample(), TopThenIID(1), ConditionalPoisson(), WithoutReplacement())
    cases = [
        Case(f"{scheme.name}, {size}", best(scheme), 10, law if scheme == WithoutReplacement() else None)
        for scheme in schemes
    ]
    cases.append(Case(f"one more order of a prepared law, {size}", lambda: law.chain(order)))
    cases.append(Case(f"inclusion without replacement, {size}", lambda: inclusion(WithoutReplacement(), draft, counts)))
    rows_of_one = torch.stack([draft[0], draft[1], draft[2]])
    one = torch.tensor(3)
    cases.append(
        Case("product of 3 rows, one node, k = 3", lambda: optimal_set(Product(), rows_of_one, target[0], one))
    )
    return cases


def finer(law: SuccessiveLaw) -> SuccessiveLaw:
    """Return the law with four times as many nodes."""
    return SuccessiveLaw(law.rates, law.counts, law.most, time_nodes(law.rates, law.counts, law.most, 4.0))


def error(law: SuccessiveLaw) -> float:
    order = torch.arange(law.rates.shape[-1]).expand_as(law.rates)
    return float((law.chain(order) - finer(law).chain(order)).abs().max())


def milliseconds(function: Callable[[], object], repeats: int) -> list[float]:
    function()
    times: list[float] = []
    for _ in range(repeats):
        begin = time.process_time()
        function()
        times.append(1e3 * (time.process_time() - begin))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="processor time on one core, float64")
    for column in ("what", "median ms", "smallest", "largest", "target", "nodes", "error"):
        table.add_column(column, justify="left" if column == "what" else "right")
    cases = [*whole_vocabulary(given.vocabulary), *batch_of_nodes(4), *batch_of_nodes(8)[4:6]]
    for case in track(cases, "theory", transient=True):
        times = milliseconds(case.function, given.repeats)
        table.add_row(
            case.name,
            *(f"{value:.2f}" for value in (median(times), min(times), max(times))),
            f"{case.target_ms:g}" if case.target_ms else "",
            *((str(case.law.nodes.time.shape[-1]), f"{error(case.law):.0e}") if case.law else ("", "")),
        )
    CONSOLE.print(table)


if __name__ == "__main__":
    main()
