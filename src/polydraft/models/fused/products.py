"""Functions of rows that take the place of a model's norms and linear layers: joined, packed, no module around them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from polydraft.errors import UnsupportedModel
from polydraft.models.anatomy import PackedLinear, can_pack, packed_product
from polydraft.models.fused.few_bits import FewBits

Product = Callable[[Float[Tensor, "... i"]], Float[Tensor, "... o"]]
LINEAR = (nn.Linear, PackedLinear, Conv1D)
EPSILONS = ("variance_epsilon", "eps", "epsilon")
ROUNDING = {torch.float32: 1e-4}
"""How far two ways to compute a norm may be from each other, relative to the largest entry; other types round more."""
COARSE = 0.02


def joined(layers: Sequence[Any], order: Int[Tensor, " o"] | None = None, *, copied: bool = True) -> Product:
    """Return the product with the weights of one linear layer, or with those of several of the same input at once.

    Args:
        layers: linear layers; their outputs stand beside each other.
        order: which output comes where; None leaves them as they are.
        copied: whether weights may be copied, joined and packed; else each layer's own are multiplied by.

    Raises:
        UnsupportedModel: one is no plain linear layer.
    """
    strange = next((one for one in layers if type(one) not in LINEAR and not _is_linear(one)), None)
    few = all(isinstance(one, FewBits) for one in layers)
    if strange is not None and not few:
        raise UnsupportedModel(f"{type(strange).__name__} is no plain linear layer")
    if not copied or (few and len({type(one) for one in layers}) > 1):
        return _apart(layers, order)
    bias = _bias_of(layers)
    bias = bias if order is None or bias is None else bias[order]
    if few:
        return layers[0].joined(layers, order, bias)
    weights = [_rows_of(one) for one in layers]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    weight = weight if order is None else weight[order]
    if can_pack(weight):
        return packed_product(weight.contiguous(), bias)
    return partial(functional.linear, weight=weight, bias=bias)


def _apart(layers: Sequence[Any], order: Int[Tensor, " o"] | None) -> Product:
    """Return the products with several layers' own matrices, beside each other."""
    few = [isinstance(one, FewBits) for one in layers]
    own = [
        one if short else partial(functional.linear, weight=_rows_of(one), bias=one.bias)
        for one, short in zip(layers, few, strict=True)
    ]
    if len(own) == 1 and order is None:
        return own[0]

    def product(rows: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
        made = torch.cat([one(rows) for one in own], -1)
        return made if order is None else made[..., order]

    return product


def norm_of(norm: nn.Module) -> Product:
    """Return the function of a norm: by the root mean square, also with gains that are told from one, or by the mean.

    Which of them it is tells a trial on a few rows, so that no list of classes is needed. In double precision, which
    texts are compared in, it is the module itself, since many norms round to single precision on their way.

    Raises:
        UnsupportedModel: it is none of them.
    """
    weight, eps = getattr(norm, "weight", None), next((vars(norm)[one] for one in EPSILONS if one in vars(norm)), None)
    if type(weight) is not nn.Parameter or weight.dim() != 1 or not isinstance(eps, float):
        raise UnsupportedModel(f"the norm {type(norm).__name__} is not known")
    if weight.dtype == torch.float64:
        return norm
    gains, bias, size = weight.detach(), getattr(norm, "bias", None), (len(weight),)
    shift = None if bias is None else bias.detach()
    shared = {"normalized_shape": size, "eps": eps}
    ways: list[Product] = (
        []
        if bias is not None
        else [
            partial(functional.rms_norm, weight=gains, **shared),
            partial(_from_one, gains=1 + gains.float(), size=size, eps=eps),
        ]
    )
    ways.append(partial(functional.layer_norm, weight=gains, bias=shift, **shared))
    found = next((way for way in ways if _agree(norm, way, gains)), None)
    if found is None:
        raise UnsupportedModel(f"the norm {type(norm).__name__} is not known")
    return found


def _from_one(rows: Float[Tensor, "... d"], gains: Float[Tensor, " d"], size: tuple[int], eps: float) -> Tensor:
    """Norm rows in the precision of gains that are more precise than they are."""
    return functional.rms_norm(rows.to(gains.dtype), size, gains, eps).to(rows.dtype)


def _is_linear(layer: nn.Module) -> bool:
    """Tell whether a layer of a class of its own computes what `nn.Linear` does."""
    if not isinstance(layer, nn.Linear) or type(layer.weight) is not nn.Parameter:
        return False
    return _agree(layer, partial(functional.linear, weight=layer.weight, bias=layer.bias), layer.weight[0])


@torch.no_grad()
def _agree(layer: nn.Module, way: Product, like: Float[Tensor, " i"]) -> bool:
    """Tell whether a layer computes on a few rows what another way does."""
    rows = torch.linspace(-2.0, 3.0, 3 * len(like), dtype=torch.float64).sin().view(3, -1).to(like)
    theirs = layer(rows)
    return bool((way(rows) - theirs).abs().max() <= ROUNDING.get(like.dtype, COARSE) * theirs.abs().max())


def _rows_of(layer: Any) -> Float[Tensor, "o i"]:
    weight: Tensor = layer.weight.detach()
    return weight.T if isinstance(layer, Conv1D) else weight


def _bias_of(layers: Sequence[Any]) -> Float[Tensor, " o"] | None:
    """Return the biases of layers beside each other, zeros for those without one; None if none has any."""
    like = next((one.bias.detach() for one in layers if one.bias is not None), None)
    if like is None:
        return None
    return torch.cat([like.new_zeros(len(_rows_of(one))) if one.bias is None else one.bias.detach() for one in layers])
