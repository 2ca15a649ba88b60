"""What a model itself keeps of a text: the shapes of keys and values, which layers may not share, and its own cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, cache_utils

from polydraft.errors import UnsupportedModel
from polydraft.models.checks.evaluation import evaluating
from polydraft.models.checks.placement import device_of
from polydraft.models.checks.supported import cache_name
from polydraft.models.sources.encoded import decoder_inputs, is_encoder_decoder, stand_in

PLACE = "polydraft_kept"
STATES = ("conv_states", "recurrent_states")
"""Where transformers' layers without keys keep their states, by number."""
Shapes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Kept:
    """What a model put into a cache in a pass over one token.

    Args:
        shapes: the heads and the width of each layer's keys and values, in turn, then those of the keys by which layers
            choose what they attend to, if some do; (0, 0) for what is not kept. None where all are the same, or if the
            pass failed: a trial of trees tells why.
        own: the model's own class of caches, if it is not transformers' usual one.
        layers: how many layers have keys.
        numbers: how many numbers the keys and values of a token are; 0 if that is not known.
        remembered: how many bytes the states of a row are, in layers that have no keys.
    """

    shapes: Shapes | None = None
    own: type[Cache] | None = None
    layers: int = 0
    numbers: int = 0
    remembered: int = 0


def kept_by(model: PreTrainedModel) -> Kept:
    """Find out what a model keeps; once per model.

    Raises:
        UnsupportedModel: a layer keeps something that only the model's own code knows.
    """
    known = model.__dict__.get(PLACE)
    if known is None:
        known = _found(model)
    if known is not None:  # what made a pass fail may go: it is not noted
        model.__dict__[PLACE] = known
    return known or Kept()


def _found(model: PreTrainedModel) -> Kept | None:
    """Return what a pass over one token left; None if it failed."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=device_of(model))
    try:
        with torch.no_grad(), evaluating(list(model.modules())):
            given = decoder_inputs(stand_in(model), token) if is_encoder_decoder(model) else {"input_ids": token}
            cache: Any = model(**given, use_cache=True)[cache_name(model)]
        cache = getattr(cache, "self_attention_cache", cache)
        if isinstance(cache, list):  # states alone, which the model hands back
            return Kept(remembered=_bytes(cast(list[Any], cache)))
        layers: list[Any] = list(cache.layers)
        pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
        found = tuple((0, 0) if one is None else (one.shape[1], one.shape[3]) for pair in pairs for one in pair)
    except Exception:  # noqa: BLE001  whatever it is, the answer is no
        return None
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
        return Kept(None if len({*found}) == 1 else found, None, count, numbers)
    missing = 2 * int(model.config.get_text_config().num_hidden_layers) - len(found)
    own = None if type(cache) is DynamicCache else type(cache)
    indexers = [getattr(layer, "indexer_keys", None) for layer in layers]
    chosen = [(0, 0) if one is None else (1, one.shape[-1]) for one in indexers]
    whole = (*found, *[(0, 0)] * max(0, missing), *(chosen if any(chosen) and max(chosen) > (0, 0) else ()))
    numbers = sum(heads * width for heads, width in whole)
    held = [value for layer in layers for name in STATES for value in (getattr(layer, name, None) or {}).values()]
    states = _bytes([*held, *(getattr(cache, "linear_cache", None) or ())])
    return Kept(None if len({*whole}) == 1 and whole[0] != (0, 0) else whole, own, count, numbers, states)


def _bytes(held: Sequence[Any]) -> int:
    """Return how much memory tensors take; what is none takes nothing."""
    return sum(one.numel() * one.element_size() for one in held if isinstance(one, torch.Tensor))
