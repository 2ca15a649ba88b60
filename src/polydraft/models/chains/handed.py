"""Caches of models that keep states in their own way: in a list of tensors (RWKV), or inside a class (MiniMax)."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache as TransformersCache

from polydraft.models.cache import TreeCache
from polydraft.models.chains.remembering import RECURRENT, Place, States, WholeCache
from polydraft.models.language_model import Forward, Layer


@lru_cache(maxsize=8)
def listed_cache(own: type[TransformersCache]) -> type[WholeCache]:
    """Return a class of tree caches that is one of a model's own class too, since such a model takes no other.

    Its own class has `linear_cache`, a list with a state, or an empty list, for each layer that was run.
    """
    return cast(type[WholeCache], type(f"Listed{own.__name__}", (_Listed, own), {}))


class _Listed(WholeCache):
    """Keys and values in slots, and states in the list that the model's own code writes to."""

    linear_cache: list[Any]

    def __init__(
        self, config: Any, layers: int, batch: int, capacity: int, shapes: Any = None, *, placed: bool = False
    ) -> None:
        super().__init__(config, layers, batch, capacity, shapes, placed=placed)
        self.linear_cache = []

    def empty(self, batch: int, capacity: int) -> TreeCache:
        """Return an empty cache of the same kind."""
        return type(self)(self.config, self.shape[0], batch, capacity - 1, self.shapes, placed=self.placed)

    def states(self) -> States | None:
        """Return what the last pass left; None before the first one."""
        found: dict[Place, Tensor] = {
            (layer, RECURRENT, 0): state.clone()
            for layer, state in enumerate(self.linear_cache)
            if isinstance(state, Tensor)
        }
        return States(tuple(found), tuple(found.values())) if found else None

    def begin(self, states: States | None) -> None:
        """Let the next pass go on from these states; None for texts of which nothing was read."""
        self.linear_cache = []
        if states is not None:
            held = {layer: state for (layer, _, _), state in zip(states.places, states.tensors, strict=True)}
            self.linear_cache = [held[layer].clone() if layer in held else [] for layer in range(self.shape[0])]

    def __len__(self) -> int:
        """Return for how many layers there are states, which is what the model's own code asks for."""
        return len(self.linear_cache)


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

    def select(self, rows: Sequence[int]) -> "HandedCache":
        """Return a cache of some rows, with copies of their states."""
        alone = self.empty(len(rows), self.shape[2])
        alone.held = None if self.held is None else [one[list(rows)] for one in self.held]
        return alone


def row_by_row(score: Callable[[int, HandedCache], Forward], cache: HandedCache) -> Forward:
    """Score the rows of a batch one by one, since transformers' pass over single tokens mixes rows.

    Args:
        score: scores a row with its own cache.
        cache: the states of all rows; those that the passes hand back take their place.
    """
    own = [cache.select([row]) for row in range(cache.shape[1])]
    found = [score(row, one) for row, one in enumerate(own)]
    held = [one.held or [] for one in own]
    cache.held = [torch.cat(rows) for rows in zip(*held, strict=True)]
    hidden: dict[Layer, Tensor] = {layer: torch.cat([one.hidden[layer] for one in found]) for layer in found[0].hidden}
    return Forward(torch.cat([one.logits for one in found]), hidden)
