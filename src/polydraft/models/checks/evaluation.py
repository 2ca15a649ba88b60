"""Passes of a trial: in evaluation mode, where a model computes, and on a copy whose settings may be changed."""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from threading import Lock
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

HOOK = "_hf_hook"
"""Where accelerate notes on a module what it does before and after its pass."""


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device of a model's passes; "meta" for a model without weights.

    Weights that are offloaded are on the meta device between passes.
    """
    if model.device.type != "meta":
        return model.device
    devices = (getattr(hook, "execution_device", None) for hook in _hooks(model))
    return next((torch.device(one) for one in devices if one is not None), model.device)


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
    """Yield what hangs on a module, or on a container of it, and is not copied."""
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
            _let_go(held)


def _let_go(held: Sequence[nn.Module]) -> None:
    with _LOCK:
        for one in held:
            _HELD[id(one)] = _HELD.get(id(one), 1) - 1
            if not _HELD[id(one)]:
                del _HELD[id(one)]
                one.training = True
