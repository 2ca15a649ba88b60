"""From a target and prompts to a tuned model whose first layers draft for it: it is written with its card."""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from polydraft.models import HuggingFaceModel
from polydraft.training.exits.exit_loss import ExitQuality, ExitSettings, ExitTraining
from polydraft.training.heads.head_making import end_ids_of
from polydraft.training.heads.loop import HeadRecipe, train_head
from polydraft.training.heads.losses.tuned_target import save_whole
from polydraft.training.heads.shards import Shards, WritingPlan, check_size, write_shards

READS = ("final",)
"""Of the states that shards hold none are read; these are there in any case."""


@dataclass(frozen=True)
class ExitPlan:
    """Everything that exits are made by.

    Args:
        settings: how they learn.
        writing: the target's text.
        recipe: the training run.
        name: what the target is called on the card.
    """

    settings: ExitSettings = field(default_factory=ExitSettings)
    writing: WritingPlan = field(default_factory=WritingPlan)
    recipe: HeadRecipe = field(default_factory=lambda: HeadRecipe(matrix_rate=1e-3, other_rate=5e-4))
    name: str = "its target"

    @property
    def run_name(self) -> str:
        """What the folder of its checkpoints is called: no run goes on from the checkpoint of another plan."""
        writing = {name: value for name, value in asdict(self.writing).items() if name != "most_bytes"}
        made_by: list[Any] = [asdict(self.settings), asdict(self.recipe), writing]
        return f"exits-{hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class MadeExits:
    """A tuned model that was written.

    Args:
        folder: where it is.
        tuned_from: the target that it was; texts follow the law of the tuned model, which is another one.
        before: what the target and its exits are like.
        after: the same of the tuned model.
        seconds: how long it learnt, since the run was begun or gone on with.
    """

    folder: Path
    tuned_from: str
    before: ExitQuality
    after: ExitQuality
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name, for JSON."""
        return {**asdict(self), "folder": str(self.folder), "another_model": True}


def make_exits(
    target: PreTrainedModel,
    prompts: Sequence[Int[Tensor, " _"]],
    work: Path,
    out: Path,
    plan: ExitPlan = ExitPlan(),
    noting: Callable[[], AbstractContextManager[Callable[[], bool]]] = lambda: nullcontext(lambda: False),
) -> MadeExits:
    """Write the target's text, tune a copy of the target on it, and write that; every part goes on where it was.

    Args:
        prompts: how the target's texts begin.
        work: the target's text and checkpoints, a folder for each plan.
        out: the tuned model's folder.
        noting: as for `make_head`.

    Raises:
        KeyboardInterrupt: it was interrupted while the model learnt.
        InvalidParameter: the prompts are too few or too long, or the text would be too large.
        ResultsError: the work folder holds something else.
        CheckpointError: the model cannot be written.
        UnsupportedModel: the target has no exits.
    """
    model = HuggingFaceModel(target)
    training = ExitTraining(target, plan.settings)  # says before hours of work what cannot be tuned
    check_size(model, READS, plan.writing)
    text = write_shards(model, prompts, work / "text", READS, plan.writing, end_ids_of(target))
    held_out = Shards(text.held_out)
    before, began = ExitQuality.of(training, held_out), perf_counter()
    with noting() as interrupted:
        run = work / plan.run_name
        train_head(training, Shards(text.learnt), held_out, run, plan.recipe, interrupted, target.device)
    tuned, seconds = training.tuned(), perf_counter() - began
    after = ExitQuality.of(ExitTraining(tuned, plan.settings), held_out)  # in the precision in which it is written
    made = MadeExits(out, plan.name, before, after, seconds)
    card = card_of(made, plan, len(Shards(text.learnt)) * plan.writing.length)
    save_whole(tuned, out, target, card, tuned_from=plan.name)
    return made


def card_of(made: MadeExits, plan: ExitPlan, tokens: int) -> str:
    """Return the text of a tuned model's README.md."""
    own, recipe, before, after = plan.settings, plan.recipe, made.before, made.after
    rows = "\n".join(
        f"| {layer} | {first:.3f} | {second:.3f} |"
        for layer, (first, second) in enumerate(zip(before.overlap, after.overlap, strict=True), start=1)
    )
    every = "" if own.every is None else f", every {own.every}"
    return f"""# {plan.name}, tuned to exit early

**This is another model than {plan.name}.** LayerSkip (arXiv 2404.16710) tuned its weights, so that its first layers
draft for it. Whatever is drafted, texts follow the law of this tuned model, and not that of {plan.name}.

It is an ordinary model folder. With drafts from its first E layers:

    polydraft generate --target THIS_FOLDER --draft self:exit=E "..."

## Measured on {after.tokens} held-out tokens that {plan.name} wrote

Perplexity of {plan.name}: {before.perplexity:.3f}; of this model: {after.perplexity:.3f}.

Mean overlap sum_x min(model, exit) at temperature 1, given the text's own tokens above it:

| layers | {plan.name} | this model |
|---|---|---|
{rows}

## Data and recipe

`polydraft train exits`: {tokens} tokens in texts of {plan.writing.length}.
{plan.name} wrote them behind given prompts, at temperatures 0, 0.7 and 1.
{recipe.steps} steps of {recipe.texts} texts; Muon at {recipe.matrix_rate:g}, and AdamW at {recipe.other_rate:g}
for norms and biases and a quarter of that for tables, cosine schedule; seed {recipe.seed}.
Layer dropout up to {own.dropout:g}; exits weigh by the scale {own.scale}, early ones {own.early:g} times as much;
curriculum {own.curriculum}{every}.
"""
