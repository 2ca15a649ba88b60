"""Exporting the trained pair as ordinary Hugging Face folders with model cards."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from polydraft.training.measure import Quality, held_out_texts, measure_quality
from polydraft.training.pair import PairRecipe, Stage


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
    wanted, drafting = (
        AutoModelForCausalLM.from_pretrained(str(out / name), dtype=torch.float32) for name in ("target", "draft")
    )
    quality = measure_quality(wanted, drafting, tokenizer, held_out_texts(work), window=recipe.context)
    corpus = json.loads((work / "corpus.json").read_text())
    for name, model in (("target", wanted), ("draft", drafting)):
        (out / name / "README.md").write_text(_card(name, model, recipe, quality, corpus))
    return quality


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
