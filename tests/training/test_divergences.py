"""Losses of rows: values and gradients by differences on three tokens, the ends of the mixture, and slips of others."""

from collections.abc import Callable
from functools import partial
from itertools import chain, combinations
from math import log

import pytest
import torch
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.schemes import IID
from polydraft.theory import optimal_acceptance
from polydraft.training.alignment.divergences import (
    drawn_variation,
    hardest,
    mixture_divergence,
    product_loss,
    reverse_divergence,
    sampled_variation,
    several_agreement,
    several_loss,
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
        **{f"lk-alpha-{drafts}": -log(optimum(draft, target, drafts)) for drafts in (1, 2, 4)},
    }


def optimum(draft: list[float], target: list[float], drafts: int) -> float:
    """Return 1 + min_H [p(H) - q(H)^k] over all sets of tokens."""
    sets = chain.from_iterable(combinations(range(3), size) for size in range(4))
    return 1 + min(sum(target[x] for x in one) - sum(draft[x] for x in one) ** drafts for one in sets)


LOSSES: dict[str, Loss] = {
    "forward": forward_divergence,
    "reverse": reverse_divergence,
    "mixture .1": partial(mixture_divergence, share=0.1),
    "mixture .9": partial(mixture_divergence, share=0.9),
    "variation": total_variation,
    "lk-alpha": lk_alpha,
    **{f"lk-alpha-{drafts}": partial(several_loss, drafts=drafts) for drafts in (1, 2, 4)},
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


def covered_by_chance(logits: Tensor, target: Tensor) -> Tensor:
    """Take 1 - (1 - alpha)^2 for what two drafts are accepted by, as if both were verified alone."""
    return -(1 - total_variation(logits, target) ** 2).log()


def of_one_draft(logits: Tensor, target: Tensor) -> Tensor:
    """Train the best single draft, whatever is drawn of it."""
    return lk_alpha(logits, target)


def other_end(logits: Tensor, target: Tensor) -> Tensor:
    """Take in the tokens from the end that the draft underrates."""
    draft = logits.softmax(-1)
    order = (draft / target).argsort()
    gaps = [target[order[:size]].sum() - draft[order[:size]].sum() ** 2 for size in range(4)]
    return -(1 + torch.stack(gaps).min()).log()


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        (covered_by_chance, "lk-alpha-2"),
        (of_one_draft, "lk-alpha-2"),
        (other_end, "lk-alpha-2"),
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


@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_what_several_drafts_are_accepted_by_is_the_optimum_of_theory(drafts: int) -> None:
    stream = torch.Generator().manual_seed(4)
    logits, target = (torch.randn(20, 7, generator=stream, dtype=torch.float64) for _ in range(2))
    target = (2 * target).softmax(-1).where(target > -1, 0.0)
    target = target / target.sum(-1, keepdim=True)
    found = several_agreement(logits, target, drafts)
    torch.testing.assert_close(found, optimal_acceptance(logits.softmax(-1), target, IID(), drafts), rtol=0, atol=1e-12)
    if drafts == 1:
        torch.testing.assert_close(found, 1 - total_variation(logits, target), rtol=0, atol=1e-12)


def test_drawn_tokens_are_the_drafts_own_and_new_ones_each_time() -> None:
    """OSD's mix seeds torch anew at each call, so that the same tokens are drawn for ever."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        logits = LOGITS.expand(4000, 3).clone().requires_grad_()
        slopes = [torch.autograd.grad(drawn_variation(logits, TARGET.expand(4000, 3)).sum(), logits)[0] for _ in "ab"]
    drawn = [one.abs().argmax(-1) for one in slopes]
    assert not torch.equal(*drawn)
    draft, reward = LOGITS.softmax(-1), (TARGET > LOGITS.softmax(-1)).double()
    spread = (draft @ reward * (1 - draft @ reward)) ** 0.5
    exact = slope(lambda one: total_variation(one, TARGET))
    torch.testing.assert_close(slopes[0].mean(0) * spread, exact, rtol=0, atol=0.03)  # five standard errors


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


def test_the_filtered_loss_has_the_gradient_of_the_mean_over_the_tokens_that_are_kept() -> None:
    """KL(p || q) of four tokens, of which a reference finds two easier than the draft does."""
    shifts = torch.tensor([[0.0, 0.4, -0.3], [0.8, -0.5, 0.1], [0.2, 0.2, 0.9], [-1.0, 0.3, 0.0]], dtype=torch.float64)
    reference = torch.tensor([0.4, 0.9, 0.02, 0.01], dtype=torch.float64)
    target = TARGET.expand(4, 3)

    def filtered(logits: Tensor) -> Tensor:
        values = forward_divergence(logits + shifts, target)
        return values[hardest(values, reference, torch.ones(4, dtype=torch.bool), 0.5)].mean()

    def by_hand(logits: Tensor) -> float:
        rows = (logits + shifts).softmax(-1).tolist()
        losses = [sum(a * log(a / b) for a, b in zip(TARGET.tolist(), row, strict=True)) for row in rows]
        gaps = [loss - own for loss, own in zip(losses, reference.tolist(), strict=True)]
        return sum(losses[place] for place in sorted(range(4), key=lambda one: -gaps[one])[:2]) / 2

    assert float(filtered(LOGITS)) == pytest.approx(by_hand(LOGITS), abs=1e-12)
    torch.testing.assert_close(slope(filtered), differences(by_hand), rtol=0, atol=1e-8)
    everything = slope(lambda one: forward_divergence(one + shifts, target).mean())
    assert float((everything - differences(by_hand)).abs().max()) > 1e-3  # without the filter the check fails


def test_products_of_overlaps_are_as_they_are_published() -> None:
    assert float(product_loss(torch.tensor([0.5, 0.5]))) == pytest.approx(1 - (0.5 + 0.25) / 2)
