"""Losses of rows: values and gradients by differences on three tokens, the ends of the mixture, and slips of others."""

from collections.abc import Callable
from functools import partial
from math import log

import pytest
import torch
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.training.alignment.divergences import (
    hardest,
    mixture_divergence,
    product_loss,
    reverse_divergence,
    sampled_variation,
)
from polydraft.training.heads.losses.row_losses import (
    forward_divergence,
    lk_alpha,
    lk_lambda,
    total_variation,
    weighted,
)

LOGITS = torch.tensor([0.9, -0.3, 0.2], dtype=torch.float64)
TARGET = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
Loss = Callable[[Tensor, Tensor], Tensor]


def slope(loss: Callable[[Tensor], Tensor], logits: Tensor = LOGITS) -> Tensor:
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def differences(loss: Callable[[Tensor], float]) -> Tensor:
    ends = [[float(loss(LOGITS + way * 1e-6 * torch.eye(3)[place])) for way in (1, -1)] for place in range(3)]
    return torch.tensor([(high - low) / 2e-6 for high, low in ends], dtype=torch.float64)


def enumerated(logits: Tensor) -> dict[str, float]:
    """Return each loss as a sum over the tokens, one by one."""
    draft, target = (logits.exp() / logits.exp().sum()).tolist(), TARGET.tolist()

    def divergence(one: list[float], other: list[float]) -> float:
        return sum(a * log(a / b) for a, b in zip(one, other, strict=True))

    def mixture(share: float) -> float:
        mixed = [share * a + (1 - share) * b for a, b in zip(target, draft, strict=True)]
        both = share * divergence(target, mixed) + (1 - share) * divergence(draft, mixed)
        return both / (share * (1 - share))

    overlap = sum(map(min, target, draft))
    return {
        "forward": divergence(target, draft),
        "reverse": divergence(draft, target),
        "mixture .1": mixture(0.1),
        "mixture .9": mixture(0.9),
        "variation": 1 - overlap,
        "lk-alpha": -log(overlap),
    }


LOSSES: dict[str, Loss] = {
    "forward": forward_divergence,
    "reverse": reverse_divergence,
    "mixture .1": partial(mixture_divergence, share=0.1),
    "mixture .9": partial(mixture_divergence, share=0.9),
    "variation": total_variation,
    "lk-alpha": lk_alpha,
}


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_of_the_sums(name: str) -> None:
    loss = partial(LOSSES[name], target=TARGET)
    assert float(loss(LOGITS)) == pytest.approx(enumerated(LOGITS)[name], abs=1e-12)
    exact = differences(lambda logits: enumerated(logits)[name])
    torch.testing.assert_close(slope(loss), exact, rtol=0, atol=1e-8)


def test_the_hybrid_weighs_both_by_a_number() -> None:
    """w FKL + (1 - w) TVD with w = exp(-3 alpha), through which no gradient goes."""
    weight = float((-3 * (1 - total_variation(LOGITS, TARGET))).exp())
    mixed = weight * slope(lambda one: forward_divergence(one, TARGET))
    mixed = mixed + (1 - weight) * slope(lambda one: total_variation(one, TARGET))
    torch.testing.assert_close(slope(lambda one: lk_lambda(one, TARGET)), mixed, rtol=0, atol=1e-12)


def test_the_mixture_tends_to_both_divergences_and_is_them_at_its_ends() -> None:
    for end, inside, other in ((0.0, 1e-6, forward_divergence), (1.0, 1 - 1e-6, reverse_divergence)):
        exact = slope(lambda one, other=other: other(one, TARGET))
        assert torch.equal(slope(lambda one, end=end: mixture_divergence(one, TARGET, end)), exact)
        near = slope(lambda one, inside=inside: mixture_divergence(one, TARGET, inside))
        torch.testing.assert_close(near, exact, rtol=0, atol=1e-5)
    with pytest.raises(InvalidParameter, match=r"in \[0, 1\], but is 1.5"):
        mixture_divergence(LOGITS, TARGET, 1.5)


def unscaled(logits: Tensor, target: Tensor) -> Tensor:
    """JSD as it is written, b a slider (ms-swift#10078): nothing is learnt near the ends."""
    return 0.1 * 0.9 * mixture_divergence(logits, target, 0.9)


def logs_mixed(logits: Tensor, target: Tensor) -> Tensor:
    """Mix log-probabilities instead of probabilities (TRL#2202)."""
    log_draft = logits.log_softmax(-1)
    mixed = 0.9 * target.log() + 0.1 * log_draft
    return ((target * (target.log() - mixed)).sum(-1) / 0.1) + (log_draft.exp() * (log_draft - mixed)).sum(-1) / 0.9


def swapped(logits: Tensor, target: Tensor) -> Tensor:
    """Give the target the draft's share of the mixture (TRL#3043)."""
    return mixture_divergence(logits, target, 0.1)


def two_divergences(logits: Tensor, target: Tensor) -> Tensor:
    """Call .9 FKL + .1 RKL a Jensen-Shannon divergence (OSD)."""
    return 0.9 * forward_divergence(logits, target) + 0.1 * reverse_divergence(logits, target)


def reversed_arguments(logits: Tensor, target: Tensor) -> Tensor:
    """Take F.kl_div(a, b) for KL(a, b) (twinkle#112, aprender#2153)."""
    return reverse_divergence(logits, target)


def other_argmax(logits: Tensor, target: Tensor) -> Tensor:
    """Compare with the target's law of temperature 0.001 (OSD's mix)."""
    return forward_divergence(logits, (target.log() / 1e-3).softmax(-1))


def in_bfloat16(logits: Tensor, target: Tensor) -> Tensor:
    """Round the draft's scores to bfloat16."""
    return forward_divergence(logits.bfloat16().double(), target)


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        (unscaled, "mixture .9"),
        (logs_mixed, "mixture .9"),
        (swapped, "mixture .9"),
        (two_divergences, "mixture .1"),
        (reversed_arguments, "forward"),
        (other_argmax, "forward"),
        (in_bfloat16, "forward"),
    ],
)
def test_the_gradient_check_fails_for_mistakes(mistake: Loss, name: str) -> None:
    exact = differences(lambda logits: enumerated(logits)[name])
    assert float((slope(lambda one: mistake(one, TARGET)) - exact).abs().max()) > 1e-4


def test_sampled_variation_has_the_gradient_of_the_sum_divided_by_its_spread() -> None:
    """Every token as often as the draft draws it, in a batch of a hundred: no noise is left."""
    draft = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    drawn = torch.repeat_interleave(torch.arange(3), torch.tensor([50, 30, 20]))
    reward = (TARGET > draft)[drawn].double()
    found = slope(lambda one: sampled_variation(one.expand(100, 3), TARGET.expand(100, 3), drawn).mean(), draft.log())
    exact = slope(lambda one: total_variation(one, TARGET), draft.log())
    torch.testing.assert_close(found * reward.std(correction=0), exact, rtol=0, atol=1e-12)
    assert float(exact.abs().max()) > 0.01


def test_all_rewarded_tokens_of_a_batch_teach_nothing() -> None:
    drawn = torch.tensor([1, 1])
    found = slope(lambda one: sampled_variation(one.expand(2, 3), TARGET.expand(2, 3), drawn).sum())
    assert not bool(found.any())


GAPS = torch.tensor([[0.1, 0.9, 0.8, 0.7], [0.0, 0.2, 0.1, 9.0]])
VALID = torch.tensor([[True] * 4, [True, True, False, False]])


def test_the_filter_ranks_valid_tokens_of_the_whole_batch_by_the_gap_to_the_reference() -> None:
    losses, reference = GAPS + 5, torch.full_like(GAPS, 5.0)
    assert hardest(losses, reference, VALID, 0.5).tolist() == [[False, True, True, True], [False] * 4]
    assert hardest(losses, losses - GAPS.flip(1), VALID, 0.2).tolist() == [[False] * 4, [True, False, False, False]]
    assert int(hardest(losses, reference, VALID, 1e-6).sum()) == 1
    assert not bool(hardest(losses, reference, torch.zeros_like(VALID)).any())
    with pytest.raises(InvalidParameter, match=r"\(0, 1\], but is 0"):
        hardest(losses, reference, VALID, 0)


def test_the_filter_is_neither_that_of_micro_batches_nor_a_mean_over_all_tokens() -> None:
    """AdaSPEC's code ranks inside of micro-batches, and divides by all tokens: its rate is scaled by the share."""
    losses, reference = GAPS + 5, torch.full_like(GAPS, 5.0)
    kept = hardest(losses, reference, VALID, 0.5)
    micro = [hardest(losses[row : row + 1], reference[row : row + 1], VALID[row : row + 1], 0.5) for row in (0, 1)]
    assert not torch.equal(torch.cat(micro), kept)
    mean, by_all = weighted(losses, kept.float()), (losses * kept).sum() / VALID.sum()
    assert float(by_all) == pytest.approx(float(mean) / 2)


def test_products_of_overlaps_are_as_they_are_published() -> None:
    assert float(product_loss(torch.tensor([0.5, 0.5]))) == pytest.approx(1 - (0.5 + 0.25) / 2)
