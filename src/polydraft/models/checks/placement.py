"""Where a model computes, also if accelerate keeps its weights elsewhere and brings them for each pass."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

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
