"""Calling somebody's generation function, and not trusting what comes back."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.errors import InvalidParameter

Tokens = Sequence[int] | Int[Tensor, " s"]
Generate = Callable[[list[int], int], Tokens]
"""Gives the tokens that follow a prompt, for a seed."""
GenerateMany = Callable[[list[list[int]], list[int]], Sequence[Tokens] | Int[Tensor, "b s"]]
"""Gives the tokens that follow each prompt, for a seed each."""


def draw(
    generate: Generate | GenerateMany,
    prompt: list[int],
    first_seed: int,
    samples: int,
    batch_size: int | None,
    shape: Sequence[int],
) -> Int[Tensor, "s n"]:
    """Generate this many texts with successive seeds and return their first n tokens.

    Args:
        generate: the callable; see `check`.
        prompt: token ids.
        first_seed: of the first text.
        samples: how many texts.
        batch_size: None if the callable takes one prompt and one seed.
        shape: the vocabulary's size, n times.

    Raises:
        InvalidParameter: too few tokens or rows come back, or tokens outside the vocabulary.
    """
    seeds = list(range(first_seed, first_seed + samples))
    rows: Sequence[Tokens] | Tensor
    if batch_size is None:
        rows = [generate(list(prompt), seed) for seed in seeds]  # type: ignore[arg-type]
    else:
        rows = generate([list(prompt) for _ in seeds], seeds)  # type: ignore[arg-type]
    if len(rows) != samples:
        raise InvalidParameter(f"generate was given {samples} prompts, but returned {len(rows)} rows.")
    first = [[int(token) for token in row[: len(shape)]] for row in rows]
    shortest = min(first, key=len)
    if len(shortest) < len(shape):
        raise InvalidParameter(
            f"generate must return at least {len(shape)} new tokens, but returned {shortest} after prompt {prompt}: "
            "turn end-of-text and stop conditions off, or take fewer new_tokens."
        )
    texts = torch.tensor(first)
    outside = texts[(texts < 0) | (texts >= shape[0])]
    if len(outside):
        raise InvalidParameter(
            f"generate returned token {int(outside[0])}, but the target's vocabulary has {shape[0]} tokens."
        )
    return texts
