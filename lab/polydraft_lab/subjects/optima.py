"""What the optimum itself costs: the largest acceptance over a whole vocabulary, and at a batch of nodes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.probs import Noise
from polydraft.schemes import Scheme, WithoutReplacement, most_drafts_of
from polydraft.theory import SuccessiveLaw, optimal_set, time_nodes
from polydraft_lab.subjects.clock import Progress, one_thread, own_milliseconds, unseen
from polydraft_lab.subjects.rows import rows_for
from polydraft_lab.subjects.rules import RulesSettings

SPREAD = 3.0
"""The standard deviation of the draft's logits; the target's are the draft's and standard normal noise."""
FINER = 4.0
"""How many times as many nodes a quadrature has that tells another's error."""


@dataclass(frozen=True)
class OptimumTime:
    """What it takes to compute the largest acceptance that a scheme allows.

    Args:
        scheme: the scheme's name.
        drafts: drafts at a node.
        rows: how many nodes at once.
        tokens: the tokens of a row.
        milliseconds: the median.
        fastest: the shortest time.
        slowest: the longest one.
        quadrature: the nodes of the quadrature over time, where the scheme needs one.
        error: how far the chances that it gives are from those of a finer one, at most.
    """

    scheme: str
    drafts: int
    rows: int
    tokens: int
    milliseconds: float
    fastest: float
    slowest: float
    quadrature: int | None
    error: float | None


def measure_optima(
    schemes: Sequence[Scheme], settings: RulesSettings, on_progress: Progress = unseen
) -> Iterator[OptimumTime]:
    """Time the optimum of every scheme on random rows, on a CPU: over a vocabulary, then at a batch of shortlists.

    Without replacement the accuracy of the quadrature is measured too. `Product` drafts, whose optimum is a
    search, are left out over the vocabulary.

    Args:
        schemes: the schemes.
        settings: the vocabulary, the nodes of the batch and their shortlist, and the numbers of drafts.
        on_progress: told of every result.
    """
    shapes = ((1, settings.vocabulary), (settings.nodes, settings.shortlist + 1))
    whole, short = (random_rows(*shape, settings.seed) for shape in shapes)
    rows = {shapes[0]: whole, shapes[1]: (without_tail(short[0]), short[1])}
    tasks = [
        (shape, scheme, k)
        for shape in shapes
        for scheme in schemes
        for k in _numbers(scheme, settings.drafts)
        if not scheme.several_rows or shape != shapes[0]
    ]
    for done, (shape, scheme, k) in enumerate(tasks, start=1):
        draft, target = rows[shape]
        drawn, counts = rows_for(scheme, draft), torch.full((len(draft),), k)
        times = _times(partial(optimal_set, scheme, drawn, target, counts), settings.repeats)
        accuracy = quadrature_of(draft, k) if scheme == WithoutReplacement() else (None, None)
        yield OptimumTime(scheme.name, k, *shape, median(times), min(times), max(times), *accuracy)
        on_progress("optima", done, len(tasks))


def _numbers(scheme: Scheme, drafts: Sequence[int]) -> list[int]:
    """Return the numbers of drafts, but no more than the scheme draws."""
    return sorted({min(k, most_drafts_of(scheme)) for k in drafts})


def random_rows(count: int, size: int, seed: int) -> tuple[Float[Tensor, "m A"], Float[Tensor, "m A"]]:
    """Return draft and target rows of normal logits."""
    (stream,) = Noise.from_seed(seed, 1).generators
    logits = SPREAD * torch.randn(count, size, generator=stream, dtype=torch.float64)
    noise = torch.randn(count, size, generator=stream, dtype=torch.float64)
    return logits.softmax(dim=-1), (logits + noise).softmax(dim=-1)


def without_tail(draft: Float[Tensor, "m A"]) -> Float[Tensor, "m A"]:
    """Return draft rows with nothing on the last atom, which stands for all tokens that are not listed."""
    listed = draft[:, :-1]
    return torch.nn.functional.pad(listed / listed.sum(dim=-1, keepdim=True), (0, 1))


def _times(call: Callable[[], object], repeats: int) -> list[float]:
    with one_thread():
        call()
        return [own_milliseconds(call, torch.device("cpu")) for _ in range(repeats)]


def quadrature_of(draft: Float[Tensor, "m A"], k: int) -> tuple[int | None, float | None]:
    """Return the nodes of the quadrature for k successive drafts, and its largest error in a chance.

    The error is the difference from four times as many nodes, over all prefixes of the tokens as they stand. Fewer
    than three drafts need no quadrature.
    """
    law = SuccessiveLaw.of(draft, torch.full((len(draft),), k))
    if law.most < 3:
        return None, None
    finer = SuccessiveLaw(law.rates, law.counts, law.most, time_nodes(law.rates, law.counts, law.most, FINER))
    return law.nodes.time.shape[-1], float((law.chain() - finer.chain()).abs().max())
