"""Sharing pairs' masses against linear programs, degenerate rows included, and the tournament's matches made of it."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor
from zoo import ZOO

from polydraft.schemes import IID, Product
from polydraft.verifiers import ImportanceWeighted
from polydraft.verifiers.nodes.importance_weighted import share_pairs


def by_program(met: np.ndarray, need: np.ndarray) -> float:
    """Return the largest sum_i min(need_i, what i gets) over all divisions of the pairs' masses."""
    pairs = list(itertools.combinations(range(len(need)), 2))
    gets = np.zeros((len(need), len(pairs) + len(need)))
    limits = np.zeros(len(need))
    for column, (i, j) in enumerate(pairs):
        gets[i, column], gets[j, column] = -met[i, j], met[i, j]
        limits[j] += met[i, j]
    gets[:, len(pairs) :] = np.eye(len(need))
    gains = np.r_[np.zeros(len(pairs)), -np.ones(len(need))]
    bounds = [(0, 1)] * len(pairs) + [(0, max(one, 0)) for one in need]
    solution = linprog(gains, gets, limits, bounds=bounds, method="highs")
    assert solution.status == 0
    return -float(solution.fun)


def by_cut(met: np.ndarray, need: np.ndarray) -> float:
    """Return the least, over sets of tokens, of what they need and the mass of the pairs that are not within them."""
    sets = np.array(list(itertools.product((0.0, 1.0), repeat=len(need))))
    return float((sets @ np.maximum(need, 0) + met.sum() / 2 - ((sets @ met) * sets).sum(axis=1) / 2).min())


def check(met: np.ndarray, need: np.ndarray) -> None:
    """Compare with the minimal cut and, where its solver is exact enough, with the linear program."""
    won = share_pairs(np.triu(met), np.asarray(need, dtype=np.float64))
    assert (won >= 0).all()
    np.testing.assert_allclose(won + won.T, met, rtol=0, atol=1e-15)
    served = float(np.minimum(np.maximum(need, 0), won.sum(axis=1)).sum())
    assert served == pytest.approx(by_cut(met, need), abs=1e-12)
    if len(need) <= 6:
        assert served == pytest.approx(by_program(met, need), abs=1e-9)


def pairs_of(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    met = np.outer(one, two)
    met = met + met.T
    np.fill_diagonal(met, 0)
    return met


@pytest.mark.parametrize("size", [2, 3, 5, 12])
def test_the_flow_is_as_large_as_the_linear_program_finds(size: int):
    rng = np.random.default_rng(size)
    for power in (1, 3, 8):
        for _ in range(6):
            one, two, need = rng.random((3, size)) ** power
            check(pairs_of(one / one.sum(), two / two.sum()), need / need.sum() - 0.1 / size)


def test_masses_that_are_no_products_are_shared_as_well():
    rng = np.random.default_rng(1)
    for _ in range(20):
        met = rng.random((6, 6)) * (rng.random((6, 6)) < 0.4)
        check(np.triu(met, 1) + np.triu(met, 1).T, rng.random(6))


@pytest.mark.parametrize(("target", "draft"), ZOO.values(), ids=list(ZOO))
def test_degenerate_rows(target: Tensor, draft: Tensor):
    mass, rows = target.numpy(), draft.numpy()
    for one, two in ((rows, rows), (rows, rows[::-1]), (mass, rows)):
        check(pairs_of(one, two), mass - one * two)
        check(pairs_of(one, two), mass * 0)  # nothing is needed


def test_a_path_over_several_tokens_is_found():
    """Token 0 has too much and shares no pair with 2, which lacks: 1 must pass it on."""
    won = [[0.0, 0.5, 0.0], [0.0, 0.0, 0.5], [0.0, 0.0, 0.0]]
    assert share_pairs(np.array(won), np.array([0.0, 0.5, 0.5])).tolist() == [
        [0.0] * 3,
        [0.5, 0.0, 0.0],
        [0.0, 0.5, 0.0],
    ]


def matched(target: Tensor, rows: Tensor, free: int) -> float:
    """Return what two drafts' match accepts by the linear program, pairs of other tokens going to the earlier one."""
    mass, (one, two) = target.numpy(), (rows[0].numpy(), rows[-1].numpy())
    order = np.argsort(-(mass - (one + two) / 2), kind="stable")
    mass, one, two = mass[order], one[order], two[order]
    met = pairs_of(one, two)
    fixed = np.triu(met).sum(axis=1) + one * two
    fixed[:free] -= np.triu(met[:free, :free]).sum(axis=1)
    served = np.minimum(fixed, mass).sum()
    return float(served + by_program(met[:free, :free], np.maximum(mass - fixed, 0)[:free]))


@pytest.mark.parametrize("free", [2, 5, 9])
def test_two_drafts_accept_what_the_linear_program_allows(free: int):
    rng = np.random.default_rng(free)
    for _ in range(5):
        target, *rows = torch.from_numpy(rng.random((3, 12)) ** 3)
        target, pair = target / target.sum(), torch.stack([row / row.sum() for row in rows])
        for scheme, given in ((Product(), pair), (IID(), pair[:1])):
            rule = ImportanceWeighted(scheme, free=free)
            draft = given if isinstance(scheme, Product) else given[0]
            accepted = float(rule.acceptance(draft, target, torch.tensor(2)))
            assert accepted == pytest.approx(matched(target, given, free), abs=1e-9)
