"""Speed-ups: right values, intervals that cover as often as they claim, and prompts as the unit of chance."""

import numpy as np
import pytest

from polydraft.bench.bootstrap import widening_for_few
from polydraft.bench.speed.ratios import PairedRuns, speed_up


def pair(seconds: float, plain_seconds: float, tokens: int = 64, plain_tokens: int = 64) -> PairedRuns:
    return PairedRuns(tokens, seconds, plain_tokens, plain_seconds)


def simulated(generator: np.random.Generator, prompts: int, repeats: int, ratio: float) -> list[list[PairedRuns]]:
    """Return runs whose ratios scatter by prompt and by repeat around a geometric mean."""
    by_prompt = ratio * np.exp(0.3 * generator.standard_normal(prompts))
    noise = np.exp(0.05 * generator.standard_normal((prompts, repeats)))
    return [[pair(1 / (own * each), 1.0) for each in row] for own, row in zip(by_prompt, noise, strict=True)]


def test_both_means_are_what_they_say() -> None:
    found = speed_up([[pair(1, 2)], [pair(3, 3), pair(3, 3)]])
    assert found.total.mean == pytest.approx(8 / 7)  # 2 + 3 + 3 seconds over 1 + 3 + 3
    assert found.paired.mean == pytest.approx(2 ** (1 / 3))
    assert found.by_prompt == pytest.approx((2.0, 1.0))


def test_tokens_count_and_not_only_seconds() -> None:
    found = speed_up([[pair(2, 1, tokens=30, plain_tokens=10)]])
    assert found.total.mean == pytest.approx(1.5) and found.paired.mean == pytest.approx(1.5)
    assert found.total.low is None and found.total.high is None  # one prompt tells nothing of others


def test_half_and_double_are_equally_far_from_one() -> None:
    found = speed_up([[pair(1, 2)], [pair(2, 1)]] * 4)
    assert found.paired.mean == pytest.approx(1) and found.paired.low * found.paired.high == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("prompts", [3, 8, 24])
def test_intervals_cover_the_true_mean_as_often_as_they_claim(prompts: int) -> None:
    generator, times = np.random.default_rng(prompts), 400
    found = [speed_up(simulated(generator, prompts, 2, 1.4)).paired for _ in range(times)]
    covered = sum(one.low <= 1.4 <= one.high for one in found)
    assert 0.9 * times < covered < 0.99 * times  # 95 % within four standard deviations of a count of 400


def test_repeats_of_a_prompt_are_no_new_evidence() -> None:
    runs = simulated(np.random.default_rng(0), 6, 1, 1.2)
    once, often = speed_up(runs), speed_up([one * 10 for one in runs])
    alone = speed_up([one for one in runs for _ in range(10)])
    for kind in ("total", "paired"):
        first, again, wrong = (getattr(one, kind) for one in (once, often, alone))
        assert (again.low, again.high) == pytest.approx((first.low, first.high))
        assert wrong.high - wrong.low < 0.5 * (first.high - first.low)


def test_equal_arms_have_the_ratio_one_with_no_doubt() -> None:
    found = speed_up([[pair(second, second)] for second in (1.0, 2.0, 5.0)])
    assert (found.total.mean, found.total.low, found.total.high) == pytest.approx((1, 1, 1))


def test_widening_for_few_prompts() -> None:
    assert widening_for_few(1) == 1
    assert widening_for_few(2) == pytest.approx(9.17, abs=0.01)
    assert widening_for_few(10) == pytest.approx(1.217, abs=0.001)
    assert 1 < widening_for_few(1000) < 1.003
