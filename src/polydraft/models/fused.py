"""A draft model's pass in a few dozen operations, where Hugging Face's own takes hundreds."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from polydraft.errors import UnsupportedModel
from polydraft.models.anatomy import HEAD, LARGE, can_pack, check_layer, chosen_precision, function_of, packed_product
from polydraft.models.cache import TreeCache
from polydraft.models.compiled import LEVELS, CompiledModel
from polydraft.models.derived import Int8Linear, int8_product
from polydraft.models.hugging_face import HuggingFaceModel
from polydraft.models.language_model import Forward, Layer

FUSED = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM)
"""The models of one anatomy: root mean square norms, rotated keys, gated SiLU layers."""
MOST_BYTES = 1 << 30
"""Larger models spend their time on arithmetic, and the joined weights take as much memory again."""
PLACE = "polydraft_fused"
TOLERANCE = 0.02
"""How far a trial pass may be from the model's own, relative to the largest logit; bfloat16 rounds by a percent."""


class FusedModel(HuggingFaceModel):
    """A `HuggingFaceModel` of the Llama anatomy whose passes run with joined weights and fused kernels.

    A small draft model's pass is mostly the cost of calling its modules and hundreds of little operations. This pass
    computes the same function up to rounding: one product for queries, keys and values, one for gate and input of the
    inner layer, fused norms and attention, no modules. Rounding in a draft model costs no exactness: the verifier is
    told the rows that were drafted from. Targets are never run this way.

    Args:
        model: the model. Joined weights are made once per model and kept with it until it changes.

    Raises:
        UnsupportedModel: it is of another anatomy or too large, or a trial pass differs from its own: see
            `draft_model`.
    """

    def __init__(self, model: object) -> None:
        super().__init__(model)
        self.joined = _joined(self)

    def scored(
        self,
        tokens: Int[Tensor, "b n"],
        positions: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n m"],
        cache: TreeCache,
        hidden_layers: tuple[Layer, ...],
        logits_to_keep: int,
        embeddings: Float[Tensor, "b n d"] | None = None,
    ) -> Forward:
        """Score tokens with joined weights; embeddings, and all under autocast, are left to the model's own pass."""
        if embeddings is not None or chosen_precision(self.device):
            return super().scored(tokens, positions, mask, cache, hidden_layers, logits_to_keep, embeddings)
        for layer in hidden_layers:
            check_layer(layer, self.layers)
        seen = self.windows[0].seen(mask, positions, cache.positions)
        return self.joined.scored(tokens, positions, seen.unsqueeze(1), cache, logits_to_keep, hidden_layers)


Product = Callable[[Float[Tensor, "r i"]], Float[Tensor, "r o"]]
Turn = tuple[Float[Tensor, "b n 1 e"], Float[Tensor, "b n 1 e"]]


class FusedLayer:
    """One transformer layer with joined weights, over rows of states: batch and tokens are one axis.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: Any) -> None:
        attention, inner = layer.self_attn, layer.mlp
        self.before, self.between = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.inward = _product(attention.q_proj, attention.k_proj, attention.v_proj)
        self.outward = _product(attention.o_proj)
        self.gated = _product(inner.gate_proj, inner.up_proj)
        self.down = _product(inner.down_proj)
        self.width: int = attention.head_dim
        self.scale: float = attention.scaling
        self.keys = attention.k_proj.out_features // self.width
        self.queries = attention.q_proj.out_features // self.width

    def __call__(
        self, number: int, states: Float[Tensor, "r d"], turn: Turn, mask: Bool[Tensor, "b 1 n m"], cache: TreeCache
    ) -> Float[Tensor, "r d"]:
        """Return the states after this layer, the number-th; its keys and values go into the cache."""
        batch, _, width, _ = mask.shape
        heads = self.inward(self.before(states)).view(batch, width, -1, self.width)
        turned, values = heads.split((self.queries + self.keys, self.keys), 2)
        turned = torch.addcmul(turned * turn[0], turned.roll(self.width // 2, -1), turn[1]).transpose(1, 2)
        queries, keys = turned.split((self.queries, self.keys), 1)
        keys, values = cache.update(keys, values.transpose(1, 2), number)
        seen = functional.scaled_dot_product_attention(
            queries, keys, values, mask, scale=self.scale, enable_gqa=self.queries != self.keys
        )
        states = states + self.outward(seen.transpose(1, 2).reshape(len(states), -1))
        gate, inner = self.gated(self.between(states)).chunk(2, -1)
        return states + self.down(functional.silu(gate) * inner)


class Joined:
    """A model's layers with joined weights, and what the model was when they were made."""

    def __init__(self, model: PreTrainedModel) -> None:
        body = cast(Any, model).model
        self.origin = function_of(model)
        self.layers = [FusedLayer(layer) for layer in body.layers]
        self.norm, self.head = _norm(body.norm), _product(cast(Any, model).lm_head)
        self.embedding: Tensor = body.embed_tokens.weight.detach()
        self.frequencies: Tensor = body.rotary_emb.inv_freq
        self.gain: float = body.rotary_emb.attention_scaling

    def scored(
        self,
        tokens: Int[Tensor, "b n"],
        positions: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b 1 n m"],
        cache: TreeCache,
        keep: int,
        hidden_layers: tuple[Layer, ...] = (),
    ) -> Forward:
        """Return the logits of the last `keep` tokens, or of all; and hidden states of all tokens."""
        batch, width = tokens.shape
        states, turn = functional.embedding(tokens, self.embedding).flatten(0, 1), self._turn(positions)
        made: dict[Layer, Tensor] = {0: states} if 0 in hidden_layers else {}
        for number, layer in enumerate(self.layers):
            states = layer(number, states, turn, mask, cache)
            if number + 1 in hidden_layers:
                made[number + 1] = states
        if keep and HEAD not in hidden_layers:
            states = states.view(batch, width, -1)[:, -keep:].flatten(0, 1)
        normed = self.norm(states)
        hidden: dict[Layer, Tensor] = {
            layer: (normed if layer == HEAD else made[layer]).view(batch, width, -1) for layer in hidden_layers
        }
        normed = normed.view(batch, -1, normed.shape[-1])[:, -keep:]
        return Forward(self.head(normed.flatten(0, 1)).view(batch, keep or width, -1), hidden)

    def _turn(self, positions: Int[Tensor, "b n"]) -> Turn:
        """Return cosines and, with the sign of the half they meet, sines of the rotation of queries and keys."""
        angles = positions.unsqueeze(-1).unsqueeze(-1) * self.frequencies
        cosines, sines = angles.cos(), angles.sin()
        if self.gain != 1:
            cosines, sines = cosines * self.gain, sines * self.gain
        dtype = self.embedding.dtype
        return torch.cat([cosines, cosines], -1).to(dtype), torch.cat([-sines, sines], -1).to(dtype)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Leave joined weights behind when their model is copied or pickled."""
        return type(None), ()


def draft_model(model: object, *, compile: bool = False) -> HuggingFaceModel:
    """Return the cheaper way to run a draft model: fused if it is of a known anatomy, else its own, compiled if asked.

    Compiling is left to models that cannot be fused, and to GPUs: on a CPU fused passes were the faster ones.

    Raises:
        InvalidParameter: this is no model; the text says what to pass.
        UnsupportedModel: it cannot score trees at all.
    """
    try:
        made: HuggingFaceModel = FusedModel(model)
    except UnsupportedModel:
        made = HuggingFaceModel(model)
    if compile and (type(made) is HuggingFaceModel or made.device.type != "cpu"):
        return CompiledModel(made.model, LEVELS)
    return made


def _norm(norm: Any) -> Product:
    weight: Tensor = norm.weight.detach()
    return partial(functional.rms_norm, normalized_shape=weight.shape, weight=weight, eps=norm.variance_epsilon)


def _product(*layers: nn.Linear) -> Product:
    """Return the product with the weights of one linear layer, or with those of several of the same input at once."""
    packed = [one for one in layers if isinstance(one, Int8Linear)]
    if len(packed) == len(layers) and all(one.bias is None for one in packed):
        return int8_product(torch.cat([one.steps for one in packed]), torch.cat([one.scales for one in packed]), None)
    weights = [one.weight.detach() for one in layers]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    biases = [one.bias.detach() for one in layers if one.bias is not None]
    bias = torch.cat(biases) if biases else None
    if weight.numel() >= LARGE and can_pack(weight):
        return packed_product(weight, bias)
    return partial(functional.linear, weight=weight, bias=bias)


def _joined(wrapped: HuggingFaceModel) -> Joined:
    """Return the layers kept with a model, made anew and tried if it is not the function that they were made of."""
    model = wrapped.model
    kept = model.__dict__.get(PLACE)
    if kept is None or kept.origin != function_of(model):
        _check_anatomy(wrapped)
        with torch.autocast(wrapped.device.type, enabled=False):
            kept = Joined(model)
            _check_trial(wrapped.plain(), kept)
        model.__dict__[PLACE] = kept
    return kept


def _check_anatomy(plain: HuggingFaceModel) -> None:
    model, name = plain.model, type(plain.model).__name__
    if type(model) not in FUSED or cast(Any, model.config).hidden_act != "silu":
        raise UnsupportedModel(f"{name} is not of the anatomy that FusedModel knows.")
    if len(plain.windows) > 1:
        raise UnsupportedModel(f"{name} has layers of several kinds, which FusedModel does not tell apart.")
    if sum(weight.numel() * weight.element_size() for weight in model.parameters()) > MOST_BYTES:
        raise UnsupportedModel(f"{name} has more than {MOST_BYTES >> 20} MiB of weights, too many to join.")
    body = cast(Any, model).model
    products = [one for layer in body.layers for one in layer.modules() if isinstance(one, nn.Linear)]
    mixed = any(isinstance(one, Int8Linear) and one.bias is not None for one in products)
    if mixed or len(products) != 7 * len(body.layers) or body.rotary_emb.rope_type in ("dynamic", "longrope"):
        raise UnsupportedModel(f"{name} has adapters or a rotation that depends on the length.")
    if len({weight.device for weight in model.parameters()} | {plain.device}) > 1 or plain.device.type == "meta":
        raise UnsupportedModel(f"{name} is spread over several devices.")


def _check_trial(plain: HuggingFaceModel, joined: Joined) -> None:
    width = min(4, plain.context)
    places = torch.arange(width, device=plain.device).unsqueeze(0)
    tokens, cache = places.clamp_max(plain.vocab_size - 1), plain.new_cache(1, width)
    mask = torch.ones(1, width, width, dtype=torch.bool, device=plain.device).tril()
    theirs = plain.forward(tokens, places, mask, cache, places[:, 0]).logits
    with torch.no_grad():
        ours = joined.scored(tokens, places, mask.unsqueeze(1), cache, 0).logits
    if not (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max():
        name = type(plain.model).__name__
        raise UnsupportedModel(f"{name} computes something else than its class says: it has hooks or other layers.")
