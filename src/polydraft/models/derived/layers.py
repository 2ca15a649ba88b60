"""A model without some of its layers."""

from collections.abc import Collection

from torch import nn
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models.derived.copying import sharing_copy

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
