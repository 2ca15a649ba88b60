"""Where a text ends: end-of-text ids, stop strings and other criteria, length and context limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from polydraft.engine.block import Emission
from polydraft.errors import InvalidParameter
from polydraft.models import BUILT_IN, first_sentence


@runtime_checkable
class StoppingCriterion(Protocol):
    """Hugging Face's interface: tells for every row whether it ends with its last token."""

    def __call__(self, input_ids: Int[Tensor, "b t"], scores: object) -> Bool[Tensor, "b"]:
        """Return True for rows that end here."""
        ...


@dataclass(frozen=True)
class Ending:
    """Where a row ends.

    Args:
        max_length: the largest number of tokens, prompt included.
        cut_by_context: whether the model's context set this limit, not the user.
        eos: end-of-text ids; the id itself is emitted.
        criteria: asked after every token.
        padding: left padding of the prompt as the user gave it, which criteria get to see again.
    """

    max_length: int
    cut_by_context: bool = False
    eos: frozenset[int] = frozenset()
    criteria: Sequence[StoppingCriterion] = ()
    padding: Int[Tensor, " _"] | None = None

    def cut(self, past: Int[Tensor, " t"], emitted: list[int], kept: int, drafted: int, deeper: bool) -> Emission:
        """Return what the row gains of the emitted tokens: everything up to the first end.

        Args:
            past: the row's tokens before these.
            emitted: accepted drafts and the next token.
            kept: how many of them are drafts.
            drafted: drafts in the row's tree.
            deeper: whether the last accepted node had drafts of its own.
        """
        room = self.max_length - len(past)
        finish, count = "", min(len(emitted), room)
        for place, token in enumerate(emitted[:count]):
            finish = self._ends(past, emitted[: place + 1], token)
            if finish:
                count = place + 1
                break
        if not finish and count == room:
            finish = "context" if self.cut_by_context else "length"
        return Emission(tuple(emitted[:count]), min(kept, count), drafted, kept + deeper, kept, finish)

    def _ends(self, past: Int[Tensor, " t"], emitted: list[int], token: int) -> str:
        if token in self.eos:
            return "eos"
        if not self.criteria:
            return ""
        new = torch.tensor(emitted, device=past.device)
        before = () if self.padding is None else (self.padding.to(past.device),)
        history = torch.cat([*before, past, new]).unsqueeze(0)
        return "stop" if any(_ends_row(criterion, history) for criterion in self.criteria) else ""


def _ends_row(criterion: StoppingCriterion, history: Int[Tensor, "1 t"]) -> bool:
    """Return what a criterion says of one row; a plain bool is understood too.

    Raises:
        InvalidParameter: it says something else, or fails by an error of Python's own kinds; others pass through.
    """
    name = getattr(criterion, "__name__", None) or type(criterion).__name__
    try:
        answer: object = criterion(history, None)
    except BUILT_IN as error:
        raise InvalidParameter(f"The stopping criterion {name} failed: {first_sentence(error)}.") from error
    if isinstance(answer, Tensor) and answer.numel() == 1 and not answer.is_floating_point():
        return bool(answer)
    if isinstance(answer, bool):
        return answer
    what = f"a tensor of shape {tuple(answer.shape)}" if isinstance(answer, Tensor) else f"{answer!r}"
    raise InvalidParameter(
        f"The stopping criterion {name} must return True or False for each row, here one, but returned {what}."
    )
