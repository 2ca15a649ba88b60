"""Whether a model still computes what it did: its weights, and all else that its passes depend on."""

from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from transformers import PreTrainedConfig

WATCHING = "polydraft_watches"
"""The mark of our own hooks, which only note what passes through."""
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
OWN_HOOKS = frozenset(("_forward_hooks", "_forward_pre_hooks"))
PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))
ELSEWHERE = frozenset(
    """
    _parameters _buffers _modules training generation_config warnings_issued prepare_inputs_for_generation
    _non_persistent_buffers_set _is_full_backward_hook _backward_hooks _backward_pre_hooks
    _forward_hooks_with_kwargs _forward_hooks_always_called _forward_pre_hooks_with_kwargs
    _state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks _load_state_dict_post_hooks
    """.split()
)
"""Fields of modules that say nothing of what passes compute, or that are looked at in another way."""
SAMPLE = 128
"""About so many entries of a weight are looked at."""
MIXING = 0x1E3779B97F4A7C15
NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def function_of(model: nn.Module) -> tuple[object, object]:
    """Return what changes when a model becomes another function: its weights, or what its passes do with them."""
    return weights_of(model), anatomy_of(model)


def weights_of(model: nn.Module) -> tuple[object, int]:
    """Return what changes when a model's weights or buffers are changed or moved.

    Their places in memory, their versions, and a mark of their bits: a change by way of `weight.data` leaves place and
    version alone, so that a sample of entries is looked at.
    """
    tensors = [*model.parameters(), *model.buffers()]
    return tuple(map(_place, tensors)), _mark(tensors)


def weight_of(weight: Tensor) -> tuple[object, int]:
    """Return what changes when one weight does, as `weights_of` does for all."""
    return _place(weight), _mark([weight])


def anatomy_of(model: nn.Module) -> tuple[object, ...]:
    """Return what changes when passes do something else with the same weights.

    That is the modules and their classes, forward hooks, flags and other fields of modules, forwards that were put in
    the place of the class's, and the configuration.
    """
    found: list[object] = [tuple(getattr(everywhere, name, ())) for name in GLOBAL_HOOKS]
    configs: dict[int, PreTrainedConfig] = {}
    for part in model.modules():
        found += (id(part), type(part), type(part).forward)
        for name, value in vars(part).items():
            if name in ELSEWHERE or name.startswith("polydraft_"):
                continue
            kind = type(value)
            if kind in PLAIN:
                found.append((name, value))
            elif name in OWN_HOOKS:
                found += ((name, key) for key, hook in value.items() if not _watches(hook))
            elif isinstance(value, PreTrainedConfig):
                configs[id(value)] = value
            else:
                found.append((name, _told(value)))
    found += (_told(vars(one)) for one in configs.values())
    return tuple(found)


def chosen_precision(device: torch.device) -> torch.dtype | None:
    """Return the precision that `torch.autocast` chooses for passes on a device; None where it does not."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _watches(hook: object) -> bool:
    return getattr(hook, WATCHING, False)


def _told(value: Any) -> object:
    """Return what can be compared of a field's value: what it holds if it is plain, else which object it is."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, dict):
        return tuple((str(name), _told(one)) for name, one in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_told, value))
    if isinstance(value, set | frozenset):
        return frozenset(map(_told, value))
    if isinstance(value, Tensor):
        return weight_of(value)
    if isinstance(value, PreTrainedConfig):
        return _told(vars(value))
    if isinstance(value, MethodType):
        return id(value.__self__), _told(value.__func__)
    try:
        return id(value), ref(value)  # a number alone may be that of a later object
    except TypeError:
        return id(value)


def _place(weight: Tensor) -> tuple[int, int]:
    try:
        return weight.data_ptr(), 0 if weight.is_inference() else weight._version
    except RuntimeError:  # weights in parts or of kinds of their own lie in no one place
        return id(weight), 0


def _mark(weights: list[Tensor]) -> int:
    """Return a number that follows from the bits of some entries; a device is waited for once or twice."""
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for weight in weights:
        found = _sample(weight)
        if found is not None:
            samples.setdefault((found.device, found.dtype), []).append(found)
    return sum(map(_hashed, samples.values()))


def _hashed(samples: list[Tensor]) -> int:
    bits = torch.cat(samples).long()
    places = torch.arange(1, len(bits) + 1, device=bits.device)
    return int(((bits ^ (bits >> 32)) * (places * MIXING)).sum())


def _sample(weight: Tensor) -> Tensor | None:
    """Return bits of some entries, as whole numbers; None of a weight that is not there or of a kind of its own."""
    size = weight.element_size()
    if weight.layout != torch.strided or weight.device.type == "meta" or size not in NUMBERS or not weight.numel():
        return None
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_contiguous():
        return None
    step = max(1, weight.numel() // SAMPLE) | 1
    return weight.detach().view(-1).view(NUMBERS[size])[::step]
