"""A copy of a model that shares its weights."""

import copy
from types import FunctionType
from typing import TypeVar

from torch import nn

from polydraft.errors import UnsupportedModel

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
