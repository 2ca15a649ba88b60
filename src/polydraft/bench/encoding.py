"""Prompts as token ids, each with a seed of its own."""

from zlib import crc32

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.bench.prompts import Prompt
from polydraft.models import Pair


def encode(pair: Pair, prompt: Prompt, excerpt_tokens: int) -> Int[Tensor, "1 t"]:
    """Return the prompt's token ids; of an excerpt the first `excerpt_tokens`."""
    ids = torch.as_tensor(
        pair.tokenizer(prompt.text, return_tensors="pt", verbose=False)["input_ids"], device=pair.target.device
    )
    return ids[:, :excerpt_tokens] if prompt.excerpt else ids


def seed_of(prompt: Prompt, seed: int) -> int:
    """Return a seed of the prompt's own, the same whatever other prompts there are."""
    return seed + crc32(f"{prompt.task}\n{prompt.name}".encode())
