"""The planner beside plain decoding and fixed trees, where drafts pay and where they do not.

Every text is written by all arms side by side: whoever has written least takes the next step, so that a machine whose
speed drifts meets all alike.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import harmonic_mean
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Generator, Tensor, nn

from polydraft.bench.speed import PromptBatch
from polydraft.drafters import LookupFirst, NgramDrafter, NoDraft
from polydraft.engine import Planner, Run, as_drafter, stream
from polydraft.engine.choices import default_policy
from polydraft.errors import InvalidParameter
from polydraft.machine_code import clock
from polydraft.models import Pair
from polydraft.planning import arms_beside
from polydraft.probs import Noise, SamplingParams
from polydraft.trees import TreePolicy
from polydraft_lab.subjects.clock import Progress, unseen

PLAIN, PLANNER = "plain decoding", "planner"
NOISE = 0.3
"""The standard deviation of the noise in a slow draft's weights, in that of the weights."""
WARM_UP = 8
"""How many tokens every arm writes before anything counts, since the first pass of a new shape is slow."""
Model = TypeVar("Model", bound=nn.Module)
Drafts = Callable[[Pair], Any]
Arm = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class PlannerSetting:
    """A draft model and a temperature under which the planner is tried.

    Args:
        name: what the setting is called.
        drafts: makes the draft model of a pair.
        temperature: of both models; sampling is from the whole distribution.
        batch_size: texts that are continued together.
        beside_trees: whether every fixed tree is measured too: that of the default and the planner's own.
    """

    name: str
    drafts: Drafts
    temperature: float
    batch_size: int = 1
    beside_trees: bool = False


def shuffled(model: Model, stream: Generator) -> Model:
    """Return a copy of a draft model with each of its weights in random order: it costs as much and knows nothing."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            order = torch.randperm(weight.numel(), generator=stream).to(weight.device)
            weight.copy_(weight.flatten()[order].view_as(weight))
    return twin


def noisy(model: Model, stream: Generator) -> Model:
    """Return a copy of a target with noise in its weights: as slow as the target, and right now and then."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            noise = torch.randn(weight.shape, generator=stream).to(weight)
            weight.add_(NOISE * weight.std() * noise)
    return twin


def _useless(pair: Pair) -> Any:
    return shuffled(_draft(pair), Noise.from_seed(0, 1).generators[0])


def _slow(pair: Pair) -> Any:
    return noisy(pair.target, Noise.from_seed(0, 1).generators[0])


def _draft(pair: Pair) -> Any:
    if pair.draft is None:
        raise InvalidParameter("A planner chooses trees for a draft model: give --draft beside --target.")
    return pair.draft


SETTINGS = (
    PlannerSetting("useless draft, temperature 0", _useless, 0.0),
    PlannerSetting("useless draft, temperature 1", _useless, 1.0),
    PlannerSetting("draft as slow as the target", _slow, 0.0),
    PlannerSetting("temperature 1.5", _draft, 1.5),
    PlannerSetting("batch 16, temperature 1", _draft, 1.0, batch_size=16),
    PlannerSetting("good pair, temperature 0", _draft, 0.0, beside_trees=True),
    PlannerSetting("good pair, temperature 1", _draft, 1.0, beside_trees=True),
)
"""Settings that are hard for a planner, and the pair as it is."""


@dataclass(frozen=True)
class PlannerOptions:
    """How the arms are measured.

    Args:
        max_new_tokens: tokens of every text; the end-of-text token ends none.
        repeats: how often every text is written; batches are written eight times as often, since they are few.
        fresh: whether every text has a planner that knows nothing; else one planner serves all texts of a setting.
        seed: fixes sampled texts; each text has a seed of its own.

    Raises:
        InvalidParameter: a value outside its range.
    """

    max_new_tokens: int = 96
    repeats: int = 2
    fresh: bool = False
    seed: int = 7

    def __post_init__(self) -> None:
        for name, bound in (("max_new_tokens", 1), ("repeats", 1), ("seed", 0)):
            if getattr(self, name) < bound:
                raise InvalidParameter(f"{name} must be at least {bound}, but is {getattr(self, name)}.")


@dataclass(frozen=True)
class PlannerSpeed:
    """How fast an arm was at a setting.

    Args:
        setting: the setting's name.
        arm: the arm's name.
        tokens_per_second: all tokens over all seconds, if all texts are equally long.
        against_plain: per text, the speed over plain decoding's.
        against_best: per text, the speed over that of the fastest fixed tree; empty where trees were not measured.
    """

    setting: str
    arm: str
    tokens_per_second: float
    against_plain: tuple[float, ...]
    against_best: tuple[float, ...]


def settings_named(parts: Sequence[str]) -> list[PlannerSetting]:
    """Return the settings whose names contain one of these texts; all for none.

    Raises:
        InvalidParameter: no name contains a text, or a text is empty.
    """
    for part in parts:
        if not part.strip() or not any(part in one.name for one in SETTINGS):
            names = "; ".join(f'"{one.name}"' for one in SETTINGS)
            raise InvalidParameter(f"There is no setting with {part!r} in its name; there are {names}.")
    return [one for one in SETTINGS if not parts or any(part in one.name for part in parts)]


def rounds_of(setting: PlannerSetting, prompts: int, options: PlannerOptions) -> int:
    """Return how many texts, or batches, every arm writes at a setting."""
    return prompts * options.repeats if setting.batch_size == 1 else 8 * options.repeats


def measure_planner(
    pair: Pair,
    prompts: Sequence[Int[Tensor, "1 _"]],
    setting: PlannerSetting,
    options: PlannerOptions,
    on_progress: Progress = unseen,
) -> list[PlannerSpeed]:
    """Let the planner, plain decoding and maybe fixed trees write the same texts side by side.

    Args:
        pair: target and draft model.
        prompts: what is continued.
        setting: the draft model and the temperature.
        options: lengths and repeats.
        on_progress: told of every text.

    Raises:
        InvalidParameter: the pair has no draft model.
    """
    drafts = setting.drafts(pair)
    whole = {"top_k": 0} if setting.temperature else {}
    common = {"drafter": drafts, "temperature": setting.temperature, "eos_token_id": None, **whole}
    arms, texts = _arms(setting, drafts, options), batches(prompts, setting.batch_size)
    for special in ({"drafter": NoDraft()}, *({"policy": tree} for tree in known_trees(setting, common["drafter"]))):
        side_by_side([Lane.begin(pair, texts[0], {**common, **special, "seed": 0, "max_new_tokens": WARM_UP})])
    found: dict[str, list[float]] = {name: [] for name in arms}
    total = rounds_of(setting, len(prompts), options)
    for number in range(total):
        first = number % len(arms)
        order = [*arms][first:] + [*arms][:first]
        own = {**common, "max_new_tokens": options.max_new_tokens, "seed": options.seed + number}
        lanes = [Lane.begin(pair, texts[number % len(texts)], {**own, **arms[name]()}) for name in order]
        for name, speed in zip(order, side_by_side(lanes), strict=True):
            found[name].append(speed)
        on_progress(setting.name, number + 1, total)
    return compared(setting.name, found)


def known_trees(setting: PlannerSetting, drafts: Any) -> tuple[TreePolicy, ...]:
    """Return the trees that a planner chooses from at a setting's temperature, the drafter's own first."""
    return arms_beside(default_policy(as_drafter(drafts), SamplingParams(setting.temperature)))


def _arms(setting: PlannerSetting, drafts: Any, options: PlannerOptions) -> dict[str, Arm]:
    """Return what is special about each arm, made anew for every text."""
    shared = Planner()
    arms: dict[str, Arm] = {
        PLAIN: lambda: {"drafter": NoDraft()},
        PLANNER: lambda: {"policy": Planner() if options.fresh else shared},
    }
    if setting.beside_trees:
        trees, looking = known_trees(setting, drafts), LookupFirst(as_drafter(drafts))
        arms |= {in_words(tree): lambda tree=tree: {"policy": tree} for tree in trees}
        arms[f"lookup, else {in_words(trees[0])}"] = lambda: {"drafter": looking, "policy": trees[0]}
        arms["lookup alone"] = lambda: {"drafter": NgramDrafter()}
    return arms


def in_words(tree: TreePolicy) -> str:
    """Name a tree by the numbers of its nodes at each depth."""
    return f"tree {'+'.join(str(sum(level)) for level in tree.shape.counts)}"


def batches(prompts: Sequence[Int[Tensor, "1 _"]], size: int) -> list[PromptBatch]:
    """Return each prompt by itself, or one batch of so many, in which prompts come again if they are fewer."""
    if size == 1:
        return [PromptBatch.of([ids]) for ids in prompts]
    return [PromptBatch.of([prompts[number % len(prompts)] for number in range(size)])]


@dataclass
class Lane:
    """A text in progress, and the seconds that it has taken."""

    run: Run
    seconds: float
    over: bool = False

    @classmethod
    def begin(cls, pair: Pair, text: PromptBatch, options: dict[str, Any]) -> "Lane":
        """Read the prompts against the clock."""
        begin = clock()
        run = stream(pair.target, text.input_ids, attention_mask=text.attention_mask, **options)
        return cls(run, clock() - begin)

    def step(self) -> None:
        """Take a step against the clock."""
        begin = clock()
        self.over = next(self.run, None) is None
        self.seconds += clock() - begin

    @property
    def written(self) -> int:
        """The tokens so far."""
        return self.run.statistics.new_tokens


def side_by_side(lanes: Sequence[Lane]) -> list[float]:
    """Write all texts, the shortest first at every step; return each one's tokens per second."""
    while going := [lane for lane in lanes if not lane.over]:
        min(going, key=lambda lane: lane.written).step()
    return [lane.written / lane.seconds for lane in lanes]


def compared(setting: str, speeds: dict[str, list[float]]) -> list[PlannerSpeed]:
    """Compare every arm with plain decoding and with the fastest of the fixed trees, text by text.

    Args:
        setting: the setting's name.
        speeds: each arm's tokens per second, a value for each text.
    """
    trees = [name for name in speeds if name not in (PLAIN, PLANNER)]
    best = max(trees, key=lambda name: harmonic_mean(speeds[name]), default=None)
    return [
        PlannerSpeed(
            setting,
            name,
            harmonic_mean(values),
            _ratios(values, speeds[PLAIN]),
            _ratios(values, speeds[best]) if best else (),
        )
        for name, values in speeds.items()
    ]


def _ratios(values: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    return tuple(value / other for value, other in zip(values, others, strict=True))
