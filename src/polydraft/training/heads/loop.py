"""One training loop for all heads: Hugging Face's Trainer over shards, with held-out measurements while it runs."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from polydraft.errors import InvalidParameter
from polydraft.training.heads.losses.row_losses import Learner, step_of
from polydraft.training.muon import Muon


@dataclass(frozen=True)
class HeadRecipe:
    """One training run of a head.

    Args:
        steps: optimiser steps.
        texts: texts per step.
        matrix_rate: peak learning rate of the weight matrices (Muon).
        other_rate: peak learning rate of tables, norms and biases (AdamW).
        warmup: share of the steps over which the rates rise.
        measure_every: steps between measurements on held-out text.
        save_every: steps between checkpoints.
        seed: of the order of texts and of the anchors.

    Raises:
        InvalidParameter: a rate outside of [0, 1].
    """

    steps: int = 4000
    texts: int = 8
    matrix_rate: float = 4e-3
    other_rate: float = 2e-3
    warmup: float = 0.02
    measure_every: int = 250
    save_every: int = 250
    seed: int = 1

    def __post_init__(self) -> None:
        for rate in (self.matrix_rate, self.other_rate):
            if not 0 <= rate <= 1:
                raise InvalidParameter(f"A head's learning rate is in [0, 1], but is {rate}.")


@dataclass(frozen=True)
class Drafting:
    """What a head drafts like on held-out text.

    Args:
        overlap: mean overlap with the target's law, by draft, given the text's own tokens above it.
        efficiency: tokens per target call of a chain at temperature 1, if overlaps along a path were independent.
    """

    overlap: tuple[float, ...]
    efficiency: float

    @classmethod
    def of(cls, overlap: Tensor) -> "Drafting":
        """Return the summary of mean overlaps by draft."""
        values = tuple(map(float, overlap))
        return cls(values, 1 + sum(math.prod(values[: depth + 1]) for depth in range(len(values))))

    def __str__(self) -> str:
        return f"{self.efficiency:.3f} tokens per call if overlaps were independent; overlap " + " ".join(
            f"{one:.3f}" for one in self.overlap
        )


@torch.no_grad()
def measured(training: nn.Module, texts: Dataset[dict[str, Tensor]], batch: int = 8, most: int = 64) -> Drafting:
    """Return what a head drafts like on the first held-out texts; anchors are drawn anew with the same seed.

    Texts come from shards on the host, and go to where the head is.
    """
    device, found = next(training.parameters()).device, list[dict[str, Tensor]]()
    with _left_as_it_is(training):
        torch.manual_seed(0)
        size = min(most, len(texts))  # pyright: ignore[reportArgumentType]  shards have a length
        for first in range(0, size, batch):
            rows = [texts[place] for place in range(first, min(first + batch, size))]
            found.append(training(**{name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}))
    counts = torch.stack([one["count"] for one in found])
    overlaps = torch.stack([one["overlap"] for one in found])
    return Drafting.of((overlaps * counts).sum(0) / counts.sum(0).clamp_min(1))


@contextmanager
def _left_as_it_is(training: nn.Module) -> Iterator[None]:
    """Let a head be measured while it learns: it learns on as if nobody had looked."""
    was, device = training.training, next(training.parameters()).device
    training.eval()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        training.train(was)


Worth = Callable[[], dict[str, tuple[float, ...]] | None]
"""Counts tokens per target call of chains of 1, 2, ... drafts on held-out text, by how they are verified; or cannot."""
After = Callable[[int, Callable[[dict[str, Any]], None]], bool]
"""Is told after every step how many there were, with a function that writes to the log; says whether it was the last.
"""


class _AfterSteps(TrainerCallback):
    """Tells of every step, and ends an interrupted run with a checkpoint."""

    def __init__(self, after: After, interrupted: Callable[[], bool]) -> None:
        self.after, self.interrupted = after, interrupted
        self.trainer: Trainer | None = None
        self.enough = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell of the step, and look whether somebody has interrupted the run."""
        assert self.trainer is not None
        self.enough = self.after(state.global_step, self.trainer.log)  # pyright: ignore[reportArgumentType]  the log takes any value
        if self.enough:
            control.should_training_stop = True
        elif self.interrupted():
            control.should_save = control.should_training_stop = True


class _NamedBar(ProgressCallback):
    """The bar of a run with a name before it, and without lines of losses between."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Name the bar."""
        super().on_train_begin(args, state, control, **more)
        if self.training_bar is not None:
            self.training_bar.set_description(self.title)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Print nothing: whoever names a run has a better measure of it than its loss."""


class _HeadTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None):
        """Take the texts of a step in parts, where their rows would be too many at once."""
        parts = model.parts(len(inputs["ids"]))
        if parts == 1:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        inputs = self._prepare_inputs(inputs)
        texts = ({name: one[first::parts] for name, one in inputs.items()} for first in range(parts))
        return step_of(model, (model(**some) for some in texts), self.accelerator.backward)


def train_head(
    training: Learner,
    texts: Dataset[dict[str, Tensor]],
    held_out: Dataset[dict[str, Tensor]],
    folder: Path,
    recipe: HeadRecipe,
    interrupted: Callable[[], bool] = lambda: False,
    device: torch.device | None = None,
    worth: Worth = lambda: None,
) -> Drafting:
    """Train a head, going on from the last checkpoint in `folder` if there is one; return what it drafts like.

    Args:
        folder: checkpoints.
        interrupted: asked after every step; where it says yes, the run leaves a checkpoint and ends.
        device: where the target's ends are, to which the head is moved; None for the host.
        worth: what the log says of the head beside its overlaps.

    Raises:
        KeyboardInterrupt: it was interrupted before its last step.
    """

    def after(step: int, log: Callable[[dict[str, Any]], None]) -> bool:
        if step % recipe.measure_every == 0:
            found = measured(training, held_out)
            with _left_as_it_is(training):
                counted = worth()
            calls = {"if independent": (found.efficiency,)} if counted is None else counted
            told = {f"tokens_per_call_{rule.replace(' ', '_')}": value[-1] for rule, value in calls.items()}
            log({**told, "overlaps": [round(one, 4) for one in found.overlap]})
        return False

    run_steps(training, texts, folder, recipe, after, interrupted, device)
    return measured(training, held_out)


def run_steps(
    training: Learner,
    texts: Dataset[dict[str, Tensor]],
    folder: Path,
    recipe: HeadRecipe,
    after: After,
    interrupted: Callable[[], bool] = lambda: False,
    device: torch.device | None = None,
    title: str = "",
) -> None:
    """Take the steps of a recipe, going on from the last checkpoint in `folder`; arguments as of `train_head`.

    Args:
        after: is told of every step; where it says that this was enough, the run ends without a checkpoint.
        title: what the bar is called; "" for a bar without a name, and a line of the loss now and then.

    Raises:
        KeyboardInterrupt: the run was interrupted before its last step.
    """
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.texts,
        lr_scheduler_type="cosine",
        warmup_steps=round(recipe.warmup * recipe.steps),
        max_grad_norm=1.0,
        use_cpu=device is None or device.type == "cpu",
        logging_steps=50,
        save_steps=recipe.save_every,
        save_total_limit=2,
        report_to=[],
        remove_unused_columns=False,
        seed=recipe.seed,
        data_seed=recipe.seed,
    )
    training.begin(recipe.steps)
    optimizer = Muon(training, recipe.matrix_rate, recipe.other_rate, slow=training.slow())
    after_steps = _AfterSteps(after, interrupted)
    trainer = _HeadTrainer(
        model=training,
        args=arguments,
        train_dataset=texts,
        optimizers=(optimizer, None),  # pyright: ignore[reportArgumentType]  the schedule is made by the trainer
        callbacks=[after_steps],
    )
    after_steps.trainer = trainer
    if title:
        trainer.remove_callback(PrinterCallback)  # which takes the bar's place where bars are off
        if trainer.pop_callback(ProgressCallback) is not None:
            trainer.add_callback(_NamedBar(title))
    with redirect_stdout(sys.stderr):  # where the trainer's log belongs: standard output is the caller's
        trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    if trainer.state.global_step < recipe.steps and not after_steps.enough:
        raise KeyboardInterrupt


def last_checkpoint(folder: Path) -> str | None:
    """Return the last checkpoint that was written to its end, if there is one; the trainer's state is written last."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda one: int(one.name.rpartition("-")[2]), reverse=True):
        with suppress(OSError, ValueError):  # who was killed in the middle of writing leaves none, or half of it
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            return str(path)
    return None
