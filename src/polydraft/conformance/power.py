"""What a test of given size can see: the smallest deviation that it would have caught, and what chance alone does."""

from math import log

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from polydraft.conformance.evidence import CONCENTRATIONS, dirichlet_evidence
from polydraft.probs import Noise

TRIALS = 40
PROBABILITY = 0.95
STEPS = 12


def distance(counts: Float[Tensor, "*b x"], law: Float[Tensor, " x"]) -> Float[Tensor, "*b"]:
    """Return the total variation between observed frequencies and a law."""
    frequency = counts / counts.sum(dim=-1, keepdim=True).clamp_min(1)
    return (frequency - law).abs().sum(dim=-1) / 2


def distance_by_chance(law: Float[Tensor, " x"], samples: int) -> float:
    """Return the total variation that frequencies of a perfect sampler show on average (by simulation)."""
    counts = torch.poisson((law * samples).expand(TRIALS, -1), generator=_stream())
    return float(distance(counts, law).mean())


def detectable_distance(law: Float[Tensor, " x"], samples: int, threshold: float, families: int) -> float:
    """Return the smallest total variation that `samples` samples would have shown with probability 0.95.

    The deviation is the one that is hardest to see for its size: all outcomes of one half of the probability gain by
    one factor and all others lose by one. Any other deviation of this total variation has a larger chi-square
    distance, since that is at least four times its square. Simulated with 40 samplers per size; only the evidence
    on the whole joint law counts, and only once all samples are there, so the test itself sees a little more.

    Args:
        law: the target's joint law.
        samples: per prompt.
        threshold: the log evidence at which the test stops.
        families: the number by which the weight of the joint law's alternatives is divided in the test.

    Returns:
        The total variation; 1 where not even the largest such deviation would be caught.
    """
    if float(law.max()) > 1 - 1e-9:  # any other token is impossible, so one is enough
        return 1 - (1 - PROBABILITY) ** (1 / samples)
    rising = _half(law)
    most = min(float(law[rising].sum()), float(law[~rising].sum()))
    needed = threshold + log(families * len(CONCENTRATIONS))
    if not _caught(_shifted(law, rising, most), law, samples, needed):
        return 1.0
    low, high = 0.0, most
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _caught(_shifted(law, rising, middle), law, samples, needed) else (middle, high)
    return high


def _stream() -> Generator:
    return Noise.from_seed(0, 1).generators[0]


def _half(law: Float[Tensor, " x"]) -> Tensor:
    """Choose outcomes whose mass is close to one half, taking the likeliest first as long as they fit."""
    chosen, mass = torch.zeros_like(law, dtype=torch.bool), 0.0
    values, order = law.sort(descending=True)
    for value, place in zip(values.tolist(), order.tolist(), strict=True):
        if mass + value <= 0.5 or not mass:
            chosen[place], mass = True, mass + value
    return chosen


def _shifted(law: Float[Tensor, " x"], rising: Tensor, moved: float) -> Float[Tensor, " x"]:
    """Move this much mass from the other outcomes to the rising ones, in proportion to what they have."""
    up, down = law * rising, law * ~rising
    return law + moved * (up / up.sum() - down / down.sum())


def _caught(biased: Float[Tensor, " x"], law: Float[Tensor, " x"], samples: int, needed: float) -> bool:
    """Simulate samplers of a biased law; tell whether enough of them are caught."""
    counts = torch.poisson((biased.clamp_min(0) * samples).expand(TRIALS, -1), generator=_stream())
    kept = counts.any(dim=0)
    logs = torch.stack([_evidence(law, counts, kept, value) for value in CONCENTRATIONS])
    return float((torch.logsumexp(logs, dim=0) >= needed).double().mean()) >= PROBABILITY


def _evidence(law: Tensor, counts: Tensor, kept: Tensor, concentration: float) -> Float[Tensor, " t"]:
    """Leave outcomes that never came out of the sum: they add nothing to it."""
    return dirichlet_evidence(law[kept], counts[:, kept], concentration)
