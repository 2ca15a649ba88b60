"""`polydraft train`: the embedded pair from nothing, and draft heads for any target from text that it writes."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from torch import Tensor

from polydraft.bench.prompts.prompt import encode
from polydraft.cli.clashes import read_asked, refuse_clashes
from polydraft.cli.printing import console, print_json_line
from polydraft.cli.process import noted_interruption, stopped
from polydraft.errors import InvalidParameter, ResultsError
from polydraft.extras import TRAIN
from polydraft.models import load, load_draft, load_pair
from polydraft.models.checkpoints.weight_versions import disk_errors
from polydraft.options.commands.making_options import (
    LearningOptions,
    TrainAdapterOptions,
    TrainConsistencyOptions,
    TrainExitsOptions,
    TrainHeadOptions,
    TrainPairOptions,
)
from polydraft.training import (
    ConsistencyPlan,
    ConsistencySettings,
    ExitPlan,
    ExitSettings,
    HeadPlan,
    HeadRecipe,
    HeadSize,
    MadeConsistent,
    MadeExits,
    MadeHead,
    PairRecipe,
    WritingPlan,
    calls_in_words,
    export_pair,
    make_consistent,
    make_exits,
    make_head,
    train_pair,
    usual_form,
)

PARTS = ("tokenizer", "train.u32", "held_out.jsonl")
"""What lies beside corpus.json, which is written last."""


def run_train_pair(options: TrainPairOptions) -> int:
    """Train, export and report; return the exit code: 0, or 130 after Ctrl-C, after which the same call goes on.

    Raises:
        InvalidParameter: both folders are the same.
        MissingExtra: accelerate cannot be used.
        ResultsError: the work folder is damaged, or a folder cannot be read or written.
    """
    notes, work, out = console(errors=True), options.work, options.out
    check_training(work, out)
    recipe = PairRecipe()
    try:
        with disk_errors():
            target, draft = train_pair(work, recipe)
            quality = export_pair(work, target, draft, out, recipe)
    except KeyboardInterrupt:
        return stopped(f"the same command goes on from the last checkpoint in {work}")
    except OSError as error:
        raise ResultsError(f"The training cannot go on in {work} and {out}: {error.strerror or error}.") from error
    notes.print(
        f"Written to {out}. On {quality.tokens} held-out tokens: target {quality.target_bits_per_byte:.3f} bits per "
        f"byte, draft {quality.draft_bits_per_byte:.3f}, overlap {quality.overlap:.3f}.",
        soft_wrap=True,
    )
    return 0


def check_training(work: Path, out: Path) -> None:
    """Check what can be checked before hours of work.

    Raises:
        InvalidParameter: both folders are the same.
        MissingExtra: accelerate cannot be used.
        ResultsError: parts of the work folder are missing.
    """
    same = work.resolve() == out.resolve()
    refuse_clashes((same, "--out and --work are the same folder: the models belong into one of their own."))
    TRAIN.check()
    missing = [name for name in PARTS if not (work / name).exists()] if (work / "corpus.json").exists() else []
    if missing:
        raise ResultsError(f"{work}: {missing[0]} is missing beside corpus.json; begin in an empty folder.")


EXCERPT_TOKENS = 64


def run_train_head(request: TrainHeadOptions) -> int:
    """Write, train, export and report; return the exit code: 0, or 130 after Ctrl-C, after which the same call goes on.

    Raises:
        InvalidParameter: options that do not go together.
        MissingExtra: accelerate cannot be used.
        ResultsError: the work folder holds something else, or a folder cannot be read or written.
    """
    plan = plan_of(request)
    noting = partial(noted_interruption, "this step")

    def make(target: Any, prompts: list[Tensor]) -> MadeHead:
        return make_head(target, prompts, request.work, request.out, plan, noting)

    return _learnt(request, plan.writing, make, in_words)


def run_train_exits(request: TrainExitsOptions) -> int:
    """Write, tune, export and report, and say that the tuned model is another one; return the exit code, as for heads.

    Raises:
        PolydraftError: what `run_train_head` raises.
    """
    one, noting = request, partial(noted_interruption, "this step")
    name = one.target or "the embedded target"
    plan = ExitPlan(
        ExitSettings(one.dropout, one.scale, one.early, one.curriculum, one.every),
        writing_of(one),
        HeadRecipe(steps=one.steps, matrix_rate=one.rate, other_rate=one.rate / 2, seed=one.seed),
        name,
    )

    def make(target: Any, prompts: list[Tensor]) -> MadeExits:
        console(errors=True).print(f"The tuned model will be another one than {name}, which stays.", soft_wrap=True)
        return make_exits(target, prompts, one.work, one.out, plan, noting)

    return _learnt(request, plan.writing, make, exits_in_words)


def run_train_consistency(request: TrainConsistencyOptions) -> int:
    """Write, tune, export and report, and say whose law texts then have; return the exit code, as for heads.

    Raises:
        PolydraftError: what `run_train_head` raises.
    """
    one, noting = request, partial(noted_interruption, "this step")
    name = one.target or "the embedded target"
    plan = ConsistencyPlan(
        ConsistencySettings(one.block, one.keep or ("law" if one.start else "tokens"), one.weight),
        writing_of(one),
        HeadRecipe(steps=one.steps, matrix_rate=one.rate, other_rate=one.rate / 2, seed=one.seed),
        name,
    )

    def make(target: Any, prompts: list[Tensor]) -> MadeConsistent:
        start = None if one.start is None else load_draft(one.start, target)
        if start is None:
            console(errors=True).print(f"The tuned model will be another one than {name}, which stays.", soft_wrap=True)
        return make_consistent(target, prompts, one.work, one.out, plan, noting, start)

    return _learnt(request, plan.writing, make, consistent_in_words)


Made = TypeVar("Made", MadeHead, MadeExits, MadeConsistent)


def _learnt(
    request: LearningOptions,
    writing: WritingPlan,
    make: Callable[[Any, list[Tensor]], Made],
    words: Callable[[Made], str],
) -> int:
    """Load the target, make what is asked for behind prompts, and report it; return the exit code."""
    notes = console(errors=True)
    check_head_request(request)
    prompts = read_asked(request.prompts, request.limit, request.chat_template)
    try:
        with notes.status("Loading the target ..."):
            pair = load_pair() if request.target is None else load(request.target)
        encoded = [encode(pair, prompt, EXCERPT_TOKENS)[0] for prompt in prompts]
        with disk_errors():
            made = make(pair.target, _fitting(encoded, writing, notes))
    except KeyboardInterrupt:
        return stopped(f"the same command goes on from where it was, in {request.work}")
    except OSError as error:
        where = f"{request.work} and {request.out}"
        raise ResultsError(f"The training cannot go on in {where}: {error.strerror or error}.") from error
    if request.as_json:
        print_json_line(made.as_dict())
    else:
        console().print(words(made), soft_wrap=True)
    return 0


def run_train_adapter(request: TrainAdapterOptions) -> int:
    """Train an adapter, which is a kind of head; return the exit code of that.

    Raises:
        PolydraftError: what `run_train_head` raises.
    """
    own = {one.name: getattr(request, one.name) for one in fields(request)}
    return run_train_head(TrainHeadOptions(kind="adapter", **own))


def plan_of(request: TrainHeadOptions) -> HeadPlan:
    """Return what is trained, and how.

    Raises:
        InvalidParameter: options that no such head has.
    """
    one = request
    return HeadPlan(
        one.kind,
        HeadSize(
            layers=one.layers,
            drafts=one.drafts,
            rank=one.rank,
            term=one.term,
            loss=one.loss,
            exit=one.exit,
            frozen_rows=one.frozen_rows,
        ),
        writing_of(one),
        HeadRecipe(steps=one.steps, matrix_rate=one.rate, other_rate=one.rate / 2, seed=one.seed),
        one.rows,
        one.form or usual_form(one.kind, one.rows),
        one.target or "the embedded target",
        one.start,
    )


def writing_of(request: LearningOptions) -> WritingPlan:
    """Return how much the target writes."""
    one = request
    return WritingPlan(tokens=one.tokens, length=one.length, past_end=one.past_end, seed=one.seed)


def check_head_request(request: LearningOptions) -> None:
    """Check what can be checked before hours of work.

    Raises:
        InvalidParameter: no prompts, one folder for both, or a folder of something else.
        MissingExtra: accelerate cannot be used.
    """
    same = request.work.resolve() == request.out.resolve()
    refuse_clashes(
        (not request.prompts, "--prompts is missing: the target writes the text to learn from behind prompts."),
        (same, "--out and --work are the same folder: what is made belongs into one of its own."),
    )
    if request.out.is_dir() and any(request.out.iterdir()):
        raise InvalidParameter(f"--out {request.out} is not empty; name a new folder.")
    TRAIN.check()


def in_words(made: MadeHead) -> str:
    """Return what was made, for people."""
    overlaps = " ".join(f"{one:.3f}" for one in made.drafting.overlap)
    tuned = "" if made.drift is None else f" Texts are exact for the tuned target only. {made.drift}"
    return (
        f"Written to {made.folder}: {made.parameters / 1e6:.2f} M parameters, learnt from {made.tokens} tokens. "
        f"On held-out text at temperature 1 its overlap with the target is {overlaps} by draft. "
        f"{calls_in_words(made)}{tuned}"
    )


def exits_in_words(made: MadeExits) -> str:
    """Return what was tuned, for people."""
    own = zip(made.before.overlap, made.after.overlap, strict=True)
    exits = "; ".join(f"{layer}: {first:.3f}, {second:.3f}" for layer, (first, second) in enumerate(own, start=1))
    return (
        f"Written to {made.folder}: another model than {made.tuned_from}, whose law texts then have. On "
        f"{made.after.tokens} held-out tokens its perplexity is {made.after.perplexity:.3f}, and that of "
        f"{made.tuned_from} {made.before.perplexity:.3f}. Overlap with the whole model behind so many layers, before "
        f"and after: {exits}."
    )


def consistent_in_words(made: MadeConsistent) -> str:
    """Return what was tuned, for people."""
    what = f"a draft for {made.tuned_from}" if made.draft else f"another model than {made.tuned_from}"
    law = "." if made.draft else f", whose law texts then have. {made.drift or ''}"
    return (
        f"Written to {made.folder}: {what}{law} In the model's own iteration on held-out text: {made.before} before, "
        f"and {made.after} after. Overlap behind wrong guesses: {made.overlap[0]:.3f} before, {made.overlap[1]:.3f} "
        "after."
    )


def _fitting(prompts: Sequence[Tensor], writing: WritingPlan, notes: Console) -> list[Tensor]:
    """Return the prompts behind which the target writes, and say how many are too long for it."""
    fitting = writing.fitting(prompts)
    if len(fitting) < len(prompts):
        most = f"{writing.longest_prompt} tokens, three quarters of --length {writing.length}"
        left = f"{len(prompts) - len(fitting)} of {len(prompts)} prompts left out"
        notes.print(f"{left}: each is empty, or longer than {most}.", soft_wrap=True)
    return fitting
