"""Models whose text cannot branch: recurrent and convolutional layers, and positions that cannot be given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache as TransformersCache
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from polydraft.errors import UnsupportedModel
from polydraft.models.cache import TreeCache
from polydraft.models.language_model import Forward, Layer

Place = tuple[int, str, int]
"""A layer, what it is that is remembered there, and which of several."""


@dataclass(frozen=True, eq=False)
class States:
    """The states of a batch of texts; nobody writes to them.

    Args:
        places: where each tensor belongs.
        tensors: the states, rows first; zeros of a text of which nothing was read.
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

    def empty(self, batch: int, capacity: int) -> Self:
        """Return an empty cache of the same kind."""
        return type(self)(self.config, self.shape[0], batch, capacity - 1, self.shapes, placed=self.placed)

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

    def take(
        self, row: int, other: TreeCache, slots: Sequence[Int[Tensor, "#h m"]], newest: Int[Tensor, " m"], first: int
    ) -> None:
        """Refuse; errors are those of `of_layers`."""
        self.of_layers(0, None)


class RememberingCache(WholeCache):
    """Keys and values in slots, as in every tree cache, and the states of layers that have no keys.

    A pass goes on from the states that it finds and leaves others. So who reads with it gives back the states of a
    committed text before a pass (`begin`), and takes those that a pass left (`states`). Arguments are those of
    `WholeCache`.
    """

    def __init__(self, config: Any, *given: Any, **named: Any) -> None:
        super().__init__(config, *given, **named)
        self.layers: list[Any] = list(DynamicCache(config=config).layers)

    def states(self) -> States | None:
        """Return what the last pass left; None before the first one."""
        places: list[Place] = []
        found: list[Tensor] = []
        for layer, held in enumerate(self.layers):
            if not isinstance(held, LinearAttentionCacheLayerMixin):
                continue
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


@lru_cache(maxsize=8)
def listed_cache(own: type[TransformersCache]) -> type[WholeCache]:
    """Return a class of tree caches that is one of a model's own class too, since such a model takes no other.

    Its own class has `linear_cache`, a list with a state, or an empty list, for each layer that was run.
    """
    return cast(type[WholeCache], type(f"Listed{own.__name__}", (_Listed, own), {}))


class _Listed(WholeCache):
    """Keys and values in slots, and states in the list that the model's own code writes to."""

    linear_cache: list[Any]

    def __init__(self, config: Any, *given: Any, **named: Any) -> None:
        super().__init__(config, *given, **named)
        self.linear_cache = []

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


HANDED = "state"
"""By which name such models take their states and return them."""
PEAK, LOWEST = 4, -1e30
"""Which tensor holds the largest exponent so far, and what it is before the first token; all others are zero then."""


class HandedCache(WholeCache):
    """No keys: the states that the last pass handed back, each tensor with the rows first."""

    held: list[Tensor] | None = None

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
        """Return a cache of a run of rows, with copies of their states."""
        alone = self.empty(len(rows), self.shape[2])
        alone.held = None if self.held is None else [one[rows[0] : rows[-1] + 1].clone() for one in self.held]
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
    return _joined(found, 0)


Score = Callable[[Tensor, Tensor, TreeCache, Tensor | None, int], Forward]
"""Scores tokens at positions, or embeddings, into a cache that knows their slots; the number is of logits to keep."""


def without(token: int, score: Score) -> Score:
    """Return how to score chains of a model that does not count one token, its padding: such chains one by one."""

    def scored(tokens: Tensor, positions: Tensor, cache: TreeCache, given: Tensor | None, keep: int) -> Forward:
        if not bool((tokens == token).any()):
            return score(tokens, positions, cache, given, keep)
        first, found = cache.first, list[Forward]()
        for place in range(tokens.shape[1]):
            own, at = slice(place, place + 1), first + place
            cache.place(torch.tensor([at]), 1, at + 1)
            found.append(score(tokens[:, own], positions[:, own], cache, None if given is None else given[:, own], 0))
        return _joined(found, 1, keep)

    return scored


def scored_by_count(
    score: Score,
    tokens: Int[Tensor, "b n"],
    positions: Int[Tensor, "b n"],
    cache: TreeCache,
    starts: Int[Tensor, "b"],
    embeddings: Float[Tensor, "b n d"] | None,
    context: int,
    keep: int,
    *,
    alone: bool = False,
) -> Forward:
    """Score chains that begin in slots `starts`: all rows together if they begin in one slot, else one by one.

    With `alone` several rows are always scored one by one, since each reads a source of its own. What lies behind the
    last slot of a row, or behind the model's context, is no text of it; its logits are zeros.
    """
    firsts: list[int] = starts.tolist()
    together = len(firsts) == 1 or (len({*firsts}) == 1 and not alone)
    if together and firsts[0] + tokens.shape[1] <= context:
        cache.place(starts, tokens.shape[1], firsts[0] + tokens.shape[1])
        cache.first = firsts[0]
        return score(tokens, positions, cache, embeddings, keep)
    most = min(context, cache.shape[2])

    def scored(row: int, first: int) -> Forward:
        first = min(first, most - 1)  # a chain that begins behind the context is no text, and its logits do not matter
        width = min(tokens.shape[1], most - first)
        own, given = cache.select([row]), None if embeddings is None else embeddings[row : row + 1, :width]
        own.place(torch.tensor([first]), width, first + width)
        found = score(tokens[row : row + 1, :width], positions[row : row + 1, :width], own, given, 0)
        behind = (0, 0, 0, tokens.shape[1] - width)
        hidden: dict[Layer, Tensor] = {layer: pad(states, behind) for layer, states in found.hidden.items()}
        return Forward(pad(found.logits, behind), hidden)

    return _joined([scored(row, first) for row, first in enumerate(firsts)], 0, keep)


def _joined(passes: Sequence[Forward], axis: int, keep: int = 0) -> Forward:
    """Return passes over rows (axis 0) or tokens (1) as one, with the last `keep` logits of each row, or all."""
    hidden: dict[Layer, Tensor] = {
        layer: torch.cat([one.hidden[layer] for one in passes], axis) for layer in passes[0].hidden
    }
    return Forward(torch.cat([one.logits for one in passes], axis)[:, -keep:], hidden)
