"""What a model reads beside the text that it writes: which arguments of a call are such inputs."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from polydraft.errors import InvalidParameter
from polydraft.models.checks import cache_in, cache_name, reads_prompts_both_ways, sees
from polydraft.models.sources.encoded import is_encoder_decoder

IDS = "input_ids"
START = "decoder_start_token_id"
OF_DECODERS = frozenset(("decoder_input_ids", START, "decoder_attention_mask"))
"""Arguments of a call that say how the text of an encoder-decoder begins."""
MADE_INSIDE = frozenset(
    "logits_processor stopping_criteria generation_config attention_mask position_ids use_cache "
    "logits_to_keep cache_position synced_gpus inputs_tensor".split()
)
"""What `model.generate` itself hands to a decoding method."""
NOT_INPUTS = frozenset(("self", "kwargs", "labels", "return_dict", "encoder_outputs", *MADE_INSIDE))
"""Parameters of passes that are no inputs of a text."""
BY_TOKEN = ("position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Inputs that have a number for each token of the prompt."""


def main_input(model: PreTrainedModel) -> str:
    """Return by which name a call takes what is read: token ids, or what the model's encoder reads instead."""
    return model.main_input_name if is_encoder_decoder(model) else IDS


def read_size(model: PreTrainedModel) -> int:
    """Return how many tokens there are of the kind that is read."""
    config = model.config
    if is_encoder_decoder(model):
        return int(getattr(config, "encoder", config).vocab_size)
    return int(config.get_text_config(decoder=True).vocab_size)


def own_inputs(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of what a model reads beside its main input; nothing for models of text alone."""
    if is_encoder_decoder(model):
        return OF_DECODERS | _parameters(model.get_encoder()) - {main_input(model), cache_name(model)}
    if not sees(model):
        return frozenset()
    return (_parameters(model) | {"mm_encoder_outputs"}) - {IDS, "inputs_embeds", cache_name(model)}


def beside_text(model: PreTrainedModel, prepared: Mapping[str, Any]) -> bool:
    """Tell whether the first pass reads more than text, such as images, or in both directions."""
    given = ((name, prepared.get(name)) for name in own_inputs(model))
    return reads_prompts_both_ways(model) or (sees(model) and any(_says_something(*one) for one in given))


def _says_something(name: str, value: Any) -> bool:
    """Tell whether an input is there; kinds of tokens that are all text say nothing."""
    return value is not None and value != {} and not (name == "mm_token_type_ids" and not bool(value.any()))


def _parameters(module: Any) -> frozenset[str]:
    return frozenset(inspect.signature(module.forward).parameters) - NOT_INPUTS


def check_begun(model: PreTrainedModel, rows: int, options: Mapping[str, Any]) -> None:
    """Check how the text of an encoder-decoder is to begin.

    Raises:
        InvalidParameter: rows or a mask do not fit, or the first token is none of the model's.
    """
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    begun, mask, start = (options.get(name) for name in ("decoder_input_ids", "decoder_attention_mask", START))
    if mask is not None and begun is None:
        raise InvalidParameter("decoder_attention_mask needs decoder_input_ids, whose padding it names.")
    if isinstance(begun, Tensor) and begun.shape[:1] != (rows,):
        raise InvalidParameter(f"decoder_input_ids must have a row for each input, {rows}, but has {len(begun)}.")
    if start is not None:
        strange = [one for one in torch.as_tensor(start).reshape(-1).tolist() if not 0 <= one < size]
        if strange:
            raise InvalidParameter(f"{START} must be one of the model's tokens, 0 to {size - 1}, but is {strange[0]}.")


def check_own_way(model: PreTrainedModel) -> None:
    """Check that a model's `generate` is Hugging Face's, which prepares one text for one decoding method.

    Raises:
        InvalidParameter: it is the model's own, which does more, such as cutting audio.
    """
    if getattr(type(model), "generate", None) is not vars(GenerationMixin)["generate"]:
        raise InvalidParameter(
            f"{type(model).__name__} has a generate of its own, which does more than to decode; call "
            "model.generate(..., custom_generate=polydraft.generate)."
        )


def check_made_inside(model: PreTrainedModel, input_ids: Tensor, inputs: Mapping[str, Any]) -> None:
    """Check, of a call from inside `model.generate`, that the model's inputs are those that are handed on.

    Raises:
        InvalidParameter: there are others, positions of the user's own, or keys of another text.
    """
    known, keys = MADE_INSIDE | own_inputs(model) | {"encoder_outputs"}, cache_in(inputs)
    for name, value in inputs.items():
        if name not in known and value is not None and value is not keys:
            raise InvalidParameter(
                f"{name} is an input of the model beside its tokens, which polydraft does not hand on; leave it out."
            )
    if keys is not None and keys.get_seq_length() > 0:
        name = next(name for name, value in inputs.items() if value is keys)
        raise InvalidParameter(f"{name} is refused: polydraft reads the whole prompt; leave it out.")
    if is_encoder_decoder(model):
        return
    mask, places = inputs.get("attention_mask"), inputs.get("position_ids")
    usual = (input_ids * 0 + 1 if mask is None else mask.long()).cumsum(dim=-1) - 1
    if beside_text(model, inputs) or places is None:
        return
    if places.shape[-2:] != usual.shape or bool(((places - usual) * (usual >= 0)).any()):
        raise InvalidParameter("position_ids is refused: positions follow from attention_mask; leave it out.")
