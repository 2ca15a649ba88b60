"""A search for the sub-layers that a target drafts best without, kept in a study file and resumed from it."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from jaxtyping import Int
from torch import Tensor, nn

from polydraft.drafters import NoDraft, SelfDrafter, View
from polydraft.engine.compare import compare
from polydraft.engine.generate import stream
from polydraft.engine.skips.skip_costs import HeldOut, SkipCosts, time_skips
from polydraft.errors import InvalidParameter, shown
from polydraft.extras import TUNE
from polydraft.models import HuggingFaceModel, SubLayer, layer_set, skip_sets, sublayers, without
from polydraft.planning.plan import ModelIdentity
from polydraft.probs import SamplingParams
from polydraft.trees import Chain

SKIP_SAMPLERS = ("tpe", "gp")
STUDY, TARGET = "polydraft skips", "target"
CHECKED = 5
"""How many sets are timed at the end, beside greedy addition's."""
FALLING = 3
"""Greedy addition ends when so many additions in turn were no gain."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SkipSettings:
    """What is searched, and on what.

    Args:
        trials: how many sets the sampler proposes, those in the study counted.
        sampler: "tpe" or "gp".
        max_tokens: how many tokens the target writes behind each prompt, on which overlaps are measured.
        temperature: of the target and its drafts.
        seed: fixes what is written and proposed.

    Raises:
        InvalidParameter: fewer than one trial or two tokens, an unknown sampler, or a temperature that is none.
    """

    trials: int = 300
    sampler: str = "tpe"
    max_tokens: int = 32
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("trials", self.trials, 1), ("max_tokens", self.max_tokens, 2)):
            if value < least:
                raise InvalidParameter(f"{name} must be at least {least}, but is {value}.")
        if self.sampler not in SKIP_SAMPLERS:
            raise InvalidParameter(f"There is no sampler {self.sampler!r}; use {' or '.join(SKIP_SAMPLERS)}.")
        SamplingParams(self.temperature)


@dataclass(frozen=True)
class CheckedSkips:
    """A set of skipped sub-layers, and what is known of it.

    Args:
        skipped: the names of the sub-layers.
        overlap: of its law with the target's.
        predicted: the speed-up over plain decoding that follows from the overlap and the cost table.
        length: the drafts of a chain with which it is predicted.
        measured: the median of paired speed-ups; None if it was not timed.
    """

    skipped: tuple[str, ...]
    overlap: float
    predicted: float
    length: int
    measured: float | None = None


@dataclass(frozen=True)
class FoundSkips:
    """What a search found.

    Args:
        layers: how many layers the target has.
        singles: the overlap without each single sub-layer, by its name.
        greedy: the best set by adding single skips, the baseline, which is timed too.
        best: the sets that were timed, the fastest first: those that are predicted to be, and greedy addition's.
        sets: the fastest set as a skip file has it: {"layers": N, "attention": [...], "mlp": [...]}.
        trials: how many sets were proposed.
    """

    layers: int
    singles: dict[str, float]
    greedy: CheckedSkips
    best: tuple[CheckedSkips, ...]
    sets: dict[str, Any]
    trials: int

    def save(self, path: str | Path) -> None:
        """Write a file that `self:skip=FILE` reads.

        Raises:
            InvalidParameter: it cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(self.sets) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidParameter(f"The skip file {path} cannot be written: {error.strerror}.") from error


def _silent(what: str, done: int, total: int) -> None:
    """Show nothing."""


def tune_skips(
    target: nn.Module,
    prompts: Sequence[Int[Tensor, "1 _"]],
    study: str | Path,
    settings: SkipSettings = SkipSettings(),
    *,
    on_progress: Progress = _silent,
) -> FoundSkips:
    """Search the sub-layers that a target drafts best without, attention and inner layers apart.

    Rule: maximise the tokens per second that are predicted for the best chain of up to eight drafts, from the mean
    overlap a of the view's first draft with the target's law and the times of passes:
    (1 - a^(g + 1)) / (1 - a) / (g t_draft + t_scoring(g + 1)). Overlaps are measured on text that the target writes
    behind the prompts, in one pass a text (`HeldOut`); times are measured once, when the search begins. First each
    single skip is measured, and single skips are added greedily, the best first; then Optuna's sampler proposes sets.
    The five best of all are timed against plain decoding, in pairs, and so is greedy addition's set, which the fastest
    must beat.
    Approximation: the overlap is that of first drafts; later ones of a chain read the view's own keys.
    Sources: the search is that of Zhang et al., arXiv 2309.08168 (Draft & Verify), with predicted for measured time.

    Args:
        target: the model.
        prompts: texts of the kind that will be generated, one row each.
        study: a SQLite file that keeps every set measured. A search of the same target, prompts and settings goes on
            from it, also after Ctrl-C.
        settings: what is searched.
        on_progress: called with what is being done, how much of it is done, and how much there is.

    Raises:
        InvalidParameter: no prompts, a study of another target or of other settings, or a file that is no study or
            cannot be written.
        MissingExtra: Optuna is not installed.
        UnsupportedModel: the target has no fused pass.
    """
    TUNE.check()
    if not prompts:
        raise InvalidParameter("Tuning skips needs at least one prompt.")
    model = HuggingFaceModel(target)
    parts = sublayers(model)
    own = ModelIdentity.of(target, shown(str(getattr(target, "name_or_path", "") or type(target).__name__)))
    known = _opened(study, settings, own, _conditions(prompts, settings))
    texts = [
        _continued(target, ids, settings, partial(on_progress, "writing texts", at + 1, len(prompts)))
        for at, ids in enumerate(prompts)
    ]
    held = HeldOut.of(model, texts, SamplingParams(settings.temperature))
    longest = max((own for own, _ in texts), key=len).unsqueeze(0)
    kept = known.user_attrs.get("costs")
    costs = SkipCosts.read(kept) if kept else time_skips(model, parts, longest, partial(on_progress, "timing passes"))
    known.set_user_attr("costs", costs.as_dict())
    task = _SkipSearch(model, parts, held, costs, known, settings, on_progress)
    singles, greedy = task.by_hand()
    task.sampled()
    drafting = [own for own in task.seen if len(own) < len(parts)]  # without all of them nothing is left that drafts
    best = sorted(drafting, key=lambda own: -costs.speed(own, task.seen[own])[0])[:CHECKED]
    timed = task.timed(dict.fromkeys((*best, greedy)), target, prompts)
    order = sorted(timed, key=lambda own: -(timed[own].measured or 0.0))
    sets = skip_sets(layer_set((parts[number] for number in order[0]), model.layers))
    return FoundSkips(model.layers, singles, timed[greedy], tuple(timed[own] for own in order), sets, settings.trials)


@dataclass(eq=False)
class _SkipSearch:
    """A search that goes on: every set measured is in the study, and `seen` has their overlaps."""

    model: HuggingFaceModel
    parts: tuple[SubLayer, ...]
    held: HeldOut
    costs: SkipCosts
    study: Any
    settings: SkipSettings
    on_progress: Progress

    def __post_init__(self) -> None:
        self.seen: dict[tuple[int, ...], float] = {}
        self.proposed = 0
        for trial in self.study.get_trials(deepcopy=False):
            if "overlap" in trial.user_attrs:
                self.seen[self._skipped(trial.params)] = trial.user_attrs["overlap"]
                self.proposed += trial.user_attrs.get("proposed", False)

    def by_hand(self) -> tuple[dict[str, float], tuple[int, ...]]:
        """Measure each single skip, and add them greedily, the one with the best prediction first."""
        singles = dict[tuple[int, ...], float]()
        for number in range(len(self.parts)):
            singles[number,] = self._measured((number,))
            self.on_progress("single skips", number + 1, len(self.parts))
        order = sorted(singles, key=lambda own: -self.costs.speed(own, singles[own])[0])
        best, fallen, own = order[0], 0, tuple[int, ...]()
        for at, (number,) in enumerate(order[:-1]):
            own = tuple(sorted((*own, number)))
            self.on_progress("adding skips", at + 1, len(order))
            gains = self._speed(own) > self._speed(best)
            best, fallen = (own, 0) if gains else (best, fallen + (own != best))
            if fallen == FALLING:
                break
        return {self.parts[number].name: overlap for (number,), overlap in singles.items()}, best

    def sampled(self) -> None:
        """Let the sampler propose sets until there are as many as asked for; a set cut short by Ctrl-C is forgotten."""
        while self.proposed < self.settings.trials:
            trial = self.study.ask(_choices(self.parts))
            try:
                skipped = self._skipped(trial.params)
                overlap = self._overlap(skipped)
            except BaseException:
                self.study.tell(trial, state=_optuna().trial.TrialState.FAIL)
                raise
            trial.set_user_attr("overlap", overlap)
            trial.set_user_attr("proposed", True)
            self.study.tell(trial, self.costs.speed(skipped, overlap)[0])
            self.seen[skipped] = overlap
            self.proposed += 1
            self.on_progress("trials", self.proposed, self.settings.trials)

    def described(self, skipped: tuple[int, ...], measured: float | None = None) -> CheckedSkips:
        """Return what is known of a set."""
        speed, length = self.costs.speed(skipped, self.seen[skipped])
        names = tuple(self.parts[number].name for number in skipped)
        return CheckedSkips(names, self.seen[skipped], speed / self.costs.plain, length, measured)

    def timed(
        self, sets: Iterable[tuple[int, ...]], target: nn.Module, prompts: Sequence[Tensor]
    ) -> dict[tuple[int, ...], CheckedSkips]:
        """Time sets against plain decoding, in pairs."""
        found, every = dict[tuple[int, ...], CheckedSkips](), [*sets]
        for at, skipped in enumerate(every):
            found[skipped] = self._timed(skipped, target, prompts)
            self.on_progress("timing the best", at + 1, len(every))
        return found

    def _timed(self, skipped: tuple[int, ...], target: nn.Module, prompts: Sequence[Tensor]) -> CheckedSkips:
        known, settings = self.described(skipped), self.settings
        drafter = SelfDrafter(View(layers=layer_set(self.parts[number] for number in skipped)))
        sampling: dict[str, Any] = {"temperature": settings.temperature, "seed": settings.seed + 1}
        sampling |= {"top_k": 0} if settings.temperature else {}
        found = compare(
            target,
            prompts,
            drafter=drafter,
            policy=Chain(known.length),
            max_new_tokens=settings.max_tokens,
            **sampling,
        )
        return self.described(skipped, found.speedup)

    def _speed(self, skipped: tuple[int, ...]) -> float:
        return self.costs.speed(skipped, self._measured(skipped))[0]

    def _measured(self, skipped: tuple[int, ...]) -> float:
        """Return the overlap of a set, and keep it in the study unless it is there."""
        if skipped not in self.seen:
            self.seen[skipped] = overlap = self._overlap(skipped)
            params = {part.name: number in skipped for number, part in enumerate(self.parts)}
            trial = _optuna().trial.create_trial(
                params=params,
                distributions=_choices(self.parts),
                value=self.costs.speed(skipped, overlap)[0],
                user_attrs={"overlap": overlap},
            )
            self.study.add_trial(trial)
        return self.seen[skipped]

    def _overlap(self, skipped: tuple[int, ...]) -> float:
        """Return the overlap of a set; 0 of all sub-layers, which leave nothing to run, and of none."""
        if not 0 < len(skipped) < len(self.parts):
            return 0.0
        return self.held.overlap(without(self.model, layer_set(self.parts[number] for number in skipped)))

    def _skipped(self, params: dict[str, Any]) -> tuple[int, ...]:
        return tuple(number for number, part in enumerate(self.parts) if params[part.name])


def _continued(target: nn.Module, ids: Tensor, settings: SkipSettings, done: Callable[[], None]) -> tuple[Tensor, int]:
    """Return a prompt with what the target writes behind it, and how many of the tokens are given."""
    sampling: dict[str, Any] = {"temperature": settings.temperature, "seed": settings.seed}
    sampling |= {"top_k": 0} if settings.temperature else {}
    run = stream(target, ids, drafter=NoDraft(), max_new_tokens=settings.max_tokens, **sampling).exhaust()
    done()
    return torch.cat([ids[0], ids.new_tensor(run.new_tokens[0])]), ids.shape[1]


def _conditions(prompts: Sequence[Tensor], settings: SkipSettings) -> dict[str, Any]:
    """Return what sets must have in common to be compared beside the target: prompts, and how texts are written."""
    mark = 0
    for ids in prompts:
        mark = crc32(ids.cpu().numpy().tobytes(), mark)
    return {
        "prompts": f"{mark:08x}",
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
    }


def _opened(path: str | Path, settings: SkipSettings, target: ModelIdentity, conditions: dict[str, Any]) -> Any:
    """Return the study of a file, new or as it was left.

    Raises:
        InvalidParameter: it is of another target or of other settings, or is no study.
    """
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    place = Path(path).expanduser()
    kinds = {"tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler}
    try:
        study = optuna.create_study(
            storage=f"sqlite:///{place}",
            sampler=kinds[settings.sampler](seed=settings.seed),
            study_name=STUDY,
            direction="maximize",
            load_if_exists=True,
        )
        before = study.user_attrs
        for name, value in {TARGET: asdict(target), **conditions}.items() if not before else ():
            study.set_user_attr(name, value)
        there = ModelIdentity(**before[TARGET]) if before else target
    except Exception as error:
        raise InvalidParameter(f"{path} is no study that can be read and written: {type(error).__name__}.") from error
    others = [f"target {there.beside(target)} there, {target.beside(there)} here"] if there.beside(target) else []
    others += [
        f"{name.replace('_', ' ')} {shown(before.get(name))} there, {shown(value)} here"
        for name, value in conditions.items()
        if before and before.get(name) != value
    ]
    if others:
        raise InvalidParameter(f"The study {path} is of another search ({'; '.join(others)}); give another file.")
    return study


def _choices(parts: Sequence[SubLayer]) -> dict[str, Any]:
    """Return what a sampler chooses: of each sub-layer whether it is skipped."""
    return {part.name: _optuna().distributions.CategoricalDistribution([False, True]) for part in parts}


def _optuna() -> Any:
    """Return Optuna, which is imported when it is needed."""
    import optuna

    return optuna
