"""Heads that read a token and a hidden state at a time: EAGLE-1 and EAGLE-3.

The pair (t_{i+1}, f_i), a token and what the target made of the token before it, stands at position i. A head makes of
it a hidden state h'_{i+1}, of which the rows for t_{i+2} follow, and which takes the place of the target's own state in
the next pair of a drafted path.

    EAGLE-1:  x = fc [e; f];   x <- x + attn(x);   x <- x + mlp(norm x);   h' = x, as if behind the target's last norm
    EAGLE-3:  h = fc [h_1; ...; h_k], or a recycled h';   g = hidden_norm h
              x = h + attn [input_layernorm e; g];   h' = x + mlp(norm x);   rows = lm_head(norm h')

Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858, the same heads), EAGLE-3 (2503.01840), SafeAILab/EAGLE; the
variants of EAGLE-3.1 from vllm-project/speculators and sgl-project/SpecForge.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.drafters.heads.layers import Anatomy, Attention, Gated, Norm, Seen, Turn
from polydraft.drafters.heads.layers import Layer as DecoderLayer
from polydraft.errors import InvalidParameter
from polydraft.models import Layer


class EagleHead(nn.Module):
    """What both kinds of heads are for decoding and training.

    Args:
        anatomy: sizes of its layers.
        layers: how many; each keeps keys.
        reads: which of the target's hidden states it reads, joined in this order.
        target_width: the width of these.
    """

    def __init__(self, anatomy: Anatomy, layers: int, reads: tuple[Layer, ...], target_width: int) -> None:
        super().__init__()
        if layers < 1 or not reads:
            raise InvalidParameter("A head has at least one layer and reads at least one hidden state.")
        self.anatomy, self.depth, self.reads, self.target_width = anatomy, layers, reads, target_width

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A weight, whose device and precision are the head's."""

    @abstractmethod
    def fused(self, features: Float[Tensor, "b n r"]) -> Float[Tensor, "b n d"]:
        """Return what enters a pair, made of the target's own hidden states, joined."""

    @abstractmethod
    def forward(
        self,
        embedded: Float[Tensor, "b n d"],
        hidden: Float[Tensor, "b n d"],
        places: Int[Tensor, "b n"],
        seen: Sequence[Seen],
        mask: Bool[Tensor, "b n m"],
    ) -> Float[Tensor, "b n d"]:
        """Return the hidden states of pairs.

        Args:
            embedded: the tokens' embeddings.
            hidden: what `fused` or `recycled` gave of the token before.
            places: the pairs' positions.
            seen: per layer, gives all keys and values, given the pairs' own.
            mask: True where a pair may look at a key.
        """

    @abstractmethod
    def recycled(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Return what enters the pairs behind these, made of the head's own hidden states."""

    @abstractmethod
    def before_output(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Return what goes to the output head."""

    def _turn(self, places: Int[Tensor, "b n"], dtype: torch.dtype) -> Turn:
        return self.anatomy.rotation.turn(places, self.anatomy.channels, dtype)


class Eagle1Head(EagleHead):
    """EAGLE-1's head, which EAGLE-2 and HASS use as well: it foretells the state behind the target's last norm.

    Args:
        anatomy: sizes of its layers, as wide as the target.
        layers: how many; the first has no norm before its attention, unless `normed`.
        bias: whether the projection of pairs has one.
        normed: whether there are norms behind the embedding, before the attention and before the output head as well
            (the variant with layer norms of vllm-project/speculators).
    """

    def __init__(self, anatomy: Anatomy, layers: int = 1, *, bias: bool = True, normed: bool = False) -> None:
        super().__init__(anatomy, layers, ("final",), anatomy.width)
        self.normed = normed
        self.fc = nn.Linear(2 * anatomy.width, anatomy.width, bias=bias)
        self.layers = nn.ModuleList(DecoderLayer(anatomy, normed=normed or place > 0) for place in range(layers))
        self.embed_layernorm = Norm(anatomy.width, anatomy.eps) if normed else nn.Identity()
        self.lm_head_layernorm = Norm(anatomy.width, anatomy.eps) if normed else nn.Identity()

    @property
    def like(self) -> Tensor:
        """A weight."""
        return self.fc.weight

    def fused(self, features):
        """Return the state behind the target's last norm as it is."""
        return features

    def forward(self, embedded, hidden, places, seen, mask):
        """Return the foretold states of the next tokens; arguments as for `EagleHead`."""
        states = self.fc(torch.cat([self.embed_layernorm(embedded), hidden], dim=-1))
        turn = self._turn(places, states.dtype)
        for layer, keys in zip(self.layers, seen, strict=True):
            states = layer(states, turn, keys, mask)
        return states

    def recycled(self, states):
        """Return the foretold states, which stand for the target's own."""
        return states

    def before_output(self, states):
        """Return the foretold states, which need no norm."""
        return self.lm_head_layernorm(states)


@dataclass(frozen=True)
class Eagle3Norms:
    """Where heads of EAGLE-3's kind differ.

    Args:
        residual: whether the residual is the state behind `hidden_norm`, not before it (`norm_before_residual`).
        output: whether the state behind the last norm is recycled, not the one before it (`norm_output`).
        joined: whether the joined hidden states are normed together (`norm_before_fc`).
        sources: whether each of them is normed by itself (`fc_norm`).
    """

    residual: bool = False
    output: bool = False
    joined: bool = False
    sources: bool = False


class PairLayer(nn.Module):
    """EAGLE-3's layer: attention reads the normed embedding beside the normed state, and adds to the state alone.

    Args:
        anatomy: sizes.
        after: whether the residual is the normed state.
    """

    def __init__(self, anatomy: Anatomy, *, after: bool) -> None:
        super().__init__()
        self.after = after
        self.input_layernorm = Norm(anatomy.width, anatomy.eps)
        self.hidden_norm = Norm(anatomy.width, anatomy.eps)
        self.self_attn = Attention(anatomy, 2 * anatomy.width)
        self.post_attention_layernorm = Norm(anatomy.width, anatomy.eps)
        self.mlp = Gated(anatomy)

    def forward(
        self,
        embedded: Float[Tensor, "b n d"],
        hidden: Float[Tensor, "b n d"],
        turn: Turn,
        seen: Seen,
        mask: Bool[Tensor, "b n m"],
    ) -> Float[Tensor, "b n d"]:
        """Return the layer's output; arguments as for `EagleHead` and `Attention`."""
        normed = self.hidden_norm(hidden)
        pairs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        states = (normed if self.after else hidden) + self.self_attn(pairs, turn, seen, mask)
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3Head(EagleHead):
    """EAGLE-3's head, with the variants of EAGLE-3.1.

    Args:
        anatomy: sizes of its layers.
        reads: which of the target's hidden states it reads: outputs of so many layers, joined in this order.
        target_width: the width of these.
        norms: where norms are.
        layers: how many; those behind the first are ordinary ones.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        reads: tuple[Layer, ...],
        target_width: int,
        norms: Eagle3Norms = Eagle3Norms(),
        layers: int = 1,
    ) -> None:
        super().__init__(anatomy, layers, reads, target_width)
        self.norms = norms
        self.fc = nn.Linear(len(reads) * target_width, anatomy.width, bias=False)
        self.midlayer = PairLayer(anatomy, after=norms.residual)
        self.layers = nn.ModuleList(DecoderLayer(anatomy) for _ in range(layers - 1))
        self.norm = Norm(anatomy.width, anatomy.eps)
        self.input_norm = Norm(len(reads) * target_width, anatomy.eps) if norms.joined else nn.Identity()
        sources = len(reads) if norms.sources else 0
        self.fc_norm = nn.ModuleList(Norm(target_width, anatomy.eps) for _ in range(sources))

    @property
    def like(self) -> Tensor:
        """A weight."""
        return self.fc.weight

    def fused(self, features):
        """Return the target's hidden states, projected to one."""
        features = self.input_norm(features)
        if self.norms.sources:
            parts = features.split(self.target_width, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(self, embedded, hidden, places, seen, mask):
        """Return the hidden states of pairs; arguments as for `EagleHead`."""
        turn = self._turn(places, hidden.dtype)
        states = self.midlayer(embedded, hidden, turn, seen[0], mask)
        for layer, keys in zip(self.layers, seen[1:], strict=True):
            states = cast(DecoderLayer, layer)(states, turn, keys, mask)
        return states

    def recycled(self, states):
        """Return the states as they came out of the last layer, or behind the last norm."""
        return self.norm(states) if self.norms.output else states

    def before_output(self, states):
        """Return the states behind the last norm."""
        return self.norm(states)
