"""A model cut in width: the heads and the channels of its gated layers that are the most active on a text are left.

How active a head or a channel is is the mean absolute value of what it gives to the layer's last matrix. Heads that
share keys stay or go together; where all of them share one, some of them go. The states between layers stay as wide as
they were, so that the ends, and the rows of what is left, are the model's own.

Source: Minitron (arXiv 2407.14679, section 2.2), who cut these states and the norms as well.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models.anatomy import layers_of

QUERIES, KEYS, MIXED = ("q_proj",), ("k_proj", "v_proj"), "o_proj"
GATED, INNER = ("gate_proj", "up_proj"), "down_proj"
HALF = 2
"""One in so many heads and inner channels is left, and of layers where these are cut too."""


@dataclass(frozen=True)
class Sizes:
    """A model's heads, how many of them have keys, channels of a head, and channels inside its gated layers."""

    heads: int
    groups: int
    channels: int
    inner: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Sizes":
        """Read them from a configuration.

        Raises:
            UnsupportedModel: the layers are not those of Llama's kind.
        """
        config: Any = model.config.get_text_config()
        try:
            layers = cast(Any, layers_of(model))
            for layer in layers:
                parts = (*(getattr(layer.self_attn, one) for one in (*QUERIES, *KEYS, MIXED)),)
                parts += (*(getattr(layer.mlp, one) for one in (*GATED, INNER)),)
                if not all(type(one) is nn.Linear for one in parts):
                    raise AttributeError
            channels = layers[0].self_attn.q_proj.out_features // config.num_attention_heads
            return cls(config.num_attention_heads, config.num_key_value_heads, channels, config.intermediate_size)
        except AttributeError as error:
            raise UnsupportedModel(
                f"{type(model).__name__} cannot be cut in width: its layers are not of Llama's kind; take another form."
            ) from error


def narrower(model: PreTrainedModel, texts: Int[Tensor, "b t"] | None) -> PreTrainedModel:
    """Return a copy in single precision with half of the heads and inner channels; no weight is shared.

    Args:
        model: the model.
        texts: by which they are chosen; None takes the first ones.

    Raises:
        InvalidParameter: it has one head or channel, so that none can go.
        UnsupportedModel: the layers are not those of Llama's kind.
    """
    sizes = Sizes.of(model)
    by_group = sizes.groups > 1
    groups = max(1, sizes.groups // HALF) if by_group else sizes.groups
    heads = groups * (sizes.heads // sizes.groups) if by_group else max(1, sizes.heads // HALF)
    inner = max(1, sizes.inner // HALF)
    if heads == sizes.heads or inner == sizes.inner:
        raise InvalidParameter(f"{type(model).__name__} has one head or channel a layer, so that none can be cut.")
    active = _activity(model, texts) if texts is not None else None
    config = copy.deepcopy(model.config)
    own: Any = config.get_text_config()
    own.num_attention_heads, own.num_key_value_heads, own.head_dim = heads, groups, sizes.channels
    own.intermediate_size = inner
    made = type(model)(config).float()
    weights = {name: value.detach().clone().float() for name, value in model.state_dict().items()}
    layers = layers_of(model)
    place = next(name for name, one in model.named_modules() if one is layers)
    for number in range(len(layers)):
        of_heads, of_inner = (None, None) if active is None else active[number]
        for name, kept in _cuts(sizes, heads, groups, inner, of_heads, of_inner):
            _cut(weights, f"{place}.{number}.{name}", kept, columns=name.endswith((MIXED, INNER)))
    made.load_state_dict(weights)
    return made.eval()


def _cuts(
    sizes: Sizes, heads: int, groups: int, inner: int, of_heads: Tensor | None, of_inner: Tensor | None
) -> Iterator[tuple[str, Int[Tensor, " k"]]]:
    """Return which rows, or columns of the last matrices, are left of each matrix of a layer."""
    each = sizes.heads // sizes.groups
    activity = torch.zeros(sizes.heads) if of_heads is None else of_heads
    if groups < sizes.groups:
        kept_groups = _most(activity.view(sizes.groups, each).sum(-1), groups)
        kept_heads = (kept_groups.unsqueeze(-1) * each + torch.arange(each)).flatten()
    else:
        kept_groups, kept_heads = torch.arange(groups), _most(activity, heads)
    queries, keys = (
        (one.unsqueeze(-1) * sizes.channels + torch.arange(sizes.channels)).flatten()
        for one in (kept_heads, kept_groups)
    )
    channels = _most(torch.zeros(sizes.inner) if of_inner is None else of_inner, inner)
    yield from ((f"self_attn.{name}", queries) for name in (*QUERIES, MIXED))
    yield from ((f"self_attn.{name}", keys) for name in KEYS)
    yield from ((f"mlp.{name}", channels) for name in (*GATED, INNER))


def _most(values: Float[Tensor, " n"], count: int) -> Int[Tensor, " k"]:
    """Return the places of the largest values, rising; of equal ones the first."""
    return values.argsort(descending=True, stable=True)[:count].sort().values


def _cut(weights: dict[str, Tensor], name: str, kept: Int[Tensor, " k"], *, columns: bool) -> None:
    matrix, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    at = kept.to(matrix.device)
    weights[f"{name}.weight"] = matrix[:, at] if columns else matrix[at]
    if bias is not None and not columns:
        weights[f"{name}.bias"] = bias[at]


@torch.no_grad()
def _activity(model: PreTrainedModel, texts: Int[Tensor, "b t"]) -> list[tuple[Tensor, Tensor]]:
    """Return, of every layer, the mean absolute value of what its heads and its gated channels give."""
    sizes, found, layers = Sizes.of(model), dict[tuple[int, str], Tensor](), cast(Any, layers_of(model))

    def watching(key: tuple[int, str]) -> Any:
        def watch(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            found[key] = given[0].float().abs().flatten(0, -2).mean(0).cpu()

        return watch

    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            for name, part in ((MIXED, layer.self_attn.o_proj), (INNER, layer.mlp.down_proj)):
                hooks.callback(part.register_forward_pre_hook(watching((number, name))).remove)
        model(input_ids=texts, use_cache=False)
    return [
        (found[number, MIXED].view(sizes.heads, sizes.channels).sum(-1), found[number, INNER])
        for number in range(len(layers))
    ]
