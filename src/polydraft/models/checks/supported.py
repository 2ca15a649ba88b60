"""What models say of themselves: what is around them, whether a token tree can be scored, and what else was passed."""

import inspect
import warnings
from os import PathLike
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicIndexedLayer, LinearAttentionCacheLayerMixin

from polydraft.errors import InvalidParameter, UnsupportedModel, shown
from polydraft.models.checks.layout import cache_name, device_of, empty_window
from polydraft.models.distributed.splitting import check_own_plan

COMPILED = "_orig_mod"
"""Where a module of torch.compile keeps what it was made of."""
SHARDING = "torch.distributed.fsdp"
BY_TASK = ("POLY", "XLORA")
"""Adapters of PEFT that a model works out, or is told, in each call anew."""
TUNED_FROM = "tuned_from"
"""Where a configuration names the model that this one was, before its weights were tuned."""


def unwrapped(model: object) -> object:
    """Return the model inside of what was put around it, which computes the same; else what was given.

    Adapters of PEFT live in the layers of the model inside.

    Raises:
        UnsupportedModel: what is around the model changes what it computes, or holds its weights back.
        InvalidParameter: the wrapper has a `generation_config` of its own, which the model inside would not follow.
    """
    inner = _inside(model) if isinstance(model, nn.Module) else None
    while inner is not None:
        _check_settings(model, inner)
        model, inner = inner, _inside(inner)
    return model


def check_alike(model: nn.Module) -> None:
    """Check that PEFT does not choose an adapter for each row now, as within its `generate(adapter_names=[...])`.

    Raises:
        InvalidParameter: it does.
    """
    hooks = (hook for part in model.modules() if part._forward_pre_hooks for hook in part._forward_pre_hooks.values())
    if any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks):
        raise InvalidParameter(
            "adapter_names gives each row an adapter of its own, but all rows are of one model here; choose adapters "
            "by set_adapter and make a call for each choice."
        )


def held_by(model: nn.Module) -> tuple[str, PreTrainedModel] | None:
    """Return by which attribute a module that is no model of Hugging Face's holds one, and that one; None for none."""
    parts = () if isinstance(model, PreTrainedModel) else model.named_children()
    return next(((name, one) for name, one in parts if isinstance(one, PreTrainedModel)), None)


def _inside(model: nn.Module) -> nn.Module | None:
    """Return what a wrapper is around; None of anything else."""
    kind = type(model)
    held = {name: part for name, part in model.named_modules(remove_duplicate=False) if name and "." not in name}
    if any(base.__module__.startswith(SHARDING) for base in kind.__mro__) and "module" in held:
        raise UnsupportedModel(
            f"{kind.__name__} keeps its weights in pieces; within {kind.__name__}.summon_full_params(model) pass what "
            "it holds, model.module."
        )
    if isinstance(model, DataParallel | DistributedDataParallel):
        return model.module
    if COMPILED in held:
        return held[COMPILED]
    if callable(getattr(kind, "get_base_model", None)):
        _check_adapters(model)
        return model.get_base_model()  # pyright: ignore[reportCallIssue]
    if kind.__module__.startswith("peft.") and not isinstance(model, PreTrainedModel):
        _check_adapters(model)
        return next((held[name] for name in ("base_model", "model") if name in held), None)
    return None


def _check_adapters(model: Any) -> None:
    """Check that PEFT's adapters are all in the layers of the model inside."""
    name, known = type(model).__name__, getattr(model, "peft_config", None)
    for config in known.values() if isinstance(known, dict) else ():
        kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
        if getattr(config, "is_prompt_learning", False) or kind in BY_TASK:
            raise UnsupportedModel(
                f"{name} has an adapter of type {kind}, which is not in the layers alone; call its own generate, or "
                "delete_adapter and take one such as LoRA."
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedModel(
                f"{name} has an activated LoRA (alora_invocation_tokens), which begins in the midst of a text; call "
                "its own generate, or take a plain LoRA."
            )


def _check_settings(wrapper: Any, inner: Any) -> None:
    own, theirs = vars(wrapper).get("generation_config"), getattr(inner, "generation_config", None)
    if own is not None and own is not theirs and own != theirs:
        name = type(wrapper).__name__
        raise InvalidParameter(
            f"This {name} has a generation_config of its own, which the {type(inner).__name__} inside does not follow; "
            "pass generation_config=model.generation_config, and leave it out of the wrapper or set it on both."
        )


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
    if getattr(pretrained.config, "distributed_config", None) is not None:
        check_own_plan(pretrained, type(pretrained).__name__)
    check_alike(pretrained)
    return pretrained


def _check_bare(model: nn.Module) -> None:
    """Check that a model is not a wrapper of an unknown kind, which hands its arguments on."""
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


def remembers(config: Any) -> bool:
    """Tell whether a model has layers with a state of constant size, as Hugging Face's cache for it says."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


def chooses(config: Any) -> bool:
    """Tell whether a model has layers that choose what they attend to, as Hugging Face's cache for it says."""
    return any(isinstance(layer, DynamicIndexedLayer) for layer in DynamicCache(config=config).layers)


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


def say_if_tuned(model: PreTrainedModel, name: str) -> None:
    """Warn that a model is another one than that whose weights were tuned to make it, if its configuration says so."""
    first = getattr(model.config, TUNED_FROM, None)
    if first:
        warnings.warn(
            f"{name!r} is another model than {str(first)!r}, whose weights were tuned; texts have its law.",
            stacklevel=3,
        )


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
