"""What models say of themselves: whether a token tree can be scored, and what was passed where a model should be."""

import inspect
from os import PathLike
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from polydraft.errors import InvalidParameter, UnsupportedModel, shown
from polydraft.models.checks.evaluation import device_of
from polydraft.models.checks.layout import cache_name, empty_window
from polydraft.models.checks.wrapped import check_alike, held_by, unwrapped

ATTENTION_WITH_MASKS = ("sdpa", "eager")
BOTH_WAYS = (True, "all")
"""Values of `use_bidirectional_attention` that concern text; another one concerns images only.

In models that see images they concern the prompt, which is read by the model's own code."""


def check_model(model: object) -> PreTrainedModel:
    """Return what was passed as a model if it is one that can score token trees, as far as it says so itself.

    Of a wrapper it is the model inside (`unwrapped`).

    Raises:
        InvalidParameter: it is something else, such as a pair, a tokenizer, a folder's name, or nothing; the text says
            what to pass.
        UnsupportedModel: it is a model that cannot be used; the text names the reason.
    """
    if not isinstance(model, nn.Module):
        raise InvalidParameter(f"A Hugging Face causal model is needed, but {_described(model)}")
    model = cast(nn.Module, unwrapped(model))
    _check_bare(model)
    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise UnsupportedModel(
            f"{type(model).__name__} is no Hugging Face model: it has no config that says what it is; pass the model "
            "that it holds, or one loaded by polydraft.load."
        )
    pretrained = cast(PreTrainedModel, model)
    check_supported(pretrained)
    check_alike(pretrained)
    return pretrained


def _check_bare(model: nn.Module) -> None:
    """Check that a model is not a wrapper of an unknown kind, which hands its arguments on.

    Raises:
        UnsupportedModel: it is; the text says what to pass.
    """
    held = held_by(model)
    if held is not None and cache_name(held[1]) not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(
            f"{type(model).__name__} is a wrapper around {type(held[1]).__name__}; pass the model that it holds, its "
            f"attribute `{held[0]}`."
        )


def check_supported(model: PreTrainedModel) -> None:
    """Check that a model can score a token tree, by its class and configuration.

    Raises:
        UnsupportedModel: it cannot; the text names the reason.
    """
    name, config = type(model).__name__, model.config
    check_architecture(model, config, name)
    if config._attn_implementation not in ATTENTION_WITH_MASKS:
        raise UnsupportedModel(
            f"{name} runs {config._attn_implementation} attention, which takes no tree masks; "
            'load it with attn_implementation="sdpa".'
        )
    if device_of(model).type == "meta":
        raise UnsupportedModel(f"{name} is on the meta device, which holds no weights; load it on cpu or cuda.")


def check_architecture(model: Any, config: PreTrainedConfig, name: str) -> None:
    """Check what can be told of a model, or of its class before its weights are loaded.

    Raises:
        UnsupportedModel: it cannot score a token tree; the text names the reason.
    """
    text, arguments = config.get_text_config(decoder=True), inspect.signature(model.forward).parameters
    if config.is_encoder_decoder and not {"encoder_outputs", "decoder_input_ids"} <= arguments.keys():
        raise UnsupportedModel(
            f"{name} is an encoder-decoder model that does not take what its encoder made apart from its text."
        )
    if not callable(getattr(model, "generate", None)):
        raise UnsupportedModel(
            f"{name} has no head that predicts the next token; load the model with AutoModelForCausalLM."
        )
    empty = empty_window(text)
    if empty is not None:
        raise UnsupportedModel(
            f"{name} has {empty}=0, so its tokens see nothing; set it to None for all that is before."
        )
    if getattr(text, "use_bidirectional_attention", None) in BOTH_WAYS and not sees(model, config):
        raise UnsupportedModel(f"{name} attends in both directions; only causal models can be used.")


def sees(model: Any, config: PreTrainedConfig | None = None) -> bool:
    """Tell whether the prompts of a decoder, or of a class of decoders, may hold more than text, such as images.

    The text part of such a model alone may be of a class of the same family, but its configuration has no parts.
    """
    kinds = getattr(model, "input_modalities", "text")
    parts = (config or model.config).sub_configs
    return bool(parts) and kinds != "text" and {*kinds} != {"text"}


def reads_prompts_both_ways(model: PreTrainedModel) -> bool:
    """Tell whether a model reads a prompt in both directions, and only what it writes itself in one."""
    text = model.config.get_text_config(decoder=True)
    return sees(model) and getattr(text, "use_bidirectional_attention", None) in BOTH_WAYS


def counts_itself(model: PreTrainedModel) -> bool:
    """Tell whether a model counts positions by its cache, so that those of a tree's siblings cannot be given.

    Decoders of encoder-decoders do, or measure distances in slots.
    """
    text = model.config.get_text_config()
    local = "local" in (getattr(text, "attention_layers", None) or ())
    unasked = "position_ids" not in inspect.signature(model.forward).parameters
    return model.config.is_encoder_decoder or unasked or local or bool(getattr(text, "alibi", False))


def _described(thing: object) -> str:
    """Return what something is that is no model, and what to pass instead."""
    kind = type(thing).__name__
    inner = [name for name in ("target", "model") if isinstance(getattr(thing, name, None), nn.Module)]
    if thing is None:
        return "None was given; polydraft.load and polydraft.load_pair return models."
    if isinstance(thing, str | PathLike):
        return f"a name was given, {str(thing)!r}; load it first: polydraft.load({str(thing)!r}).target."
    if isinstance(thing, PreTrainedTokenizerBase):
        return f"a tokenizer was given ({kind}); pass the model, and the token ids that the tokenizer makes."
    if inner == ["target"]:
        return f"a {kind} was given; pass its target as the model, and drafter=pair.draft."
    if inner:
        return f"a {kind} was given; pass the model that it holds, its attribute `{inner[0]}`."
    return f"what was given is {shown(thing)}; polydraft.load and polydraft.load_pair return models."
