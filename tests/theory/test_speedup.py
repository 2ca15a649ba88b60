"""The speed-up formulas against simulation-free recomputation, published examples and bad input."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from zoo import ZOO, pairs, row

from polydraft.errors import InvalidParameter
from polydraft.probs import overlap
from polydraft.theory import (
    best_length,
    block_efficiency,
    can_gain,
    divergence,
    expected_accepted_length,
    least_gain,
    lenient_acceptance,
    operations_factor,
    time_factor,
    tokens_per_call,
)

RATES = st.floats(0, 1)
COSTS = st.floats(0, 2)


@given(pair=pairs(2, 5))
def test_divergence_is_one_minus_the_acceptance_of_one_draft(pair: tuple[Tensor, Tensor]):
    target, draft = pair
    assert float(divergence(draft, target)) == pytest.approx(1 - float(overlap(target, draft)), abs=1e-12)
    assert float(divergence(draft, target)) == pytest.approx(float((target - draft).abs().sum()) / 2, abs=1e-12)
    assert float(divergence(draft, draft)) == 0


def test_divergence_of_disjoint_supports_is_one():
    target, draft = ZOO["disjoint supports"]
    assert float(divergence(draft, target)) == 1


def test_lenience_accepts_more():
    target, draft = row(0.2, 0.8), row(0.6, 0.4)
    assert float(lenient_acceptance(draft, target, 1.0)) == pytest.approx(0.6)
    assert float(lenient_acceptance(draft, target, 0.5)) == pytest.approx(0.8)
    assert float(lenient_acceptance(draft, target, 0.1)) == pytest.approx(1)
    for lenience in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(InvalidParameter, match=f"lenience must be in .* {lenience}"):
            lenient_acceptance(draft, target, lenience)


@given(rate=RATES, length=st.integers(0, 6))
def test_tokens_per_call_is_the_mean_over_all_runs_of_acceptances(rate: float, length: int):
    mean = 0.0
    for accepted in product([True, False], repeat=length):
        chance, run = 1.0, 0
        for one in accepted:
            chance *= rate if one else 1 - rate
        while run < length and accepted[run]:
            run += 1
        mean += chance * (run + 1)
    assert tokens_per_call(rate, length) == pytest.approx(mean, abs=1e-12)
    if rate < 1:
        assert tokens_per_call(rate, length) == pytest.approx((1 - rate ** (length + 1)) / (1 - rate), rel=1e-6)


def test_tokens_per_call_where_all_or_nothing_is_accepted():
    assert tokens_per_call(1.0, 5) == 6
    assert tokens_per_call(0.0, 5) == 1
    assert tokens_per_call(0.7, 0) == 1


@pytest.mark.parametrize(
    ("rate", "length", "time", "operations"),
    [(0.6, 2, 1.96, 1.53), (0.7, 3, 2.53, 1.58), (0.8, 2, 2.44, 1.23), (0.8, 5, 3.69, 1.63), (0.9, 10, 6.86, 1.60)],
)
def test_the_table_of_leviathan(rate: float, length: int, time: float, operations: float):
    """arXiv 2211.17192, table 1, where a draft costs nothing."""
    assert time_factor(rate, length, 0.0) == pytest.approx(time, abs=0.006)
    assert operations_factor(rate, length, 0.0) == pytest.approx(operations, abs=0.006)


@given(rate=RATES, cost=COSTS)
def test_some_chain_gains_if_and_only_if_the_acceptance_exceeds_the_cost(rate: float, cost: float):
    best = best_length(rate, cost)
    factor = time_factor(rate, best, cost)
    assert factor == max(time_factor(rate, length, cost) for length in range(65))
    if can_gain(rate, cost):
        assert factor >= least_gain(rate, cost)
        assert least_gain(rate, cost) == pytest.approx((1 + rate) / (1 + cost))
        assert best > 0 or rate < cost + 1e-9
    else:
        assert (best, factor) == (0, 1)


def test_the_best_length_is_the_shortest_of_equals():
    assert best_length(0.8, 0.05) == 8
    assert best_length(0.0, 0.0) == 0
    assert best_length(1.0, 0.1, longest=9) == 9
    assert best_length(0.5, 0.5) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tokens_per_call(1.5, 2), "acceptance must be in .* 1.5"),
        (lambda: tokens_per_call(float("nan"), 2), "acceptance must be in .* nan"),
        (lambda: tokens_per_call(0.5, -1), "length must be an integer >= 0, but is -1"),
        (lambda: time_factor(0.5, 2, -0.1), "cost must be >= 0, but is -0.1"),
        (lambda: operations_factor(0.5, 2, -0.1), "cost must be >= 0, but is -0.1"),
        (lambda: best_length(0.5, 0.1, -1), "longest must be an integer >= 0, but is -1"),
    ],
)
def test_arguments_outside_their_range_are_named(call, message: str):
    with pytest.raises(InvalidParameter, match=message):
        call()


def test_a_chain_is_a_tree():
    parents = (-1, 0, 1, 2, 3)
    branching = torch.full((5,), 0.7, dtype=torch.float64)
    assert float(block_efficiency(parents, branching)) == pytest.approx(tokens_per_call(0.7, 4), abs=1e-14)


def by_walking(parents: tuple[int, ...], branching: list[float]) -> float:
    """Return the mean accepted length by walking all ways down from the root."""

    def below(node: int) -> float:
        children = [child for child, parent in enumerate(parents) if parent == node]
        return sum(branching[child] * (1 + below(child)) for child in children)

    return below(0)


@given(
    parents=st.lists(st.integers(0, 7), max_size=7).map(
        lambda picks: (-1, *(pick % (place + 1) for place, pick in enumerate(picks)))
    ),
    branching=st.lists(RATES, min_size=8, max_size=8),
)
def test_a_tree_is_worth_the_sum_of_the_products_along_its_paths(parents: tuple[int, ...], branching: list[float]):
    rates = branching[: len(parents)]
    length = expected_accepted_length(parents, torch.tensor(rates, dtype=torch.float64))
    assert float(length) == pytest.approx(by_walking(parents, rates), abs=1e-12)


def test_trees_come_in_batches_and_the_root_alone_is_worth_one_token():
    parents = (-1, 0, 0, 1)
    branching = torch.tensor([[1, 0.5, 0.3, 0.4], [9, 0.2, 0.1, 1.0]], dtype=torch.float64)
    assert expected_accepted_length(parents, branching).tolist() == pytest.approx([1.0, 0.5])
    assert block_efficiency(parents, branching).tolist() == pytest.approx([2.0, 1.5])
    assert float(block_efficiency((-1,), torch.ones(1))) == 1


@pytest.mark.parametrize(
    ("parents", "message"),
    [((-1, 0), "2 parents, but 3"), ((0, 0, 0), "Node 0 has parent 0"), ((-1, 0, 2), "Node 2 has parent 2"),
     ((-1, -1, 0), "Node 1 has parent -1")],
)  # fmt: skip
def test_parents_that_are_no_tree_are_named(parents: tuple[int, ...], message: str):
    with pytest.raises(InvalidParameter, match=message):
        expected_accepted_length(parents, torch.ones(3))
