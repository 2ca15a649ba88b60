"""A cache of models that take their states as a list of tensors and hand the next ones back (RWKV)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polydraft.models.chains.remembering import RECURRENT, WholeCache
from polydraft.models.chains.states import States
from polydraft.models.protocol import Forward, Layer

NAME = "state"
"""By which name such models take their states and return them."""
PEAK, LOWEST = 4, -1e30
"""Which tensor holds the largest exponent so far, and what it is before the first token; all others are zero then."""


class HandedCache(WholeCache):
    """No keys: the states that the last pass handed back, each tensor with the rows first."""

    held: list[Tensor] | None = None

    def empty(self, batch: int, capacity: int) -> "HandedCache":
        """Return an empty cache of the same kind."""
        return HandedCache(self.config, self.shape[0], batch, capacity - 1, self.shapes, placed=self.placed)

    def states(self) -> States | None:
        """Return what the last pass left; None before the first one."""
        if self.held is None:
            return None
        places = tuple((0, f"{RECURRENT} {place}", place) for place in range(len(self.held)))
        return States(places, tuple(one.clone() for one in self.held))

    def begin(self, states: Any) -> None:
        """Let the next pass go on from these states; None, or zeros in a row, for texts of which nothing was read."""
        if states is None:
            self.held = None
            return
        self.held = [one.clone() for one in states.tensors]
        read = torch.stack([one.flatten(1).any(-1) for one in self.held]).any(0)
        self.held[PEAK][~read] = LOWEST

    def of_row(self, row: int) -> "HandedCache":
        """Return a cache of one row, with copies of its states."""
        alone = self.empty(1, self.shape[2])
        alone.held = None if self.held is None else [one[row : row + 1].clone() for one in self.held]
        return alone


def row_by_row(score: Callable[[int, HandedCache], Forward], cache: HandedCache) -> Forward:
    """Score the rows of a batch one by one, since transformers' pass over single tokens mixes rows.

    Args:
        score: scores a row with its own cache.
        cache: the states of all rows; those that the passes hand back take their place.
    """
    own = [cache.of_row(row) for row in range(cache.shape[1])]
    found = [score(row, one) for row, one in enumerate(own)]
    held = [one.held or [] for one in own]
    cache.held = [torch.cat(rows) for rows in zip(*held, strict=True)]
    hidden: dict[Layer, Tensor] = {layer: torch.cat([one.hidden[layer] for one in found]) for layer in found[0].hidden}
    return Forward(torch.cat([one.logits for one in found]), hidden)
