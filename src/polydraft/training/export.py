"""Measuring the trained pair on held-out text, and exporting it as ordinary Hugging Face folders with model cards."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from polydraft.probs import overlap
from polydraft.training.pair import PairRecipe, Stage


@dataclass(frozen=True)
class Quality:
    """What was measured on held-out text.

    Args:
        target_bits_per_byte: cross-entropy of the target, per byte of text.
        draft_bits_per_byte: the same of the draft model.
        overlap: mean of sum_x min(target(x), draft(x)) at temperature 1.
        same_top: how often the two models' likeliest tokens agree, which is acceptance at temperature 0.
        tokens: positions measured.
        text_bytes: bytes of text they cover.
    """

    target_bits_per_byte: float
    draft_bits_per_byte: float
    overlap: float
    same_top: float
    tokens: int
    text_bytes: int


def held_out_texts(work: Path) -> list[str]:
    """Return the held-out files' texts that `prepare_text` left in the work folder."""
    lines = (work / "held_out.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


@torch.inference_mode()
def measure_quality(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    *,
    window: int = 1024,
    most_windows: int = 96,
) -> Quality:
    """Score the beginning of each text with both models, teacher-forced.

    Args:
        tokenizer: their tokenizer; its end-of-text token stands before each text, as in training.
        window: tokens per text, the first one included.
    """
    nats = {"target": 0.0, "draft": 0.0}
    shared = agreed = 0.0
    tokens = text_bytes = 0
    for _, text in zip(range(most_windows), texts, strict=False):
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text)["input_ids"]][:window]])
        wanted, drafted = (model(input_ids=ids, use_cache=False).logits[0, :-1].float() for model in (target, draft))
        nats["target"] += _nats(wanted, ids[0])
        nats["draft"] += _nats(drafted, ids[0])
        shared += float(overlap(wanted.softmax(-1), drafted.softmax(-1)).sum())
        agreed += float((wanted.argmax(-1) == drafted.argmax(-1)).sum())
        tokens += ids.shape[1] - 1
        text_bytes += len(str(tokenizer.decode(ids[0, 1:])).encode())
    bits = {name: value / math.log(2) / text_bytes for name, value in nats.items()}
    return Quality(bits["target"], bits["draft"], shared / tokens, agreed / tokens, tokens, text_bytes)


def _nats(logits: Float[Tensor, "t V"], ids: Int[Tensor, " s"]) -> float:
    return float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))


def export_pair(work: Path, target: Path, draft: Path, out: Path, recipe: PairRecipe) -> Quality:
    """Write `out/target` and `out/draft`: weights in bfloat16, tokenizer, configuration and a card with measurements.

    The measurements are made on the exported weights, not on those in training precision.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(work / "tokenizer"))
    for source, name in ((target, "target"), (draft, "draft")):
        model = AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.bfloat16)
        end = int(tokenizer.eos_token_id)
        model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end)
        model.save_pretrained(str(out / name))
        tokenizer.save_pretrained(str(out / name))
        _run_in_single(out / name / "config.json")
    wanted, drafting = (
        AutoModelForCausalLM.from_pretrained(str(out / name), dtype=torch.float32) for name in ("target", "draft")
    )
    quality = measure_quality(wanted, drafting, tokenizer, held_out_texts(work), window=recipe.context)
    corpus = json.loads((work / "corpus.json").read_text())
    for name, model in (("target", wanted), ("draft", drafting)):
        (out / name / "README.md").write_text(_card(name, model, recipe, quality, corpus))
    return quality


def _run_in_single(config: Path) -> None:
    """Let a model that is stored in bfloat16 run in single precision: so small ones write the same text everywhere."""
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**settings, "dtype": "float32"}, indent=2) + "\n", encoding="utf-8")


def _card(role: str, model: PreTrainedModel, recipe: PairRecipe, quality: Quality, corpus: dict[str, object]) -> str:
    shape = recipe.target_shape if role == "target" else recipe.draft_shape
    bits = quality.target_bits_per_byte if role == "target" else quality.draft_bits_per_byte
    licences = corpus["licences"]
    sources = ", ".join(sorted(licences)) if isinstance(licences, dict) else ""
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# polydraft embedded pair: {role}

A small Llama model of Python source code: {model.num_parameters() / 1e6:.2f} M parameters, {shape.layers} layer(s) of
width {shape.width}, {recipe.vocab_size} byte-level BPE tokens, context {recipe.context}. It exists to demonstrate and
test multi-draft speculative decoding; it writes code-like text, not correct programs.

## Measured on held-out files

| | |
|---|---|
| bits per byte of this model | {bits:.3f} |
| mean overlap sum_x min(target, draft) at temperature 1 | {quality.overlap:.3f} |
| target and draft agree on the likeliest token | {quality.same_top:.3f} |
| tokens measured (beginnings of held-out files) | {quality.tokens} |

## Data

{corpus["training_files"]} Python files ({corpus["training_bytes"]} bytes, {corpus["training_tokens"]} tokens) of the
Python standard library and of installed packages under permissive licences; {corpus["held_out_files"]} files held out.
Deduplicated by line; split by file. Packages: {sources}.

## Recipe

`polydraft train pair`. {_recipe(role, recipe)} Muon for the weight matrices, AdamW for embeddings and norms, gradients
clipped to norm 1. Stored in bfloat16.

## Licence

Apache-2.0.
"""


def _recipe(role: str, recipe: PairRecipe) -> str:
    if role == "target":
        return f"Next-token cross-entropy: {_stage(recipe.target)}, then {_stage(recipe.extend)}."
    return (
        f"Next-token cross-entropy: {_stage(recipe.draft)}; then distillation from the target (forward "
        f"Kullback-Leibler divergence plus -log overlap): {_stage(recipe.distil)}, then {_stage(recipe.refine)}, "
        f"then {_stage(recipe.polish)}; then half on text that the target wrote, "
        f"{recipe.own_text.batches * recipe.own_text.rows} texts of {recipe.own_text.written} tokens after "
        f"{recipe.own_text.given} of the corpus: {_stage(recipe.follow)}."
    )


def _stage(stage: Stage) -> str:
    decay = f", decaying over the last {stage.decay_steps}" if stage.decay_steps else ""
    windows = f"{stage.windows} windows of {stage.tokens} tokens"
    return f"{stage.steps} steps of {windows} at peak rate {stage.matrix_rate:g}{decay}"
