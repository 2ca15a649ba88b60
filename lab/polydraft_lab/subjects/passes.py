"""What a pass of a model costs, by the tokens that it scores and by those that it has read before."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.models import LanguageModel
from polydraft.probs import Noise
from polydraft.trees import causal_mask
from polydraft_lab.subjects.clock import Progress, unseen, wall_milliseconds


@dataclass(frozen=True)
class PassSettings:
    """How passes are timed.

    Args:
        known: how many tokens were read before.
        widths: how many tokens a pass scores.
        repeats: how often each pass is timed.
        seed: fixes the tokens, which are drawn at random.

    Raises:
        InvalidParameter: a number below 1, a seed below 0, or a number that is given twice.
    """

    known: tuple[int, ...] = (64, 512)
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    repeats: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values in (("known", self.known), ("widths", self.widths)):
            if not values or len({*values}) < len(values) or min(values) < 1:
                raise InvalidParameter(f"{name} must be different numbers >= 1, at least one, but are {values}.")
        for name, bound in (("repeats", 1), ("seed", 0)):
            if getattr(self, name) < bound:
                raise InvalidParameter(f"{name} must be at least {bound}, but is {getattr(self, name)}.")


@dataclass(frozen=True)
class PassTime:
    """What the passes of one kind took.

    Args:
        model: the model's name.
        known: how many tokens it had read.
        width: how many tokens a pass scored.
        milliseconds: the median.
        fastest: the shortest pass.
        slowest: the longest one.
        passes: how many there were.
    """

    model: str
    known: int
    width: int
    milliseconds: float
    fastest: float
    slowest: float
    passes: int


def check_room(models: Mapping[str, LanguageModel], settings: PassSettings) -> None:
    """Check that every pass fits into every model's context.

    Raises:
        InvalidParameter: the longest does not.
    """
    known, width = max(settings.known), max(settings.widths)
    for name, model in models.items():
        if known + width > model.facts.context:
            raise InvalidParameter(
                f"A pass over {width} tokens after {known} does not fit into the context of {name}, "
                f"{model.facts.context} tokens: give smaller numbers, or a model with a longer context."
            )


def time_passes(
    models: Mapping[str, LanguageModel], settings: PassSettings, on_progress: Progress = unseen
) -> Iterator[PassTime]:
    """Time the passes of all models; the results of one number of known tokens come together.

    Models and widths take turns, so that a slow drift of the machine meets all alike.

    Args:
        models: the models by name.
        settings: which passes, and how often.
        on_progress: told of every turn.

    Raises:
        InvalidParameter: a pass does not fit into a context.
    """
    check_room(models, settings)
    noise, turns = Noise.from_seed(settings.seed, 1), len(settings.known) * settings.repeats
    for place, known in enumerate(settings.known):
        times: dict[tuple[str, int], list[float]] = {(one, width): [] for one in models for width in settings.widths}
        for turn in range(settings.repeats):
            for width in settings.widths:
                for name, model in models.items():
                    tokens = _tokens(model, width, noise)
                    times[name, width].append(time_pass(model, known, tokens))
            on_progress("turns", place * settings.repeats + turn + 1, turns)
        for (name, width), taken in times.items():
            yield PassTime(name, known, width, median(taken), min(taken), max(taken), len(taken))


def _tokens(model: LanguageModel, width: int, noise: Noise) -> Tensor:
    return (
        (noise.uniform(width) * model.facts.vocab_size)
        .long()
        .clamp_max(model.facts.vocab_size - 1)
        .to(model.facts.device)
    )


@torch.inference_mode()
def time_pass(model: LanguageModel, known: int, tokens: Tensor) -> float:
    """Return the milliseconds of one pass over tokens of shape [1, t] after `known` ones.

    The pass is made twice, since the first one also reserves the cache, and the shorter time counts. What the known
    tokens were does not matter for the time: their keys are zero.
    """
    total = known + tokens.shape[1]
    cache, starts = model.new_cache(1, total), torch.tensor([known], device=model.facts.device)
    places = torch.arange(known, total, device=model.facts.device).unsqueeze(0)
    mask = causal_mask(torch.tensor([total], device=model.facts.device), total, known)
    score = partial(model.forward, tokens, places, mask, cache, starts)
    return min(wall_milliseconds(score, model.facts.device) for _ in range(2))
