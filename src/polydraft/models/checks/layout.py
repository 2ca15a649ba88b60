"""How a model's passes are run and laid out: in evaluation mode, with which cache, in which shapes and windows."""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from threading import Lock
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, cache_utils

from polydraft.errors import UnsupportedModel
from polydraft.models.chain_models import HANDED
from polydraft.models.checkpoints.silence import first_sentence
from polydraft.models.sources import decoder_inputs, is_encoder_decoder, stand_in

HOOK = "_hf_hook"
"""Where accelerate notes on a module what it does before and after its pass."""


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device of a model's passes; "meta" for a model without weights.

    Weights that are offloaded are on the meta device between passes.
    """
    first = model.device
    if first.type != "meta":
        return first
    devices = (getattr(hook, "execution_device", None) for hook in _hooks(model))
    return next((torch.device(one) for one in devices if one is not None), first)


def is_offloaded(model: nn.Module) -> bool:
    """Tell whether accelerate brings some of a model's weights for each pass, so that they cannot be read otherwise."""
    return any(getattr(hook, "offload", False) for hook in _hooks(model))


def _hooks(model: nn.Module) -> Iterator[Any]:
    for part in model.modules():
        hook = vars(part).get(HOOK)
        if hook is not None:
            yield from getattr(hook, "hooks", (hook,))


COPIED = (nn.Module, PreTrainedConfig, dict, list, tuple, partial, MethodType)
"""What is copied; all else that hangs on a model, weights, hooks and caches among it, is its own."""
Model = TypeVar("Model", bound=PreTrainedModel)


def twin_of(model: Model) -> Model:
    """Return a copy with modules and configurations of its own, in evaluation mode; weights are shared.

    Methods that were put onto a module, as accelerate does to bring weights when they are needed, become those of its
    copy.
    """
    twin = copy.deepcopy(model, memo={id(one): one for part in model.modules() for one in _shared(part)})
    for part in twin.modules():
        part.training = False
    return twin


def _shared(value: Any, deepest: int = 3) -> Iterator[Any]:
    inside: Any = vars(value) if isinstance(value, nn.Module) else value
    for one in cast(list[Any], list(inside.values()) if isinstance(inside, dict) else list(inside)):
        if not isinstance(one, COPIED):
            yield one
        elif deepest and isinstance(one, dict | list | tuple):
            yield from _shared(one, deepest - 1)


OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Settings of a configuration by which a model returns more than its logits, or computes more of it."""
TRAINING = attrgetter("training")
_LOCK = Lock()
_HELD: dict[int, int] = {}
"""How many passes hold each module in evaluation mode that was in training, by its identity."""


def for_logits(model: PreTrainedModel) -> dict[str, bool]:
    """Return what a pass is told so that it returns its logits and its cache, whatever the configuration says."""
    taken = inspect.signature(model.forward).parameters
    open_to_all = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    configs = (model.config, model.config.get_text_config(decoder=True))
    asked = [name for name in OUTPUTS if any(getattr(one, name, False) for one in configs)]
    told = {name: False for name in asked if open_to_all or name in taken}
    return told if model.config.return_dict else {**told, "return_dict": True}


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode for a while; each goes back to its own mode, also after an error.

    Passes of several threads may share modules: the last one that ends gives them their mode back. The flags are set
    one by one and not by `train`, which some layers override to merge or freeze weights.
    """
    held: list[nn.Module] = []
    try:
        with _LOCK:
            if _HELD or any(map(TRAINING, modules)):
                for one in modules:
                    if one.training or id(one) in _HELD:
                        held.append(one)
                        _HELD[id(one)] = _HELD.get(id(one), 0) + 1
                        one.training = False
        yield
    finally:
        if held:
            with _LOCK:
                for one in held:
                    _HELD[id(one)] = _HELD.get(id(one), 1) - 1
                    if not _HELD[id(one)]:
                        del _HELD[id(one)]
                        one.training = True


PLACE = "polydraft_kept"
OLD_WORDS = ("past_key_values", "cache_params")
"""Names of caches that are tried last: those of wrappers and own models that name no parameter."""
STATES = ("conv_states", "recurrent_states")
"""Where transformers' layers without keys keep their states, by number."""
Shapes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Kept:
    """What a model put into a cache in a pass over one token.

    Args:
        shapes: the heads and the width of each layer's keys and values, in turn, then those of the keys by which layers
            choose what they attend to, if some do; (0, 0) for what is not kept. None where all are the same.
        name: by which name the model takes its cache.
        own: the model's own class of caches, if it is not transformers' usual one.
        layers: how many layers have keys.
        numbers: how many numbers the keys and values of a token are; 0 if that is not known.
        remembered: how many bytes the states of a row are, in layers that have no keys.
    """

    shapes: Shapes | None = None
    name: str = ""
    own: type[Cache] | None = None
    layers: int = 0
    numbers: int = 0
    remembered: int = 0


def cache_name(model: PreTrainedModel) -> str:
    """Return by which name a model takes its cache; errors are those of `kept_by`."""
    return kept_by(model).name


def cache_in(named: Mapping[str, Any]) -> Cache | None:
    """Return the cache among what is given to a model, or among what it returns; None if there is none."""
    return next((value for value in named.values() if isinstance(value, Cache)), None)


def kept_by(model: PreTrainedModel) -> Kept:
    """Find out what a model keeps, and by which name it takes a cache; once per model, but for passes that failed.

    Raises:
        UnsupportedModel: the model takes no cache, or a layer keeps something that only the model's own code knows.
    """
    if PLACE not in model.__dict__:
        model.__dict__[PLACE] = _found(model)
    return model.__dict__[PLACE]


def _found(model: PreTrainedModel) -> Kept:
    with torch.no_grad(), evaluating(list(model.modules())):
        name, taken = _taken(model)
    if isinstance(taken, list):  # states alone, which the model hands back
        return Kept(name=name, remembered=_bytes(cast(list[Any], taken)))
    cache: Any = getattr(taken, "self_attention_cache", taken)
    try:
        layers: list[Any] = list(cache.layers)
        pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
        found = tuple((0, 0) if one is None else (one.shape[1], one.shape[3]) for pair in pairs for one in pair)
    except Exception:  # noqa: BLE001  whatever it is, the answer is no
        return Kept(name=name)
    strange = [type(layer).__name__ for layer in layers if type(layer).__module__ != cache_utils.__name__]
    if strange:
        raise UnsupportedModel(
            f"{type(model).__name__} keeps a {strange[0]}, a kind of layer that only its own code knows, so what it "
            "has read cannot be taken back."
        )
    count = 1 + max((place for place, one in enumerate(found) if one != (0, 0)), default=-1) // 2
    if is_encoder_decoder(model):  # the configuration counts the encoder's layers
        found = found[: 2 * count]
        numbers = sum(heads * width for heads, width in found)
        return Kept(None if len({*found}) == 1 else found, name, None, count, numbers)
    missing = 2 * int(model.config.get_text_config().num_hidden_layers) - len(found)
    own = None if type(cache) is DynamicCache else type(cache)
    indexers = [getattr(layer, "indexer_keys", None) for layer in layers]
    chosen = [(0, 0) if one is None else (1, one.shape[-1]) for one in indexers]
    whole = (*found, *[(0, 0)] * max(0, missing), *(chosen if any(chosen) and max(chosen) > (0, 0) else ()))
    numbers = sum(heads * width for heads, width in whole)
    held = [value for layer in layers for name in STATES for value in (getattr(layer, name, None) or {}).values()]
    states = _bytes([*held, *(getattr(cache, "linear_cache", None) or ())])
    return Kept(None if len({*whole}) == 1 and whole[0] != (0, 0) else whole, name, own, count, numbers, states)


def _taken(model: PreTrainedModel) -> tuple[str, Cache | list[Any]]:
    """Return by which name a model takes a cache, and the cache that it made; passes over one token show it.

    Versions of transformers call it by other names, a model need not take it by the name by which it returns it, and a
    signature may name something else so, or nothing.
    """
    token, name = torch.zeros(1, 1, dtype=torch.int64, device=device_of(model)), type(model).__name__
    text = decoder_inputs(stand_in(model), token) if is_encoder_decoder(model) else {"input_ids": token}
    told = for_logits(model)
    try:
        made: Any = model(**text, use_cache=True, **told)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedModel(f"{name} cannot read a token into a cache: {first_sentence(error)}.") from error
    if not isinstance(made, Mapping):
        raise UnsupportedModel(f"{name} returns a {type(made).__name__} without names, so its logits are not known.")
    if isinstance(made.get(HANDED), list):
        return HANDED, made[HANDED]
    found = [word for word, value in made.items() if isinstance(value, Cache)]
    cache = cache_in(made) or DynamicCache(config=model.config.get_text_config(decoder=True))
    for word in dict.fromkeys((*found, *inspect.signature(model.forward).parameters, *OLD_WORDS)):
        if word not in text and _goes_on(model, text, word, cache):
            return word, cache
    raise UnsupportedModel(f"{name} takes no cache that could keep what was read, so every step would read it all.")


def _goes_on(model: PreTrainedModel, text: Mapping[str, Any], word: str, cache: Cache) -> bool:
    """Tell whether a pass that is given a cache by this name fills it, or hands it back."""
    try:
        made: Any = model(**text, use_cache=True, **for_logits(model), **{word: cache})
        back = cache_in(made)
        return back is cache or (back is None and cache.get_seq_length() > 0)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001  whatever it is, the answer is no
        return False


def _bytes(held: Sequence[Any]) -> int:
    return sum(one.numel() * one.element_size() for one in held if isinstance(one, torch.Tensor))


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
class KeyWindow:
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
        self, mask: Bool[Tensor, "b n m"], queries: Int[Tensor, "b n"], keys: Int[Tensor, "b s"] | None
    ) -> Bool[Tensor, "b n m"]:
        """Return which of the visible keys are read, given the positions of queries and of the keys in all slots."""
        if self.size is None or keys is None or mask.shape[-1] <= self.size:
            return mask
        queries, keys = queries.unsqueeze(-1), keys[:, : mask.shape[-1]].unsqueeze(-2)
        if self.kind == CHUNKED:
            return mask & (queries // self.size == keys // self.size)
        return mask & (queries - keys < self.size)


Windows = tuple[KeyWindow, ...]
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
        return (_window(SLIDING, config) if SIZES[SLIDING] in settings_of(config) else KeyWindow(FULL),)
    parts = [part for kind in kinds for part in PARTS.get(kind, (kind,))]
    return tuple(_window(kind, config) for kind in dict.fromkeys(parts))


def candidates(config: Any) -> tuple[Windows, ...]:
    """Return what a model's layers may read, the likeliest first: some slide whatever `layer_types` says."""
    likeliest = windows_of(config)
    everywhere = (_window(SLIDING, config),)
    other = not sizes_of(likeliest) and sizes_of(everywhere)
    return (likeliest, everywhere) if other else (likeliest,)


def windowed_layers(windows: Windows, config: Any, layers: int) -> tuple[int, ...]:
    """Return the layers that read by windows, given the kinds of a model's layers and its configuration."""
    sized = {one.kind for one in windows if one.size is not None}
    kinds = [windows[0].kind] * layers if len(windows) == 1 else config.layer_types
    return tuple(layer for layer, kind in enumerate(kinds) if kind in sized)


def sizes_of(windows: Windows) -> tuple[int, ...]:
    """Return the sizes of those that have one."""
    return tuple(one.size for one in windows if one.size is not None)


def narrowed(windows: Windows, size: int) -> Windows:
    """Return the same kinds with windows of another size."""
    return tuple(KeyWindow(one.kind, one.size and size) for one in windows)


def settings_of(config: Any) -> Mapping[str, int]:
    """Return the sizes of windows that a configuration, or a layer, has, by name."""
    found = {name: getattr(config, name, None) for name in SIZES.values()}
    return {name: size for name, size in found.items() if isinstance(size, int) and size > 0}


def _window(kind: str, config: Any) -> KeyWindow:
    size = getattr(config, SIZES[kind], None) if kind in SIZES else None
    return KeyWindow(kind, size or None)


SWITCHING, SWITCH = ("longrope", "su"), "original_max_position_embeddings"
"""Rotations with one set of frequencies for short passes and one for long ones, and the setting that says how long."""


def context_of(config: object) -> int:
    """Return the most tokens of a text; with frequencies that switch by the longest position of a pass, up to there.

    Frequencies that grow with it (`dynamic`) do so beyond the longest text of the configuration only.
    """
    names = ("max_position_embeddings", "max_seq_len", "max_target_positions")
    longest = [size for size in (getattr(config, name, None) for name in names) if size]
    return min((2**31 - 1, *longest, *_switches(config)))


def _switches(config: object) -> Iterator[int]:
    """Yield the lengths at which frequencies switch; layers of every kind may have settings of their own, nested."""
    left: list[object] = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            settings = cast(Mapping[str, Any], one)
            left += settings.values()
            if settings.get("rope_type", settings.get("type")) in SWITCHING:
                size = settings.get(SWITCH) or getattr(config, SWITCH, None)
                yield from (size,) if size else ()
