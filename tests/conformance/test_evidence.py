"""The statistics of the sequential test: exact expectation, false alarms, power, and what the report says of it."""

from itertools import product
from math import factorial, log, prod

import pytest
import torch
from torch import Tensor

from polydraft.conformance.evidence import (
    CONCENTRATIONS,
    Evidence,
    JointLaw,
    detectable_distance,
    dirichlet_evidence,
    distance,
    distance_by_chance,
)

ALPHA = 0.05


def law(*shape: int, seed: int = 0) -> JointLaw:
    mass = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3 + 0.02
    return JointLaw(mass / mass.sum())


def counted(probs: Tensor, samples: int, runs: int, seed: int) -> Tensor:
    """Return the counts of samples from a law, in many runs."""
    stream = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(probs.flatten().expand(runs, -1), samples, replacement=True, generator=stream)
    return torch.zeros(runs, probs.numel(), dtype=torch.float64).scatter_add(1, drawn, torch.ones_like(drawn).double())


def every_count(cells: int, samples: int) -> list[tuple[int, ...]]:
    return [counts for counts in product(range(samples + 1), repeat=cells) if sum(counts) == samples]


def chance(counts: tuple[int, ...], probs: list[float]) -> float:
    ways = factorial(sum(counts)) / prod(map(factorial, counts))
    return ways * prod(share**times for share, times in zip(probs, counts, strict=True))


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_the_evidence_has_mean_one_under_the_law(samples: int) -> None:
    """By enumeration of all counts of two prompts with two tokens of two kinds each."""
    laws = [law(2, 2, seed=1), law(2, 2, seed=2)]
    every = every_count(4, samples)
    both = list(product(every, every))
    counts = [torch.tensor([pair[place] for pair in both], dtype=torch.float64) for place in (0, 1)]
    weights = [[chance(one, law_.probs.flatten().tolist()) for one in every] for law_ in laws]
    weight = torch.tensor([a * b for a, b in product(*weights)], dtype=torch.float64)
    assert float(weight.sum()) == pytest.approx(1, abs=1e-12)
    assert float(weight @ Evidence(laws).log_e(counts).exp()) == pytest.approx(1, abs=1e-9)


def test_the_evidence_is_a_martingale() -> None:
    """What it is after one more sample is on average what it is now, whatever was seen so far."""
    one = law(3, 3)
    seen = counted(one.probs, 40, 1, seed=3)[0]
    now = Evidence([one]).log_e([seen])
    later = Evidence([one]).log_e([seen + torch.eye(9, dtype=torch.float64)])
    assert float(one.probs.flatten() @ later.exp()) == pytest.approx(float(now.exp()), rel=1e-9)


def test_the_closed_form_is_the_product_of_predictions() -> None:
    one, concentration = law(4), 10.0
    drawn = [2, 0, 2, 2, 1, 3, 2]
    ratio, counts = 1.0, torch.zeros(4, dtype=torch.float64)
    for token in drawn:
        predicted = (concentration * one.probs[token] + counts[token]) / (concentration + counts.sum())
        ratio *= float(predicted / one.probs[token])
        counts[token] += 1
    assert float(dirichlet_evidence(one.probs, counts, concentration)) == pytest.approx(log(ratio), abs=1e-10)


def looks(probs: list[Tensor], laws: list[JointLaw], runs: int, rounds: int, each: int, seed: int) -> Tensor:
    """Return for each run whether the evidence ever reached 1 / ALPHA, looking after every round."""
    evidence = Evidence(laws)
    counts = [torch.zeros(runs, one.numel(), dtype=torch.float64) for one in probs]
    reached = torch.zeros(runs, dtype=torch.bool)
    for look in range(rounds):
        counts = [
            seen + counted(one, each, runs, seed=seed + 10 * look + place)
            for place, (seen, one) in enumerate(zip(counts, probs, strict=True))
        ]
        reached |= evidence.log_e(counts) >= -log(ALPHA)
    return reached


@pytest.mark.parametrize(("shape", "each"), [((3,), 1), ((3, 3), 5), ((5, 5), 40)])
def test_a_correct_sampler_is_called_wrong_at_most_as_often_as_stated(shape: tuple[int, ...], each: int) -> None:
    laws = [law(*shape, seed=4), law(*shape, seed=5)]
    reached = looks([one.probs for one in laws], laws, runs=600, rounds=60, each=each, seed=1000)
    assert 0 < float(reached.double().mean()) <= ALPHA


def test_looking_often_at_an_ordinary_test_would_not_keep_the_rate() -> None:
    """The chi-square test, looked at after every round, calls many correct samplers wrong: ours has to do better."""
    one, runs = law(3, seed=4), 600
    counts, reached = torch.zeros(runs, 3, dtype=torch.float64), torch.zeros(runs, dtype=torch.bool)
    for look in range(60):
        counts += counted(one.probs, 5, runs, seed=2000 + look)
        expected = counts.sum(dim=-1, keepdim=True) * one.probs
        statistic = ((counts - expected) ** 2 / expected).sum(dim=-1)
        reached |= statistic > -2 * log(ALPHA)  # chi-square with two degrees of freedom
    assert float(reached.double().mean()) > 3 * ALPHA


def test_a_small_bias_is_caught_and_a_smaller_one_later() -> None:
    one = law(4, 4, seed=6)
    biases = [one.probs + amount * (torch.eye(4, dtype=torch.float64) / 4 - one.probs) for amount in (0.3, 0.1, 0.0)]
    early = [float(looks([bias], [one], 100, 10, 50, 3000).double().mean()) for bias in biases]
    late = [float(looks([bias], [one], 100, 60, 50, 3000).double().mean()) for bias in biases]
    assert early[0] > 0.9 > early[1] > early[2]
    assert late[1] > 0.9 and late[2] <= ALPHA


def test_a_bias_of_one_prompt_among_many_is_caught_and_so_is_a_faint_one_of_all() -> None:
    laws = [law(4, 4, seed=seed) for seed in range(8)]
    honest = [one.probs for one in laws]
    bent = [one.at_temperature(1.5).view(4, 4) for one in laws]
    alone = looks([*honest[:-1], bent[-1]], laws, 50, 20, 50, 4000)
    assert float(alone.double().mean()) > 0.9
    faint = [one.at_temperature(1.1).view(4, 4) for one in laws]
    shared = looks(faint, laws, 50, 20, 50, 5000)
    single = looks(faint[:1], laws[:1], 50, 20, 50, 5000)
    assert float(shared.double().mean()) > 0.9 > float(single.double().mean())


def test_an_impossible_outcome_is_infinite_evidence() -> None:
    probs = torch.tensor([[0.5, 0.0], [0.25, 0.25]], dtype=torch.float64)
    evidence = Evidence([JointLaw(probs), law(2, 2)])
    fine, counts = torch.tensor([[3.0, 0.0, 2.0, 1.0]]).double(), torch.tensor([[3.0, 1.0, 2.0, 1.0]]).double()
    assert bool(evidence.log_e([fine, fine]).isfinite())
    assert float(evidence.log_e([counts, fine])) == float("inf")


def test_tempering_tempers_every_next_token_law() -> None:
    one = law(3, 3, seed=7)
    first, second = one.probs.sum(-1), one.probs / one.probs.sum(-1, keepdim=True)
    wanted = (first**2 / (first**2).sum()).unsqueeze(-1) * (second**2 / (second**2).sum(-1, keepdim=True))
    torch.testing.assert_close(one.at_temperature(0.5).view(3, 3), wanted)
    torch.testing.assert_close(one.at_temperature(1.0).view(3, 3), one.probs)


SAMPLES = 2000


def test_the_detectable_distance_is_detected() -> None:
    """Whatever the direction, samplers that are off by the stated distance are caught; by a half of it, they are not.

    In the hardest direction, that is: half of the outcomes too likely by one factor.
    """
    one, threshold = law(4, 4, seed=8), log(1e6)
    probs = one.probs.flatten()
    found = detectable_distance(probs, SAMPLES, threshold + log(2), one.probs.dim() + 1)
    assert 0.02 < found < 0.3
    stream = torch.Generator().manual_seed(9)

    def caught(size: float, direction: Tensor) -> float:
        up, down = probs * direction, probs * (1 - direction)
        bias = probs + size * (up / up.sum() - down / down.sum())
        assert float((bias - probs).abs().sum()) / 2 == pytest.approx(size) and bool((bias >= 0).all())
        log_e = Evidence([one]).log_e([counted(bias, SAMPLES, 200, seed=10)])
        return float((log_e >= threshold).double().mean())

    tried = [(torch.rand(16, generator=stream) < 0.5).double() for _ in range(12)]
    usable = [half for half in tried if float((probs * (1 - half)).sum()) > found and bool(half.any())]
    assert len(usable) > 5
    assert min(caught(found, half) for half in usable) > 0.9
    hardest = min(usable, key=lambda half: abs(float(probs @ half) - 0.5))
    assert caught(found / 2, hardest) < 0.5


def test_the_detectable_distance_at_its_ends() -> None:
    certain = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    assert detectable_distance(certain, 1, 14.0, 2) == pytest.approx(0.95)
    assert detectable_distance(certain, 100, 14.0, 2) == pytest.approx(1 - 0.05**0.01)
    assert detectable_distance(law(4, 4).probs.flatten(), 3, 14.0, 3) == 1.0
    sizes = [detectable_distance(law(4, 4).probs.flatten(), samples, 14.0, 3) for samples in (200, 2000, 20_000)]
    assert sizes == sorted(sizes, reverse=True) and sizes[1] > 2 * sizes[2]


def test_the_distance_by_chance_is_that_of_correct_samplers() -> None:
    one = law(5, 5, seed=11)
    seen = distance(counted(one.probs, 500, 400, seed=12), one.probs.flatten())
    assert distance_by_chance(one.probs.flatten(), 500) == pytest.approx(float(seen.mean()), rel=0.1)


def test_concentrations_reach_from_coarse_to_fine() -> None:
    """The best one grows with the number of samples that are needed."""
    one = law(4, seed=13)
    best = []
    for amount, samples in ((0.5, 100), (0.05, 5000)):
        bias = one.probs + amount * (0.25 - one.probs)
        counts = counted(bias, samples, 20, seed=14)
        means = [float(dirichlet_evidence(one.probs, counts, value).mean()) for value in CONCENTRATIONS]
        best.append(means.index(max(means)))
    assert best[0] < best[1]
