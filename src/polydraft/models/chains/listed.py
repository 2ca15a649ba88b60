"""A cache for models whose own class of caches holds the states of linear attention in a list (MiniMax)."""

from functools import lru_cache
from typing import Any, cast

from torch import Tensor
from transformers import Cache as TransformersCache

from polydraft.models.cache import TreeCache
from polydraft.models.chains.remembering import RECURRENT, WholeCache
from polydraft.models.chains.states import Place, States


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
