"""Which of the visible keys a layer reads: all of them, those of a sliding window, or those of its chunk."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""The names of kinds of layers in a model's `layer_types`, and of masks in the mapping that it takes."""
RECURRENT, CONVOLUTIONAL = "linear_attention", "conv"
KEYLESS = (RECURRENT, CONVOLUTIONAL, "mlp", "moe")
"""Kinds of layers that read no keys."""
HYBRID, SLIDING_HYBRID = "hybrid", "hybrid_sliding"
WITHOUT = (RECURRENT, CONVOLUTIONAL)
PARTS = {HYBRID: (HYBRID, FULL, *WITHOUT), SLIDING_HYBRID: (SLIDING_HYBRID, SLIDING, *WITHOUT)}
"""Kinds of layers with parts, each with a mask of its own; some models look for the whole's name, some for theirs."""
SIZES = {SLIDING: "sliding_window", SLIDING_HYBRID: "sliding_window", CHUNKED: "attention_chunk_size"}
"""The setting of a configuration that holds the size of a kind's window."""


@dataclass(frozen=True)
class Window:
    """The keys that layers of one kind read.

    Rule: a query at position q reads the visible keys at positions k; of a sliding window of W those with q - k < W, of
    chunks of C those with floor(q / C) = floor(k / C).

    Args:
        kind: the name of the kind.
        size: W or C; None for all keys.
    """

    kind: str
    size: int | None = None

    @property
    def has_keys(self) -> bool:
        """Whether layers of this kind read keys, so that a mask says which."""
        return self.kind not in KEYLESS

    def seen(
        self, mask: Bool[Tensor, "b n m"], queries: Int[Tensor, "b n"], keys: Int[Tensor, "b m"]
    ) -> Bool[Tensor, "b n m"]:
        """Return which of the visible keys are read, given the positions of queries and keys."""
        if self.size is None:
            return mask
        queries, keys = queries.unsqueeze(-1), keys.unsqueeze(-2)
        if self.kind == CHUNKED:
            return mask & (queries // self.size == keys // self.size)
        return mask & (queries - keys < self.size)


Windows = tuple[Window, ...]
"""The kinds of a model's attention layers, each once; one for most models."""


def empty_window(config: Any) -> str | None:
    """Return the setting by which layers would read no key at all; None if there is none."""
    kinds = getattr(config, "layer_types", None) or (SLIDING,)
    names = dict.fromkeys(SIZES[kind] for kind in kinds if kind in SIZES)
    return next((name for name in names if getattr(config, name, None) == 0), None)


def windows_of(config: Any) -> Windows:
    """Return the kinds of attention layers of a model by its configuration."""
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return (_window(SLIDING, config) if SIZES[SLIDING] in settings_of(config) else Window(FULL),)
    parts = [part for kind in kinds for part in PARTS.get(kind, (kind,))]
    return tuple(_window(kind, config) for kind in dict.fromkeys(parts))


def candidates(config: Any) -> tuple[Windows, ...]:
    """Return what a model's layers may read, the likeliest first: some slide whatever `layer_types` says."""
    likeliest = windows_of(config)
    everywhere = (_window(SLIDING, config),)
    other = not sizes_of(likeliest) and sizes_of(everywhere)
    return (likeliest, everywhere) if other else (likeliest,)


def sizes_of(windows: Windows) -> tuple[int, ...]:
    """Return the sizes of those that have one."""
    return tuple(one.size for one in windows if one.size is not None)


def narrowed(windows: Windows, size: int) -> Windows:
    """Return the same kinds with windows of another size."""
    return tuple(Window(one.kind, one.size and size) for one in windows)


def settings_of(config: Any) -> Mapping[str, int]:
    """Return the sizes of windows that a configuration, or a layer, has, by name."""
    found = {name: getattr(config, name, None) for name in SIZES.values()}
    return {name: size for name, size in found.items() if isinstance(size, int) and size > 0}


def _window(kind: str, config: Any) -> Window:
    size = getattr(config, SIZES[kind], None) if kind in SIZES else None
    return Window(kind, size or None)
