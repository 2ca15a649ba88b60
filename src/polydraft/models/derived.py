"""Draft models made of the target itself: with weights of eight bits, or without some of its layers."""

import copy
import re
from collections.abc import Callable, Collection, Hashable
from types import FunctionType
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.fetched import DERIVED
from polydraft.models.anatomy import function_of
from polydraft.models.checks.layout import is_offloaded

NUMBER = "layer_idx"


def without_layers(model: PreTrainedModel, skipped: Collection[int]) -> PreTrainedModel:
    """Return a copy without these layers, counted from 0; all weights are shared.

    Source: Zhang et al., "Draft & Verify", arXiv 2309.08168, who skip sublayers; here whole layers, in a model of its
    own with keys of its own.

    Raises:
        InvalidParameter: the model has no such layer, or none would be left.
        UnsupportedModel: its layers are not in one list.
    """
    count = model.config.get_text_config().num_hidden_layers
    wrong = [number for number in skipped if not 0 <= number < count]
    if wrong or len({*skipped}) >= count:
        raise InvalidParameter(
            f"Layers to skip lie between 0 and {count - 1}, and one must be left: {sorted(skipped)}."
        )
    made = sharing_copy(model)
    lists = [name for name, one in made.named_modules() if isinstance(one, nn.ModuleList) and len(one) == count]
    if len(lists) != 1:
        raise UnsupportedModel(f"{type(model).__name__} does not keep its layers in one list, so none can be skipped.")
    layers = [layer for number, layer in enumerate(made.get_submodule(lists[0]).children()) if number not in skipped]
    made.set_submodule(lists[0], nn.ModuleList(layers))
    for number, layer in enumerate(layers):
        for part in layer.modules():
            if NUMBER in vars(part):
                setattr(part, NUMBER, number)
    config = made.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = len(layers)
    if kinds:
        config.layer_types = [kind for number, kind in enumerate(kinds) if number not in skipped]
    return made


_MADE = WeakKeyDictionary[PreTrainedModel, dict[Hashable, tuple[object, PreTrainedModel]]]()


def kept(model: PreTrainedModel, name: Hashable, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return what is made of a model under a name; it is made once, and anew when the model has changed."""
    function, known = function_of(model), _MADE.setdefault(model, {})
    if name not in known or known[name][0] != function:
        known[name] = (function, make())
    return known[name][1]


Model = TypeVar("Model", bound=nn.Module)


def sharing_copy(model: Model) -> Model:
    """Return a copy whose modules without parts are the model's own; the modules that hold them are new.

    So layers may be left out of the copy, renumbered or replaced, and no memory is spent on weights. What polydraft has
    found out about the model stays with the model.

    Raises:
        UnsupportedModel: something on the model cannot be copied, or its passes do not run its own modules.
    """
    parts = [one for one in model.modules() if not any(True for _ in one.children())]
    leaves = {*map(id, parts)}
    if any(isinstance(vars(one).get("forward"), FunctionType) for one in model.modules() if id(one) not in leaves):
        raise UnsupportedModel(
            f"No draft can be made of this {type(model).__name__}, since the forward of a part was replaced by a "
            "function that runs the original, as torch.compile(model.forward) does; take another drafter."
        )
    shared = {id(one): one for one in [*parts, *model.parameters(), *model.buffers()]}
    try:
        made = copy.deepcopy(model, memo=shared)
    except Exception as error:  # what users hang onto a model may refuse to be copied in any way
        raise UnsupportedModel(
            f"No draft can be made of this {type(model).__name__}, since something that hangs on it, such as a hook, "
            f"cannot be copied: {type(error).__name__}: {error}."
        ) from error
    for name in [name for name in vars(made) if name.startswith("polydraft_")]:
        delattr(made, name)
    return made


STEPS = 127
MOST_ROWS = 64
"""Of more rows than this the kernel is slower than a product with unpacked weights."""
BLOCK = 16
"""The kernel reads so many columns at a time, beyond the end of a row if it must."""


class Int8Linear(nn.Linear):
    """A linear layer with weights of eight bits, a scale for each row of them.

    Layers around it, such as adapters, may look at its `weight`: that is the matrix that the eight bits stand for.
    """

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.training = plain.training
        self.in_features, self.out_features = plain.in_features, plain.out_features
        steps, scales = rounded(plain.weight.detach())
        self.precision = plain.weight.dtype
        self.steps = nn.Parameter(steps, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = plain.bias

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  there is no such parameter
        """The matrix, in the precision that it had."""
        return (self.steps * self.scales.unsqueeze(1)).to(self.precision)

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ (scales * steps).T + bias."""
        rows = input.reshape(-1, self.in_features)
        return int8_product(self.steps, self.scales, self.bias)(rows).view(*input.shape[:-1], self.out_features)


def rounded(weight: Float[Tensor, "o i"]) -> tuple[Int[Tensor, "o i"], Float[Tensor, " o"]]:
    """Return the nearest multiples of each row's step, and the steps in single precision, which no step falls below."""
    whole = weight.float()
    scales = (whole.abs().amax(dim=1) / STEPS).clamp_min(torch.finfo(torch.float32).tiny)
    return (whole / scales.unsqueeze(1)).round().clamp(-STEPS, STEPS).to(torch.int8), scales


def int8_product(
    weight: Int[Tensor, "o i"], scales: Float[Tensor, " o"], bias: Float[Tensor, " o"] | None
) -> Callable[[Float[Tensor, "r i"]], Float[Tensor, "r o"]]:
    """Return rows -> rows @ (scales * weight).T + bias; a few rows are multiplied in bfloat16."""
    short, whole = scales.to(torch.bfloat16), weight.shape[1] % BLOCK == 0

    def product(rows: Float[Tensor, "r i"]) -> Float[Tensor, "r o"]:
        if len(rows) > MOST_ROWS or not whole:
            return functional.linear(rows, (weight * scales.unsqueeze(1)).to(rows.dtype), bias)
        out = torch.ops.aten._weight_int8pack_mm(rows.to(torch.bfloat16), weight, short).to(rows.dtype)
        return out if bias is None else out + bias

    return product


@torch.inference_mode(False)
@torch.no_grad()
def in_int8(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with weights of eight bits in all linear layers, the head included; the rest is shared.

    Raises:
        UnsupportedModel: the model is not on a CPU, for which the kernel is made, or its weights are elsewhere between
            passes, or its layers are of other kinds.
    """
    head = model.get_output_embeddings()
    if not any(isinstance(one, nn.Linear) and one is not head for one in model.modules()):
        raise UnsupportedModel(f"{type(model).__name__} has no linear layers of torch's that could have eight bits.")
    if is_offloaded(model):
        raise UnsupportedModel(
            f"Weights of this {type(model).__name__} are offloaded, so none of eight bits can be made; take another "
            "drafter, or load the model on one device."
        )
    if model.device.type != "cpu":
        raise UnsupportedModel(f"A draft of eight bits is made for CPUs, but the model is on {model.device}.")
    made = sharing_copy(model)
    for name, module in list(made.named_modules()):
        if isinstance(module, nn.Linear) and not isinstance(module, Int8Linear):
            made.set_submodule(name, Int8Linear(module))
    return made


INT8 = "int8"
SKIP = re.compile(r"skip=(\d{1,4})(?:-(\d{1,4}))?")


def check_word(name: str) -> tuple[bool, frozenset[int]]:
    """Return whether the weights have eight bits, and which layers are skipped.

    Raises:
        InvalidParameter: the name says something else.
    """
    parts, layers = name.removeprefix(DERIVED).split(","), set[int]()
    for part in parts:
        found = SKIP.fullmatch(part)
        named = range(int(found[1]), int(found[2] or found[1]) + 1) if found else ()
        layers |= {*named}
        if not named and part != INT8:
            raise InvalidParameter(
                f"The draft model {name!r} is not known: one made of the target is self:int8, self:skip=12-19 (layers, "
                "counted from 0), or self:int8,skip=12-19."
            )
    return INT8 in parts, frozenset(layers)


def derived(target: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return the draft model that a name means, made of the target; the same one as long as its weights are.

    Raises:
        InvalidParameter: the name says something else, or skips layers that are not there.
        UnsupportedModel: it cannot be made of this target.
    """
    short, skipped = check_word(name)

    def make() -> PreTrainedModel:
        made = without_layers(target, skipped) if skipped else target
        return in_int8(made) if short else made

    return kept(target, name, make)
