"""Means over positions with their intervals, by task, temperature, scheme and rule."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from polydraft.bench.bootstrap import Estimate, bootstrap_weights, estimate
from polydraft.bench.prompts import ALL
from polydraft.verifiers import cross_fitted
from polydraft_lab.limits.cases import ANY_RULE
from polydraft_lab.limits.measuring import OPTIMUM, Record


@dataclass(frozen=True)
class NodeResult:
    """What one rule accepts at one setting.

    Args:
        task: the task, or "all".
        temperature: the target's.
        scheme: how the drafts are drawn.
        rule: the rule.
        k: the number of drafts.
        prompts: the number of texts.
        positions: the number of positions.
        acceptance: the rule's acceptance rate.
        optimum: the largest of any rule for the scheme.
        gap: the difference, paired position by position.
    """

    task: str
    temperature: float
    scheme: str
    rule: str
    k: int
    prompts: int
    positions: int
    acceptance: Estimate
    optimum: Estimate
    gap: Estimate


@dataclass(frozen=True)
class TreeResult:
    """What one tree rule accepts at one setting.

    Args:
        task: the task, or "all".
        temperature: the target's.
        shape: the trees.
        scheme: how they are drawn.
        rule: the rule.
        prompts: the number of texts.
        positions: the number of trees.
        accepted: the expected number of accepted drafts.
        behind: how much less that is than the best rule's on this shape, whatever its scheme.
    """

    task: str
    temperature: float
    shape: str
    scheme: str
    rule: str
    prompts: int
    positions: int
    accepted: Estimate
    behind: Estimate


def summarise(records: Sequence[Record], seed: int = 0) -> tuple[list[NodeResult], list[TreeResult]]:
    """Summarise records by task, and all tasks together if there are several, and temperature."""
    nodes: list[NodeResult] = []
    trees: list[TreeResult] = []
    for task, temperature, group in _groups(records):
        weights = bootstrap_weights(len(group), seed)
        nodes.extend(_node_results(task, temperature, group, weights))
        with_trees = [one for one in group if one.tree_positions]
        if with_trees:
            weights = bootstrap_weights(len(with_trees), seed)
            for shape in with_trees[0].trees:
                trees.extend(_tree_results(task, temperature, shape, with_trees, weights))
    return nodes, trees


def _groups(records: Sequence[Record]) -> Iterator[tuple[str, float, list[Record]]]:
    tasks = list(dict.fromkeys(one.task for one in records))
    for task in [*tasks, ALL] if len(tasks) > 1 else tasks:
        of_task = [one for one in records if task in (one.task, ALL)]
        for temperature in sorted({one.temperature for one in of_task}):
            yield task, temperature, [one for one in of_task if one.temperature == temperature]


def _node_results(
    task: str, temperature: float, group: Sequence[Record], weights: Float[np.ndarray, "r m"]
) -> Iterator[NodeResult]:
    counts = np.array([one.positions for one in group], dtype=float)
    for scheme, by_k in group[0].nodes.items():
        for k, rules in by_k.items():
            sums = {rule: np.array([one.nodes[scheme][k][rule] for one in group]) for rule in rules}
            best = estimate(sums[OPTIMUM], counts, weights)
            for rule in (one for one in rules if one != OPTIMUM):
                reached = estimate(sums[rule], counts, weights)
                gap = estimate(sums[OPTIMUM] - sums[rule], counts, weights)
                yield NodeResult(
                    task, temperature, scheme, rule, int(k), len(group), int(counts.sum()), reached, best, gap
                )


def _tree_results(
    task: str, temperature: float, shape: str, group: Sequence[Record], weights: Float[np.ndarray, "r m"]
) -> Iterator[TreeResult]:
    counts = np.array([one.tree_positions for one in group], dtype=float)
    sums = {
        (scheme, rule): np.array([one.trees[shape][scheme][rule] for one in group])
        for scheme, rules in group[0].trees[shape].items()
        for rule in rules
    }
    bounds = {key: one for key, one in sums.items() if key[1].startswith(ANY_RULE)}
    for scheme in dict.fromkeys(scheme for scheme, _ in bounds):
        by_family = torch.tensor(np.stack([sums.pop(key) for key in bounds if key[0] == scheme]))
        sums[scheme, ANY_RULE] = cross_fitted(by_family).numpy()
    best = max(sums.values(), key=lambda one: float(one.sum()))
    for (scheme, rule), one in sums.items():
        reached, behind = estimate(one, counts, weights), estimate(best - one, counts, weights)
        yield TreeResult(task, temperature, shape, scheme, rule, len(group), int(counts.sum()), reached, behind)


def as_lines(nodes: Sequence[NodeResult], trees: Sequence[TreeResult]) -> list[dict[str, Any]]:
    """Return the results as JSON objects, one a line, rounded to six decimals."""
    kinds: list[tuple[str, Sequence[NodeResult | TreeResult]]] = [("node", nodes), ("tree", trees)]
    return [{"kind": kind, **_rounded(asdict(one))} for kind, results in kinds for one in results]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return round(value, 6) if isinstance(value, float) else value


def nearest(values: Sequence[float], wanted: float) -> float:
    """Return the value nearest to the wanted one, the larger of two."""
    return min(values, key=lambda value: (abs(value - wanted), -value))
