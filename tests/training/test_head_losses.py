"""Losses of heads, computed by hand: small rows, the formulas of their papers, and what happens at the edges.

Sources: D-PACE (speculators, SpecForge), LK losses (SpecForge, speculators), DSpark's loss (DeepSpec), whose TV term is
0.9 of the L1 distance, twice the total variation.
"""

from math import exp, log

import pytest
import torch
from torch import Tensor

from polydraft.training.heads.losses.block_training import BlockLoss
from polydraft.training.heads.losses.row_losses import (
    agreement,
    chances,
    cross_entropy,
    d_pace,
    decaying,
    lk_alpha,
    lk_lambda,
    total_variation,
    unsure,
    weighted,
)
from polydraft.training.heads.new_heads import BLOCK_LOSSES

FIRST, SECOND, THIRD = [0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]
"""Rows of a head; the target's beside them have .7, .6 and .4 in common with them."""
LAWS = [[0.2, 0.3, 0.5], [0.4, 0.4, 0.2], [0.8, 0.1, 0.1]]
ONE_HOT = [80.0, 0.0, 0.0]
"""Logits of a row that is one-hot to rounding."""


def numbers(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rows() -> tuple[Tensor, Tensor]:
    """Return logits and laws of one block of three drafts."""
    return 1.7 + numbers(FIRST, SECOND, THIRD).log(), numbers(*LAWS)


def near(found: Tensor, *wanted: float) -> None:
    assert found.flatten().tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_overlap_and_total_variation() -> None:
    near(agreement(*rows()), 0.7, 0.6, 0.4)
    near(total_variation(*rows()), 0.3, 0.4, 0.6)  # half of |.3| + 0 + |.3|, of .3 + .4 + .1, of .6 + .1 + .5
    near(agreement(numbers(ONE_HOT), numbers([0.0, 0.5, 0.5])), 0.0)
    near(agreement(numbers(ONE_HOT), numbers([1.0, 0.0, 0.0])), 1.0)


def test_tokens_that_a_head_has_not_have_no_entropy_and_no_chance() -> None:
    logits, labels = rows()[0], torch.tensor([1, -1, 2])
    near(cross_entropy(logits, labels), -log(0.3), 0.0, -log(0.6))
    near(chances(logits, labels), 0.3, 0.0, 0.6)


def test_lk_alpha() -> None:
    near(lk_alpha(*rows()), -log(0.7), -log(0.6), -log(0.4))
    near(lk_alpha(numbers(ONE_HOT), numbers([0.0, 0.5, 0.5])), -log(1e-5))
    near(lk_alpha(numbers(ONE_HOT), numbers([1.0, 0.0, 0.0])), 0.0)


def test_lk_lambda() -> None:
    """KL(p || q) is .2 log .4 + .5 log 2.5 = .3 log 2.5 in the first row, and so on."""
    first = 0.3 * log(2.5)
    second = 0.4 * log(4) + 0.4 * log(0.5) + 0.2 * log(2)
    third = 0.8 * log(4) + 0.1 * log(0.5) + 0.1 * log(1 / 6)
    wanted = [
        exp(-3 * alpha) * divergence + (1 - exp(-3 * alpha)) * (1 - alpha)
        for alpha, divergence in ((0.7, first), (0.6, second), (0.4, third))
    ]
    near(lk_lambda(*rows()), *wanted)
    near(lk_lambda(*rows(), scale=0.0), 0.3, 0.4, 0.6)
    near(lk_lambda(*rows(), decay=0.0), first, second, third)


def test_lk_lambda_of_one_hot_rows() -> None:
    """Where nothing is shared the loss is the divergence; against a one-hot target that is -log q."""
    near(lk_lambda(numbers(ONE_HOT), numbers([0.0, 0.5, 0.5])), 80 + log(0.5))
    weight = exp(-0.9)
    found = lk_lambda(numbers(FIRST).log(), numbers([0.0, 1.0, 0.0]))
    near(found, -weight * log(0.3) + (1 - weight) * 0.7)
    near(lk_lambda(numbers(ONE_HOT), numbers([1.0, 0.0, 0.0])), 0.0)


def test_the_weight_of_lk_lambda_has_no_gradient() -> None:
    """So the gradient is w grad KL - (1 - w) grad alpha; by logits, these are q - p and q (least - its mean)."""
    logits, law = rows()[0][:1].requires_grad_(True), [0.2, 0.4, 0.4]
    lk_lambda(logits, numbers(law)).sum().backward()
    assert logits.grad is not None
    weight, least, mean = exp(-2.1), [0.0, 1.0, 1.0], 0.5  # min(p, q) follows q where q is less; so has q .5 of mass
    wanted = [weight * (q - p) - (1 - weight) * q * (one - mean) for q, p, one in zip(FIRST, law, least, strict=True)]
    assert logits.grad[0].tolist() == pytest.approx(wanted, abs=1e-9)


def test_decaying_weights() -> None:
    near(decaying(3, 4.0, numbers(0.0)), 1.0, exp(-0.25), exp(-0.5))


def test_d_pace() -> None:
    """With c = .5, .2, .8: s = .75, .6, .9, P = .75, .45, .405, and w their sums from the end."""
    every = torch.ones(3, dtype=torch.bool)
    near(d_pace(numbers(0.5, 0.2, 0.8), every), 1.605, 0.855, 0.405)
    near(d_pace(numbers(0.0, 0.0, 0.0), every), 0.875, 0.375, 0.125)
    near(d_pace(numbers(1.0, 1.0, 1.0), every), 3.0, 2.0, 1.0)
    near(d_pace(numbers(0.5, 0.2, 0.8), every, share=1.0), 3.0, 2.0, 1.0)
    near(d_pace(numbers(0.5, 0.2, 0.8), every, share=0.0), 0.68, 0.18, 0.08)  # .5 + .1 + .08, .1 + .08


def test_d_pace_leaves_out_drafts_that_are_not_there() -> None:
    near(d_pace(numbers(0.5, 0.2, 0.8), torch.tensor([True, True, False])), 1.2, 0.45, 0.0)
    near(d_pace(numbers(0.5, 0.2, 0.8), torch.tensor([True, False, True])), 1.425, 0.0, 0.675)  # P = .75, -, .75 * .9
    near(d_pace(numbers(0.5, 0.2, 0.8), torch.zeros(3, dtype=torch.bool)), 0.0, 0.0, 0.0)


def test_d_pace_weights_have_no_gradient() -> None:
    given = numbers(0.5, 0.2, 0.8).requires_grad_(True)
    assert not d_pace(given, torch.ones(3, dtype=torch.bool)).requires_grad


def test_weighted_means() -> None:
    near(weighted(numbers(1.0, 3.0), numbers(0.5, 1.5)), 2.5)
    near(weighted(numbers(1.0, 3.0), numbers(0.0, 0.0)), 0.0)


def test_confidence() -> None:
    sure, overlap = numbers(0.6, 0.9, 0.5, 1.0, 0.0), numbers(0.7, 0.6, 1.0, 0.7, 0.0)
    wanted = [
        -(0.7 * log(0.6) + 0.3 * log(0.4)),
        -(0.6 * log(0.9) + 0.4 * log(0.1)),
        -log(0.5),
        -(0.7 * log(1 - 1e-6) + 0.3 * log(1e-6)),  # a certain mistake costs much, and not all
        -log(1 - 1e-6),
    ]
    assert unsure(sure, overlap).tolist() == pytest.approx(wanted, rel=1e-6)
    near(unsure(numbers(0.5), numbers(1 + 1e-9)), -log(0.5))  # an overlap may exceed one by rounding


SURE = [0.6, 0.9, 0.3]


def block(own: BlockLoss, labels: list[int], there: list[bool], sure: list[float] | None = SURE) -> float:
    """Return the loss of one block of `rows`."""
    logits, laws = rows()
    given = None if sure is None else numbers(sure)
    found = own.of(logits.unsqueeze(0), laws.unsqueeze(0), torch.tensor([labels]), torch.tensor([there]), given)
    return float(found)


def crossed(sure: float, overlap: float) -> float:
    return -(overlap * log(sure) + (1 - overlap) * log(1 - sure))


def test_dsparks_published_loss() -> None:
    """0.1 CE + 0.9 L1 + BCE at each draft, weighted by exp(-i / 4) and divided by the sum of the weights."""
    weights = [1.0, exp(-0.25), exp(-0.5)]
    entropies = [-log(0.5), -log(0.8), -log(0.2)]
    distances = [0.6, 0.8, 1.2]
    missed = [crossed(0.6, 0.7), crossed(0.9, 0.6), crossed(0.3, 0.4)]
    parts = [0.1 * ce + 0.9 * l1 + bce for ce, l1, bce in zip(entropies, distances, missed, strict=True)]
    wanted = sum(w * one for w, one in zip(weights, parts, strict=True)) / sum(weights)
    assert block(BLOCK_LOSSES["published"], [0, 1, 0], [True] * 3) == pytest.approx(wanted, rel=1e-9)
    cut = (weights[0] * parts[0] + weights[1] * parts[1]) / (weights[0] + weights[1])
    assert block(BLOCK_LOSSES["published"], [0, 1, 0], [True, True, False]) == pytest.approx(cut, rel=1e-9)
    assert block(BLOCK_LOSSES["published"], [0, 1, 0], [False] * 3) == 0


def test_a_head_without_confidence_has_no_term_for_it() -> None:
    wanted = 0.1 * -log(0.5) + 0.9 * 0.6
    assert block(BlockLoss(), [0, 1, 0], [True, False, False], None) == pytest.approx(wanted, rel=1e-9)
    assert block(BlockLoss(confidence=0.0), [0, 1, 0], [True, False, False]) == pytest.approx(wanted, rel=1e-9)


def test_d_pace_of_a_block() -> None:
    """Labels have .5, .8 and .6: s = .75, .9, .8, P = .75, .675, .54, w = 1.965, 1.215, .54."""
    wanted = (1.965 * -log(0.5) + 1.215 * -log(0.8) + 0.54 * -log(0.6)) / (1.965 + 1.215 + 0.54)
    assert block(BLOCK_LOSSES["d-pace"], [0, 1, 2], [True] * 3, None) == pytest.approx(wanted, rel=1e-9)


def test_d_pace_of_a_block_with_a_label_that_the_head_has_not() -> None:
    """It can never be drafted: c = .5, 0, .6, s = .75, .5, .8, P = .75, .375, .3, w = 1.425, .675, .3."""
    wanted = (1.425 * -log(0.5) + 0.3 * -log(0.6)) / (1.425 + 0.675 + 0.3)
    assert block(BLOCK_LOSSES["d-pace"], [0, -1, 2], [True] * 3, None) == pytest.approx(wanted, rel=1e-9)


def test_lk_losses_of_a_block() -> None:
    weights = [1.0, exp(-0.25), exp(-0.5)]
    for name, loss in (("lk-alpha", lk_alpha), ("lk-lambda", lk_lambda)):
        values = loss(*rows()).tolist()
        wanted = sum(w * one for w, one in zip(weights, values, strict=True)) / sum(weights)
        assert block(BLOCK_LOSSES[name], [0, -1, 0], [True] * 3, None) == pytest.approx(wanted, rel=1e-9)


def test_blocks_are_averaged_together() -> None:
    """Weights are summed over all blocks, so that a short block counts less than a whole one."""
    logits, laws = (torch.stack([one, one]) for one in rows())
    labels, there = torch.tensor([[0, 1, 0], [0, 1, 0]]), torch.tensor([[True] * 3, [True, False, False]])
    second = exp(-0.25)
    entropies = [-log(0.5), -log(0.8), -log(0.2)]
    total = 2 * entropies[0] + second * entropies[1] + exp(-0.5) * entropies[2]
    wanted = total / (2 + second + exp(-0.5))
    assert float(BlockLoss(1.0, 0.0).of(logits, laws, labels, there, None)) == pytest.approx(wanted, rel=1e-9)
