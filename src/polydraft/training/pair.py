"""The embedded model pair: a deep, narrow Llama target, and a one-layer draft distilled from it.

Data flow: corpus files -> tokenizer and token files -> target (cross-entropy) -> draft (cross-entropy, then
distillation from the target) -> two ordinary Hugging Face folders. Every stage leaves its result in the work
folder and is skipped when the result is there, and training resumes from its last checkpoint, so an interrupted
run goes on where it stopped.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from polydraft.training.corpus import SourceFile, gather
from polydraft.training.losses import distillation_loss, next_token_loss, overlap_loss
from polydraft.training.windows import Windows, encode_files, train_tokenizer


@dataclass(frozen=True)
class Shape:
    """The size of one Llama model: layers, widths, heads of 64 channels sharing one key/value head."""

    layers: int
    width: int
    inner: int
    heads: int


@dataclass(frozen=True)
class Stage:
    """One training run: optimiser steps, peak learning rate, and weight of the loss terms."""

    steps: int
    learning_rate: float
    warmup_steps: int = 100
    decay_share: float = 0.3


@dataclass(frozen=True)
class PairRecipe:
    """Everything that determines the embedded pair, apart from what is installed beside the interpreter.

    `batch` windows of `context` tokens make one optimiser step; the draft sees `draft` steps of text first and
    `distil` steps of the target's distributions afterwards.
    """

    vocab_size: int = 8192
    context: int = 1024
    batch: int = 4
    seed: int = 20_261_121
    target_shape: Shape = Shape(layers=14, width=256, inner=384, heads=4)
    draft_shape: Shape = Shape(layers=1, width=128, inner=384, heads=2)
    target: Stage = Stage(steps=1500, learning_rate=2e-3)
    draft: Stage = Stage(steps=1200, learning_rate=4e-3)
    distil: Stage = Stage(steps=900, learning_rate=2e-3)


def build_model(shape: Shape, recipe: PairRecipe, end_id: int) -> LlamaForCausalLM:
    """Return an untrained Llama model of the given shape with tied embeddings."""
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        bos_token_id=end_id,
        eos_token_id=end_id,
    )
    return LlamaForCausalLM(config)


class NextTokenTrainer(Trainer):
    """A Trainer whose loss is plain next-token cross-entropy."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the cross-entropy of one batch of windows."""
        outputs = model(input_ids=inputs["input_ids"], use_cache=False)
        loss = next_token_loss(outputs.logits, inputs["input_ids"])
        return (loss, outputs) if return_outputs else loss


class DistillationTrainer(Trainer):
    """A Trainer that moves the draft's distributions towards a frozen target's."""

    def __init__(self, *args, target: PreTrainedModel, **keywords) -> None:
        super().__init__(*args, **keywords)
        self.frozen_target = target.eval().requires_grad_(False).to(self.args.device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return KL(target || draft) plus -log of their overlap, for one batch of windows."""
        ids: Tensor = inputs["input_ids"]
        with torch.no_grad():
            wanted = self.frozen_target(input_ids=ids, use_cache=False).logits
        outputs = model(input_ids=ids, use_cache=False)
        loss = distillation_loss(outputs.logits, wanted) + overlap_loss(outputs.logits, wanted)
        return (loss, outputs) if return_outputs else loss


def has_fast_bfloat16() -> bool:
    """Tell whether this machine multiplies bfloat16 matrices in hardware (emulation is forty times slower)."""
    return torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()


def training_arguments(folder: Path, recipe: PairRecipe, stage: Stage) -> TrainingArguments:
    """Return the Trainer settings of one stage: warm-up, constant rate, linear decay; a checkpoint every 100 steps."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=stage.steps,
        per_device_train_batch_size=recipe.batch,
        learning_rate=stage.learning_rate,
        lr_scheduler_type="warmup_stable_decay",
        warmup_steps=stage.warmup_steps,
        lr_scheduler_kwargs={"num_decay_steps": int(stage.steps * stage.decay_share), "decay_type": "linear"},
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        bf16=has_fast_bfloat16(),
        torch_compile=True,
        logging_steps=20,
        save_steps=100,
        save_total_limit=2,
        report_to=[],
        remove_unused_columns=False,
        seed=recipe.seed,
        data_seed=recipe.seed,
    )


def run_stage(trainer: Trainer, folder: Path) -> None:
    """Train, resuming from the last checkpoint in `folder` when there is one, and save the model there."""
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(str(folder / "final"))


def prepare_text(work: Path, recipe: PairRecipe) -> PreTrainedTokenizerFast:
    """Write tokenizer, token files and the held-out texts into `work`, unless they are there; return the tokenizer."""
    folder = work / "tokenizer"
    if (work / "corpus.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(str(folder))
    work.mkdir(parents=True, exist_ok=True)
    training, held_out = gather()
    tokenizer = train_tokenizer((file.text for file in training[::3]), recipe.vocab_size, recipe.context)
    tokenizer.save_pretrained(str(folder))
    tokens = encode_files(tokenizer, [file.text for file in training], work / "train.u16")
    (work / "held_out.jsonl").write_text("\n".join(json.dumps(asdict(file)) for file in held_out))
    (work / "corpus.json").write_text(json.dumps(_describe(training, held_out, tokens), indent=1))
    return tokenizer


def _describe(training: list[SourceFile], held_out: list[SourceFile], tokens: int) -> dict[str, object]:
    return {
        "training_files": len(training),
        "held_out_files": len(held_out),
        "training_bytes": sum(len(file.text.encode()) for file in training),
        "held_out_bytes": sum(len(file.text.encode()) for file in held_out),
        "training_tokens": tokens,
        "licences": dict(sorted({(file.package, file.licence) for file in training})),
    }


def train_pair(work: Path, recipe: PairRecipe = PairRecipe()) -> tuple[Path, Path]:
    """Train the pair from nothing in folder `work`; return the folders of the trained target and draft.

    Raises:
        OSError: the work folder cannot be written.
    """
    tokenizer = prepare_text(work, recipe)
    windows = Windows(work / "train.u16", recipe.context)
    torch.manual_seed(recipe.seed)
    target_run, draft_run, distil_run = work / "target", work / "draft", work / "distil"
    end_id = int(tokenizer.eos_token_id)
    if not (target_run / "final").is_dir():
        model = build_model(recipe.target_shape, recipe, end_id)
        arguments = training_arguments(target_run, recipe, recipe.target)
        run_stage(NextTokenTrainer(model, arguments, train_dataset=windows), target_run)
    if not (draft_run / "final").is_dir():
        model = build_model(recipe.draft_shape, recipe, end_id)
        arguments = training_arguments(draft_run, recipe, recipe.draft)
        run_stage(NextTokenTrainer(model, arguments, train_dataset=windows), draft_run)
    if not (distil_run / "final").is_dir():
        model = LlamaForCausalLM.from_pretrained(draft_run / "final")
        target = LlamaForCausalLM.from_pretrained(target_run / "final")
        arguments = training_arguments(distil_run, recipe, recipe.distil)
        run_stage(DistillationTrainer(model, arguments, train_dataset=windows, target=target), distil_run)
    return target_run / "final", distil_run / "final"
