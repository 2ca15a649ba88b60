"""Hedge for experts that sleep: weights that follow who would have done best, with a bound on the regret."""

from collections.abc import Collection, Mapping
from math import exp, log
from typing import TypeVar

Expert = TypeVar("Expert")


def choice_law(weights: Mapping[Expert, float], awake: Collection[Expert]) -> dict[Expert, float]:
    """Return the law by which one of the experts that are awake is chosen: pi_e = w_e / sum of w over those awake.

    Args:
        weights: the logarithms of the experts' weights.
        awake: the experts that have something to say in this round, at least one.
    """
    most = max(weights[expert] for expert in awake)
    raw = {expert: exp(weights[expert] - most) for expert in awake}
    total = sum(raw.values())
    return {expert: value / total for expert, value in raw.items()}


def chosen(law: Mapping[Expert, float], uniform: float) -> Expert:
    """Draw an expert, by a number from [0, 1)."""
    for expert, share in law.items():
        uniform -= share
        if uniform < 0:
            return expert
    return next(reversed([*law]))


def hedged(weights: Mapping[Expert, float], gains: Mapping[Expert, float], rate: float) -> dict[Expert, float]:
    """Return the logarithms of weights after a round.

    With pi the choice law of those awake and g their gains, all in [0, 1],

        w_e <- w_e exp(rate (g_e - m)),   m = log(sum_e pi_e exp(rate g_e)) / rate,

    which leaves the sum of all weights as it is. So for every expert u that began with the share pi_u, over the rounds
    in which it is awake,

        sum (g_u - sum_e pi_e g_e)  <=  log(1 / pi_u) / rate + rate * rounds / 8:

    its weight never exceeds the sum, hence sum (g_u - m) <= log(1 / pi_u) / rate, and m is at most the mean gain plus
    rate / 8 (Hoeffding's lemma). With rate = sqrt(8 log(n) / rounds) this is sqrt(rounds log(n) / 2).

    Args:
        weights: the logarithms of all weights.
        gains: of the experts that were awake, also of those that were not chosen.
        rate: how fast weights move.

    Source: Freund, Schapire, Singer and Warmuth, STOC 1997 (experts that sleep); HedgeSpec, arXiv 2510.20064.
    """
    before = {expert: weights[expert] for expert in gains}
    after = {expert: weight + rate * gains[expert] for expert, weight in before.items()}
    mixed = (_log_sum(after.values()) - _log_sum(before.values())) / rate
    return {**weights, **{expert: weights[expert] + rate * (gain - mixed) for expert, gain in gains.items()}}


def _log_sum(values: Collection[float]) -> float:
    """Return log(sum(exp(v))), also where exp(v) is no number that there is room for."""
    most = max(values)
    return most + log(sum(exp(value - most) for value in values))
