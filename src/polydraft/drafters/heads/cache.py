"""Keys and values of a head's layers: slot j holds the j-th token of a row, and what is drafted lies behind."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters.heads.layers import Anatomy, Seen
from polydraft.rows import run


@dataclass(frozen=True, eq=False)
class HeadCache:
    """Preallocated keys and values; the last slot takes what belongs to no token.

    Args:
        keys: rotated keys.
        values: values.
    """

    keys: Float[Tensor, "l b g m h"]
    values: Float[Tensor, "l b g m h"]

    @classmethod
    def new(cls, anatomy: Anatomy, layers: int, rows: int, capacity: int, like: Tensor) -> "HeadCache":
        """Return an empty cache with `capacity` slots a row, on the device and in the precision of `like`."""
        shape = (layers, rows, anatomy.groups, capacity + 1, anatomy.channels)
        return cls(like.new_zeros(shape), like.new_zeros(shape))

    def writer(self, layer: int, slots: Int[Tensor, "b n"], stop: int) -> Seen:
        """Return what stores the keys and values of a pass in their slots, and shows the first `stop` slots.

        Args:
            layer: whose.
            slots: where, per token; -1 for tokens that are padding.
            stop: how many slots the pass may look at.
        """

        def seen(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            self.write(layer, slots, keys, values)
            return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]

        return seen

    def write(self, layer: int, slots: Int[Tensor, "b n"], keys: Tensor, values: Tensor) -> None:
        """Store keys and values, "b g n h" each, in their slots; those of slot -1 are lost."""
        last = self.keys.shape[3] - 1
        rows = torch.arange(len(slots), device=slots.device).unsqueeze(-1)
        places = slots.where(slots >= 0, last)
        self.keys[layer].transpose(1, 2)[rows, places] = keys.transpose(1, 2).to(self.keys.dtype)
        self.values[layer].transpose(1, 2)[rows, places] = values.transpose(1, 2).to(self.values.dtype)

    def put(self, row: int, other: "HeadCache") -> "HeadCache":
        """Return a cache in which the only row of another one takes the place of a row, or comes behind the last.

        The other's slots beyond this one's room are left out: nothing was read into them that could be kept.
        """
        if row == self.keys.shape[1]:
            return HeadCache(
                *(torch.cat([own, own.new_zeros(own[:, :1].shape)], dim=1) for own in (self.keys, self.values))
            ).put(row, other)
        shared = min(self.keys.shape[3], other.keys.shape[3]) - 1
        self.keys[:, row, :, :shared] = other.keys[:, 0, :, :shared]
        self.values[:, row, :, :shared] = other.values[:, 0, :, :shared]
        return self

    def select(self, rows: Sequence[int]) -> "HeadCache":
        """Return a view of a run of rows: what is written there is written here."""
        return HeadCache(self.keys[:, run(rows)], self.values[:, run(rows)])

    def cut(self, row: int, length: int) -> "HeadCache":
        """Return the cache: who reads it knows how many slots count."""
        return self
