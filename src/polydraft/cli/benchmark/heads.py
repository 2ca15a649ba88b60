"""`polydraft bench heads`: train heads of every kind by one recipe, and measure them side by side."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from rich.console import Console

from polydraft.bench import USUAL, Prompt
from polydraft.bench.environment import described
from polydraft.bench.head_table import HEADS, head_page, head_table, records_of_heads
from polydraft.bench.prompts.prompt import encode
from polydraft.bench.speed import (
    Arm,
    SpeedResults,
    SpeedSettings,
    drafting_arm,
    prompts_that_fit,
    speed_conditions,
    summarise_speed,
)
from polydraft.bench.speed.records import HeadConditions
from polydraft.bench.speed.summary import overall
from polydraft.bench.table import grouped
from polydraft.catalogue import parse_policy
from polydraft.cli.benchmark.arm_spelling import build_arms, spell_arm
from polydraft.cli.benchmark.bench import kept, measure_all, print_json, print_table, settings_of
from polydraft.cli.clashes import read_asked
from polydraft.cli.printing import console as new_console
from polydraft.cli.printing import notes_beside
from polydraft.cli.process import INTERRUPTED, noted_interruption, stopped
from polydraft.engine import load as load_whole
from polydraft.errors import InvalidParameter, hint
from polydraft.extras import TRAIN
from polydraft.models import Pair, load
from polydraft.options.commands.bench_options import BenchHeadsOptions
from polydraft.training import MAKERS, HeadPlan, HeadRecipe, MadeHead, WritingPlan, make_head, usual_form
from polydraft.training.heads.head_making import run_name

EVERY = 1_000_000
"""As many prompts as there are."""
EMBEDDED, MODEL, UNTRAINED = "embedded pair", "draft-model", "untrained"
"""What the pair that ships and the arm of its draft model are called, and the last row: a head of the first kind with
its first weights."""
ALL = tuple(kind for kind, maker in MAKERS.items() if not maker.encodes)
"""The kinds that are measured unless some are named: those for decoders."""
TREE = "chain:5"
"""What every arm drafts, so that heads are compared alone and at equal depth."""
FIRST_STEPS = 4
"""So many steps tell how long one takes, the first of them aside."""
MADE, STEPS = "made.json", "steps.json"
"""What was learnt, and for how many steps where seconds were asked for, in each head's folder."""
NOTED = "this step"
"""What Ctrl-C waits for."""


def run_heads(request: BenchHeadsOptions) -> int:
    """Train, measure and print; return the exit code: 0, or 130 after Ctrl-C, after which the same call goes on.

    Raises:
        InvalidParameter: an unknown kind, or no prompts are left to learn behind.
        MissingExtra: accelerate cannot be used.
    """
    TRAIN.check()
    kinds = request.kinds or ALL
    for kind in kinds:
        if kind not in ALL:
            raise InvalidParameter(f"Heads of the kind {', '.join(ALL)} are compared, not {kind!r}{hint(kind, ALL)}.")
    settings, notes = settings_of(SpeedSettings, request), notes_beside(request)
    asked, learn = _divided(request)
    with notes.status("Loading the target ..."):
        name = request.target or "pair"
        embedded = name == "pair"  # its draft model stands beside its heads
        pair = load(name, "pair-draft" if embedded else None, device=request.device)
    try:
        folders = _folders(request, kinds, pair, learn)
        made = {name: _made(request, pair, folder, learn, notes) for name, folder in folders.items()}
    except KeyboardInterrupt:
        return stopped(f"the same command goes on from where it was, in {request.work}")
    built = _arms(request, pair, folders, settings)
    fit = prompts_that_fit(pair, asked, settings)
    names = (EMBEDDED, EMBEDDED) if embedded else (name, None)
    conditions = {**speed_conditions(pair, built, settings, names, request.chat_template), HEADS: made}
    results = SpeedResults(conditions, request.out)
    interrupted = measure_all(pair, built, fit, settings, results, notes)
    if interrupted:
        stopped(kept("rounds", len(results.records), request.out))
    _shown(request, results, interrupted=interrupted)
    return INTERRUPTED if interrupted else 0


def _divided(request: BenchHeadsOptions) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to measure, the first of each task, and those to learn behind: the others, or named ones."""
    every = read_asked(request.prompts or USUAL, EVERY, request.chat_template)
    tasks = [*grouped(every, lambda one: one.task).values()]
    rest = [one for task in tasks for one in task[request.limit :]]
    learn = read_asked(request.learn, EVERY, request.chat_template) if request.learn else rest
    if not learn:
        raise InvalidParameter(
            f"All prompts are among the first {request.limit} of their task, and none is left to learn behind; lower "
            "--limit, or name others by --learn."
        )
    return [one for task in tasks for one in task[: request.limit]], learn


def _folders(
    request: BenchHeadsOptions, kinds: Sequence[str], pair: Pair, learn: Sequence[Prompt]
) -> Mapping[str, Path]:
    """Return where each head lies, by its name: heads of other targets, texts and recipes lie elsewhere."""
    length = request.steps if request.seconds is None else f"{request.seconds} s"
    told = [described(pair.target)["weights"], request.tokens, length, request.rows, *map(repr, learn)]
    mark = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:8]
    called = {**{kind: kind for kind in kinds}, UNTRAINED: f"{UNTRAINED}-{kinds[0]}"}
    return {name: request.work / HEADS / f"{place}-{mark}" for name, place in called.items()}


def _kind(folder: Path) -> str:
    return folder.name.removeprefix(f"{UNTRAINED}-").rpartition("-")[0]


def _arms(request: BenchHeadsOptions, pair: Pair, folders: Mapping[str, Path], settings: SpeedSettings) -> list[Arm]:
    """Return plain decoding, the draft model if there is one, and an arm for each head."""
    tuned = {name: folder for name, folder in folders.items() if MAKERS[_kind(folder)].tunes}
    arms = ["plain", *([f"name={MODEL} drafter=model tree={TREE}"] if pair.draft is not None else [])]
    arms += [f"name={name} drafter=model draft={one} tree={TREE}" for name, one in folders.items() if name not in tuned]
    built = build_arms(pair, [spell_arm(arm) for arm in arms], settings)
    built += [_tuned_arm(name, folder, request.device) for name, folder in tuned.items()]
    order = {name: place for place, name in enumerate(folders)}
    return sorted(built, key=lambda one: order.get(one.name, -1))


def _tuned_arm(name: str, folder: Path, device: str) -> Arm:
    """Return the arm of a target that learnt with its head: another target, and so not lossless for the given one."""
    own = load_whole(folder, device=device)
    told = f"target={folder} drafter=model tree={TREE} (weights {described(own.target)['weights']})"
    arm = drafting_arm(name, own.target, own.draft, policy=parse_policy(TREE))
    return replace(arm, lossless=False, description=told)


def _made(
    request: BenchHeadsOptions, pair: Pair, folder: Path, learn: Sequence[Prompt], notes: Console
) -> Mapping[str, Any]:
    """Return what a head learnt, which is trained if it is not there."""
    if not (folder / MADE).is_file():
        kind = _kind(folder)
        learns = not folder.name.startswith(UNTRAINED)
        recipe = HeadRecipe(steps=request.steps) if learns else HeadRecipe(steps=1, matrix_rate=0.0, other_rate=0.0)
        rows = request.rows if MAKERS[kind].fewer else None
        form, writing = usual_form(kind, rows), WritingPlan(tokens=request.tokens)
        plan = HeadPlan(kind, writing=writing, recipe=recipe, rows=rows, form=form)
        prompts = plan.writing.fitting([encode(pair, one)[0] for one in learn])
        making = partial(make_head, pair.target, prompts, request.work)
        if learns and request.seconds is not None:
            steps = _steps_within(request.seconds, folder / STEPS, plan, request.work, making)
            plan = replace(plan, recipe=replace(recipe, steps=steps))
        notes.print(f"{kind}: {plan.recipe.steps} steps.", soft_wrap=True)
        head = making(out=folder, plan=plan, noting=partial(noted_interruption, NOTED))
        law = "path" if MAKERS[kind].path else "slot"
        drift = (None, None) if head.drift is None else (head.drift.divergence, head.drift.agreement)
        found = HeadConditions(head.parameters, head.tokens, head.seconds, head.drafting.overlap, law, *drift)
        (folder / MADE).write_text(json.dumps(asdict(found)))
    return json.loads((folder / MADE).read_text())


def _steps_within(seconds: float, file: Path, plan: HeadPlan, work: Path, making: Callable[..., MadeHead]) -> int:
    """Return how many steps take about so many seconds, by the first ones of a head of the same plan.

    The number is kept in a file: another one would be another run, and what was learnt before Ctrl-C would be lost.
    """
    if not file.is_file():
        few, times = replace(plan, recipe=replace(plan.recipe, steps=FIRST_STEPS)), list[float]()
        rmtree(work / run_name(few), ignore_errors=True)  # steps that are there already take no time

        @contextmanager
        def timed() -> Iterator[Callable[[], bool]]:
            with noted_interruption(NOTED) as interrupted:

                def after_step() -> bool:
                    times.append(perf_counter())
                    return interrupted()

                yield after_step

        with TemporaryDirectory() as folder:
            making(out=Path(folder) / "first", plan=few, noting=timed)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(max(1, round(seconds * (len(times) - 1) / (times[-1] - times[0])))))
    return int(file.read_text())


def _shown(request: BenchHeadsOptions, results: SpeedResults, *, interrupted: bool) -> None:
    conditions, records = results.conditions, results.records
    if request.as_json:
        print_json(conditions, records, interrupted=interrupted)
        return
    if not records:
        return
    console, found = new_console(), overall(summarise_speed(records, [*conditions["arms"]], conditions["seed"]))
    print_table(console, head_table(conditions[HEADS], found, conditions["target"]["name"]))
    page = request.out.with_name("table.md")
    page.write_text(head_page(records_of_heads(page.parent)))
    console.print(f"Every run is in {request.out}; {page} shows all such files of its folder.", soft_wrap=True)
