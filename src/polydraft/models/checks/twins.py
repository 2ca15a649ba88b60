"""A copy of a model on which settings may be changed for a trial, while others use the model."""

import copy
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

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
