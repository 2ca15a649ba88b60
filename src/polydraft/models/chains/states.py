"""What recurrent and convolutional layers remember of a text, as a value."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

Place = tuple[int, str, int]
"""A layer, what it is that is remembered there, and which of several."""


@dataclass(frozen=True, eq=False)
class States:
    """The states of a batch of texts; nobody writes to them.

    A text of which nothing was read has zeros.

    Args:
        places: where each tensor belongs.
        tensors: the states, rows first.
    """

    places: tuple[Place, ...]
    tensors: tuple[Shaped[Tensor, "b ..."], ...]

    def of_row(self, row: int) -> "States":
        """Return those of one row."""
        return self._each(lambda one: one[row : row + 1])

    def taken(self, other: "States", rows: Sequence[int]) -> "States":
        """Return these with some rows from other states of the same batch."""
        if len(rows) == (self.tensors[0].shape[0] if self.tensors else 0):
            return other
        taken = torch.zeros(self.tensors[0].shape[0], dtype=torch.bool)
        taken[list(rows)] = True
        mask = taken.to(self.tensors[0].device)
        pairs = zip(self.tensors, other.tensors, strict=True)
        return States(self.places, tuple(new.where(mask.view(-1, *[1] * (old.dim() - 1)), old) for old, new in pairs))

    def joined(self, row: int, other: "States") -> "States":
        """Return these with the only row of others in place of a row, or behind the last."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return States(self.places, tuple(torch.cat([own[:row], new, own[row + 1 :]]) for own, new in pairs))

    def nothing(self, batch: int) -> "States":
        """Return the states of texts of which nothing was read."""
        return self._each(lambda one: one.new_zeros(batch, *one.shape[1:]))

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is remembered, each kind once."""
        return tuple(dict.fromkeys(kind for _, kind, _ in self.places))

    def noisy(self, kind: str, random: torch.Generator) -> "States":
        """Return these with noise in place of all of a kind, a hundred times as large, and ten at least."""

        def drawn(one: Tensor) -> Tensor:
            return (torch.randn(one.shape, generator=random) * max(10.0, 100 * float(one.abs().max()))).to(one)

        pairs = zip(self.places, self.tensors, strict=True)
        return States(self.places, tuple(drawn(one) if place[1] == kind else one for place, one in pairs))

    def without(self, row: int) -> "States":
        """Return these with a row of which nothing was read."""
        return self.joined(row, self.nothing(1))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "States":
        return States(self.places, tuple(map(change, self.tensors)))
