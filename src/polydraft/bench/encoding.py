"""Prompts as token ids, each with a seed of its own: the only door from a prompt to tokens."""

from zlib import crc32

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.bench.prompts import Prompt
from polydraft.errors import InvalidParameter
from polydraft.models import Pair, conversation_ids


def encode(pair: Pair, prompt: Prompt, excerpt_tokens: int | None = None) -> Int[Tensor, "1 t"]:
    """Return the prompt's token ids, on the target's device.

    A conversation goes through the tokenizer's chat template, raw text through the tokenizer alone; of an excerpt the
    first `excerpt_tokens` are returned.

    Raises:
        InvalidParameter: there is no chat template, or it refuses the conversation, which is named.
    """
    if not prompt.messages:
        ids = pair.tokenizer(prompt.text, return_tensors="pt", verbose=False)["input_ids"]
        found = torch.as_tensor(ids, device=pair.target.device)
        return found[:, :excerpt_tokens] if prompt.excerpt else found
    try:
        tokens = conversation_ids(pair.tokenizer, prompt.messages)
    except InvalidParameter as error:
        named = f"The prompt {prompt.name!r} of {prompt.task}: " if prompt.name and prompt.task else ""
        raise InvalidParameter(f"{named}{error}") from error
    return torch.tensor([tokens], device=pair.target.device)


def seed_of(prompt: Prompt, seed: int) -> int:
    """Return a seed of the prompt's own, the same whatever other prompts there are."""
    return seed + crc32(f"{prompt.task}\n{prompt.name}".encode())
