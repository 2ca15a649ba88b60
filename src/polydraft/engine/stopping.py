"""Where a text ends: end-of-text ids, stop strings and other criteria, length and context limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from polydraft.drafters import Text
from polydraft.engine.block import Emission


@runtime_checkable
class StoppingCriterion(Protocol):
    """Hugging Face's interface: tells for every row whether it ends with its last token."""

    def __call__(self, input_ids: Int[Tensor, "b t"], scores: object) -> Bool[Tensor, "b"]:
        """Return True for rows that end here."""
        ...


@dataclass(frozen=True)
class Limits:
    """When rows end.

    Args:
        max_length: per row, the largest number of tokens, prompt included.
        cut_by_context: whether the model's context set these limits, not the user.
        eos: end-of-text ids; the id itself is emitted.
        criteria: asked after every token.
        padding: left padding per row of the prompts as the user gave them, which criteria get to see again.
    """

    max_length: tuple[int, ...]
    cut_by_context: tuple[bool, ...] = ()
    eos: frozenset[int] = frozenset()
    criteria: Sequence[StoppingCriterion] = ()
    padding: tuple[Int[Tensor, " _"], ...] = ()

    def cut(self, row: int, text: Text, emitted: list[int], kept: int, drafted: int, deeper: bool) -> Emission:
        """Return what row `row` gains of the emitted tokens: everything up to the first end.

        Args:
            row: which row.
            text: the text before these tokens.
            emitted: accepted drafts and the next token.
            kept: how many of them are drafts.
            drafted: drafts in the row's tree.
            deeper: whether the last accepted node had drafts of its own.
        """
        length = int(text.lengths[row])
        room = self.max_length[row] - length
        finish, count = "", min(len(emitted), room)
        for place, token in enumerate(emitted[:count]):
            finish = self._ends(row, text, length, emitted[: place + 1], token)
            if finish:
                count = place + 1
                break
        if not finish and count == room:
            finish = "context" if self.cut_by_context and self.cut_by_context[row] else "length"
        return Emission(tuple(emitted[:count]), min(kept, count), drafted, kept + deeper, kept, finish)

    def _ends(self, row: int, text: Text, length: int, emitted: list[int], token: int) -> str:
        if token in self.eos:
            return "eos"
        if not self.criteria:
            return ""
        new = torch.tensor(emitted, device=text.tokens.device)
        before = self.padding[row : row + 1]
        history = torch.cat([*before, text.tokens[row, :length], new]).unsqueeze(0)
        return "stop" if any(bool(criterion(history, None)[0]) for criterion in self.criteria) else ""
