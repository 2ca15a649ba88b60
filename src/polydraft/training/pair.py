"""The embedded model pair: a deep, narrow Llama target, and a two-layer draft distilled from it.

Data flow: corpus files -> tokenizer and token files -> target (cross-entropy) -> draft (cross-entropy, then
distillation from the target, at last on text that the target wrote too) -> two ordinary Hugging Face folders. Every
stage leaves its result in the work folder and is skipped when the result is there, and training resumes from its last
checkpoint, so an interrupted run goes on where it stopped.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
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
from polydraft.training.muon import Muon, has_fast_bfloat16
from polydraft.training.token_files import Alternating, OwnText, Windows, encode_files, train_tokenizer, write_own_text


def next_token_loss(logits: Float[Tensor, "b t V"], ids: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Return the mean cross-entropy, in nats, of each token given those before it."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def distillation_loss(draft_logits: Float[Tensor, "b t V"], target_logits: Float[Tensor, "b t V"]) -> Float[Tensor, ""]:
    """Return the mean Kullback-Leibler divergence of the draft's rows from the target's, in nats.

    KL(target || draft) = sum_x target(x) log(target(x) / draft(x)) at every position (DistillSpec,
    arXiv 2310.08461, section 4: forward KL).
    """
    draft = functional.log_softmax(draft_logits.float(), dim=-1).flatten(0, 1)
    target = functional.log_softmax(target_logits.float(), dim=-1).flatten(0, 1)
    return functional.kl_div(draft, target, reduction="batchmean", log_target=True)


def overlap_loss(draft_logits: Float[Tensor, "b t V"], target_logits: Float[Tensor, "b t V"]) -> Float[Tensor, ""]:
    """Return the mean of -log sum_x min(target(x), draft(x)): the acceptance rate of a single draft, directly.

    The sum is one minus the total variation distance and equals the acceptance probability of speculative
    sampling (arXiv 2211.17192, theorem 3.5); its logarithm keeps the gradient alive where the overlap is small.
    """
    draft = torch.softmax(draft_logits.float(), dim=-1)
    target = torch.softmax(target_logits.float(), dim=-1)
    return -torch.minimum(draft, target).sum(dim=-1).clamp_min(1e-6).log().mean()


def draft_distance(draft_logits: Float[Tensor, "b t V"], target_logits: Float[Tensor, "b t V"]) -> Float[Tensor, ""]:
    """Return what the embedded draft is distilled by: KL(target || draft) plus -log of their overlap."""
    return distillation_loss(draft_logits, target_logits) + overlap_loss(draft_logits, target_logits)


Collect = Callable[[], tuple[list[SourceFile], list[SourceFile]]]


@dataclass(frozen=True)
class PairShape:
    """The size of one Llama model: layers, widths, heads of 64 channels sharing one key/value head."""

    layers: int
    width: int
    inner: int
    heads: int


@dataclass(frozen=True)
class Stage:
    """One training run.

    Args:
        steps: optimiser steps.
        windows: text windows per step.
        tokens: tokens per window.
        matrix_rate: peak learning rate of the weight matrices (Muon).
        other_rate: peak learning rate of embeddings and norms (AdamW).
        warmup_steps: steps of linear warm-up.
        decay_steps: last steps, over which the rates fall linearly to zero.
        data_offset: another number shuffles the windows in another order.
    """

    steps: int
    windows: int
    tokens: int
    matrix_rate: float
    other_rate: float
    warmup_steps: int = 0
    decay_steps: int = 0
    data_offset: int = 0


@dataclass(frozen=True)
class PairRecipe:
    """Everything that determines the embedded pair, apart from what is installed beside the interpreter.

    The target learns on short windows, which are cheaper, then on windows as long as its context while its learning
    rate falls. The draft learns from text first and from the target's distributions afterwards, and three times again
    from the full rate on, which gained most of its overlap (docs/log.md); the last time half of the text is the
    target's own.
    """

    vocab_size: int = 8192
    context: int = 1024
    compiled: bool = True
    save_every: int = 50
    seed: int = 20_261_121
    target_shape: PairShape = PairShape(layers=14, width=256, inner=384, heads=4)
    draft_shape: PairShape = PairShape(layers=2, width=128, inner=384, heads=2)
    target: Stage = Stage(1100, 16, 256, matrix_rate=5e-3, other_rate=5e-3, warmup_steps=30)
    extend: Stage = Stage(150, 4, 1024, matrix_rate=5e-3, other_rate=5e-3, decay_steps=150)
    draft: Stage = Stage(500, 4, 1024, matrix_rate=5e-3, other_rate=5e-3, warmup_steps=30, decay_steps=100)
    distil: Stage = Stage(1600, 4, 1024, matrix_rate=4e-3, other_rate=4e-3, warmup_steps=10, decay_steps=800)
    refine: Stage = Stage(1100, 4, 1024, matrix_rate=4e-3, other_rate=4e-3, decay_steps=400, data_offset=1)
    polish: Stage = Stage(2300, 4, 1024, matrix_rate=4e-3, other_rate=4e-3, decay_steps=900, data_offset=2)
    own_text: OwnText = OwnText(batches=60, rows=192, given=64, written=192, seed=1)
    follow: Stage = Stage(
        2300, 4, 1024, matrix_rate=4e-3, other_rate=4e-3, warmup_steps=10, decay_steps=900, data_offset=3
    )


def build_model(shape: PairShape, recipe: PairRecipe, end_id: int) -> LlamaForCausalLM:
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


class PairTrainer(Trainer):
    """A Trainer that learns from the text, by cross-entropy, or from a frozen teacher's distributions."""

    def __init__(self, *args, teacher: PreTrainedModel | None, **keywords) -> None:
        super().__init__(*args, **keywords)
        frozen = None if teacher is None else cast(nn.Module, teacher.eval().requires_grad_(False))
        self.teacher = None if frozen is None else frozen.to(self.args.device)
        self.distance = torch.compile(draft_distance) if self.args.torch_compile else draft_distance

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the cross-entropy of one batch of windows, or KL(teacher || draft) plus -log of their overlap."""
        ids: Tensor = inputs["input_ids"]
        with torch.no_grad():
            wanted = None if self.teacher is None else self.teacher(input_ids=ids, use_cache=False).logits
        outputs = model(input_ids=ids, use_cache=False)
        loss = next_token_loss(outputs.logits, ids) if wanted is None else self.distance(outputs.logits, wanted)
        return (loss, outputs) if return_outputs else loss


def training_arguments(folder: Path, recipe: PairRecipe, stage: Stage) -> TrainingArguments:
    """Return the Trainer settings of one stage: warm-up, constant rate, linear decay; regular checkpoints."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=stage.steps,
        per_device_train_batch_size=stage.windows,
        lr_scheduler_type="warmup_stable_decay",
        warmup_steps=stage.warmup_steps,
        lr_scheduler_kwargs={"num_decay_steps": stage.decay_steps, "decay_type": "linear"},
        max_grad_norm=1.0,
        bf16=has_fast_bfloat16(),
        use_cpu=not torch.cuda.is_available(),
        torch_compile=recipe.compiled,
        logging_steps=20,
        save_steps=recipe.save_every,
        save_total_limit=2,
        report_to=[],
        remove_unused_columns=False,
        seed=recipe.seed + stage.tokens + stage.data_offset,
        data_seed=recipe.seed + stage.tokens + stage.data_offset,
    )


def prepare_text(work: Path, recipe: PairRecipe, collect: Collect) -> PreTrainedTokenizerFast:
    """Write tokenizer, token files and the held-out texts into `work`, unless they are there; return the tokenizer."""
    folder = work / "tokenizer"
    if (work / "corpus.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(str(folder))
    work.mkdir(parents=True, exist_ok=True)
    training, held_out = collect()
    tokenizer = train_tokenizer((file.text for file in training[::3]), recipe.vocab_size, recipe.context)
    tokenizer.save_pretrained(str(folder))
    tokens = encode_files(tokenizer, [file.text for file in training], work / "train.u32")
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


def train_pair(work: Path, recipe: PairRecipe = PairRecipe(), collect: Collect = gather) -> tuple[Path, Path]:
    """Train the pair from nothing in folder `work`; return the folders of the trained target and draft.

    Args:
        work: corpus, checkpoints and stages; what is there already is not done again.
        recipe: sizes, steps and rates.
        collect: gives the (training, held-out) files.

    Raises:
        OSError: the work folder cannot be written.
    """
    end_id = int(cast(int, prepare_text(work, recipe, collect).eos_token_id))
    torch.manual_seed(recipe.seed)
    target = train_stage(
        work, "target", recipe, recipe.target, lambda: build_model(recipe.target_shape, recipe, end_id)
    )
    extended = train_stage(work, "extend", recipe, recipe.extend, lambda: _load(target))
    draft = train_stage(work, "draft", recipe, recipe.draft, lambda: build_model(recipe.draft_shape, recipe, end_id))
    distilled = train_stage(work, "distil", recipe, recipe.distil, lambda: _load(draft), teacher=extended)
    refined = train_stage(work, "refine", recipe, recipe.refine, lambda: _load(distilled), teacher=extended)
    polished = train_stage(work, "polish", recipe, recipe.polish, lambda: _load(refined), teacher=extended)
    own = work / "own.u32"
    write_own_text(_load(extended), work / "train.u32", own, recipe.own_text)
    text = Alternating(Windows(own, recipe.follow.tokens), Windows(work / "train.u32", recipe.follow.tokens))
    followed = train_stage(work, "follow", recipe, recipe.follow, lambda: _load(polished), teacher=extended, text=text)
    return extended, followed


def train_stage(
    work: Path,
    name: str,
    recipe: PairRecipe,
    stage: Stage,
    start: Callable[[], PreTrainedModel],
    teacher: Path | None = None,
    text: Dataset[dict[str, Tensor]] | None = None,
) -> Path:
    """Run one stage, resuming it where it stopped, and return the folder of its model; a finished one is not rerun.

    With a teacher the stage distils from it; else it learns from the text, that of the corpus unless another is given.
    """
    folder = work / name
    final = folder / "final"
    if final.is_dir():
        return final
    text = Windows(work / "train.u32", stage.tokens) if text is None else text
    model = start()
    trainer = PairTrainer(
        model=model,
        args=training_arguments(folder, recipe, stage),
        train_dataset=text,
        optimizers=(Muon(model, stage.matrix_rate, stage.other_rate), None),
        teacher=None if teacher is None else _load(teacher),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.is_dir() else None)
    trainer.save_model(str(final))
    return final


def _load(folder: Path) -> PreTrainedModel:
    return LlamaForCausalLM.from_pretrained(str(folder))
