"""Making and distilling: a few forms and losses are tried briefly, and the best step of the best is kept."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from polydraft.bench.aligning.draft_card import CURVE_PICTURE, CurvePoint, best_of, curve_svg, curve_table
from polydraft.bench.aligning.form_costs import FormCost
from polydraft.bench.aligning.work_folder import SPENT, Budget, Pace, WorkFolder
from polydraft.errors import PolydraftError, ResultsError
from polydraft.models import HuggingFaceModel
from polydraft.training.alignment.draft_forms import DraftForm, Material, kept_tokens, seeded
from polydraft.training.alignment.draft_losses import draft_loss
from polydraft.training.alignment.held_out import ROWS, HeldOutTexts, score, tokens_per_call
from polydraft.training.alignment.held_out import TEXTS as HELD_TEXTS
from polydraft.training.alignment.model_weights import read_weights, write_weights
from polydraft.training.heads.loop import HeadRecipe, run_steps
from polydraft.training.heads.losses.row_losses import HeadTraining, TargetEnds
from polydraft.training.heads.new_heads import NewHead
from polydraft.training.heads.shards import Shards, WrittenShards, most_written

TRIED = 0.42
"""The share of the budget that is spent when trials end."""
JUDGED, MOST_JUDGED = 0.24, 600.0
"""The share of the budget that is left to judge by, and how many seconds of it suffice."""
TEXTS, FEW_TEXTS, LARGE_VOCABULARY = 8, 2, 2**14
"""Texts of a step, and of one of a head that holds all rows of it at once, each of more tokens than the third."""
LEAST_STEPS, MOST_STEPS, MEASUREMENTS, PATIENCE = 4, 100_000, 10, 3
"""The bounds of a run's steps, how often it is measured, and after how many measurements without a rise it ends."""
ENOUGH, SAVED = 8, 4
"""A trial has so many steps, for which later ones are left out if need be, and leaves so many checkpoints."""
BESIDES, SLOWER = 1.2, 1.2
"""What a step takes more than its two passes, and what a trial may take more than was foreseen."""
MEASURED = 0.12
"""The share of the budget that measurements on held-out text may take."""
CURVE, TRIALS, PLANNED, RUN, HELD, BEST = "curve", "trials", "planned", "run", "held", "best"
FAILED = "failed"
BEGUN, REFERENCE = "begun-{}.safetensors", "reference-{}"
Noting = Callable[[], AbstractContextManager[Callable[[], bool]]]


@dataclass(frozen=True, eq=False)
class Distilling:
    """What all runs have in common.

    Args:
        target: the target.
        given: the user's own draft model, if it is to be tuned; else None.
        text: the target's text.
        held_out: the texts to choose by.
        work: where everything is kept.
        budget: the time.
        costs: of each form.
        seed: of runs.
        noting: gives a function that tells whether somebody has interrupted.
    """

    target: HuggingFaceModel
    given: Any
    text: WrittenShards
    held_out: HeldOutTexts
    work: WorkFolder
    budget: Budget
    costs: Mapping[str, FormCost]
    seed: int
    noting: Noting

    def new(self, form: DraftForm, loss: str) -> NewHead:
        """Return a draft that has learnt nothing yet; the same every time."""
        params = replace(self.held_out.filters, temperature=max(self.held_out.rows) or 1.0)
        learnt = Shards(self.text.learnt)
        texts = torch.stack([learnt[place]["ids"] for place in range(min(TEXTS, len(learnt)))])
        target, reference = self.target, self.reference(form)
        ends = replace(TargetEnds.of(target.model), filters=self.held_out.filters)
        tokens = None
        if form.cuts:
            tokens = most_written(self.text.learnt, target.vocab_size, kept_tokens(target.vocab_size), target.device)
        material = Material(
            *(target, ends, self.given, texts.to(target.device), params, tokens),
            reference if reference.is_file() else None,
        )
        return seeded(form, material, loss, self.seed)

    def reference(self, form: DraftForm) -> Path:
        """Return where the weights are that AdaSPEC's filter compares those of a form with."""
        return self.work.path / f"reference-{form.word.replace(':', '-')}.safetensors"

    def learnt(self, draft: NewHead) -> Shards:
        """Return the texts to learn from, with what a draft asks for."""
        return Shards(self.text.learnt, heats=draft.training.heated)

    def point(self, draft: NewHead, step: int) -> CurvePoint:
        """Measure a draft on held-out text."""
        found = self.held_out.worth(draft)
        calls = tokens_per_call(found)
        overlap = {f"{heat:g}": round(one.overlap[0], 4) for heat, one in found.items()}
        told = {f"{heat:g}": round(value, 4) for heat, value in calls.items()}
        return CurvePoint(step, told, round(score(calls), 5), overlap, round(self.budget.used / 60, 3))

    def run(
        self,
        draft: NewHead,
        recipe: HeadRecipe,
        folder: Path,
        after: Callable[[int], bool],
        title: str,
    ) -> None:
        """Take steps, with Ctrl-C seen between them.

        Raises:
            KeyboardInterrupt: it was pressed.
        """
        with self.noting() as interrupted:
            run_steps(
                draft.training,
                self.learnt(draft),
                folder,
                recipe,
                lambda step, _: after(step),
                interrupted,
                self.target.device,
                title,
            )


def seconds_of_step(draft: NewHead, texts: Shards, budget: Budget, device: torch.device, most: float = inf) -> float:
    """Return about how long a step takes, behind one of a single text, which makes what is kept.

    Args:
        most: where a step seems to take longer than this, by the one text, that is returned.
    """
    every = texts_of_step(draft)
    rows = [texts[place % len(texts)] for place in range(every)]
    batch: dict[str, Tensor] = {name: torch.stack([one[name] for one in rows]).to(device) for name in rows[0]}
    draft.training.to(device).train()

    def taken(count: int) -> float:
        began, parts = budget.used, draft.training.parts(count)
        for first in range(parts):
            draft.training(**{name: one[first:count:parts] for name, one in batch.items()})["loss"].backward()
        return max(1e-4, BESIDES * (budget.used - began))

    guessed = every * taken(1)
    found = guessed if guessed > most else taken(every)
    draft.training.zero_grad()
    return found


def texts_of_step(draft: NewHead) -> int:
    """Return how many texts a step has, so that its rows take a bounded room."""
    training = cast(HeadTraining, draft.training)
    bounded = training.sparing or bool(training.held) or len(training.target[0].rows) <= LARGE_VOCABULARY
    return TEXTS if bounded else FEW_TEXTS


def tried(distilling: Distilling, arms: Sequence[tuple[DraftForm, str]]) -> Mapping[str, Any]:
    """Try every form with its loss for a part of the time, and return what the best of them was.

    Its weights are kept, to go on from. Forms are compared by what their tokens per call are worth here. Behind the
    first one those are left out of whose steps too few fit, and all when the time is over. Of several forms those count
    that this target can have; why others fail is kept.

    Raises:
        PolydraftError: all fail; this is why the last one did.
    """
    work, budget = distilling.work, distilling.budget
    trials: list[dict[str, Any]] = work.read(TRIALS) or []
    last: PolydraftError | None = None
    for number, (form, loss) in enumerate(arms):
        folder = work.path / f"trial-{number}"
        if (form.word, loss) in {(one["form"], one["loss"]) for one in trials}:
            _drop(folder)
            continue
        measuring = trials[-1]["measuring"] if trials else work.read(HELD)["seconds"]
        if trials and (work.read(RUN) is not None or budget.left(TRIED) <= measuring):
            break  # the best of them has gone on, or the time is over
        try:
            found = _trial(distilling, arms, number, measuring, first=not trials)
        except ResultsError:  # what is kept is damaged, whatever the form
            raise
        except PolydraftError as error:
            last, found = error, None
            work.write(FAILED, {**failures(work), _arm_in_words(form.word, loss): str(error)})
            _drop(work.path / REFERENCE.format(number))
        if found is not None:
            trials.append(found)
            work.write(TRIALS, trials)
            work.write(SPENT, budget.used)
            _leave_best(work, trials)
        _drop(folder)
    if last is not None and not trials:
        raise last
    return _leave_best(work, trials)


def _trial(
    distilling: Distilling, arms: Sequence[tuple[DraftForm, str]], number: int, measuring: float, *, first: bool
) -> dict[str, Any] | None:
    """Try a form with its loss, and return what became of it; None where too few of its steps fit."""
    work, budget, (form, loss) = distilling.work, distilling.budget, arms[number]
    if form.is_model and draft_loss(loss).share < 1 and not distilling.reference(form).is_file():
        seconds = (budget.left(TRIED) / (len(arms) - number) - measuring) / 2
        other, name = distilling.new(form, "fkl"), REFERENCE.format(number)
        _briefly(distilling, other, form, name, _step_of(distilling, other), seconds)
        write_weights(other.training, distilling.reference(form))
        _drop(work.path / name)
    draft = distilling.new(form, loss)
    if form.tunes:
        _keep_start(distilling, draft, form)
    most = budget.left(TRIED) - measuring
    each = _step_of(distilling, draft, inf if first else most / ENOUGH)
    if not first and ENOUGH * each > most:
        return None
    seconds = budget.left(TRIED) / (len(arms) - number) - measuring
    taken = _briefly(distilling, draft, form, f"trial-{number}", each, max(seconds, min(most, ENOUGH * each)))
    since = budget.used
    point = distilling.point(draft, taken)
    value = distilling.costs[form.word].value(point.score) if isfinite(point.score) else 0.0
    weights = BEGUN.format(number)
    write_weights(draft.training, work.path / weights)
    told = {"value": value, "step": each, "measuring": budget.used - since, "weights": weights}
    return {"form": form.word, "loss": loss, **told, "point": point.as_dict()}


def _leave_best(work: WorkFolder, trials: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the best trial, and delete the weights of the others."""
    best = max(trials, key=lambda one: one["value"])
    for one in work.path.glob(BEGUN.format("*")):
        if one.name != best["weights"]:
            one.unlink()
    return best


def _drop(folder: Path) -> None:
    """Delete a run that has ended; one that is half deleted has another name, so that nobody goes on from it."""
    gone = folder.with_name(f"{folder.name}-over")
    shutil.rmtree(gone, ignore_errors=True)
    if folder.is_dir():
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def untried(work: WorkFolder, arms: Sequence[tuple[DraftForm, str]]) -> list[str]:
    """Return which forms, with which losses, there was no time to try."""
    known = {*_known(work), *failures(work)}
    return [one for form, loss in arms if (one := _arm_in_words(form.word, loss)) not in known]


def failures(work: WorkFolder) -> Mapping[str, str]:
    """Return why forms cannot be had that were tried, by form and loss."""
    kept: dict[str, str] = work.read(FAILED) or {}
    return {name: why for name, why in kept.items() if name not in _known(work)}


def _known(work: WorkFolder) -> set[str]:
    """Return what was tried and learnt."""
    return {_arm_in_words(one["form"], one["loss"]) for one in work.read(TRIALS) or []}


def _arm_in_words(form: str, loss: str) -> str:
    return f"{form} by {loss}"


def _step_of(distilling: Distilling, draft: NewHead, most: float = inf) -> float:
    return seconds_of_step(draft, distilling.learnt(draft), distilling.budget, distilling.target.device, most)


def _briefly(distilling: Distilling, draft: NewHead, form: DraftForm, name: str, each: float, seconds: float) -> int:
    """Let a draft learn for about so long by steps that take so long each; return how many there were.

    Raises:
        KeyboardInterrupt: it was interrupted; the same run goes on later.
    """
    budget, folder = distilling.budget, distilling.work.path / name
    planned: dict[str, int] = distilling.work.read(PLANNED) or {}
    steps = planned.get(name) or max(LEAST_STEPS, min(MOST_STEPS, int(seconds / each)))
    distilling.work.write(PLANNED, {**planned, name: steps})
    last = _Last(steps, budget.used + SLOWER * max(0.0, seconds), budget)
    recipe = _recipe(form, draft, steps + 1, distilling.seed, max(1, steps // SAVED))
    distilling.run(draft, recipe, folder, last, f"{name} of {form.word}")
    return last.taken[-1] if last.taken else steps


def measurable(distilling: Distilling, arms: Sequence[tuple[DraftForm, str]]) -> Distilling:
    """Return the same with as many held-out texts as there is time to measure drafts on, the same ever after.

    How long that takes is seen with a head if there is one, since heads are asked place by place.
    """
    work, whole = distilling.work, distilling.held_out
    known = work.read(HELD)
    if known is None:
        budget, few = distilling.budget, whole.first(ROWS)
        draft = _slowest(distilling, arms)
        began = budget.used
        few.worth(draft)
        seconds = budget.used - began
        times = MEASURED * budget.seconds / (MEASUREMENTS + len(arms) + 1) / max(seconds, 1e-6)
        texts = ROWS * max(1, min(HELD_TEXTS // ROWS, int(times)))
        known = {"texts": texts, "seconds": seconds * texts / ROWS}
        work.write(HELD, known)
    return replace(distilling, held_out=whole.first(known["texts"]))


def _slowest(distilling: Distilling, arms: Sequence[tuple[DraftForm, str]]) -> NewHead:
    """Return a draft of a form that is measured slowly: a head if there is one that this target can have."""
    *others, last = sorted(arms, key=lambda arm: arm[0].is_model)
    for form, loss in others:
        with suppress(PolydraftError):
            return distilling.new(form, loss)
    return distilling.new(*last)


@dataclass(frozen=True)
class _Last:
    """Tells of a step whether it was a trial's last one, by its number or by the clock, and keeps which were taken."""

    steps: int
    latest: float
    budget: Budget
    taken: list[int] = field(default_factory=list)

    def __call__(self, step: int) -> bool:
        self.taken.append(step)
        return step >= self.steps or self.budget.used > self.latest


def _keep_start(distilling: Distilling, draft: NewHead, form: DraftForm) -> None:
    """Measure a given draft before the first step of all trials, so that nothing that is worse is kept."""
    if distilling.work.read(CURVE) is None:
        point = distilling.point(draft, 0)
        keep_best(distilling, draft, form, point)
        distilling.work.write(CURVE, [point.as_dict()])


def _recipe(form: DraftForm, draft: NewHead, steps: int, seed: int, every: int) -> HeadRecipe:
    return HeadRecipe(
        steps=steps,
        texts=texts_of_step(draft),
        matrix_rate=form.rate,
        other_rate=form.rate / 2,
        warmup=0.05,
        save_every=every,
        seed=seed,
    )


def distilled_by(seconds: float) -> float:
    """Return the share of a budget that is spent when distilling ends: all but what judging takes."""
    return 1 - min(JUDGED, MOST_JUDGED / seconds)


def distilled(distilling: Distilling, form: DraftForm, trial: Mapping[str, Any]) -> list[CurvePoint]:
    """Go on with the best trial until the time is over or nothing rises, and return the curve; the best step is kept.

    Raises:
        KeyboardInterrupt: it was interrupted; the best step so far is kept.
    """
    work, budget, ends = distilling.work, distilling.budget, distilled_by(distilling.budget.seconds)
    curve, begun = curve_of(work), int(trial["point"]["step"])
    if work.read(RUN) is not None and work.read(RUN).get("over"):
        return curve
    if not form.tunes:  # a draft of another speed is not to be compared with the given one by its tokens
        curve = [one for one in curve if one.step]
    draft = distilling.new(form, trial["loss"])
    read_weights(draft.training, work.path / trial["weights"])
    if all(one.step != begun for one in curve):
        _add(distilling, draft, form, curve, CurvePoint(**trial["point"]))
    plan = work.read(RUN)
    if plan is None:
        seconds = budget.left(ends) - MEASUREMENTS * trial["measuring"]
        plan = {"steps": max(MEASUREMENTS, min(MOST_STEPS, int(seconds / trial["step"])))}
        work.write(RUN, plan)
    steps = plan["steps"]
    every, measuring = max(1, steps // MEASUREMENTS), Pace(budget, ends, trial["measuring"] + trial["step"])

    def after(step: int) -> bool:
        over = step >= steps or not measuring.fits()
        if step % every and not over:
            return False
        measuring.begin()
        _add(distilling, draft, form, curve, distilling.point(draft, begun + step))
        measuring.done()
        return over or stale([one.score for one in curve if one.step > begun])

    if measuring.fits():
        recipe = _recipe(form, draft, steps + 1, distilling.seed + 1, every)
        distilling.run(draft, recipe, work.path / "main", after, form.word)
    work.write(RUN, {**plan, "over": True})
    return curve


def _add(distilling: Distilling, draft: NewHead, form: DraftForm, curve: list[CurvePoint], point: CurvePoint) -> None:
    """Add a point to a curve, in place of one of the same step, and keep the draft if it is the best."""
    curve[:] = sorted([one for one in curve if one.step != point.step] + [point], key=lambda one: one.step)
    if isfinite(point.score) and best_of([one for one in curve if isfinite(one.score)]) is point:
        keep_best(distilling, draft, form, point)
    distilling.work.write(CURVE, [one.as_dict() for one in curve])
    distilling.work.write(SPENT, distilling.budget.used)


def stale(scores: Sequence[float]) -> bool:
    """Tell whether the last three of a run's measurements are no higher than what was there before them.

    What was measured before the run does not count: its rate is high at first, and much of the gain comes as it falls.
    """
    return len(scores) > PATIENCE and max(scores[-PATIENCE:]) <= max(scores[:-PATIENCE])


def keep_best(distilling: Distilling, draft: NewHead, form: DraftForm, point: CurvePoint) -> None:
    """Write a draft as a folder, then let the work say that this is the best one, then drop the others."""
    work = distilling.work
    name = f"{BEST}-{point.step:06d}"
    shutil.rmtree(work.path / name, ignore_errors=True)
    told = f"An unfinished draft: `polydraft align` was at step {point.step}, and has no verdict yet.\n"
    curve = sorted([*(one for one in curve_of(work) if one.step != point.step), point], key=lambda one: one.step)
    with torch.no_grad():
        draft.write(work.path / name, distilling.target, form.folder, f"{told}\n{curve_table(curve)}\n")
    (work.path / name / CURVE_PICTURE).write_text(curve_svg(curve))
    work.write(BEST, {"folder": name, "step": point.step})
    for other in work.path.glob(f"{BEST}-*"):
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)


def curve_of(work: WorkFolder) -> list[CurvePoint]:
    """Return the curve so far."""
    return [CurvePoint(**one) for one in work.read(CURVE) or []]


def best_folder(work: WorkFolder) -> Path | None:
    """Return where the best draft so far is; None if there is none."""
    found = work.read(BEST)
    return None if found is None else work.path / found["folder"]
