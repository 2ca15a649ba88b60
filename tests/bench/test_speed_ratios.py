"""Speed-ups: right values, intervals that cover as often as they claim, and prompts as the unit of chance."""

from dataclasses import replace

import numpy as np
import pytest
from rich.table import Table

from polydraft.bench.bootstrap import Estimate, widening_for_few
from polydraft.bench.speed import PLAIN, verdicts
from polydraft.bench.speed.speed_ups import PairedRuns, SpeedUp, speed_up
from polydraft.bench.speed.summary import ArmResult
from polydraft.cli.generation.summaries import add_comparison
from polydraft.engine import Comparison, Statistics


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


PART = ArmResult(
    PLAIN, "code", 1.0, 1, 2, 2, 9.0, SpeedUp(Estimate(1, 1, 1), Estimate(1, 1, 1), ()), None, None, {}, *[None] * 3
)
BEST = "the best of them, **{}**, {} times plain decoding ({}), is"


def arm(name: str, *ends: float | None) -> ArmResult:
    return replace(PART, arm=name, speed_up=replace(PART.speed_up, total=Estimate(*ends)))


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ([("a", 1.5, 1.3, 1.7), ("b", 0.8, 0.7, 0.9)], "**a** was fastest, 1.50 times plain decoding (1.30 to 1.70)."),
        (
            [("a", 0.8, 0.7, 0.9), ("b", 0.93, 0.9, 0.96)],
            f"no arm was faster than plain decoding; {BEST.format('b', '0.93', '0.90 to 0.96')} slower than it.",
        ),
        (
            [("a", 0.97, 0.9, 1.04)],
            "no arm was faster than plain decoding; "
            f"{BEST.format('a', '0.97', '0.90 to 1.04')} not told apart from it.",
        ),
        (
            [("a", 1.05, 0.97, 1.13), ("b", 0.5, 0.4, 0.6)],
            "no arm was shown to be faster than plain decoding; "
            f"{BEST.format('a', '1.05', '0.97 to 1.13')} not told apart from it.",
        ),
        (
            [("a", 1.2, None, None)],
            "no arm was shown to be faster than plain decoding; "
            f"{BEST.format('a', '1.20', 'one prompt gives no interval')} not told apart from it.",
        ),
        (
            [("a", 1.2, 1.1, 1.3), ("b", 1.3, 0.9, 1.9)],
            "**a** was faster, 1.20 times plain decoding (1.10 to 1.30); **b**, 1.30 times plain "
            "decoding (0.90 to 1.90), is not told apart from it.",
        ),
        (
            [("a", 1.0, 1.0, 1.0)],
            "no arm was faster than plain decoding; "
            f"{BEST.format('a', '1.00', '1.00 to 1.00')} not told apart from it.",
        ),
    ],
)
def test_no_arm_is_called_fastest_that_is_not_told_apart_from_plain_decoding(arms: list[tuple], said: str) -> None:
    (line,) = verdicts([PART, *(arm(*one) for one in arms)])
    assert line == f"Temperature 1, batch 1: {said}"


def test_plain_decoding_alone_has_no_verdict_and_every_setting_its_own() -> None:
    assert verdicts([PART]) == []
    hot = replace(arm("a", 0.9, 0.8, 1.1), temperature=0.0)
    warm, cold = verdicts([PART, hot, arm("a", 2.0, 1.5, 2.5)])
    assert "no arm was faster" in cold and "**a** was fastest, 2.00" in warm


@pytest.mark.parametrize(
    ("ratios", "shown"),
    [
        (
            (1.2, 1.1, 1.3),
            "1.20x over plain decoding at 50.0 tokens per second (median of 3 paired runs, 1.10 to 1.30)",
        ),
        ((0.9, 0.8, 0.95), "0.80 to 0.95): slower than plain decoding"),
        ((1.2, 0.99, 1.3), "0.99 to 1.30): not told apart from plain decoding"),
        ((0.9, 1.0, 0.8), "0.80 to 1.00): not told apart from plain decoding"),
        ((1.5,), "1.50 to 1.50): not told apart from plain decoding"),
    ],
)
def test_a_comparison_says_what_its_pairs_show(ratios: tuple[float, ...], shown: str) -> None:
    plain = Statistics(new_tokens=100, seconds={"total": 2.0})
    table = Table()
    add_comparison(table, Comparison(plain, plain, ratios, (True,) * len(ratios)))
    assert next(iter(table.columns[1].cells)).endswith(shown)
