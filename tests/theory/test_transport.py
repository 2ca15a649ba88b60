"""The two transport references against hand-made cases and each other, and their named errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from zoo import pairs, row

from polydraft.errors import InvalidParameter, NotConverged
from polydraft.schemes import IID, Given, Product, Scheme, TopK, WithoutReplacement
from polydraft.theory import drafted_sets, flow_acceptance, lp_acceptance

BOTH = pytest.mark.parametrize("solve", [lp_acceptance, flow_acceptance])


def test_drafted_sets_forget_order_and_repeats():
    draft = row(0.8, 0.1, 0.1)
    independent = drafted_sets(IID(), draft, 2)
    assert independent[frozenset({0})] == pytest.approx(0.64)
    assert independent[frozenset({0, 1})] == pytest.approx(0.16)
    assert sum(independent.values()) == pytest.approx(1)
    assert drafted_sets(WithoutReplacement(), row(0.5, 0.5, 0), 3) == {frozenset({0, 1}): pytest.approx(1)}
    assert drafted_sets(IID(), row(0, 0), 2) == {frozenset(): 1.0}


@BOTH
def test_hand_made_transports(solve):
    draft, target = row(0.6, 0.4), row(0.3, 0.7)
    assert solve(IID(), draft, target, 1) == pytest.approx(0.7)
    assert solve(IID(), draft, target, 2) == pytest.approx(0.3 + 1 - 0.36)
    assert solve(TopK(), draft, target, 1) == pytest.approx(0.3)
    assert solve(Given(), draft, target, 2) == pytest.approx(1)
    assert solve(IID(), draft, 0.5 * target, 2) == pytest.approx(0.15 + 0.35)
    assert solve(Product(), torch.stack([row(1, 0), row(0, 1)]), target, 2) == pytest.approx(1)
    assert solve(IID(), row(0, 0), target, 2) == 0


@settings(max_examples=60)
@given(
    pair=pairs(2, 5),
    scheme=st.sampled_from([IID(), WithoutReplacement()]),
    k=st.integers(1, 3),
    scale=st.sampled_from([1.0, 0.6]),
)
def test_the_two_references_agree(pair: tuple[Tensor, Tensor], scheme: Scheme, k: int, scale: float):
    target, draft = pair
    by_flow = flow_acceptance(scheme, draft, scale * target, k)
    assert by_flow <= scale + 1e-12
    assert lp_acceptance(scheme, draft, scale * target, k) == pytest.approx(by_flow, abs=1e-9)


def test_the_flow_keeps_tiny_masses():
    assert flow_acceptance(IID(), row(1, 1e-30), row(0, 1), 1) == pytest.approx(1e-30, rel=1e-12, abs=0)
    assert flow_acceptance(IID(), row(1, 1e-30), row(0, 1), 2) == pytest.approx(2e-30, rel=1e-12, abs=0)


def test_a_linear_program_that_is_not_solved_is_named():
    stream = torch.Generator().manual_seed(0)
    draft, target = (torch.softmax(torch.randn(6, generator=stream).double(), dim=-1) for _ in range(2))
    with pytest.raises(NotConverged, match=r"56 drafted sets was not solved \(.*limit"):
        lp_acceptance(IID(), draft, target, 4, max_iterations=0)
    assert 0 < lp_acceptance(IID(), draft, target, 4) < 1


@BOTH
def test_too_many_drafts_to_list_are_named(solve):
    with pytest.raises(InvalidParameter, match="at most 200000"):
        solve(IID(), torch.full((100,), 0.01, dtype=torch.float64), torch.full((100,), 0.01, dtype=torch.float64), 4)
