"""LiLiCorr's path term: the likeliest tokens of all slots look at each other once, and neighbours match by vectors.

Of every slot that drafts the likeliest k tokens are its candidates, in falling order, with log-probabilities log q over
all of the head's rows. With e their embeddings and z_s the hidden state of slot s, candidate c of slot s begins as

    P e + Q z_s + F([log q, q, log q - max log q, c / (k - 1), c = 0]) + slot_s + rank_c

with F a small network. A few layers let all candidates of the block attend to each other. Then, with u made of the
newest row of the context, that of the token before the anchor:

    s = silu(factor_input [x; u; x * u]);   out = unit(out_head s);   in = unit(in_head s);   start = unit(anchor_out u)
    q(first = c) = softmax_c(scale * <start, in_c> / T);   q(c | previous) = softmax_c(scale * <out_previous, in_c> / T)

on the candidates of the next slot, and 0 elsewhere. Log-probabilities of the backbone enter as features alone. All
vectors follow from the block, before anything is drafted; so a node's law is a function of its own token.

Sources: arXiv 2608.20530; NVIDIA/Model-Optimizer, `speculative/plugins/modeling_lilicorr.py`; sgl-project/sglang,
`srt/models/lilicorr.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, scaled_dot_product_attention, silu

from polydraft.drafters.heads.paths import FilledBlock, PathTerm
from polydraft.drafters.heads.sublayers import Norm
from polydraft.errors import InvalidParameter

STD = 0.02
"""The standard deviation of new weights. Vectors that match by products must not start at zero: none would learn."""
FEATURES = 5
"""How many numbers say how likely a candidate is."""


@dataclass(frozen=True)
class LatticeShape:
    """The sizes of the term.

    Args:
        candidates: of each slot, k; all of the head's tokens where it has fewer.
        width: of candidates' states.
        layers: how many.
        heads: of their attention.
        ratio: width inside their second part, as a multiple.
        factors: width of the vectors that are matched.
        vector_eps: the least norm that a vector is divided by.
        scale: what products of vectors are multiplied by.
        eps: added to mean squares in norms.

    Raises:
        InvalidParameter: the width is no multiple of the heads.
    """

    candidates: int
    width: int
    layers: int
    heads: int
    ratio: float
    factors: int
    vector_eps: float
    scale: float
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise InvalidParameter(f"{self.heads} heads cannot share a width of {self.width}.")


class LatticeAttention(nn.Module):
    """Attention without a mask whose scores have a bias, with the tensor names of `torch.nn.MultiheadAttention`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.randn(3 * width, width) * STD)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        self.heads = heads

    def forward(self, states: Float[Tensor, "b n w"], bias: Float[Tensor, "h n n"]) -> Float[Tensor, "b n w"]:
        """Return what each state finds among all."""
        joined = linear(states, self.in_proj_weight, self.in_proj_bias)
        queries, keys, values = joined.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
        return self.out_proj(found.transpose(1, 2).flatten(-2))


class LatticeLayer(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, shape: LatticeShape) -> None:
        super().__init__()
        width, inner = shape.width, int(shape.width * shape.ratio)
        self.attn_norm, self.mlp_norm = Norm(width, shape.eps), Norm(width, shape.eps)
        self.attn = LatticeAttention(width, shape.heads)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))

    def forward(self, states: Float[Tensor, "b n w"], bias: Float[Tensor, "h n n"]) -> Float[Tensor, "b n w"]:
        """Return the layer's output."""
        states = states + self.attn(self.attn_norm(states), bias)
        return states + self.mlp(self.mlp_norm(states))


class Lattice(NamedTuple):
    """The candidates of a block: their places among the head's tokens, the target's tokens, and their vectors."""

    places: Int[Tensor, "b D k"]
    tokens: Int[Tensor, "b D k"]
    outs: Float[Tensor, "b D k f"]
    ins: Float[Tensor, "b D k f"]


class LiLiCorr(PathTerm):
    """LiLiCorr's term. A node's state is the vector that its children's are matched with.

    A token that is none of its slot's candidates can be drafted only where its law has no chance for it; its vector is
    zero, so that all candidates below it are equally likely. Below the block the last slot is drafted again.

    Args:
        width: width of slots and embeddings.
        drafts: how many slots draft.
        shape: the term's own sizes.
    """

    anchored = True

    def __init__(self, width: int, drafts: int, shape: LatticeShape) -> None:
        super().__init__()
        own = shape.width
        self.shape, self.drafts, self.size = shape, drafts, shape.factors
        self.token_proj = nn.Identity() if own == width else nn.Linear(width, own)
        self.pass_hidden_proj = nn.Linear(width, own)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, own), nn.SiLU(), nn.Linear(own, own)
        )
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, drafts, 1, own))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, shape.candidates, own))
        self.relative_slot_bias = nn.Parameter(torch.zeros(shape.heads, 2 * drafts + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(shape.heads))
        self.context_proj = nn.Linear(width, own)
        self.layers = nn.ModuleList(LatticeLayer(shape) for _ in range(shape.layers))
        self.output_norm, self.anchor_norm = Norm(own, shape.eps), Norm(own, shape.eps)
        self.factor_input_proj = nn.Linear(3 * own, own)
        self.out_head = nn.Linear(own, shape.factors)
        self.in_head = nn.Linear(own, shape.factors)
        self.anchor_out_head = nn.Linear(own, shape.factors)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=STD)
                nn.init.zeros_(module.bias)

    def begin(self, block: FilledBlock) -> tuple[Float[Tensor, "b 1 f"], Lattice]:
        """Return the anchor's vector, and the candidates."""
        assert block.logits is not None and block.context is not None and block.known is not None
        precise = torch.promote_types(block.logits.dtype, torch.float32)
        logs = block.logits.log_softmax(-1, dtype=precise)
        best, places = logs.topk(min(self.shape.candidates, logs.shape[-1]), dim=-1)
        tokens = places if block.ends.tokens is None else block.ends.tokens[places]
        states = self._states(block, tokens, best)
        # Before the first token there is no row, and u is made of nothing, not of the projection's bias.
        anchor = self.anchor_norm(self.context_proj(block.context) * block.known.unsqueeze(-1))
        beside = anchor[:, None, None].expand_as(states)
        mixed = silu(self.factor_input_proj(torch.cat([states, beside, states * beside], dim=-1)))
        outs, ins = self._unit(self.out_head(mixed)), self._unit(self.in_head(mixed))
        return self._unit(self.anchor_out_head(anchor)).unsqueeze(1), Lattice(places, tokens, outs, ins)

    def read(self, state, tokens, embedded, place):
        """Return the nodes' vectors; the anchor has its own already."""
        (depth,), lattice = place.depth, cast(Lattice, place.made)
        if not depth:
            return state
        slot = min(depth, self.drafts) - 1
        same = tokens.unsqueeze(-1) == lattice.tokens[:, slot].unsqueeze(1)
        return same.to(state) @ lattice.outs[:, slot]

    def corrected(self, logits, state, place):
        """Return the nodes' logits: of the candidates, and none elsewhere."""
        lattice = cast(Lattice, place.made)
        slots = [min(depth, self.drafts - 1) for depth in place.depth]
        scores = self.shape.scale * (lattice.ins[:, slots] * state.unsqueeze(-2)).sum(-1)
        places = lattice.places[:, slots].expand_as(scores)
        return torch.full_like(logits, -torch.inf).scatter(-1, places, scores.to(logits))

    def _states(
        self, block: FilledBlock, tokens: Int[Tensor, "b D k"], logs: Float[Tensor, "b D k"]
    ) -> Float[Tensor, "b D k w"]:
        """Return the candidates' states behind the layers."""
        slots, most = tokens.shape[1:]
        rank = torch.arange(most, device=logs.device).to(logs)
        parts = [logs, logs.exp(), logs - logs.amax(-1, keepdim=True), rank / max(most - 1, 1), (rank == 0).to(logs)]
        features = torch.stack([part.expand_as(logs) for part in parts], dim=-1)
        like = self.pass_hidden_proj.weight
        embedded = block.ends.embed(tokens.flatten(1)).unflatten(1, (slots, most)).to(like)
        states = self.token_proj(embedded) + self.pass_hidden_proj(block.drafting).unsqueeze(-2)
        states = states + self.feature_mlp(features.to(like))
        states = (states + self.slot_embedding[0] + self.rank_embedding[0, :, :, :most]).flatten(1, 2)
        bias = self._bias(slots, most)
        for layer in self.layers:
            states = layer(states, bias)
        return self.output_norm(states).unflatten(1, (slots, most))

    def _bias(self, slots: int, most: int) -> Float[Tensor, "h n n"]:
        """Return what is added to the scores of attention: by the distance of slots, and inside a slot."""
        slot = torch.arange(slots, device=self.same_slot_bias.device).repeat_interleave(most)
        distance = slot.unsqueeze(1) - slot
        same = (distance == 0).to(self.same_slot_bias)
        return self.relative_slot_bias[:, distance + slots] + same * self.same_slot_bias[:, None, None]

    def _unit(self, vectors: Float[Tensor, "*b f"]) -> Float[Tensor, "*b f"]:
        return normalize(vectors, dim=-1, eps=self.shape.vector_eps)
