"""A Hugging Face cache with numbered slots, so that the accepted branch of a tree can be kept and the rest dropped."""

from collections.abc import Sequence
from functools import reduce
from operator import itemgetter
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache as TransformersCache

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.probs import sent

Shape = tuple[int, int]
"""The heads and the width of a layer's keys or values."""


class TreeCache(TransformersCache):
    """Keys and values of all layers in one preallocated tensor for each shape: keeping a path is one indexed copy.

    Most models have one shape. Entry 2 i is the keys of layer i, entry 2 i + 1 its values. Where layers choose what
    they attend to, entry 2 n + i is the keys of the indexer of layer i of n.

    Args:
        layers: the number of attention layers.
        batch: rows.
        capacity: slots per row.
        shapes: the shape of every entry, a sequence, if they differ; None if all are as the first keys.
        placed: whether to keep the position of every slot, for masks that depend on it.

    Beside its keys a row has what the model reads beside its text (`sources`), None for nothing, which goes with it.
    """

    def __init__(self, layers: int, batch: int, capacity: int, shapes: Any = None, *, placed: bool = False) -> None:
        TransformersCache.__init__(self, layers=[])  # also where a model's own class of caches stands between them
        self.shape, self.placed = (layers, batch, capacity), placed
        self.shapes: Sequence[Shape] | None = shapes
        kinds = sorted(set(shapes or ()))
        self.groups = [[place for place, one in enumerate(shapes or ()) if one == kind] for kind in kinds]
        self.stores: tuple[Float[Tensor, "e b h m d"], ...] = ()
        self.entries: tuple[Float[Tensor, "b h m d"], ...] = ()
        self.positions: Int[Tensor, "b m"] | None = None
        self.rows: Int[Tensor, "b 1"] | None = None
        self.slots: Int[Tensor, "b n"] | None = None
        self.first = 0
        self.width = 0
        self.used = 0
        self.sources: list[Any] = [None] * batch
        self.windowed: tuple[int, ...] = ()  # the layers of which the positions say what they read
        self.few = False  # whether slots were taken, so that a slot's number is no place
        self.written: tuple[Tensor, ...] = ()
        self.read: tuple[Tensor, ...] = ()
        self.recorded: Any = None  # passes that were recorded over this memory (`Graphs`)

    @property
    def owner(self) -> "TreeCache":
        """The cache whose memory this is."""
        return self

    @property
    def store(self) -> Float[Tensor, "e b h m d"] | None:
        """All keys and values, where they have one shape; None as long as there are none."""
        return self.stores[0] if len(self.stores) == 1 else None

    def place(
        self, starts: Int[Tensor, "b"], width: int, used: int, positions: Int[Tensor, "b n"] | None = None
    ) -> None:
        """Say where the next forward pass writes: slots starts to starts + width - 1; the first `used` are read.

        In a batch, what would lie before the first slot is written to it, and what would lie behind the last to that.
        The positions are those of the tokens.
        """
        if used > self.shape[2]:
            raise UnsupportedModel(f"The cache has {self.shape[2]} slots, but {used} are needed.")
        self.used, self.width = used, width
        if len(starts) == 1:
            self.first = int(starts[0])
            self._cut()
        else:
            self.rows = torch.arange(len(starts), device=starts.device).unsqueeze(-1)
            slots = starts.unsqueeze(-1) + torch.arange(width, device=starts.device)
            self.slots = slots.clamp(0, self.shape[2] - 1)
        if self.placed and positions is not None:
            known = self._positions(positions)
            if len(starts) == 1:
                known[:, self.first : self.first + width] = positions
            else:
                known[self.rows, self.slots] = positions

    def _positions(self, like: Int[Tensor, "..."]) -> Int[Tensor, "b m"]:
        if self.positions is None:
            self.positions = like.new_zeros(self.shape[1:])
        return self.positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values and return the slots in use; called by the model's attention."""
        self._allocated(key_states, value_states)
        layer = 2 * layer_idx
        if self.shape[1] == 1:
            self.written[layer].copy_(key_states)
            self.written[layer + 1].copy_(value_states)
            return _like(key_states, self.read[layer]), _like(value_states, self.read[layer + 1])
        keys, values = self.entries[layer], self.entries[layer + 1]
        keys[self.rows, :, self.slots] = _like(keys, key_states.transpose(1, 2))
        values[self.rows, :, self.slots] = _like(values, value_states.transpose(1, 2))
        return _like(key_states, keys[:, :, : self.used]), _like(value_states, values[:, :, : self.used])

    def update_indexer(self, indexer_key_states: Float[Tensor, "b n d"], layer_idx: int) -> Float[Tensor, "b m d"]:
        """Store the keys by which a layer chooses what it attends to, and return those in use."""
        self._allocated(indexer_key_states.unsqueeze(1), indexer_key_states.unsqueeze(1))
        place = 2 * self.shape[0] + layer_idx
        if self.shape[1] == 1:
            self.written[place].copy_(indexer_key_states.unsqueeze(1))
            return _like(indexer_key_states, self.read[place].squeeze(1))
        self.entries[place][self.rows, 0, self.slots] = _like(self.entries[place], indexer_key_states)
        return _like(indexer_key_states, self.entries[place][:, 0, : self.used])

    def _cut(self) -> None:
        """Cut out what the next pass writes and reads, for all layers at once: less to do in every layer."""
        if self.stores:
            self.written = self._each([store.narrow(3, self.first, self.width) for store in self.stores])
            self.read = self._each([store.narrow(3, 0, self.used) for store in self.stores])

    def _each(self, stores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the entries of stores, or of parts of them, in the order of layers."""
        if len(stores) == 1:
            return stores[0].unbind()
        pairs = [
            pair
            for group, store in zip(self.groups, stores, strict=True)
            for pair in zip(group, store.unbind(), strict=True)
        ]
        return tuple(entry for _, entry in sorted(pairs, key=itemgetter(0)))

    def _allocated(self, key_states: Tensor, value_states: Tensor) -> None:
        if not self.stores:
            self._opened(key_states)
            if self.shape[1] == 1:
                self._cut()
        self._widened(key_states.dtype, value_states.dtype)
        if self.shapes is None and key_states.shape != value_states.shape:
            raise UnsupportedModel(
                f"Keys of shape {tuple(key_states.shape)} and values of shape {tuple(value_states.shape)} "
                "cannot share one cache."
            )

    def _opened(self, like: Tensor) -> None:
        """Make the slots when the first keys come, like these."""
        if not self.stores:
            layers, batch, capacity = self.shape
            kinds = sorted(set(self.shapes or ()))
            sizes = [(len(group), *kind) for group, kind in zip(self.groups, kinds, strict=True)]
            sizes = sizes or [(2 * layers, like.shape[1], like.shape[3])]
            self.hold([like.new_zeros(count, batch, heads, capacity, width) for count, heads, width in sizes])

    def _widened(self, *precisions: torch.dtype) -> None:
        """Make room for numbers of these precisions: `torch.autocast` chooses one for each product."""
        own = self.stores[0].dtype
        wide = own if all(one == own for one in precisions) else reduce(torch.promote_types, precisions, own)
        if wide != own:
            self._widen(wide)
            if self.shape[1] == 1:
                self._cut()

    def _widen(self, precision: torch.dtype) -> None:
        self.hold([store.to(precision) for store in self.stores])

    def hold(self, stores: Sequence[Tensor]) -> None:
        """Take memory for all keys and values."""
        whole = tuple(stores)
        self.entries = self._each(whole) if whole else ()
        self.stores = whole  # last: who finds stores takes the entries for granted, also behind an interrupt

    def keep(self, base: Int[Tensor, "b"], path: Int[Tensor, "b D"]) -> None:
        """Move the slots base + path[i] to base + 1 + i, in all layers at once."""
        if not self.stores or path.shape[-1] == 0:
            return
        if len(base) == 1 and path.device.type == "cpu" and _stays(path[0].tolist()):
            return
        if path.device != self.stores[0].device:  # a draft model may lie on another device than its target
            base, path = base.to(self.stores[0].device), path.to(self.stores[0].device)
        order = torch.arange(1, path.shape[-1] + 1, device=path.device)
        source = torch.where(path >= 0, path, order)
        if len(base) == 1:
            first = int(base[0])
            goals = slice(first + 1, first + 1 + path.shape[-1])
            for store in self.stores:
                store[:, :, :, goals] = store.index_select(3, source[0] + first)
            if self.positions is not None:
                self.positions[:, goals] = self.positions.index_select(1, source[0] + first)
        else:
            source, goal = base.unsqueeze(-1) + source, base.unsqueeze(-1) + order
            rows = torch.arange(len(base), device=path.device).unsqueeze(-1)
            for store in self.stores:
                store[:, rows, :, goal] = store[:, rows, :, source]
            if self.positions is not None:
                self.positions[rows, goal] = self.positions[rows, source]

    def put(self, row: int, other: "TreeCache", length: int) -> "TreeCache":
        """Copy the first `length` slots of the only row of another cache over a row's, or behind a copy of all rows.

        Raises:
            UnsupportedModel: they do not fit.
        """
        if row == self.shape[1]:
            return self._extended().put(row, other, length)
        if isinstance(other, _View):
            other._look()
        self.sources[row] = other.sources[0]
        if not other.stores:  # nothing was scored yet: the prompt is a single token
            return self
        if length > self.shape[2]:
            raise UnsupportedModel(f"The cache has {self.shape[2]} slots, but {length} are needed.")
        self._opened(other.stores[0][0])
        self._widened(other.stores[0].dtype)
        for own, store in zip(self.stores, other.stores, strict=True):
            own[:, row, :, :length] = store[:, 0, :, :length]
        if other.positions is not None:
            self._positions(other.positions)[row, :length] = other.positions[0, :length]
        return self

    def in_slot(self, slot: int) -> tuple[Tensor, ...]:
        """Return copies of the keys and values in a slot of the first row, in the order of entries."""
        return tuple(entry[0, :, slot].clone() for entry in self.entries)

    def known(self) -> tuple[int, ...]:
        """Return how many tokens of each row came with its source, so that they need not be read."""
        return tuple(getattr(source, "known", 0) for source in self.sources)

    def check_not_again(self, starts: Int[Tensor, "b"]) -> None:
        """Check that no pass reads a prompt with images again, which it would read as text.

        Raises:
            InvalidParameter: one does: rows beside it have more to read.
        """
        known = () if self.few else self.known()
        if any(known) and any(start < count for start, count in zip(starts.tolist(), known, strict=True)):
            raise InvalidParameter("A prompt with images is read once; rows beside it must have equally much to read.")

    def moved(self, positions: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
        """Return the positions of tokens behind prompts whose last position is not their last place."""
        offsets = [getattr(source, "offset", 0) for source in self.sources]
        return positions + sent(torch.tensor(offsets), positions.device).unsqueeze(-1) if any(offsets) else positions

    def empty(self, batch: int, capacity: int) -> "TreeCache":
        """Return an empty cache of the same kind."""
        made = TreeCache(self.shape[0], batch, capacity, self.shapes, placed=self.placed)
        made.windowed, made.few = self.windowed, self.few
        return made

    def states(self) -> Any:
        """Return None: keys are all there is."""
        return None

    def begin(self, states: Any) -> None:
        """Do nothing: a text begins in its first slot."""

    def _extended(self) -> "TreeCache":
        """Return a cache with the same slots and an empty row behind the last."""
        more = self.empty(self.shape[1] + 1, self.shape[2])
        more.hold([torch.cat([store, torch.zeros_like(store[:, :1])], dim=1) for store in self.stores])
        if self.positions is not None:
            more.positions = torch.nn.functional.pad(self.positions, (0, 0, 0, 1))
        more.sources = [*self.sources, None]
        return more

    def of_layers(self, first: int, stop: int | None) -> "TreeCache":
        """Return a view of the keys of some layers."""
        return _View(self, layers=range(first, self.shape[0] if stop is None else stop))

    def select(self, rows: Sequence[int]) -> "TreeCache":
        """Return a view of the keys of a run of rows; none too: a batch may have fewer than there is memory for."""
        return _View(self, rows=range(rows[0], rows[-1] + 1) if rows else range(0))

    def take(
        self, row: int, other: "TreeCache", slots: Sequence[Int[Tensor, "#h m"]], newest: Int[Tensor, " m"], first: int
    ) -> None:
        """Copy slots of the only row of another cache into a row's slots from `first` on; see `Cache.take`.

        Raises:
            UnsupportedModel: there is no room for them, or layers choose what they attend to by keys of their own.
        """
        if isinstance(other, _View):
            other._look()
        if len(self.shapes or ()) > 2 * self.shape[0]:
            raise UnsupportedModel("A model whose layers choose what they attend to cannot be read over few keys.")
        self.sources[row], self.few = other.sources[0], True
        if first + len(newest) > self.shape[2]:
            raise UnsupportedModel(f"The cache has {self.shape[2]} slots, but {first + len(newest)} are needed.")
        if not other.stores or not len(newest):
            return
        self._opened(other.stores[0][0])
        self._widened(other.stores[0].dtype)
        behind, groups = slice(first, first + len(newest)), self.groups or [list(range(2 * self.shape[0]))]
        for group, own, store in zip(groups, self.stores, other.stores, strict=True):
            layers = [entry // 2 for entry in group]
            own_slots = [newest.unsqueeze(0) if one in self.windowed else slots[one % len(slots)] for one in layers]
            chosen = torch.stack([one.expand(store.shape[2], -1) for one in own_slots]).unsqueeze(-1)
            own[:, row, :, behind] = store[:, 0].gather(2, chosen.expand(-1, -1, -1, store.shape[4]))
        if other.positions is not None:
            self._positions(other.positions)[row, behind] = other.positions[0, newest]

    def keys_of(self, layer: int, count: int) -> Float[Tensor, "h m d"]:
        """Return a layer's keys in the first slots of the only row."""
        return self.entries[2 * layer][0, :, :count]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of slots in use, the new ones not counted."""
        return self.first

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of key slots and their offset; asked for only by masks that are not given."""
        return self.used, 0

    @property
    def is_compileable(self) -> bool:
        """Tell Hugging Face that this cache's reads change length."""
        return False


class _View(TreeCache):
    """Some layers, or some rows, of another cache, which may be a view itself and need not be allocated yet."""

    def __init__(self, whole: TreeCache, *, layers: range | None = None, rows: range | None = None) -> None:
        count, batch, capacity = whole.shape
        own = range(count) if layers is None else layers
        if layers is not None and whole.shapes is not None and len(whole.shapes) > 2 * count:
            raise UnsupportedModel("A model whose layers choose what they attend to cannot be read in part.")
        shapes = whole.shapes if whole.shapes is None or layers is None else whole.shapes[2 * own.start : 2 * own.stop]
        super().__init__(len(own), batch if rows is None else len(rows), capacity, shapes, placed=whole.placed)
        self.whole, self.part, self.few = whole, rows, whole.few
        self.sources = whole.sources if rows is None else whole.sources[rows.start : rows.stop]
        self.own = range(2 * own.start, 2 * own.stop)
        self.windowed = tuple(layer - own.start for layer in whole.windowed if layer in own)

    @property
    def owner(self) -> TreeCache:
        """The cache that this is a part of, or the one that is a part of."""
        return self.whole.owner

    def place(
        self, starts: Int[Tensor, "b"], width: int, used: int, positions: Int[Tensor, "b n"] | None = None
    ) -> None:
        """Say where the next forward pass writes, in memory that the whole cache may have by now."""
        self._look()
        super().place(starts, width, used, positions)

    def keep(self, base: Int[Tensor, "b"], path: Int[Tensor, "b D"]) -> None:
        """Move slots of the part."""
        self._look()
        super().keep(base, path)

    def put(self, row: int, other: TreeCache, length: int) -> TreeCache:
        """Copy slots of another cache into the part, or behind a copy of it."""
        self._look()
        return super().put(row, other, length)

    def in_slot(self, slot: int) -> tuple[Tensor, ...]:
        """Return copies of the part's keys and values in a slot."""
        self._look()
        return super().in_slot(slot)

    def take(
        self, row: int, other: TreeCache, slots: Sequence[Int[Tensor, "#h m"]], newest: Int[Tensor, " m"], first: int
    ) -> None:
        """Copy slots of another cache into the part."""
        self._look()
        super().take(row, other, slots, newest, first)

    def keys_of(self, layer: int, count: int) -> Float[Tensor, "h m d"]:
        """Return a layer's keys of the part."""
        self._look()
        return super().keys_of(layer, count)

    def _look(self) -> None:
        """Find the part in the whole cache, which may have been given memory since."""
        if isinstance(self.whole, _View):
            self.whole._look()
        stores, positions = self.whole.stores, self.whole.positions
        if stores and self.part is None:
            groups = self.whole.groups or [list(range(2 * self.whole.shape[0]))]
            inside = [[place for place, entry in enumerate(group) if entry in self.own] for group in groups]
            stores = tuple(store.narrow(0, one[0], len(one)) for store, one in zip(stores, inside, strict=True) if one)
        if self.part is not None:
            first, count = self.part.start, len(self.part)
            stores = tuple(store.narrow(1, first, count) for store in stores)
            positions = None if positions is None else positions.narrow(0, first, count)
        self.hold(stores)
        self.positions = positions

    def _opened(self, like: Tensor) -> None:
        self.whole._opened(like)
        self._look()

    def _widen(self, precision: torch.dtype) -> None:
        self.whole._widen(precision)
        self._look()

    def _positions(self, like: Int[Tensor, "..."]) -> Int[Tensor, "b m"]:
        if self.positions is None:
            self.whole._positions(like.new_zeros(1, 1))
            self._look()
        return cast(Tensor, self.positions)


class SlotView(TreeCache):
    """A cache over given memory that writes to given slots and reads the first: nothing in it depends on the text.

    Args:
        entries: keys and values, in the order of layers, by number.
        slots: where the next pass writes.
        room: how many slots are read; None for all.
    """

    def __init__(self, entries: Any, slots: Tensor, room: int | None = None) -> None:
        super().__init__(len(entries) // 2, entries[0].shape[0], entries[0].shape[2])
        self.entries, self.slots, self.room = entries, slots, room

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values and return the slots that are read."""
        slots = cast(Tensor, self.slots)
        keys, values = self.entries[2 * layer_idx], self.entries[2 * layer_idx + 1]
        if len(keys) == 1:
            keys.index_copy_(2, slots[0], _like(keys, key_states))
            values.index_copy_(2, slots[0], _like(values, value_states))
        else:
            places = slots[:, None, :, None]
            keys.scatter_(2, places.expand(key_states.shape), _like(keys, key_states))
            values.scatter_(2, places.expand(value_states.shape), _like(values, value_states))
        if self.room is not None:
            keys, values = keys[:, :, : self.room], values[:, :, : self.room]
        return _like(key_states, keys), _like(value_states, values)


def _like(given: Tensor, entry: Tensor) -> Tensor:
    """Return an entry in another tensor's precision, itself if it has that."""
    return entry if entry.dtype == given.dtype else entry.to(given.dtype)


def _stays(path: list[int]) -> bool:
    """Tell whether a path's nodes are in their places already, as those of a chain are; -1 is no node."""
    return all(node in (-1, place) for place, node in enumerate(path, 1))
