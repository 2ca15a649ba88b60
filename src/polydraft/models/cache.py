"""A Hugging Face cache with numbered slots, so that the accepted branch of a tree can be kept and the rest dropped."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache as TransformersCache

from polydraft.errors import UnsupportedModel


class TreeCache(TransformersCache):
    """Keys and values of all layers in one preallocated tensor: keeping a path is one indexed copy.

    Args:
        layers: the number of attention layers.
        batch: rows.
        capacity: slots per row.
    """

    def __init__(self, layers: int, batch: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.shape = (layers, batch, capacity)
        self.store: Float[Tensor, "2l b h m d"] | None = None
        self.rows: Int[Tensor, "b 1"] | None = None
        self.slots: Int[Tensor, "b n"] | None = None
        self.first = 0
        self.width = 0
        self.used = 0
        self.written: tuple[Tensor, ...] = ()
        self.read: tuple[Tensor, ...] = ()

    def place(self, starts: Int[Tensor, "b"], width: int, used: int) -> None:
        """Say where the next forward pass writes: slots starts to starts + width - 1; the first `used` are read.

        What would lie before slot 0, in a batch, is written to slot 0.
        """
        if used > self.shape[2]:
            raise UnsupportedModel(f"The cache has {self.shape[2]} slots, but {used} are needed.")
        self.used, self.width = used, width
        if len(starts) == 1:
            self.first = int(starts[0])
            self._cut()
        else:
            self.rows = torch.arange(len(starts), device=starts.device).unsqueeze(-1)
            self.slots = (starts.unsqueeze(-1) + torch.arange(width, device=starts.device)).clamp_min(0)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values and return the slots in use; called by the model's attention."""
        store = self._allocated(key_states, value_states)
        layer = 2 * layer_idx
        if self.shape[1] == 1:
            self.written[layer].copy_(key_states)
            self.written[layer + 1].copy_(value_states)
            return self.read[layer], self.read[layer + 1]
        keys, values = store[layer], store[layer + 1]
        keys[self.rows, :, self.slots] = key_states.transpose(1, 2)
        values[self.rows, :, self.slots] = value_states.transpose(1, 2)
        return keys[:, :, : self.used], values[:, :, : self.used]

    def _cut(self) -> None:
        """Cut out what the next pass writes and reads, for all layers at once: less to do in every layer."""
        if self.store is not None:
            self.written = self.store.narrow(3, self.first, self.width).unbind()
            self.read = self.store.narrow(3, 0, self.used).unbind()

    def _allocated(self, key_states: Tensor, value_states: Tensor) -> Tensor:
        if key_states.shape != value_states.shape:
            raise UnsupportedModel(
                f"Keys of shape {tuple(key_states.shape)} and values of shape {tuple(value_states.shape)} "
                "cannot share one cache."
            )
        if self.store is not None:
            return self.store
        store = self._opened(key_states)
        if self.shape[1] == 1:
            self._cut()
        return store

    def _opened(self, like: Tensor) -> Tensor:
        """Return the slots, which are made when the first keys come, like these."""
        if self.store is None:
            layers, batch, capacity = self.shape
            self.store = like.new_zeros(2 * layers, batch, like.shape[1], capacity, like.shape[3])
        return self.store

    def keep(self, base: Int[Tensor, "b"], path: Int[Tensor, "b D"]) -> None:
        """Move the slots base + path[i] to base + 1 + i, in all layers at once."""
        if self.store is None or path.shape[-1] == 0:
            return
        if len(base) == 1 and path.device.type == "cpu" and _stays(path[0].tolist()):
            return
        order = torch.arange(1, path.shape[-1] + 1, device=path.device)
        source = torch.where(path >= 0, path, order)
        if len(base) == 1:
            first = int(base[0])
            moved = self.store.index_select(3, source[0] + first)
            self.store[:, :, :, first + 1 : first + 1 + path.shape[-1]] = moved
        else:
            source, goal = base.unsqueeze(-1) + source, base.unsqueeze(-1) + order
            rows = torch.arange(len(base), device=path.device).unsqueeze(-1)
            self.store[:, rows, :, goal] = self.store[:, rows, :, source]

    def join(self, row: int, other: "TreeCache", length: int) -> None:
        """Copy the first `length` slots of the only row of another cache over a row's.

        Raises:
            UnsupportedModel: they do not fit.
        """
        if isinstance(other, _View):
            other._look()
        if other.store is None:  # nothing was scored yet: the prompt is a single token
            return
        if length > self.shape[2]:
            raise UnsupportedModel(f"The cache has {self.shape[2]} slots, but {length} are needed.")
        store = self._opened(other.store[0])
        store[:, row, :, :length] = other.store[:, 0, :, :length]

    def extended(self) -> "TreeCache":
        """Return a cache with the same slots and an empty row behind the last."""
        layers, batch, capacity = self.shape
        more = TreeCache(layers, batch + 1, capacity)
        if self.store is not None:
            more.store = torch.cat([self.store, torch.zeros_like(self.store[:, :1])], dim=1)
        return more

    def of_layers(self, first: int, stop: int | None) -> "TreeCache":
        """Return a view of the keys of some layers."""
        return _View(self, layers=range(first, self.shape[0] if stop is None else stop))

    def of_row(self, row: int) -> "TreeCache":
        """Return a view of the keys of one row."""
        return _View(self, row=row)

    def compacted(self, slots: Int[Tensor, "b m"], room: int) -> "TreeCache":
        """Return a cache with a copy of some slots of each row, and `room` empty ones behind them."""
        layers, batch, _ = self.shape
        fewer = TreeCache(layers, batch, slots.shape[1] + room)
        if self.store is not None:
            rows = torch.arange(batch, device=slots.device).unsqueeze(-1)
            kept = self.store[:, rows, :, slots].permute(2, 0, 3, 1, 4)
            fewer.store = torch.nn.functional.pad(kept, (0, 0, 0, room)).contiguous()
        return fewer

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
    """Some layers, or one row, of another cache, which may be a view itself and need not be allocated yet."""

    def __init__(self, whole: TreeCache, *, layers: range | None = None, row: int | None = None) -> None:
        count, batch, capacity = whole.shape
        super().__init__(count if layers is None else len(layers), batch if row is None else 1, capacity)
        self.whole = whole
        self.part = (1, row or 0, 1) if layers is None else (0, 2 * layers.start, 2 * len(layers))

    def place(self, starts: Int[Tensor, "b"], width: int, used: int) -> None:
        """Say where the next forward pass writes, in memory that the whole cache may have by now."""
        self._look()
        super().place(starts, width, used)

    def keep(self, base: Int[Tensor, "b"], path: Int[Tensor, "b D"]) -> None:
        """Move slots of the part."""
        self._look()
        super().keep(base, path)

    def join(self, row: int, other: TreeCache, length: int) -> None:
        """Copy slots of another cache into the part."""
        self._look()
        super().join(row, other, length)

    def extended(self) -> TreeCache:
        """Return a copy of the part with an empty row behind the last."""
        self._look()
        return super().extended()

    def compacted(self, slots: Int[Tensor, "b m"], room: int) -> TreeCache:
        """Return a copy of some slots of the part."""
        self._look()
        return super().compacted(slots, room)

    def _look(self) -> None:
        """Find the part in the whole cache, which may have been given memory since."""
        if isinstance(self.whole, _View):
            self.whole._look()
        self.store = None if self.whole.store is None else self.whole.store.narrow(*self.part)

    def _opened(self, like: Tensor) -> Tensor:
        self.whole._opened(like)
        self._look()
        return super()._opened(like)


def _stays(path: list[int]) -> bool:
    """Tell whether a path's nodes are in their places already, as those of a chain are; -1 is no node."""
    return all(node in (-1, place) for place, node in enumerate(path, 1))
