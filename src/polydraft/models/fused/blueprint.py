"""What a decoder computes, read from its modules: products, norms, rotation, windows, multipliers and soft caps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as everywhere
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from polydraft.errors import UnsupportedModel
from polydraft.models.anatomy import GLOBAL_HOOKS, OWN_HOOKS, WATCHING, layers_of
from polydraft.models.fused.folded import attend
from polydraft.models.fused.products import Product, joined, norm_of
from polydraft.models.language_model import LayerSet

POSITIONS = ("wpe", "embed_positions")
LAST_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")
ATTENTIONS = ("self_attn", "attention", "attn", "self_attention")
INNER = ("mlp", "block_sparse_moe", "feed_forward")
BEFORE = ("input_layernorm", "ln_1", "self_attn_layer_norm", "ln_attn")
BETWEEN = ("post_attention_layernorm", "ln_2", "final_layer_norm", "ln_mlp")
SANDWICH, BEHIND = "pre_feedforward_layernorm", "post_feedforward_layernorm"
APART = ("q_proj", "k_proj", "v_proj")
TOGETHER = ("qkv_proj", "query_key_value", "c_attn")
OUTWARD = ("o_proj", "dense", "c_proj", "out_proj")
GATED = (("gate_proj", "up_proj"), ("gate_up_proj",))
PLAIN = ("dense_h_to_4h", "c_fc", "fc1", "up_proj")
DOWN = ("down_proj", "dense_4h_to_h", "c_proj", "fc2")
ACTIVATIONS = ("act_fn", "act", "activation_fn", "activation")
KEY_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
KERNELS = ("sdpa", "eager")
UNKNOWN = ("clip_qkv", "attention_chunk_size", "alibi", "attn_temperature_tuning", "project_in", "project_out")
"""Settings of what no blueprint has."""


@dataclass(frozen=True)
class Attending:
    """How a layer attends.

    Args:
        inward: states to queries, keys and values, beside each other.
        outward: what was read to states.
        queries: heads of queries.
        keys: heads of keys and values.
        width: the width of a head.
        scale: by which scores are multiplied.
        cap: scores s become cap tanh(s / cap); None for no such cap.
        eager: whether weights are computed one operation after another, as the model was told to.
        norms: of queries and of keys; none for most models.
        whole: whether these norms run over all heads together.
        turned: how many dimensions of a head are rotated.
        frequencies: which of the model's rotations; None for none.
        kind: which layers' mask it reads by, a name of `KeyWindow`.
    """

    inward: Product
    outward: Product
    queries: int
    keys: int
    width: int
    scale: float
    cap: float | None
    eager: bool
    norms: tuple[Product, Product] | None
    whole: bool
    turned: int
    frequencies: str | None
    kind: str


@dataclass(frozen=True)
class Inner:
    """An inner layer: down(act(gate) * inner) if it is gated, else down(act(inner)).

    Args:
        inward: states to gate and inner states, beside each other; the layer itself where no more is known of it.
        act: the activation.
        down: inner states to states; None for a layer that is called as it is.
        gated: whether there is a gate.
    """

    inward: Product
    act: Product
    down: Product | None
    gated: bool


@dataclass(frozen=True)
class LayerPlan:
    """What a layer does: its norms, its attention and its inner layer, each None where there is none.

    Args:
        before: the norm before attention.
        attention: how it attends.
        behind: the norm of what attention gives.
        between: the norm before the inner layer.
        inner: the inner layer.
        after: the norm of what the inner layer gives.
        parallel: whether the inner layer reads what attention reads, not what it gives.
        weight: by which both are multiplied before they are added.
    """

    before: Product | None
    attention: Attending | None
    behind: Product | None
    between: Product | None
    inner: Inner | None
    after: Product | None
    parallel: bool
    weight: float

    def beside(self) -> "LayerPlan":
        """Return the same with both side by side; where there is one norm, both read it."""
        return replace(self, parallel=True, between=self.between or self.before)


@dataclass(frozen=True)
class Blueprint:
    """What a model computes.

    Args:
        embedded: token ids to states.
        positions: a row to be added for each position; None where they are rotated.
        layers: what each layer does.
        norm: the norm behind the last.
        head: states to logits.
        frequencies: by name, the rotations' angles by position, and what cosines and sines are multiplied by.
        scaled: logits are multiplied by it,
        cap: and capped as scores are; None for no cap.
        pairs: whether the dimensions that are rotated together stand beside each other, not half a head apart.
    """

    embedded: Callable[[Tensor], Tensor]
    positions: Float[Tensor, "p d"] | None
    layers: tuple[LayerPlan, ...]
    norm: Product | None
    head: Product
    frequencies: dict[str, tuple[Tensor, float]]
    scaled: float
    cap: float | None
    pairs: bool = False

    @property
    def records(self) -> bool:
        """Whether a pass launches the same whatever is read; what layers of experts do depends on it."""
        return all(layer.inner is None or layer.inner.down is not None for layer in self.layers)

    def without(self, layers: LayerSet) -> "Blueprint":
        """Return what is computed by some of the sub-layers alone."""
        run = [
            replace(
                plan,
                attention=None if number in layers.skipped_attention else plan.attention,
                inner=None if number in layers.skipped_mlp else plan.inner,
            )
            for number, plan in enumerate(self.layers[: layers.exit])
        ]
        return replace(self, layers=tuple(run))

    def variants(self) -> Iterator["Blueprint"]:
        """Yield this and what it may be too, where modules do not say so: their order, and which dimensions turn."""
        side = replace(self, layers=tuple(layer.beside() for layer in self.layers))
        yield from (self, side, replace(self, pairs=True), replace(side, pairs=True))


def blueprint_of(model: PreTrainedModel, kinds: Sequence[str], *, copied: bool = True) -> Blueprint:
    """Return what a model computes, by its modules.

    Args:
        model: the model.
        kinds: the kinds of its layers' masks.
        copied: whether weights may be copied, which takes as much memory as they do.

    Raises:
        UnsupportedModel: something in it is not known; the text says what.
    """
    _check_nobody_looks(model)
    config, body = cast(Any, model.config.get_text_config(decoder=True)), _body(model)
    read = _Modules(set(), copied)
    layers = layers_of(model)
    rotary = getattr(body, "rotary_emb", None)
    plans = [read.layer(layer, number, config, rotary, kinds) for number, layer in enumerate(layers)]
    norm, head = _one(body, LAST_NORMS), model.get_output_embeddings()
    embedding = cast(nn.Module, model.get_input_embeddings())
    if head is None:
        raise UnsupportedModel("it has no output head")
    found = Blueprint(
        _embedding(read, embedding, body),
        read.positions(body),
        tuple(plans),
        None if norm is None else read.norm(norm),
        read.product(head),
        _frequencies(rotary),
        _number(config, "logit_scale", 1.0) / _number(config, "logits_scaling", 1.0),
        getattr(config, "final_logit_softcapping", None),
    )
    left = [name for name, weight in model.named_parameters() if id(weight) not in read.weights]
    if left:
        raise UnsupportedModel(f"nothing is known of its {left[0]}")
    return found


@dataclass
class _Modules:
    """What was read so far: parameters that have a place; and whether their products may have copies of them."""

    weights: set[int]
    copied: bool

    def norm(self, norm: nn.Module) -> Product:
        self._note(norm)
        return norm_of(norm)

    def product(self, *layers: nn.Module, order: Tensor | None = None) -> Product:
        for one in layers:
            self._note(one)
        return joined(layers, order, copied=self.copied)

    def called(self, part: nn.Module) -> nn.Module:
        self._note(part)
        return part

    def _note(self, part: nn.Module) -> None:
        self.weights |= {*map(id, part.parameters())}

    def positions(self, body: Any) -> Tensor | None:
        table = _one(body, POSITIONS)
        if table is None:
            return None
        self._note(table)
        return cast(Tensor, table.weight).detach()[getattr(table, "offset", 0) :]

    def layer(self, layer: Any, number: int, config: Any, rotary: Any, kinds: Sequence[str]) -> LayerPlan:
        """Read a layer; the sandwich of norms is told from their names."""
        named = {name: one for name, one in layer.named_children()}
        before, between, behind, after = _one(layer, BEFORE), _one(layer, BETWEEN), None, named.get(BEHIND)
        if after is not None:
            behind, between = between, named.get(SANDWICH)
        if not getattr(layer, "do_layer_norm_before", True):
            raise UnsupportedModel("it norms behind its layers")
        attention = _one(layer, ATTENTIONS)
        if attention is None:
            raise UnsupportedModel(f"{type(layer).__name__} has no attention of a known name")
        side = getattr(layer, "use_parallel_residual", getattr(config, "parallel_attn", False))
        norms = [None if one is None else self.norm(one) for one in (before, behind, between, after)]
        plan = LayerPlan(
            norms[0],
            self.attention(attention, number, config, rotary, kinds),
            norms[1],
            norms[2],
            self.inner(layer),
            norms[3],
            False,
            _number(layer, "residual_multiplier", 1.0),
        )
        return plan.beside() if side else plan

    def attention(self, part: Any, number: int, config: Any, rotary: Any, kinds: Sequence[str]) -> Attending:
        """Read how a layer attends."""
        apart = [getattr(part, name, None) for name in APART]
        whole, outward = _one(part, TOGETHER), _one(part, OUTWARD)
        heads = config.num_attention_heads
        width = getattr(part, "head_dim", None) or getattr(part, "head_size", None) or config.hidden_size // heads
        if outward is None or (whole is None and None in apart):
            raise UnsupportedModel(f"{type(part).__name__} has no projections of known names")
        if whole is None:
            queries, keys = (cast(nn.Linear, one).out_features // width for one in apart[:2])
            inward = self.product(*cast(list[nn.Module], apart))
        else:
            queries, keys, order = _split(part, whole, config, width)
            inward = self.product(whole, order=order)
        pair = next((names for names in KEY_NORMS if _has(part, names[0])), None)
        norms = None if pair is None else (self.norm(getattr(part, pair[0])), self.norm(getattr(part, pair[1])))
        spread = pair is not None and getattr(part, pair[0]).weight.shape[0] != width
        kind = _kind(config, number, kinds)
        named = _rotation(part, rotary, config, number)
        return Attending(
            inward, self.product(outward), queries, keys, width,
            float(getattr(part, "scaling", width**-0.5)), getattr(part, "attn_logit_softcapping", None),
            config._attn_implementation == "eager",
            norms, spread, 0 if named is None else 2 * _frequencies(rotary)[named][0].shape[-1], named, kind,
        )  # fmt: skip

    def inner(self, layer: Any) -> Inner:
        """Read an inner layer; one that is not known is called as it is."""
        part = _one(layer, INNER) or layer
        down, act = _one(part, DOWN), next((getattr(part, one) for one in ACTIVATIONS if _has(part, one)), None)
        gates = next((names for names in GATED if all(_has(part, name) for name in names)), None)
        plain = next((one for one in PLAIN if _has(part, one)), None)
        if isinstance(act, nn.Module) and down is not None and (gates or plain):
            act = functional.silu if type(act).__name__ in ("SiLU", "SiLUActivation") else act
            names = gates or (cast(str, plain),)
            inward = self.product(*(getattr(part, name) for name in names))
            return Inner(inward, act, self.product(down), gates is not None)
        if part is layer:
            raise UnsupportedModel(f"{type(layer).__name__} has no inner layer of a known name")
        return Inner(self.called(part), functional.silu, None, False)


def _check_nobody_looks(model: nn.Module) -> None:
    """Raise unless a pass is what the modules' own classes compute, with nobody who looks or changes on the way."""
    if any(getattr(everywhere, name, None) for name in GLOBAL_HOOKS):
        raise UnsupportedModel("hooks are set on all modules")
    for part in model.modules():
        own = vars(part)
        hooks = [hook for name in OWN_HOOKS for hook in own[name].values()]
        if any(not getattr(hook, WATCHING, False) for hook in hooks):
            raise UnsupportedModel(f"its {type(part).__name__} has a hook")
        if "forward" in own or own.get("_compiled_call_impl") is not None:
            raise UnsupportedModel(f"the forward of its {type(part).__name__} was replaced")
    config = cast(Any, model).config.get_text_config(decoder=True)
    kernel = config._attn_implementation
    usual = sdpa_attention_forward, attend
    if kernel not in KERNELS or (kernel == "sdpa" and ALL_ATTENTION_FUNCTIONS[kernel] not in usual):
        raise UnsupportedModel(f"its attention runs by {kernel!r}")
    strange = [name for name in UNKNOWN if getattr(config, name, None)]
    if strange:
        raise UnsupportedModel(f"its {strange[0]} is not known")


def _body(model: PreTrainedModel) -> Any:
    body: Any = model.base_model
    return getattr(body, "decoder", body)


def _one(part: Any, names: Sequence[str]) -> nn.Module | None:
    return next((found for name in names if isinstance(found := getattr(part, name, None), nn.Module)), None)


def _has(part: Any, name: str) -> bool:
    return getattr(part, name, None) is not None


def _number(part: Any, name: str, usual: float) -> float:
    found = getattr(part, name, usual)
    return usual if found is None else float(found)


def _embedding(read: _Modules, embedding: nn.Module, body: Any) -> Callable[[Tensor], Tensor]:
    read.called(embedding)
    factor = _number(body, "embedding_multiplier", 1.0)
    if type(embedding) is not nn.Embedding:
        return embedding if factor == 1 else lambda tokens: embedding(tokens) * factor
    table = embedding.weight.detach()
    if factor == 1:
        return partial(functional.embedding, weight=table)
    return lambda tokens: functional.embedding(tokens, table) * factor


def _frequencies(rotary: Any) -> dict[str, tuple[Tensor, float]]:
    """Return a model's rotations by name: one, or one for each kind of its layers."""
    if rotary is None:
        return {}
    kinds = rotary.rope_type if isinstance(rotary.rope_type, dict) else {"": rotary.rope_type}
    if any(one in ("dynamic", "longrope") for one in kinds.values()):
        raise UnsupportedModel("its rotation depends on the length of the text")
    prefixes = {kind: f"{kind}_" if kind else "" for kind in kinds}
    return {
        kind: (getattr(rotary, f"{first}inv_freq").float(), float(getattr(rotary, f"{first}attention_scaling")))
        for kind, first in prefixes.items()
    }


def _rotation(part: Any, rotary: Any, config: Any, number: int) -> str | None:
    if rotary is None or not getattr(part, "use_rope", True):
        return None
    names = _frequencies(rotary)
    return config.layer_types[number] if "" not in names else ""


def _kind(config: Any, number: int, kinds: Sequence[str]) -> str:
    return kinds[0] if len(kinds) == 1 else config.layer_types[number]


def _split(part: Any, whole: Any, config: Any, width: int) -> tuple[int, int, Tensor | None]:
    """Return the heads of queries and of keys, and the order that puts queries, keys and values beside each other."""
    heads, rows = config.num_attention_heads, whole.weight.shape[1 if _has(whole, "nf") else 0] // width
    if not _has(part, "query_key_value"):
        return heads, (rows - heads) // 2, None
    places = torch.arange(rows * width).view(rows, width)
    if rows == heads + 2 and heads != 1:  # one head of keys and one of values behind the queries
        return heads, 1, None
    if rows != 3 * heads:
        raise UnsupportedModel(f"the projections of {type(part).__name__} are in an order that is not known")
    order = places.view(heads, 3, width).transpose(0, 1).reshape(-1)
    return heads, heads, order
