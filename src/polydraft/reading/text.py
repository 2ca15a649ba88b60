"""The committed tokens of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Text:
    """The committed tokens of a batch: right-padded rows and their lengths.

    Args:
        tokens: token ids; anything beyond a row's length.
        lengths: committed tokens per row, at least 1.
    """

    tokens: Int[Tensor, "b t"]
    lengths: Int[Tensor, "b"]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The lengths as numbers, read back once."""
        return tuple(self.lengths.tolist())

    @cached_property
    def roots(self) -> Int[Tensor, "b"]:
        """The places of the last tokens; one row's on the host, where it is asked for."""
        return torch.tensor([self.counts[0] - 1]) if len(self.counts) == 1 else self.lengths - 1

    def last(self, back: int = 1) -> Int[Tensor, "b"]:
        """Return the last committed token of each row, or the one `back` places from the end (the first at least)."""
        place = (self.lengths - back).clamp_min(0).unsqueeze(-1)
        return self.tokens.gather(-1, place).squeeze(-1)

    def copied(self) -> "Text":
        """Return the text in memory of its own, for somebody who may write to it."""
        return Text(self.tokens.clone(), self.lengths.clone())

    def of(self, rows: Sequence[int]) -> "Text":
        """Return the text of some rows; of -1 a text of one token, which is any."""
        own = torch.tensor(list(rows), device=self.tokens.device)
        lengths = self.lengths[own.clamp_min(0)].where(own >= 0, 1)
        return Text(self.tokens[own.clamp_min(0)], lengths)
