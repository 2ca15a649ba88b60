"""A model's layers: what comes out of some of them, and the model cut before or behind one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models.language_model import Layer
from polydraft.models.weights import WATCHING

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
    of another thread over the same model meets these hooks too, and is not noted.

    Raises:
        InvalidParameter: the model has no such layer.
        UnsupportedModel: the model's layers are not in one list, or its head has no input.
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
        found.update({layer: _first(output)})

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


def _first(output: Any) -> Float[Tensor, "b n d"]:
    return output if isinstance(output, Tensor) else output[0]
