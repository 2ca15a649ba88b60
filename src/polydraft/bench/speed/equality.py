"""Whether two arms wrote the same text, and if not, where they part and how close the decision was."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.models import LanguageModel
from polydraft.trees import causal_mask

ROUNDING = 16
"""Margins up to this many units of the logits' precision, at the size of the larger one, are called rounding."""


@dataclass(frozen=True)
class Difference:
    """The first place at which an arm's greedy text differs from the plain one.

    Args:
        row: in the batch.
        position: from 0, in the new tokens.
        expected: the plain text's token there; -1 if it has ended.
        found: the arm's; -1 if it has ended.
        margin: by how much the target's logit of the expected token is larger, given the text before; None if a text
            has ended. It is negative where the arm was right and plain decoding was not.
        rounding: whether the two logits are so close that arithmetic in another order may swap them.
    """

    row: int
    position: int
    expected: int
    found: int
    margin: float | None
    rounding: bool


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Return the first position at which two texts differ, the end of one included; None if they are equal."""
    shorter = min(len(expected), len(found))
    apart = (place for place in range(shorter) if expected[place] != found[place])
    return next(apart, None if len(expected) == len(found) else shorter)


def compare_texts(
    model: LanguageModel,
    prompts: Sequence[Int[Tensor, " _"]],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
) -> list[Difference]:
    """Return the first difference of every row that has one; the target tells how close the decision was."""
    differences: list[Difference] = []
    for row, (prompt, ours, theirs) in enumerate(zip(prompts, expected, found, strict=True)):
        place = first_difference(ours, theirs)
        if place is not None:
            one, other = (text[place] if place < len(text) else -1 for text in (ours, theirs))
            before = torch.cat([prompt, prompt.new_tensor(list(ours[:place]))])
            margin, rounding = logit_margin(model, before, one, other) if min(one, other) >= 0 else (None, False)
            differences.append(Difference(row, place, one, other, margin, rounding))
    return differences


@torch.no_grad()
def logit_margin(model: LanguageModel, text: Int[Tensor, " t"], one: int, other: int) -> tuple[float, bool]:
    """Return by how much one token's logit after a text exceeds another's, and whether that is within rounding.

    The text is scored in a single pass. Rounding is `ROUNDING` times the precision of the model's arithmetic times
    the larger logit's size, or 1 if both are smaller.
    """
    length = torch.tensor([len(text)], device=text.device)
    positions = torch.arange(len(text), device=text.device).unsqueeze(0)
    cache, mask = model.new_cache(1, len(text)), causal_mask(length, len(text))
    starts = torch.zeros_like(length)
    logits = model.forward(text.unsqueeze(0), positions, mask, cache, starts, logits_to_keep=1).logits[0, -1]
    first, second = logits[one].double(), logits[other].double()
    precision = torch.finfo(logits.dtype).eps
    size = max(1.0, float(first.abs()), float(second.abs()))
    margin = float(first - second)
    return margin, abs(margin) <= ROUNDING * precision * size
