"""What a model is made of: whether its weights and parts are those that they were, its layers, its packed products."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from types import MethodType
from typing import Any
from weakref import ref

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as everywhere
from transformers import PreTrainedConfig

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models.language_model import Layer

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
PROCESSOR = Path("/proc/cpuinfo")
SHORT_PRODUCTS = ("avx512_bf16", "amx_bf16", "bf16")
"""What the system calls a processor's products of numbers in bfloat16; the last one on ARM."""
NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def function_of(model: nn.Module) -> tuple[object, object]:
    """Return what changes when a model becomes another function: its weights, or what its passes do with them."""
    return weights_of(model), anatomy_of(model)


def weights_of(model: nn.Module) -> tuple[object, int]:
    """Return what changes when a model's weights or buffers are changed or moved.

    Their places in memory, their versions, and a mark of their bits: a change by way of `weight.data` leaves place and
    version alone, so that a sample of entries is looked at.
    """
    return places_of(model), _mark([*model.parameters(), *model.buffers()])


def places_of(model: nn.Module) -> tuple[object, ...]:
    """Return where a model's weights and buffers are, and their versions: what can be asked before every text."""
    return tuple(map(_place, (*model.parameters(), *model.buffers())))


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
                found += ((name, key) for key, hook in value.items() if not getattr(hook, WATCHING, False))
            elif isinstance(value, PreTrainedConfig):
                configs[id(value)] = value
            else:
                found.append((name, _told(value)))
    found += (_told(vars(one)) for one in configs.values())
    return tuple(found)


def chosen_precision(device: torch.device) -> torch.dtype | None:
    """Return the precision that `torch.autocast` chooses for passes on a device; None where it does not."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


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
    total = 0
    for each in samples.values():
        bits = torch.cat(each).long()
        places = torch.arange(1, len(bits) + 1, device=bits.device)
        total += int(((bits ^ (bits >> 32)) * (places * MIXING)).sum())
    return total


def _sample(weight: Tensor) -> Tensor | None:
    """Return bits of some entries, as whole numbers; None of a weight that is not there or of a kind of its own."""
    size = weight.element_size()
    if weight.layout != torch.strided or weight.device.type == "meta" or size not in NUMBERS or not weight.numel():
        return None
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_contiguous():
        return None
    step = max(1, weight.numel() // SAMPLE) | 1
    return weight.detach().view(-1).view(NUMBERS[size])[::step]


HEAD = "final"


class _OfOneThread(dict[Layer, Tensor]):
    """Hidden states that the thread that made this has noted; what another one notes is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = get_ident()

    def update(self, *given: Any, **named: Any) -> None:
        if get_ident() == self.thread:
            super().update(*given, **named)


@contextmanager
def observed_layers(
    model: Any, layers: Sequence[Layer], modules: Sequence[nn.Module]
) -> Iterator[dict[Layer, Float[Tensor, "b n d"]]]:
    """Note the hidden states of some layers during a pass; `modules` are all parts of the model.

    Hugging Face's own list of hidden states has the last layer's behind the norm only, so that hooks are used. A pass
    of another thread over the same model meets these hooks too, and is not noted. Errors are those of `watch_layers`.
    """
    found = _OfOneThread()
    hooks = watch_layers(model, layers, found, modules)
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def watch_layers(
    model: Any,
    layers: Sequence[Layer],
    found: dict[Layer, Float[Tensor, "b n d"]],
    modules: Sequence[nn.Module] | None = None,
) -> list[Any]:
    """Note the hidden states of some layers in `found` from now on; return the hooks.

    Raises:
        InvalidParameter: the model has no such layer.
        UnsupportedModel: the model's layers are not in one list, or its head has no input.
    """
    listed = layers_of(model, modules) if any(layer != HEAD for layer in layers) else nn.ModuleList()
    return [_hook(model, layer, listed, found) for layer in layers]


def check_layer(layer: Layer, count: int) -> None:
    """Raise `InvalidParameter` unless a model of so many layers has hidden states of that name."""
    if layer != HEAD and not (isinstance(layer, int) and 0 <= layer <= count):
        raise InvalidParameter(f"Hidden states are those of 0 to {count} layers or {HEAD!r}, not {layer!r}.")


def layers_of(model: Any, modules: Sequence[nn.Module] | None = None) -> nn.ModuleList:
    """Return a model's layers; who knows all parts of the model gives them, which spares the search for them.

    Raises:
        UnsupportedModel: they are not in one list.
    """
    count = model.config.get_text_config().num_hidden_layers
    parts = model.modules() if modules is None else modules
    lists = [one for one in parts if isinstance(one, nn.ModuleList) and len(one) == count]
    if len(lists) != 1:
        raise UnsupportedModel(f"{type(model).__name__} does not keep its layers in one list, so none can be read.")
    return lists[0]


def _hook(model: Any, layer: Layer, listed: nn.ModuleList, found: dict[Layer, Float[Tensor, "b n d"]]) -> Any:
    def behind(_module: nn.Module, _inputs: Any, output: Any) -> None:
        found.update({layer: output if isinstance(output, Tensor) else output[0]})

    def before(_module: nn.Module, inputs: tuple[Any, ...], *named: dict[str, Any]) -> None:
        # torch leaves the named ones out of another thread's pass while the thread that made this hook removes it
        states: Tensor | None = inputs[0] if inputs else (named[0] if named else {}).get("hidden_states")
        if states is not None:
            found.update({layer: states})

    for one in (behind, before):
        setattr(one, WATCHING, True)
    if layer == HEAD:
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Module):
            raise UnsupportedModel(f"{type(model).__name__} has no output head whose input could be read.")
        return model.base_model.register_forward_hook(behind)
    check_layer(layer, len(listed))
    if layer == len(listed):
        return listed[-1].register_forward_hook(behind)
    return listed[layer].register_forward_pre_hook(before, with_kwargs=True)


MOST_BYTES = 1 << 30
"""Models with larger weights are left alone; their passes are bound by memory and would gain little."""
SMALL, LARGE = 1 << 16, 1 << 19
"""A matrix of fewer entries is not worth packing; from the second number on even a single row is faster packed."""


class PackedLinear(nn.Linear):
    """A linear layer that shares the parameters of another and also keeps them packed.

    The packed copy is used for inference on a CPU, without autocast, as long as the weights are those that were packed;
    training them, moving them or changing their precision falls back to the plain layer.
    """

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.training = plain.training
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.packed = _packed(plain.weight)
        self.origin: tuple[int, int] | None = (plain.weight.data_ptr(), plain.weight._version)
        self.mark = weight_of(plain.weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight.T + bias."""
        if torch.compiler.is_compiling():
            return functional.linear(input, self.weight, self.bias)  # the compiler packs weights itself
        rows = input.numel() // self.in_features
        short = self.weight.dtype == torch.bfloat16
        worth_it = rows > 1 or short or self.weight.numel() >= LARGE
        usable = input.dtype == self.weight.dtype and not torch.is_autocast_enabled("cpu")
        usable = usable and (self.weight.data_ptr(), self.weight._version) == self.origin
        if not worth_it or torch.is_grad_enabled() or not usable:
            return functional.linear(input, self.weight, self.bias)
        flat = input.reshape(rows, self.in_features)
        return _multiplied(flat, self.packed, self.bias).view(*input.shape[:-1], self.out_features)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "packed": None, "origin": None, "mark": None}  # packed, it cannot be copied or stored


def check_packed(model: nn.Module) -> None:
    """Let go of packed weights that were changed by way of `weight.data`, which leaves no trace, as PEFT merges do."""
    for one in model.modules():
        if isinstance(one, PackedLinear) and one.origin is not None and one.mark != weight_of(one.weight):
            one.origin = None


def pack_linear_layers(model: nn.Module) -> nn.Module:
    """Replace a model's linear layers by packed ones where that helps; parameters and state stay what they are.

    Does nothing for models over one GiB, off the CPU, in precisions that it does not multiply, or without oneDNN.
    """
    if fits_packed(model):
        for name, module in list(model.named_modules()):
            if not isinstance(module, nn.Linear) or module.weight.numel() <= SMALL:
                continue
            if type(module) is nn.Linear or (isinstance(module, PackedLinear) and module.origin is None):
                model.set_submodule(name, PackedLinear(module))
    return model


def fits_packed(model: nn.Module) -> bool:
    """Tell whether the model's linear layers can be packed, and twice the memory is affordable."""
    weights = [one.weight for one in model.modules() if isinstance(one, nn.Linear)]
    fits = sum(weight.numel() * weight.element_size() for weight in weights) <= MOST_BYTES
    counted = not any(weight.is_inference() for weight in weights)  # others keep no count of their changes
    return fits and counted and all(map(can_pack, weights))


def can_pack(weight: Tensor) -> bool:
    """Tell whether there are packed products with such a matrix: on a CPU that multiplies its numbers, with oneDNN."""
    known = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and multiplies_short())
    return weight.device.type == "cpu" and known and torch.backends.mkldnn.is_available()


@cache
def multiplies_short() -> bool:
    """Tell whether the processor multiplies numbers in bfloat16, and oneDNN may (ONEDNN_MAX_CPU_ISA forbids it).

    Where the system does not say, it does not.
    """
    try:
        flags = PROCESSOR.read_text()
    except OSError:
        return False
    return any(f" {one}" in flags for one in SHORT_PRODUCTS) and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def cheapest(dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """Return the precision in which drafts are cheapest where a target runs in another one: rounding costs no law."""
    single = dtype == torch.float32 and torch.device(device).type == "cpu"
    return torch.bfloat16 if single and multiplies_short() else dtype


def packed_product(
    weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None
) -> Callable[[Float[Tensor, "r i"]], Float[Tensor, "r o"]]:
    """Return rows -> rows @ weight.T + bias, over a packed copy of the matrix."""
    return partial(_POINTWISE, W=_packed(weight), B=bias, attr="none", scalars=[], algorithm="")


class _Forgotten(dict[str, Any]):
    """What stays behind when its owner is copied or stored: packed matrices can be neither."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _Forgotten, ()


def kept_product(holder: nn.Module, names: Sequence[str], rows: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
    """Return products with several layers of a module, beside each other; for inference by a packed copy that it keeps.

    Args:
        holder: the module.
        names: of its linear layers, or of parameters that are matrices.
        rows: what is multiplied.
    """
    layers = [getattr(holder, name) for name in names]
    pairs = [(one, None) if isinstance(one, Tensor) else (one.weight, one.bias) for one in layers]
    if torch.is_grad_enabled() or rows.dtype != pairs[0][0].dtype or not can_pack(pairs[0][0]):
        return torch.cat([functional.linear(rows, *pair) for pair in pairs], -1)
    kept, places = holder.__dict__.setdefault("polydraft_products", _Forgotten()), [_place(pair[0]) for pair in pairs]
    known = kept.get(names)
    if known is None or known[0] != places:
        biases = [weight.new_zeros(len(weight)) if bias is None else bias.detach() for weight, bias in pairs]
        bias = None if all(one is None for _, one in pairs) else torch.cat(biases)
        known = kept[names] = places, packed_product(torch.cat([weight.detach() for weight, _ in pairs]), bias)
    return known[1](rows.reshape(-1, rows.shape[-1])).view(*rows.shape[:-1], -1)


def linear_of(weight: Float[Tensor, "o i"]) -> nn.Linear:
    """Return a frozen linear layer without a bias over these rows, packed where that helps."""
    if weight.is_inference():  # a packed layer asks for its matrix's version, which only ordinary tensors have
        with torch.inference_mode(False):
            weight = weight.clone()
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    return PackedLinear(plain) if can_pack(weight) and weight.numel() > SMALL else plain


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)


_POINTWISE = torch.ops.mkldnn._linear_pointwise


def _multiplied(rows: Float[Tensor, "r i"], packed: Tensor, bias: Tensor | None) -> Float[Tensor, "r o"]:
    return _POINTWISE(rows, packed, bias, "none", [], "")
