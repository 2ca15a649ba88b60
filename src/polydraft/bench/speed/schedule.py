"""What is measured in which order: rounds in which every arm continues the same prompts, in an order of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from polydraft.bench.prompts.prompt import Prompt, taking_turns
from polydraft.bench.table import grouped
from polydraft.errors import InvalidParameter
from polydraft.probs import SamplingParams

RoundKey = tuple[str, tuple[str, ...], float, int, int]
"""Task, names of the prompts, temperature, batch size and repeat."""


COLDEST = 1e-30


@dataclass(frozen=True)
class SpeedSettings:
    """How the arms are measured.

    Args:
        temperatures: of sampling; 0 is greedy decoding.
        batch_sizes: prompts that are continued together.
        repeats: how often every batch is measured; repeats differ in their random numbers.
        max_new_tokens: how many tokens every arm gives per prompt, no more and, unless texts end, no less.
        excerpt_tokens: how many tokens of a plain text's passage are the prompt.
        warm_up_tokens: how many tokens every arm gives before it is measured at a temperature and batch size.
        seed: fixes sampled texts and the order of the arms.
        until_end: whether a text ends where the model ends it.
        replay: whether every arm writes the text that a prompt has as `edited`, and ends with it.

    Raises:
        InvalidParameter: a value outside its range.
    """

    temperatures: tuple[float, ...] = (0.0, 1.0)
    batch_sizes: tuple[int, ...] = (1,)
    repeats: int = 1
    max_new_tokens: int = 64
    excerpt_tokens: int = 64
    warm_up_tokens: int = 8
    seed: int = 0
    until_end: bool = False
    replay: bool = False

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)
            if 0 < temperature < COLDEST:
                raise InvalidParameter(
                    f"A temperature is 0 or at least {COLDEST}, since Hugging Face overflows below it, but is "
                    f"{temperature}."
                )
        least = {"repeats": 1, "max_new_tokens": 1, "excerpt_tokens": 1, "warm_up_tokens": 1, "seed": 0}
        values = [(name, getattr(self, name), bound) for name, bound in least.items()]
        for name, value, bound in [*values, *(("batch_sizes", size, 1) for size in self.batch_sizes)]:
            if value < bound:
                raise InvalidParameter(f"{name} must be at least {bound}, but is {value}.")
        for name in ("temperatures", "batch_sizes"):
            several = getattr(self, name)
            if not several or len({*several}) < len(several):
                raise InvalidParameter(f"{name} must be different values, at least one, but are {several}.")

    @property
    def ends(self) -> bool:
        """Whether texts may have fewer tokens than all."""
        return self.until_end or self.replay

    def conditions(self) -> dict[str, object]:
        """Return what runs must agree in to belong together; temperature, batch and repeat are in each of them."""
        names = ("max_new_tokens", "excerpt_tokens", "warm_up_tokens", "seed")
        ends: dict[str, object] = {name: True for name in ("until_end", "replay") if getattr(self, name)}
        return {name: getattr(self, name) for name in names} | ends


@dataclass(frozen=True)
class Round:
    """One batch of prompts of one task, which all arms continue one after the other."""

    prompts: tuple[Prompt, ...]
    temperature: float
    repeat: int

    @property
    def key(self) -> RoundKey:
        """What tells it from other rounds."""
        names = tuple(one.name for one in self.prompts)
        return self.prompts[0].task, names, self.temperature, len(names), self.repeat

    def order(self, arms: int, seed: int) -> list[int]:
        """Return in which order the arms have their turns: a random one, the same whenever the round is run."""
        return np.random.default_rng([seed, crc32(repr(self.key).encode())]).permutation(arms).tolist()


def rounds(prompts: Sequence[Prompt], settings: SpeedSettings) -> list[Round]:
    """Return all rounds; repeats come last and tasks take turns, so that a slow drift of the machine hits all alike."""
    return [
        Round(batch, temperature, repeat)
        for repeat in range(settings.repeats)
        for batch in taking_turns([batches(prompts, size) for size in settings.batch_sizes])
        for temperature in settings.temperatures
    ]


def batches(prompts: Sequence[Prompt], size: int) -> list[tuple[Prompt, ...]]:
    """Return full batches of prompts of one task, tasks taking turns; what does not fill a batch is left out.

    Raises:
        InvalidParameter: no task has enough prompts.
    """
    tasks = grouped(prompts, lambda one: one.task).values()
    found = [[tuple(own[at : at + size]) for at in range(0, len(own) - size + 1, size)] for own in tasks]
    if not any(found):
        most = max(map(len, tasks), default=0)
        raise InvalidParameter(f"Batches of {size} need as many prompts of a task; the largest has {most}.")
    return taking_turns(found)


def left_out(prompts: Sequence[Prompt], settings: SpeedSettings) -> dict[int, int]:
    """Return for each batch size how many prompts fill no batch."""
    used = {size: sum(map(len, batches(prompts, size))) for size in settings.batch_sizes}
    return {size: len(prompts) - count for size, count in used.items() if count < len(prompts)}
