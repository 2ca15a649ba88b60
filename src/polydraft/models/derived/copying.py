"""Copies of a model that share its weights, also without some layers, kept as long as these compute what they did."""

import copy
from collections.abc import Callable, Collection, Hashable
from types import FunctionType
from typing import TypeVar
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models.weights import function_of

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
