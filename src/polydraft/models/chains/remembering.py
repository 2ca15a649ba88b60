"""A cache of models with recurrent or convolutional layers: slots for attention, states for the rest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from polydraft.errors import UnsupportedModel
from polydraft.models.cache import TreeCache

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


CONV, RECURRENT = "conv", "recurrent"


def remembers(config: Any) -> bool:
    """Tell whether a model has layers with a state of constant size, as Hugging Face's cache for it says."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


class WholeCache(TreeCache):
    """A tree cache of which no part can be read: some layers remember in states.

    A row may have less to read than the pass is wide. What lies behind its end is written to slots behind its text,
    or to one spare slot if there are none.

    Args:
        config: the configuration of the model's text part.
        layers: the number of layers.
        batch: rows.
        capacity: slots per row.
        shapes: the shape of every entry, a sequence, if they differ.
        placed: whether to keep the position of every slot.
    """

    def __init__(
        self, config: Any, layers: int, batch: int, capacity: int, shapes: Any = None, *, placed: bool = False
    ) -> None:
        super().__init__(layers, batch, capacity + 1, shapes, placed=placed)
        self.config, self.starts = config, tuple[int, ...]()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of slots in use, the new ones not counted, of a single row.

        Raises:
            UnsupportedModel: there are several rows, which need not be equally far.
        """
        if self.shape[1] > 1 and len({*self.starts}) > 1:
            raise UnsupportedModel(
                f"The model of type {self.config.model_type} counts positions by its cache and has states too, so "
                "texts of a batch would have to be equally long."
            )
        return self.starts[0] if self.starts else 0

    def place(
        self, starts: Int[Tensor, "b"], width: int, used: int, positions: Int[Tensor, "b n"] | None = None
    ) -> None:
        """Say where the next forward pass writes."""
        self.starts = tuple(starts.tolist())
        super().place(starts, width, used, positions)

    def of_layers(self, first: int, stop: int | None) -> TreeCache:
        """Refuse: states are not kept by layers.

        Raises:
            UnsupportedModel: always.
        """
        raise UnsupportedModel("A model with layers that remember cannot be read in part.")

    def select(self, rows: Sequence[int]) -> TreeCache:
        """Refuse; errors are those of `of_layers`."""
        return self.of_layers(0, None)

    def compacted(self, slots: Int[Tensor, "b m"], room: int) -> TreeCache:
        """Refuse; errors are those of `of_layers`."""
        return self.of_layers(0, None)


class RememberingCache(WholeCache):
    """Keys and values in slots, as in every tree cache, and the states of layers that have no keys.

    A pass goes on from the states that it finds and leaves others. So who reads with it gives back the states of a
    committed text before a pass (`begin`), and takes those that a pass left (`states`). Arguments are those of
    `WholeCache`.
    """

    def __init__(
        self, config: Any, layers: int, batch: int, capacity: int, shapes: Any = None, *, placed: bool = False
    ) -> None:
        super().__init__(config, layers, batch, capacity, shapes, placed=placed)
        self.layers: list[Any] = list(DynamicCache(config=config).layers)

    def empty(self, batch: int, capacity: int) -> "RememberingCache":
        """Return an empty cache of the same kind."""
        return RememberingCache(self.config, self.shape[0], batch, capacity - 1, self.shapes, placed=self.placed)

    def states(self) -> States | None:
        """Return what the last pass left; None before the first one."""
        places: list[Place] = []
        found: list[Tensor] = []
        for layer in self._remembering():
            held = self.layers[layer]
            for kind, states in ((CONV, held.conv_states), (RECURRENT, held.recurrent_states)):
                for number, state in states.items():
                    if state is not None:
                        places.append((layer, kind, number))
                        found.append(state.clone())
        return States(tuple(places), tuple(found)) if places else None

    def begin(self, states: States | None) -> None:
        """Let the next pass go on from these states; None for texts of which nothing was read."""
        if states is None:
            self.layers = list(DynamicCache(config=self.config).layers)
            return
        for (layer, kind, number), state in zip(states.places, states.tensors, strict=True):
            held = self.layers[layer]
            held.has_previous_state[number] = True
            if kind == CONV:
                held.conv_states[number], held.is_conv_states_initialized[number] = state.clone(), True
                held.conv_kernel_size[number] = held.conv_kernel_size[number] or state.shape[-1]
            else:
                held.recurrent_states[number], held.is_recurrent_states_initialized[number] = state.clone(), True

    def _remembering(self) -> list[int]:
        return [place for place, layer in enumerate(self.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]
