"""Hedge for experts that sleep: the bound on the regret in simulation, and what weights do."""

import random
from math import log, sqrt

import pytest

from polydraft.drafters.routing import choice_law, hedged


def regrets(rounds: int, rate: float, seed: int, awake: float) -> dict[int, tuple[float, int]]:
    """Return each expert's regret over the rounds in which it was awake, and their number.

    Gains are adversarial: whoever has the largest weight does badly for a while, then experts change places.
    """
    stream, experts = random.Random(seed), range(4)
    weights = dict.fromkeys(experts, 0.0)
    regret, seen = dict.fromkeys(experts, 0.0), dict.fromkeys(experts, 0)
    for number in range(rounds):
        there = [one for one in experts if stream.random() < awake] or [stream.choice(experts)]
        law = choice_law(weights, there)
        leader = max(there, key=weights.__getitem__)
        phase = number // (rounds // 5)
        gains = {one: stream.random() * (0.2 if one == leader else 0.4 + 0.15 * ((one + phase) % 4)) for one in there}
        mean = sum(law[one] * gains[one] for one in there)
        for one in there:
            regret[one], seen[one] = regret[one] + gains[one] - mean, seen[one] + 1
        weights = hedged(weights, gains, rate)
    return {one: (regret[one], seen[one]) for one in experts}


@pytest.mark.parametrize("awake", [1.0, 0.6])
@pytest.mark.parametrize("rate", [0.05, 0.3, 2.0])
def test_the_regret_stays_below_its_bound(rate: float, awake: float) -> None:
    for seed in range(20):
        for regret, rounds in regrets(500, rate, seed, awake).values():
            assert regret <= log(4) / rate + rate * rounds / 8


def test_the_best_rate_gives_the_root_of_the_rounds() -> None:
    rounds = 2000
    rate = sqrt(8 * log(4) / rounds)
    for seed in range(5):
        assert max(one for one, _ in regrets(rounds, rate, seed, 1.0).values()) <= sqrt(rounds * log(4) / 2)


def test_weights_of_those_asleep_and_the_sum_of_those_awake_stay() -> None:
    weights = {"a": 0.3, "b": -1.0, "c": 2.0}
    after = hedged(weights, {"a": 1.0, "b": 0.1}, 0.7)
    assert after["c"] == weights["c"]
    before, later = choice_law(weights, weights), choice_law(after, after)
    assert before["c"] == pytest.approx(later["c"], abs=1e-12)
    assert later["a"] > before["a"] and later["b"] < before["b"]


def test_the_choice_law_is_that_of_the_weights() -> None:
    assert choice_law({"a": log(3.0), "b": 0.0, "c": 9.0}, ["a", "b"]) == pytest.approx({"a": 0.75, "b": 0.25})


def test_a_fast_rate_is_no_error() -> None:
    weights = {"a": 0.0, "b": -2e4, "c": 1.0}
    after = hedged(weights, {"a": 0.0, "b": 1.0}, 1e4)
    assert after["a"] == pytest.approx(0.0) and after["b"] == pytest.approx(-1e4) and after["c"] == 1.0
