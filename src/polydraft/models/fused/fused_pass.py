"""A model's pass in a few dozen operations a layer, where Hugging Face's own takes hundreds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models.anatomy import HEAD, function_of
from polydraft.models.cache import TreeCache
from polydraft.models.fused.blueprint import Attending, Blueprint, Inner, LayerPlan, blueprint_of
from polydraft.models.fused.few_bits import rounds_short
from polydraft.models.fused.folded import FOLDED
from polydraft.models.fused.graphs import Graphs, Masks
from polydraft.models.language_model import Forward, Layer, LayerSet, Queries
from polydraft.models.memory import affords_copies

PLACE = "polydraft_fused"
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
"""How far what a layer adds may be from what the model's own adds, relative to that, in the norm of rows."""
COARSE = 0.05
"""The same in other precisions, which round by a percent, and for weights of few bits, whose products do."""
ROUNDING = 8
"""In units of the precision: how far the sums may be from each other, where a layer adds little to much."""
STRANGE = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)
"""What modules of unknown kinds end in when they are looked at and called."""
TRIED = 4
Turn = tuple[Float[Tensor, "b n 1 r"], Float[Tensor, "b n 1 r"]]


class FusedPass:
    """A model's pass with joined weights and fused kernels.

    A small model's pass is mostly the cost of calling its modules and hundreds of little operations. This pass computes
    the same function up to rounding: one product for queries, keys and values, one for gate and input of the inner
    layer, fused norms, no modules. Heads of queries that share a head of keys become queries of one head, so that
    attention reads each key once (the fold).

    Args:
        blueprint: what the model computes.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        self.plan = blueprint
        self.graphs: Graphs | None = None
        self.copied = 0
        """How many bytes of weights were copied."""
        self.origin: object = None
        """The function that it is the whole of (`function_of`); None of a pass through a part."""

    def __call__(
        self,
        tokens: Int[Tensor, "b n"],
        positions: Int[Tensor, "b n"],
        masks: Masks,
        cache: TreeCache,
        keep: int,
        hidden_layers: Sequence[Layer] = (),
        embeddings: Float[Tensor, "b n d"] | None = None,
        queries: int = 0,
    ) -> Forward:
        """Return the logits of the last `keep` tokens, or of all; and hidden states of all tokens.

        Args:
            tokens: token ids.
            positions: their positions.
            masks: for each kind of layers what may be seen; None where everything is.
            cache: where keys and values go; it knows their slots.
            keep: how many logits of each row; 0 for all.
            hidden_layers: whose states to return.
            embeddings: what enters the first layer instead of the tokens' own; None for those.
            queries: of how many of the last tokens to return the queries.
        """
        plan, (batch, width) = self.plan, tokens.shape
        states = self.entering(tokens, positions, embeddings)
        reading = self.reading(positions, masks, cache, states.dtype)
        reading.queries = queries
        made: dict[Layer, Tensor] = {0: states} if 0 in hidden_layers else {}
        for number, layer in enumerate(plan.layers):
            states = reading.through(layer, number, states)
            if number + 1 in hidden_layers:
                made[number + 1] = states
        if keep and HEAD not in hidden_layers:
            states = states.view(batch, width, -1)[:, -keep:].flatten(0, 1)
        normed = self.normed(states)
        hidden: dict[Layer, Tensor] = {
            layer: (normed if layer == HEAD else made[layer]).view(batch, width, -1) for layer in hidden_layers
        }
        normed = normed.view(batch, -1, normed.shape[-1])[:, -keep:]
        logits = self.logits(normed.flatten(0, 1)).view(batch, keep or width, -1)
        return Forward(logits, hidden, Queries.of(reading.noted) if queries else None)

    def of_layers(self, layers: slice) -> "FusedPass":
        """Return a pass through some of the layers, with the last norm and the head behind them."""
        return FusedPass(replace(self.plan, layers=self.plan.layers[layers]))

    def without(self, layers: LayerSet) -> "FusedPass":
        """Return a pass through some of the sub-layers, over the same weights."""
        return FusedPass(self.plan.without(layers))

    def entering(
        self, tokens: Int[Tensor, "b n"], positions: Int[Tensor, "b n"], embeddings: Float[Tensor, "b n d"] | None
    ) -> Float[Tensor, "r d"]:
        """Return what enters the first layer."""
        states = (self.plan.embedded(tokens) if embeddings is None else embeddings).flatten(0, 1)
        table = self.plan.positions
        return states if table is None else states + functional.embedding(positions.flatten(), table)

    def reading(self, positions: Int[Tensor, "b n"], masks: Masks, cache: TreeCache, dtype: torch.dtype) -> "_Walking":
        """Return a pass through the layers by tokens at these positions."""
        pairs, rotations = self.plan.pairs, self.plan.frequencies.items()
        turns = {name: _turn(positions, *found, dtype, pairs) for name, found in rotations}
        return _Walking(masks, turns, cache, pairs, *positions.shape)

    def normed(self, states: Float[Tensor, "r d"]) -> Float[Tensor, "r d"]:
        """Return the last layer's states behind the norm."""
        return states if self.plan.norm is None else self.plan.norm(states)

    def logits(self, states: Float[Tensor, "r d"]) -> Float[Tensor, "r V"]:
        """Return the logits of normed states."""
        logits = self.plan.head(states)
        logits = logits if self.plan.scaled == 1 else logits * self.plan.scaled
        return logits if self.plan.cap is None else (logits / self.plan.cap).tanh() * self.plan.cap

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Leave joined weights behind when their model is copied or pickled."""
        return type(None), ()


class _Walking:
    """One pass through the layers: batch and tokens are one axis of the states."""

    def __init__(
        self, masks: Masks, turns: dict[str, Turn], cache: TreeCache, pairs: bool, batch: int, width: int
    ) -> None:
        self.masks, self.turns, self.cache, self.batch, self.width = masks, turns, cache, batch, width
        self.swapped = _swapped_pairs if pairs else _swapped_halves
        self.folded = dict[tuple[str, int], Tensor | None]()
        self.queries, self.noted = 0, list[Tensor]()  # how many of the last tokens', and those of the layers so far

    def through(self, layer: LayerPlan, number: int, states: Float[Tensor, "r d"]) -> Float[Tensor, "r d"]:
        """Return the states after a layer, the number-th; its keys and values go into the cache."""
        if layer.attention is None and layer.inner is None:
            return states
        normed, before = states if layer.before is None else layer.before(states), states
        if layer.attention is not None:
            seen = self._read(layer.attention, number, normed)
            seen = seen if layer.behind is None else layer.behind(seen)
            states = states + (seen if layer.weight == 1 else seen * layer.weight)
        if layer.inner is None:
            return states
        if layer.parallel:
            inner = normed if layer.between is layer.before else layer.between(before) if layer.between else before
            return states + _through_inner(layer.inner, inner)
        inner = _through_inner(layer.inner, states if layer.between is None else layer.between(states))
        inner = inner if layer.after is None else layer.after(inner)
        return states + (inner if layer.weight == 1 else inner * layer.weight)

    def _read(self, own: Attending, number: int, states: Float[Tensor, "r d"]) -> Float[Tensor, "r d"]:
        heads = own.inward(states)
        if own.norms is not None and own.whole:
            heads = self._normed_whole(heads, own, own.norms)
        heads = heads.view(self.batch, self.width, -1, own.width)
        turned, values = heads.split((own.queries + own.keys, own.keys), 2)
        if own.norms is not None and not own.whole:
            queries, keys = turned.split((own.queries, own.keys), 2)
            turned = torch.cat([own.norms[0](queries), own.norms[1](keys)], 2)
        if own.frequencies is not None:
            turned = self._rotated(turned, self.turns[own.frequencies], own.turned)
        queries, keys = turned.transpose(1, 2).split((own.queries, own.keys), 1)
        if self.queries:
            self.noted.append((queries[:, :, -self.queries :] * own.scale).transpose(1, 2).flatten(2))
        keys, values = self.cache.update(keys, values.transpose(1, 2), number)
        return own.outward(self._attended(own, queries, keys, values))

    def _rotated(self, heads: Float[Tensor, "b n h e"], turn: Turn, turned: int) -> Float[Tensor, "b n h e"]:
        """Rotate the first dimensions of heads; `turned` is how many."""
        if turned == heads.shape[-1]:
            return torch.addcmul(heads * turn[0], self.swapped(heads), turn[1])
        first, rest = heads[..., :turned], heads[..., turned:]
        return torch.cat([torch.addcmul(first * turn[0], self.swapped(first), turn[1]), rest], -1)

    def _normed_whole(
        self, heads: Float[Tensor, "r e"], own: Attending, norms: tuple[Any, Any]
    ) -> Float[Tensor, "r e"]:
        queries, keys, values = heads.split([own.width * one for one in (own.queries, own.keys, own.keys)], 1)
        return torch.cat([norms[0](queries), norms[1](keys), values], 1)

    def _attended(
        self, own: Attending, queries: Float[Tensor, "b h n e"], keys: Float[Tensor, "b k m e"], values: Tensor
    ) -> Float[Tensor, "r d"]:
        """Return what was read, each key once for all queries that share it."""
        heads, width = queries.shape[1:3]
        group = heads // own.keys if width <= FOLDED else 1
        mask = self._mask(own.kind, group, queries.dtype)
        if group > 1:
            queries = queries.reshape(self.batch, own.keys, group * width, -1)
        if not own.eager:
            seen = functional.scaled_dot_product_attention(
                queries, keys, values, mask, scale=own.scale, enable_gqa=queries.shape[1] != own.keys
            )
        else:
            seen = _by_hand(queries, keys, values, mask, own)
        seen = seen.reshape(self.batch, heads, width, -1)
        return seen.transpose(1, 2).reshape(self.batch * width, -1)

    def _mask(self, kind: str, group: int, dtype: torch.dtype) -> Float[Tensor, "b 1 q m"] | None:
        """Return a mask as numbers to be added to scores, once for every query of a group; made once a pass."""
        if (kind, group) not in self.folded:
            mask = self.masks[kind]
            if mask is not None:
                numbers = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
                numbers = numbers.masked_fill_(~mask, torch.finfo(dtype).min).unsqueeze(1)
                mask = numbers if group == 1 else numbers.repeat(1, 1, group, 1)
            self.folded[kind, group] = mask
        return self.folded[kind, group]


def _turn(positions: Int[Tensor, "b n"], frequencies: Tensor, gain: float, dtype: torch.dtype, pairs: bool) -> Turn:
    """Return cosines and, with the sign of the dimension they meet, sines of the rotation of queries and keys."""
    angles = positions.unsqueeze(-1).unsqueeze(-1) * frequencies
    cosines, sines = angles.cos(), angles.sin()
    if gain != 1:
        cosines, sines = cosines * gain, sines * gain
    if pairs:
        cosines, sines = torch.stack([cosines] * 2, -1).flatten(-2), torch.stack([-sines, sines], -1).flatten(-2)
    else:
        cosines, sines = torch.cat([cosines] * 2, -1), torch.cat([-sines, sines], -1)
    return cosines.to(dtype), sines.to(dtype)


def _swapped_halves(heads: Float[Tensor, "b n h e"]) -> Float[Tensor, "b n h e"]:
    return heads.roll(heads.shape[-1] // 2, -1)


def _swapped_pairs(heads: Float[Tensor, "b n h e"]) -> Float[Tensor, "b n h e"]:
    return heads.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _through_inner(own: Inner, states: Float[Tensor, "r d"]) -> Float[Tensor, "r d"]:
    if own.down is None:
        found: Any = own.inward(states.unsqueeze(0))
        return (found if isinstance(found, Tensor) else found[0]).reshape(states.shape)
    inner = own.inward(states)
    if not own.gated:
        return own.down(own.act(inner))
    gate, inner = inner.chunk(2, -1)
    return own.down(own.act(gate) * inner)


def _by_hand(
    queries: Float[Tensor, "b h q e"],
    keys: Float[Tensor, "b k m e"],
    values: Float[Tensor, "b k m e"],
    mask: Float[Tensor, "b 1 q m"] | None,
    own: Attending,
) -> Float[Tensor, "b h q e"]:
    """Attend one operation after another, with weights in single precision, as models do that are told to."""
    group = queries.shape[1] // own.keys
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = queries @ keys.transpose(2, 3) * own.scale
    scores = scores if own.cap is None else (scores / own.cap).tanh() * own.cap
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


Trial = Callable[[Int[Tensor, "1 n"], Int[Tensor, "1 n"], Bool[Tensor, "1 n n"]], tuple[Forward, TreeCache]]
"""The model's own pass over tokens at positions under a mask, with the states of all layers; and an empty cache."""


def fused_pass(model: PreTrainedModel, kinds: Sequence[str], context: int, own: Trial) -> FusedPass:
    """Return the fused pass kept with a model, made anew and tried if it is not the function that it was made of.

    Args:
        model: the model.
        kinds: the kinds of its layers' masks.
        context: its number of positions.
        own: its own pass, which the trial looks at.

    Raises:
        UnsupportedModel: it is of an anatomy that is not known, or a trial pass differs from its own.
    """
    known, function = model.__dict__.get(PLACE), function_of(model)
    if known is None or known.origin != function:
        model.__dict__[PLACE] = known = _Known(function, _made(model, kinds, context, own))
    if isinstance(known.found, str):
        raise UnsupportedModel(f"{type(model).__name__} keeps its own passes: {known.found}.")
    known.found.origin = function
    return known.found


@dataclass(frozen=True)
class _Known:
    """What was found of a model when it was this function: its pass, or why there is none."""

    origin: object
    found: FusedPass | str

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()  # it stays behind when the model is copied or pickled


def _made(model: PreTrainedModel, kinds: Sequence[str], context: int, own: Trial) -> FusedPass | str:
    """Return a pass that computes what the model does, or why there is none."""
    try:
        size, place = _size_and_place(model)
        copied = affords_copies(size, place)
        with torch.autocast(model.device.type, enabled=False):
            for plan in blueprint_of(model, kinds, copied=copied).variants():
                made = FusedPass(plan)
                if _is_same(model, made, kinds, context, own):
                    made.graphs = Graphs(made) if model.device.type == "cuda" and plan.records else None
                    made.copied = size if copied else 0
                    return made
    except UnsupportedModel as error:
        return str(error).rstrip(".")
    except InvalidParameter:
        raise
    except STRANGE as error:
        return f"reading its modules ended in {type(error).__name__}"
    return "its layers compute something else than their modules say"


def _size_and_place(model: PreTrainedModel) -> tuple[int, torch.device]:
    """Return the bytes of a model's weights, and where they are."""
    weights = [*model.parameters()]
    places = {one.device for one in weights}
    if getattr(model.config, "distributed_config", None) is not None:
        raise UnsupportedModel("its weights lie on several ranks")
    if len(places) > 1 or any(one.type == "meta" for one in places):
        raise UnsupportedModel("it is spread over several devices")
    return sum(one.numel() * one.element_size() for one in weights), places.pop()


@torch.no_grad()
def _is_same(model: PreTrainedModel, made: FusedPass, kinds: Sequence[str], context: int, own: Trial) -> bool:
    """Tell whether both passes agree on a few tokens, at the first positions and at the last.

    Each layer is given the states that the model's own pass gave to it, so that errors of rounding do not add up.
    """
    width, device, coarse = min(TRIED, context), model.device, rounds_short(model)
    tokens = torch.arange(width, device=device).unsqueeze(0) % model.config.get_text_config(decoder=True).vocab_size
    mask = torch.ones(1, width, width, dtype=torch.bool, device=device).tril()
    for first in {0, context - width}:
        places = torch.arange(first, first + width, device=device).unsqueeze(0)
        theirs, cache = own(tokens, places, mask)
        states = [theirs.hidden[number].flatten(0, 1) for number in range(len(made.plan.layers) + 1)]
        reading = made.reading(places, dict.fromkeys(kinds, mask), cache, states[0].dtype)
        pairs = [(made.entering(tokens, places, None), states[0], 0 * states[0])]
        for number, layer in enumerate(made.plan.layers):
            pairs.append((reading.through(layer, number, states[number]), states[number + 1], states[number]))
        logits = theirs.logits.flatten(0, 1)
        pairs.append((made.logits(made.normed(states[-1])), logits, 0 * logits))
        if not all(_close(*pair, coarse=coarse) for pair in pairs):
            return False
    return True


def _close(
    ours: Float[Tensor, "r d"], theirs: Float[Tensor, "r d"], before: Float[Tensor, "r d"], *, coarse: bool
) -> bool:
    """Tell whether what was added to states is the same, up to rounding of the sums."""
    share = COARSE if coarse else TOLERANCE.get(ours.dtype, COARSE)
    allowed = share * (theirs - before).float().norm()
    allowed = allowed + ROUNDING * torch.finfo(ours.dtype).eps * theirs.float().norm()
    return ours.shape == theirs.shape and bool((ours - theirs).float().norm() <= allowed)
