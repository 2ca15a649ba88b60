"""Hedge for experts that sleep: the bound on the regret in simulation, and what weights do."""

import random
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from doubles import step_of

from polydraft.drafters import DraftRequest, RoutedDrafter, Session
from polydraft.drafters.several.hedge import choice_law, hedged
from polydraft.drafters.text.guess import Bounds, Guess, TextDrafter
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.schemes import Given
from polydraft.trees import Chain, Verdict


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


LONG, SPELL = 1200, 100
"""Tokens of the doctored text, and of the spells after which members change places."""


@dataclass(frozen=True)
class Knowing(TextDrafter):
    """Guesses four tokens of a doctored text, or nothing where its stream says so.

    The first member is right in three spells of four, and the others are in the fourth.
    """

    truth: tuple[int, ...]
    number: int
    name = "knowing"
    sound = True

    def guesses(self, state: Any, text: Text, bounds: Bounds) -> tuple[list[Guess], Any]:
        (at,) = text.counts
        stream = random.Random(31 * at + self.number)
        if stream.random() < 0.2:
            return [Guess.nothing()], state
        right = stream.randrange(3, 5) if (at // SPELL % 4 == 3) == (self.number > 0) else stream.randrange(2)
        tokens = [token if place < right else 9 for place, token in enumerate(self.truth[at : at + 4])]
        return [Guess.chain(np.array(tokens, np.int64), 0.2 + 0.3 * self.number)], state


def followed(guess: Guess, path: tuple[int, ...]) -> int:
    """Return how many tokens of a path a chain follows, counted the plain way."""
    tokens = guess.tokens.tolist()
    return next((place for place, one in enumerate(path) if place == len(tokens) or tokens[place] != one), len(path))


def judged(drafter: RoutedDrafter, seed: int) -> tuple[dict[Any, list[float]], dict[Any, float], int]:
    """Let a route write the doctored text; return what each expert's judged gains were above the choice's mean.

    Also what the experts' weights were when they were first awake, and how many steps it took.
    """
    truth = drafter.members[0].truth  # type: ignore[attr-defined]
    tokens, at, rounds = torch.tensor([truth]), 1, 0
    state = drafter.start(Text(tokens, torch.tensor([1])), Session(SamplingParams(temperature=0.0), LONG, 10))
    above, first = dict[Any, list[float]](), dict[Any, float]()
    while at < LONG - 8:
        text = Text(tokens, torch.tensor([at]))
        draft, state = drafter.draft(state, DraftRequest(text, Given(), Chain(4), Noise.from_seed(seed * LONG + at, 1)))
        (one,) = state.rounds
        for expert in one.offers:
            first.setdefault(expert, one.standing.weights[expert])
        kept = followed(one.offers[one.choice], truth[at : at + 9])
        path = truth[at : at + kept + 1]
        verdict = Verdict(torch.arange(1, kept + 1).unsqueeze(0), torch.tensor([kept]), torch.tensor([path[-1]]))
        gains = {
            expert: (1 + followed(guess, path)) / (1 + (0.15 + 0.03 * len(guess) if len(guess) else 0)) / 9
            for expert, guess in one.offers.items()
        }
        mean = sum(one.law[expert] * gain for expert, gain in gains.items())
        for expert, gain in gains.items():
            above.setdefault(expert, []).append(gain - mean)
        state = drafter.commit(state, step_of(text, draft, verdict))
        at, rounds = at + kept + 1, rounds + 1
    return above, first, rounds


@pytest.mark.parametrize("rate", [0.3, 2.0, 32.0])
def test_a_route_between_text_drafters_keeps_the_bound(rate: float) -> None:
    """What the route itself does, not the rule alone: its experts sleep and come late, its gains are what it judges."""
    truth = tuple(np.random.default_rng(5).integers(0, 9, LONG).tolist())
    drafter = RoutedDrafter(tuple(Knowing(truth, number) for number in range(3)), rate=rate)
    for seed in range(2):
        above, first, rounds = judged(drafter, seed)
        assert len(above) >= 4 and rounds > 300
        total = log(sum(map(exp, first.values())))
        for expert, regrets_of in above.items():
            bound = (total - first[expert]) / rate + rate * len(regrets_of) / 8
            assert sum(regrets_of) <= bound
            assert (total - first[expert]) / rate <= log(len(first)) / rate + drafter.sure, "what promises cost at most"
        assert any(sum(one) > 0 for one in above.values())
