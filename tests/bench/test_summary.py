"""Means, intervals and gaps: what resampling whole prompts gives."""

import numpy as np
import pytest

from polydraft.bench.bootstrap import bootstrap_weights, estimate
from polydraft_lab.limits import Record, summarise
from polydraft_lab.limits.summary import nearest


def record(prompt: int, rates: dict[str, float], positions: int = 10, task: str = "a", trees: float = 1.0) -> Record:
    sums = {rule: rate * positions for rule, rate in rates.items()}
    return Record(
        task, str(prompt), 0.5, positions, {"iid": {"2": sums}}, 2, {"2,1": {"iid": {"x": 2 * trees, "y": 3.0}}}
    )


def covered(clustered: bool) -> float:
    """Return how often the interval holds the true mean of positions that share their prompt's level."""
    rng = np.random.default_rng(0)
    hits, trials, prompts, positions = 0, 200, 16, 10
    for trial in range(trials):
        level = rng.normal(0.6, 0.1, size=prompts)
        values = level[:, None] + rng.normal(0, 0.1, size=(prompts, positions))
        sums = values.sum(axis=1) if clustered else values.flatten()
        weights = bootstrap_weights(len(sums), trial)
        found = estimate(sums, np.full(len(sums), float(positions if clustered else 1)), weights)
        assert found.low is not None and found.high is not None
        hits += found.low <= 0.6 <= found.high
    return hits / trials


def test_the_interval_over_prompts_covers_and_one_over_positions_would_not() -> None:
    assert covered(clustered=True) > 0.90
    assert covered(clustered=False) < 0.60


def test_positions_weigh_alike_whatever_their_prompt() -> None:
    nodes, _ = summarise([record(1, {"optimum": 0.9, "r": 0.8}, 30), record(2, {"optimum": 0.5, "r": 0.4}, 10)])
    assert nodes[0].acceptance.mean == pytest.approx(0.7) and nodes[0].optimum.mean == pytest.approx(0.8)
    assert nodes[0].positions == 40 and nodes[0].prompts == 2


def test_gaps_are_paired_within_prompts() -> None:
    rates = [0.1, 0.9, 0.4, 0.7]
    nodes, _ = summarise([record(n, {"optimum": rate + 0.02, "r": rate}) for n, rate in enumerate(rates)])
    gap, reached = nodes[0].gap, nodes[0].acceptance
    assert gap.low == pytest.approx(0.02) and gap.high == pytest.approx(0.02)
    assert reached.low is not None and reached.high is not None and reached.high - reached.low > 0.3


def test_one_prompt_has_a_mean_and_no_interval() -> None:
    nodes, trees = summarise([record(1, {"optimum": 0.9, "r": 0.8})])
    assert nodes[0].gap.mean == pytest.approx(0.1) and nodes[0].gap.low is None
    assert [(one.rule, one.accepted.mean, one.behind.mean) for one in trees] == [("x", 1.0, 0.5), ("y", 1.5, 0.0)]


def test_tasks_are_summarised_alone_and_together_and_the_same_every_time() -> None:
    records = [record(n, {"optimum": 0.8, "r": 0.1 * n}, task=task) for n in range(1, 5) for task in ("a", "b")]
    nodes, trees = summarise(records)
    assert [one.task for one in nodes] == ["a", "b", "all"]
    assert [one.prompts for one in nodes] == [4, 4, 8]
    assert {one.task for one in trees} == {"a", "b", "all"}
    assert summarise(records) == (nodes, trees)
    assert summarise([]) == ([], [])


def test_the_nearest_value_is_the_larger_of_two() -> None:
    assert nearest([2, 4], 3) == 4 and nearest([0.0, 0.6, 0.9], 0.7) == 0.6
