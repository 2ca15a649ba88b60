"""How likely tokens are drafted, on the host: as among tensors, and as by enumeration."""

import numpy as np
import pytest
import torch

from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Coupled,
    Given,
    Product,
    SpecHub,
    TopK,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
    enumerate_drafts,
)
from polydraft.theory import inclusion
from polydraft.verifiers.host.inclusion import drafted_at

SINGLE = (
    IID(),
    WithoutReplacement(),
    ConditionalPoisson(),
    Coupled(),
    TopK(),
    TopThenSample(),
    TopThenIID(2),
    SpecHub(),
    Given(),
)


def row_of(size: int, seed: int, power: float) -> torch.Tensor:
    row = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** power
    row[::4], row[-1] = 0, 0
    return row / row.sum()


@pytest.mark.parametrize("scheme", SINGLE, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("power", [1.0, 8.0, 60.0])
def test_a_token_is_drafted_as_often_as_among_tensors(scheme: IID, count: int, power: float):
    """Also small probabilities, digit by digit, and more drafts than there are tokens."""
    for size in (12, 65):
        row = row_of(size, count, power)
        expected = inclusion(scheme, row, torch.tensor(count)).numpy()
        np.testing.assert_allclose(drafted_at(scheme, row.numpy(), count), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_drafts_of_several_rows(count: int):
    rows = torch.stack([row_of(20, seed, 3.0) for seed in range(3)])
    for some in (rows, rows * torch.tensor([1.0, 0.0, 1.0]).unsqueeze(-1)):  # a row without mass ends the drafts
        expected = inclusion(Product(), some, torch.tensor(count)).numpy()
        np.testing.assert_allclose(drafted_at(Product(), some.numpy(), count), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement(), ConditionalPoisson(), TopThenIID(1)])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_token_is_drafted_in_as_many_of_all_drafts(scheme: IID, count: int):
    row = row_of(6, count, 4.0)
    drafts, chance = enumerate_drafts(scheme, row, count)
    among = (drafts.unsqueeze(-1) == torch.arange(6)).any(dim=-2).double()
    np.testing.assert_allclose(drafted_at(scheme, row.numpy(), count), (chance @ among).numpy(), rtol=0, atol=1e-12)


def test_a_row_without_mass_drafts_nothing():
    for scheme in SINGLE:
        assert not drafted_at(scheme, np.zeros(5), 3).any()
