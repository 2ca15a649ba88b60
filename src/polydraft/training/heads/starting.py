"""Begin a head's training with the weights of another head, such as a published one."""

from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor, nn

from polydraft.drafters import Drafter, load_head, owned_networks
from polydraft.drafters.heads.block_head import BlockHead
from polydraft.drafters.heads.ends import HeadEnds
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel, Layer
from polydraft.models.anatomy import check_layer
from polydraft.training.heads.new_heads import NewHead
from polydraft.training.heads.targets import TargetEnds


def load_start(folder: Path, target: HuggingFaceModel) -> Drafter:
    """Load the head whose weights a new one begins with.

    Raises:
        CheckpointError: it is missing or damaged, or no head.
    """
    return load_head(str(folder), target.layers)


def tokens_of(drafter: Drafter) -> Int[Tensor, " v"] | None:
    """Return the tokens that a head drafts, rising; None for all of its target's."""
    found = (getattr(network, "tokens", None) for network in owned_networks(drafter))
    return next((one for one in found if one is not None), None)


def read_by(drafter: Drafter, target: HuggingFaceModel) -> tuple[Layer, ...]:
    """Return which of the target's hidden states a head reads, joined in this order.

    Raises:
        InvalidParameter: the target has no such layer.
    """
    for layer in drafter.needs.layers:
        check_layer(layer, target.layers)
    return drafter.needs.layers


def begin_with(head: NewHead, start: Drafter, folder: Path, ends: TargetEnds) -> None:
    """Give a new head the weights of another, in place.

    Copies of its target's tables, which folders of some families hold, need no place in the new one, which shares them.
    A block head takes the layers of one with another path term or confidence head: what it has not keeps its new
    weights.

    Raises:
        InvalidParameter: it is of another kind, or has other sizes, or what it reads or draws is scaled.
    """
    new, old = ([*owned_networks(one)] for one in (head.drafter, start))
    if len(new) != len(old) or head.drafter.name != start.name:
        raise InvalidParameter(f"--start {folder} is a {start.name}, and the new head is a {head.drafter.name}.")
    for network, given in zip(new, old, strict=True):
        weights, own = given.state_dict(), network.state_dict()
        for name, table in (("embed_tokens.weight", ends.embedding), ("lm_head.weight", ends.rows)):
            if name not in own and _is_copy(weights.get(name), table):
                del weights[name]
        _check_scales(given, folder)
        anew = _anew(network, given)
        weights = {name: value for name, value in weights.items() if not name.startswith(anew)}
        weights |= {name: value for name, value in own.items() if name.startswith(anew)}
        _check_shapes(own, weights, folder)
        network.load_state_dict(weights)


def _anew(network: nn.Module, given: nn.Module) -> tuple[str, ...]:
    """Return how the names begin of those parts of a network that do not begin with the given one's."""
    if not isinstance(network, BlockHead) or not isinstance(given, BlockHead):
        return ()
    if type(network.path) is not type(given.path):
        return ("path.", "confidence.", "mask_embed")
    wide = [None if one.confidence is None else one.confidence.in_features for one in (network, given)]
    return ("confidence.",) if wide[0] != wide[1] else ()


def _check_scales(given: nn.Module, folder: Path) -> None:
    """Raise `InvalidParameter` for factors at a head's ends, which no loss here knows."""
    if isinstance(given, HeadEnds) and (given.scale, given.multiplier, given.softcap) != (1, 1, None):
        raise InvalidParameter(
            f"--start {folder} scales its embeddings or caps its logits, which heads that are trained here do not."
        )


def _is_copy(weight: Tensor | None, table: Tensor) -> bool:
    """Tell whether a head's table is its target's, as far as bfloat16 says."""
    if weight is None or weight.shape != table.shape:
        return False
    return torch.allclose(weight.to(table), table, rtol=1e-2, atol=1e-6)


def _check_shapes(own: Mapping[str, Tensor], given: Mapping[str, Tensor], folder: Path) -> None:
    wanted, found = ({name: tuple(value.shape) for name, value in one.items()} for one in (own, given))
    other = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if other:
        has, needs = (_told(shapes.get(other[0])) for shapes in (found, wanted))
        raise InvalidParameter(
            f"--start {folder} has {other[0]} of the shape {has}, and the new head {needs}; "
            "take its kind, layers and drafts."
        )


def _told(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else " x ".join(map(str, shape)) or "one number"
