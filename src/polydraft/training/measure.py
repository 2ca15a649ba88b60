"""Measurements on held-out text: bits per byte of a model, and the overlap of target and draft."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from polydraft.probs import overlap


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
        target: the target.
        draft: the draft model.
        tokenizer: their tokenizer; its end-of-text token stands before each text, as in training.
        texts: held-out files.
        window: tokens per text, the first one included.
        most_windows: how many texts to use.
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
