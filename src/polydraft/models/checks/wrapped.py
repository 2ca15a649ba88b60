"""Models that others have put something around: adapters, compilers, data parallelism."""

from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel

COMPILED = "_orig_mod"
"""Where a module of torch.compile keeps what it was made of."""
SHARDING = "torch.distributed.fsdp"
BY_TASK = ("POLY", "XLORA")
"""Adapters of PEFT that a model works out, or is told, in each call anew."""


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
    """Check that PEFT's adapters are all in the layers of the model inside.

    Raises:
        UnsupportedModel: they are not.
    """
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
