"""Fused passes of fixed shapes, recorded once and replayed: on a GPU one launch takes the place of many hundreds."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from weakref import finalize

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional

from polydraft.models.cache import SlotView, TreeCache
from polydraft.models.language_model import Forward, Layer

MOST_TOKENS = 128
"""Passes over more tokens of a row are prompts: they come once, each with a length of its own."""
SLOTS = 256
"""The fewest slots that a recorded pass reads; more are doubled until they suffice."""
SEEN = 2
"""A pass is recorded when its shape was seen so often: recording takes as long as a few passes."""
MOST_KEPT = 1 << 30
"""Bytes of memory of caches that are no longer used; what is more is let go."""
LARGER = 2
"""A cache may be given memory of so many times the slots that it needs."""
Masks = Mapping[str, Bool[Tensor, "b n m"] | None]
Tensors = tuple[Tensor, ...]
Record = Callable[[Callable[[], Tensors]], tuple[Callable[[], None], Tensors]]
"""Runs a function once, and returns what runs it again, in the same memory, and where its results will be."""
Shape = tuple[object, ...]


def record_graph(run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
    """Record what a function launches on the current GPU as a CUDA graph; it is run before, as torch asks."""
    aside, usual = torch.cuda.Stream(), torch.cuda.current_stream()
    aside.wait_stream(usual)
    with torch.cuda.stream(aside):
        run()
    usual.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = run()
    return graph.replay, made


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A pass in memory of its own: what it reads, what runs it, and what it makes."""

    inputs: Tensors
    replay: Callable[[], None]
    made: Tensors


@dataclass(eq=False)
class _Memory:
    """The keys and values of one cache, and the passes that were recorded over them."""

    stores: Tensors
    seen: dict[Shape, int] = field(default_factory=dict)
    passes: dict[Shape, _Recorded] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """How much memory it is."""
        return sum(one.nbytes for one in self.stores)

    def fits(self, batch: int, capacity: int) -> bool:
        """Tell whether a cache can have it: what was made in inference mode cannot be written to outside."""
        _, rows, _, slots, _ = self.stores[0].shape
        if self.stores[0].is_inference() and not torch.is_inference_mode_enabled():
            return False
        return rows == batch and capacity <= slots <= LARGER * max(capacity, SLOTS)


class Graphs:
    """The recorded passes of a model.

    A recorded pass has a number of rows, of tokens and of slots that it reads; tokens and slots are filled up to a
    power of two. It reads tokens, positions, slots and masks where they were when it was recorded, and so the keys and
    values; the memory of a cache that is no longer used is kept, with what was recorded over it, for the next.

    Args:
        run: the fused pass.
        record: how a pass is recorded.
    """

    def __init__(self, run: Callable[..., Forward], record: Record = record_graph) -> None:
        self.run, self.record = run, record
        self.free: list[_Memory] = []
        self.left: deque[_Memory] = deque()  # caches may end in any thread, at any time
        self.lock = Lock()

    def new_cache(self, empty: Callable[[int, int], TreeCache], batch: int, capacity: int) -> TreeCache:
        """Return an empty cache with at least these slots, with memory that another one has left if there is such.

        Args:
            empty: makes a cache of so many rows and slots.
            batch: rows.
            capacity: slots of each.
        """
        with self.lock:
            self._collect()
            memory = next((one for one in self.free if one.fits(batch, capacity)), None)
            if memory is not None:
                self.free.remove(memory)
        if memory is None:
            return empty(batch, -(-capacity // SLOTS) * SLOTS)
        cache = empty(batch, memory.stores[0].shape[3])
        for one in memory.stores:
            one.zero_()
        cache.hold(memory.stores)
        self._owned(cache, memory)
        return cache

    def __call__(
        self,
        tokens: Int[Tensor, "b n"],
        positions: Int[Tensor, "b n"],
        masks: Masks,
        cache: TreeCache,
        keep: int,
        hidden_layers: Sequence[Layer],
    ) -> Forward | None:
        """Return what a recorded pass makes; None where none is recorded yet, or will be.

        A pass over many tokens is none, nor one without masks, nor the first over a cache, which has no memory yet.
        """
        width, seen = tokens.shape[1], [mask for mask in masks.values() if mask is not None]
        if not cache.stores or width > MOST_TOKENS or len(seen) < len(masks):
            return None
        room, memory = min(cache.shape[2], filled(cache.used)), self._memory(cache)
        places = tuple((one.data_ptr(), one.shape) for one in cache.stores)
        shape = (filled(width, 1), room, tuple(masks), tuple(hidden_layers), places)
        memory.seen[shape] = memory.seen.get(shape, 0) + 1
        if memory.seen[shape] <= SEEN:
            return None
        given = _inputs(tokens, positions, seen, cache, room)
        with self.lock:
            known = memory.passes.get(shape)
            if known is None:
                known = memory.passes[shape] = self._recorded(given, tuple(masks), cache, room, hidden_layers)
            for own, new in zip(known.inputs, given, strict=True):
                own.copy_(new)
            known.replay()
            logits, *states = (one[:, :width].clone() for one in known.made)
        return Forward(logits[:, -keep:], dict(zip(hidden_layers, states, strict=True)))

    def _recorded(
        self,
        given: Tensors,
        kinds: Sequence[str],
        cache: TreeCache,
        room: int,
        layers: Sequence[Layer],
    ) -> _Recorded:
        with torch.inference_mode(False):  # what is made in that mode cannot be written to outside it
            inputs = tuple(one.clone() for one in given)
        view, masks = SlotView(cache.entries, inputs[2], room), dict(zip(kinds, inputs[3:], strict=True))

        def run() -> Tensors:
            made = self.run(inputs[0], inputs[1], masks, view, 0, layers)
            return (made.logits, *(made.hidden[layer] for layer in layers))

        return _Recorded(inputs, *self.record(run))

    def _memory(self, cache: TreeCache) -> _Memory:
        owner = cache.owner
        memory: _Memory | None = owner.recorded
        if memory is None or memory.stores is not owner.stores:
            memory = _Memory(owner.stores)
            self._owned(owner, memory)
        return memory

    def _owned(self, cache: TreeCache, memory: _Memory) -> None:
        """Let a cache have memory, which is free when the cache is gone."""
        cache.recorded = memory
        finalize(cache, self.left.append, memory).atexit = False

    def _collect(self) -> None:
        """Take what ended caches have left, and let go of the oldest where that is too much."""
        while self.left:
            self.free.append(self.left.popleft())
        while sum(one.bytes for one in self.free) > MOST_KEPT:
            del self.free[0]


def _inputs(
    tokens: Int[Tensor, "b n"],
    positions: Int[Tensor, "b n"],
    masks: Sequence[Bool[Tensor, "b n m"]],
    cache: TreeCache,
    room: int,
) -> Tensors:
    """Return tokens, positions, slots and masks, filled up: the last token comes again, into the slot that it has."""
    width = tokens.shape[1]
    columns = torch.arange(filled(width, 1), device=tokens.device).clamp_max(width - 1)
    slots = (columns + cache.first).unsqueeze(0) if cache.slots is None else cache.slots[:, columns]
    seen = [functional.pad(mask, (0, room - mask.shape[-1]))[:, columns] for mask in masks]
    return (tokens[:, columns], positions[:, columns], slots, *seen)


def filled(count: int, least: int = SLOTS) -> int:
    """Return the next power of two times `least`; by default of slots."""
    while least < count:
        least *= 2
    return least
