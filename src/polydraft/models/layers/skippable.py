"""Sub-layers of a model one by one, and the model without some of them, by its fused pass: nothing has to be made."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polydraft.errors import UnsupportedModel
from polydraft.models.anatomy import chosen_precision, layers_of
from polydraft.models.cache import TreeCache
from polydraft.models.checks.layout import evaluating
from polydraft.models.fused.blueprint import ATTENTIONS
from polydraft.models.fused.fused_pass import FusedPass
from polydraft.models.hugging_face import HuggingFaceModel
from polydraft.models.language_model import LanguageModel, LayerSet
from polydraft.models.layers.variants import INNERS


@dataclass(frozen=True)
class SubLayer:
    """What may be skipped of a model: an attention, an inner layer, or both where they stand side by side.

    Args:
        layer: its number.
        attention: whether it attends.
        mlp: whether it has an inner layer.
        weights: how many bytes of weights a pass reads for it.
        per_token: and how many bytes of keys and values for each token before.
    """

    layer: int
    attention: bool
    mlp: bool
    weights: int
    per_token: int

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{'attention' if not self.mlp else 'mlp' if not self.attention else 'layer'} {self.layer}"

    def work(self, known: int) -> int:
        """Return the bytes that a pass over one token reads for it, behind so many tokens.

        Short passes on a CPU are bound by memory, so that their time is about proportional to this number; and it is
        the same on every machine, which a time is not.
        """
        return self.weights + known * self.per_token


def sublayers(model: LanguageModel) -> tuple[SubLayer, ...]:
    """Return what may be skipped of a model, in the order in which it runs.

    Raises:
        UnsupportedModel: the model has no fused pass, by which sub-layers are run one by one.
    """
    own = _fused(model)[0]
    listed, found = layers_of(own.model, own.modules), list[SubLayer]()
    for number, plan in enumerate(_fused(model)[1].plan.layers):
        reads, size = plan.attention, own.model.dtype.itemsize
        per_token = 0 if reads is None else 2 * reads.keys * reads.width * size
        bytes_of = [_bytes(getattr(listed[number], name, None) for name in names) for names in (ATTENTIONS, INNERS)]
        if plan.parallel:
            found.append(SubLayer(number, True, True, sum(bytes_of), per_token))
        else:
            found.append(SubLayer(number, True, False, bytes_of[0], per_token))
            found.append(SubLayer(number, False, True, bytes_of[1], 0))
    return tuple(found)


def layer_set(skipped: Iterable[SubLayer], depth: int | None = None) -> LayerSet:
    """Return all sub-layers but some; `depth` is how many layers the model has, where the set is to be kept."""
    skipped = tuple(skipped)
    return LayerSet(
        frozenset(one.layer for one in skipped if one.attention),
        frozenset(one.layer for one in skipped if one.mlp),
        depth=depth,
    )


def head_bytes(model: LanguageModel) -> int:
    """Return how many bytes of weights the output head reads."""
    return _bytes([_fused(model)[0].model.get_output_embeddings()])


def without(model: LanguageModel, layers: LayerSet) -> HuggingFaceModel:
    """Return a model without some of its sub-layers for passes that come soon; nothing is copied, tried or kept.

    Unlike `LanguageModel.variant` it has the fused pass alone.

    Raises:
        InvalidParameter: the model has no such layers.
        UnsupportedModel: the model has no fused pass.
    """
    own, fused = _fused(model)
    layers.check(own.layers)
    made = copy.copy(own)
    made.fused = fused.without(layers)
    return made


def walk(
    model: LanguageModel, cache: TreeCache, token: int, known: int, width: int
) -> tuple[Float[Tensor, "c d"], Callable[[SubLayer, Float[Tensor, "c d"]], Float[Tensor, "c d"]]]:
    """Return several copies of what enters the first layer at a token, and a function that runs a sub-layer over them.

    The copies stand side by side behind the known tokens, at one position, and none sees another. So each may have gone
    through other sub-layers before, and one pass runs all. Keys and values of the copies come into free slots.

    Args:
        model: the model.
        cache: a row's keys and values of the known tokens.
        token: the token that follows.
        known: how many tokens are known.
        width: how many copies.
    """
    own, fused = _fused(model)
    device = own.device
    tokens = torch.full((1, width), token, device=device)
    places, starts = torch.full_like(tokens, known), torch.tensor([known])
    alone = torch.eye(width, dtype=torch.bool, device=device).unsqueeze(0)
    mask = nn.functional.pad(alone, (known, 0), value=True)
    cache.place(starts, width, mask.shape[-1], places)
    states = fused.entering(tokens, places, None)
    reading = fused.reading(cache.moved(places), own.kind_masks(mask, places, cache), cache, states.dtype)

    @torch.no_grad()
    def through(part: SubLayer, states: Float[Tensor, "c d"]) -> Float[Tensor, "c d"]:
        plan = fused.plan.layers[part.layer]
        plan = plan if part.mlp else replace(plan, inner=None)
        with evaluating(own.modules):
            return reading.through(plan if part.attention else replace(plan, attention=None), part.layer, states)

    return states, through


@torch.no_grad()
def logits_of(model: LanguageModel, states: Float[Tensor, "c d"]) -> Float[Tensor, "c V"]:
    """Return the logits of what comes out of the last layer."""
    fused = _fused(model)[1]
    return fused.logits(fused.normed(states))


def _fused(model: LanguageModel) -> tuple[HuggingFaceModel, FusedPass]:
    if not isinstance(model, HuggingFaceModel) or model.fused is None or chosen_precision(model.device):
        why = getattr(model, "why_not_fused", "") or f"{type(model).__name__} has no fused pass."
        raise UnsupportedModel(f"Sub-layers to skip are chosen by the fused pass, and there is none: {why}")
    return model, model.fused


def _bytes(parts: Iterable[nn.Module | None]) -> int:
    """Return the bytes of the weights of modules; those that are None have none."""
    found = [one for part in parts if part is not None for one in (*part.parameters(), *part.buffers())]
    return sum(one.numel() * one.element_size() for one in {id(one): one for one in found}.values())
