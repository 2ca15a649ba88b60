"""Which of the target's keys a view sees."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.errors import InvalidParameter, is_whole, shown

RECENT = re.compile(r"recent(?::(\d{1,6})\+(\d{1,6}))?")


@dataclass(frozen=True)
class Recent:
    """Choose a text's first tokens, to which attention flows whatever they are, and its newest.

    Args:
        sinks: how many of the first; fewer where a text of the batch is short.
        window: how many of the newest.

    Source: Xiao et al., arXiv 2309.17453 (StreamingLLM); as drafts, arXiv 2408.11049 (MagicDec).
    """

    sinks: int = 16
    window: int = 240

    def __post_init__(self) -> None:
        for name, value, least in (("sinks", self.sinks, 0), ("window", self.window, 1)):
            if not is_whole(value) or value < least:
                raise InvalidParameter(f"{name} must be a whole number of at least {least}, but is {shown(value)}.")

    def choose(self, known: Sequence[int]) -> Int[Tensor, "b m"]:
        """Return slots of rows that know so many tokens, in rising order and equally many: those of the shortest."""
        count = min(self.sinks + self.window, *known)
        slots = torch.tensor(known).unsqueeze(-1) + torch.arange(-count, 0)
        sinks = torch.arange(min(self.sinks, count // 2))
        slots[:, : len(sinks)] = sinks
        return slots

    @property
    def word(self) -> str:
        """How it is named."""
        return f"recent:{self.sinks}+{self.window}"


def keys_named(word: str) -> Recent:
    """Return the choice of keys that a word means, such as recent:16+240.

    Raises:
        InvalidParameter: it means none.
    """
    found = RECENT.fullmatch(word)
    if found is None:
        raise InvalidParameter(f"keys must be recent, or recent:SINKS+WINDOW as recent:16+240, but is {shown(word)}.")
    return Recent() if found[1] is None else Recent(int(found[1]), int(found[2]))
