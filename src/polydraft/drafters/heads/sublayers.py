"""The layers of which all draft heads are built, in plain torch; decoding and training run the same code.

Tensor names inside the modules are those of published checkpoints (`self_attn.q_proj.weight`, ...), so that a reader
renames as little as possible.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import pi

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.errors import InvalidParameter
from polydraft.models import kept_product
from polydraft.rows import run

Seen = Callable[[Float[Tensor, "b g n h"], Float[Tensor, "b g n h"]], tuple[Tensor, Tensor]]
"""Takes the keys and values of the tokens of a pass, and returns all that these tokens may look at."""
Turn = tuple[Float[Tensor, "b 1 n h"], Float[Tensor, "b 1 n h"]]
"""Cosine and sine of the rotation of each position."""


@dataclass(frozen=True)
class Rotation:
    """Rotary positions (arXiv 2104.09864): channel pair i of a head turns by position * theta^(-2i/h).

    Args:
        theta: the base.
        stretch: "" for the plain frequencies; "linear" divides them by `factor`; "llama3" divides only low ones;
            "proportional" divides by `factor`, and turns only a part of the pairs (Hugging Face's kinds of that name).
        factor: by how much.
        low: of "llama3": wavelengths over `original / low` are divided.
        high: wavelengths under `original / high` are kept.
        original: the context before the stretch.
        part: of "proportional": which share of the pairs turns, the fastest ones.

    Raises:
        InvalidParameter: another stretch.
    """

    theta: float = 10_000.0
    stretch: str = ""
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    part: float = 1.0

    def __post_init__(self) -> None:
        if self.stretch not in ("", "linear", "llama3", "proportional"):
            raise InvalidParameter(f"Rotary positions of kind {self.stretch!r} are not known for draft heads.")

    @lru_cache(maxsize=64)  # noqa: B019  a value, of which there are few
    def frequencies(self, channels: int, device: torch.device) -> Float[Tensor, " c"]:
        """Return the angle per position of each pair of channels."""
        exponent = torch.arange(0, channels, 2, device=device, dtype=torch.float32) / channels
        plain = self.theta**-exponent
        if not self.stretch:
            return plain
        slow = plain / self.factor
        if self.stretch == "linear":
            return slow
        if self.stretch == "proportional":
            return slow.where(torch.arange(len(slow), device=device) < int(self.part * channels // 2), 0.0)
        turns = self.original * plain / (2 * pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept * plain + (1 - kept) * slow

    def turn(self, places: Int[Tensor, "b n"], channels: int, dtype: torch.dtype) -> Turn:
        """Return cosine and sine for these positions, each pair's angle in both halves of a head."""
        angles = places.unsqueeze(-1).float() * self.frequencies(channels, places.device)
        both = torch.cat([angles, angles], dim=-1).unsqueeze(1)
        return both.cos().to(dtype), both.sin().to(dtype)


def turned(heads: Float[Tensor, "b g n h"], turn: Turn) -> Float[Tensor, "b g n h"]:
    """Return heads rotated by their positions; channel i is paired with channel i + h/2."""
    first, second = heads.chunk(2, dim=-1)
    return heads * turn[0] + torch.cat([-second, first], dim=-1) * turn[1]


def evened(states: Float[Tensor, "*b d"], eps: float) -> Float[Tensor, "*b d"]:
    """Return states divided by their root mean square, in single precision at least."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(states.dtype)


class Norm(nn.Module):
    """Divide by the root mean square, in float32, and scale by learnt weights (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Return the scaled states."""
        if not torch.is_grad_enabled() and states.dtype == self.weight.dtype:
            return nn.functional.rms_norm(states, self.weight.shape, self.weight, self.eps)
        return self.weight * evened(states, self.eps)


@dataclass(frozen=True)
class Anatomy:
    """The sizes of a head's layers.

    Args:
        width: hidden width d.
        inner: width inside the gated layers.
        heads: query heads.
        groups: key and value heads, each shared by `heads / groups` query heads.
        channels: channels of a head.
        eps: added to mean squares in norms.
        bias: whether the projections of queries, keys and values have biases.
        output_bias: whether the projection behind attention has one.
        normed: whether queries and keys are normed per head, as in Qwen3.
        rotation: the rotary positions.

    Raises:
        InvalidParameter: query heads are no multiple of key heads, or channels are odd.
    """

    width: int
    inner: int
    heads: int
    groups: int
    channels: int
    eps: float = 1e-6
    bias: bool = False
    output_bias: bool = False
    normed: bool = False
    rotation: Rotation = Rotation()

    def __post_init__(self) -> None:
        if self.groups < 1 or self.heads % self.groups or self.channels % 2:
            raise InvalidParameter(
                f"{self.heads} query heads of {self.channels} channels cannot share {self.groups} key heads."
            )

    def turn(self, places: Int[Tensor, "b n"], dtype: torch.dtype) -> Turn:
        """Return cosine and sine for these positions."""
        return self.rotation.turn(places, self.channels, dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, over keys that the caller keeps.

    Attributes:
        scale: what scores are multiplied by; None for one over the root of the channels.

    Args:
        reads: width of what comes in; d unless said otherwise.
    """

    scale: float | None = None
    given: tuple[str, ...] = ("k_proj", "v_proj")

    def __init__(self, anatomy: Anatomy, reads: int | None = None) -> None:
        super().__init__()
        own, reads = anatomy, reads or anatomy.width
        self.anatomy = anatomy
        self.q_proj = nn.Linear(reads, own.heads * own.channels, bias=own.bias)
        self.k_proj = nn.Linear(reads, own.groups * own.channels, bias=own.bias)
        self.v_proj = nn.Linear(reads, own.groups * own.channels, bias=own.bias)
        self.o_proj = nn.Linear(own.heads * own.channels, own.width, bias=own.output_bias)
        self.q_norm = Norm(own.channels, own.eps) if own.normed else nn.Identity()
        self.k_norm = Norm(own.channels, own.eps) if own.normed else nn.Identity()

    def _heads(self, states: Float[Tensor, "b n r"], *names: str) -> Float[Tensor, "b n g h"]:
        return kept_product(self, names, states).unflatten(-1, (-1, self.anatomy.channels))

    def keys(self, states: Float[Tensor, "b n r"], turn: Turn) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values of tokens: "b g n h" each."""
        return self.turned_keys(self._heads(states, *self.given), turn)

    def turned_keys(self, projected: Float[Tensor, "b n g h"], turn: Turn) -> tuple[Tensor, Tensor]:
        """Return the same of what the projections give."""
        keys, values = projected.chunk(2, dim=2)
        return turned(self.k_norm(keys).transpose(1, 2), turn), values.transpose(1, 2)

    def forward(
        self, states: Float[Tensor, "b n r"], turn: Turn, seen: Seen, mask: Bool[Tensor, "b #n m"]
    ) -> Float[Tensor, "b n d"]:
        """Let tokens look at keys.

        Args:
            seen: gives all keys and values, given the tokens' own.
            mask: True where a token may look at a key.
        """
        queries, projected = self._heads(states, "q_proj", *self.given).tensor_split((self.anatomy.heads,), dim=2)
        queries = turned(self.q_norm(queries).transpose(1, 2), turn)
        keys, values = seen(*self.turned_keys(projected, turn))
        found = nn.functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask.unsqueeze(1),
            scale=self.scale,
            enable_gqa=self.anatomy.heads != self.anatomy.groups,
        )
        return self.o_proj(found.transpose(1, 2).flatten(-2))


class Gated(nn.Module):
    """The gated layer of Llama and Qwen: down(silu(gate x) * up x)."""

    activation = staticmethod(nn.functional.silu)

    def __init__(self, anatomy: Anatomy) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(anatomy.width, anatomy.inner, bias=False)
        self.up_proj = nn.Linear(anatomy.width, anatomy.inner, bias=False)
        self.down_proj = nn.Linear(anatomy.inner, anatomy.width, bias=False)

    def forward(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Return what is added to the states."""
        gate, up = kept_product(self, ("gate_proj", "up_proj"), states).chunk(2, dim=-1)
        return self.down_proj(self.activation(gate) * up)


class Layer(nn.Module):
    """A decoder layer: x + attention(norm x), then x + gated(norm x).

    Args:
        normed: whether there is a norm before the attention; EAGLE-1's first layer has none.
    """

    def __init__(self, anatomy: Anatomy, *, normed: bool = True) -> None:
        super().__init__()
        self.input_layernorm = Norm(anatomy.width, anatomy.eps) if normed else nn.Identity()
        self.self_attn = Attention(anatomy)
        self.post_attention_layernorm = Norm(anatomy.width, anatomy.eps)
        self.mlp = Gated(anatomy)

    def forward(
        self, states: Float[Tensor, "b n d"], turn: Turn, seen: Seen, mask: Bool[Tensor, "b #n m"]
    ) -> Float[Tensor, "b n d"]:
        """Return the layer's output; arguments as for `Attention`."""
        states = states + self.self_attn(self.input_layernorm(states), turn, seen, mask)
        return states + self.mlp(self.post_attention_layernorm(states))


class GemmaAttention(Attention):
    """Gemma 4's attention: scores are not scaled, and values are evened by their root mean square, without weights.

    Where values have no projection of their own they are that of the keys, before its norm and its rotation.
    """

    scale = 1.0

    def __init__(self, anatomy: Anatomy, *, own_values: bool) -> None:
        super().__init__(anatomy)
        self.own_values = own_values
        if not own_values:
            del self.v_proj
            self.given = ("k_proj",)

    def turned_keys(self, projected: Float[Tensor, "b n g h"], turn: Turn) -> tuple[Tensor, Tensor]:
        """Return rotated keys and evened values of what the projections give."""
        keys, values = projected.chunk(2, dim=2) if self.own_values else (projected, projected)
        keys = turned(self.k_norm(keys).transpose(1, 2), turn)
        return keys, evened(values, self.anatomy.eps).transpose(1, 2)


class GemmaGated(Gated):
    """The gated layer with Gemma's activation."""

    activation = staticmethod(partial(nn.functional.gelu, approximate="tanh"))


class GemmaLayer(Layer):
    """Gemma 4's layer, of which DeepSpec's heads for such targets are built.

        x <- x + norm_2(attn(norm_1 x));   x <- (x + norm_4(gated(norm_3 x))) * scalar

    Source: deepseek-ai/DeepSpec, `deepspec/modeling/dspark/gemma4/modeling.py`.
    """

    def __init__(self, anatomy: Anatomy, *, own_values: bool) -> None:
        super().__init__(anatomy)
        self.self_attn, self.mlp = GemmaAttention(anatomy, own_values=own_values), GemmaGated(anatomy)
        self.pre_feedforward_layernorm = Norm(anatomy.width, anatomy.eps)
        self.post_feedforward_layernorm = Norm(anatomy.width, anatomy.eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, states, turn, seen, mask):
        """Return the layer's output; arguments as for `Attention`."""
        found = self.self_attn(self.input_layernorm(states), turn, seen, mask)
        states = states + self.post_attention_layernorm(found)
        found = self.mlp(self.pre_feedforward_layernorm(states))
        return (states + self.post_feedforward_layernorm(found)) * self.layer_scalar


@dataclass(frozen=True, eq=False)
class HeadCache:
    """Preallocated keys and values; the last slot takes what belongs to no token."""

    keys: Float[Tensor, "l b g m h"]
    values: Float[Tensor, "l b g m v"]

    @classmethod
    def new(cls, anatomy: Anatomy, layers: int, rows: int, capacity: int, like: Tensor) -> "HeadCache":
        """Return an empty cache with `capacity` slots a row, on the device and in the precision of `like`."""
        shape = (layers, rows, anatomy.groups, capacity + 1, anatomy.channels)
        return cls(like.new_zeros(shape), like.new_zeros(shape))

    def writer(self, layer: int, slots: Int[Tensor, "b n"], stop: int) -> Seen:
        """Return what stores the keys and values of a pass in their slots, and shows the first `stop` slots.

        Args:
            slots: where, per token; -1 for tokens that are padding.
        """

        def seen(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            self.write(layer, slots, keys, values)
            return self.keys[layer, :, :, :stop], self.values[layer, :, :, :stop]

        return seen

    def write(self, layer: int, slots: Int[Tensor, "b n"], keys: Tensor, values: Tensor) -> None:
        """Store keys and values, "b g n h" each, in their slots; those of slot -1 are lost."""
        last = self.keys.shape[3] - 1
        rows = torch.arange(len(slots), device=slots.device).unsqueeze(-1)
        places = slots.where(slots >= 0, last)
        self.keys[layer].transpose(1, 2)[rows, places] = keys.transpose(1, 2).to(self.keys.dtype)
        self.values[layer].transpose(1, 2)[rows, places] = values.transpose(1, 2).to(self.values.dtype)

    def put(self, row: int, other: "HeadCache") -> "HeadCache":
        """Return a cache in which the only row of another one takes the place of a row, or comes behind the last.

        The other's slots beyond this one's room are left out: nothing was read into them that could be kept.
        """
        if row == self.keys.shape[1]:
            return HeadCache(
                *(torch.cat([own, own.new_zeros(own[:, :1].shape)], dim=1) for own in (self.keys, self.values))
            ).put(row, other)
        shared = min(self.keys.shape[3], other.keys.shape[3]) - 1
        self.keys[:, row, :, :shared] = other.keys[:, 0, :, :shared]
        self.values[:, row, :, :shared] = other.values[:, 0, :, :shared]
        return self

    def select(self, rows: Sequence[int]) -> "HeadCache":
        """Return a view of a run of rows: what is written there is written here."""
        return HeadCache(self.keys[:, run(rows)], self.values[:, run(rows)])

    def cut(self, row: int, length: int) -> "HeadCache":
        """Return the cache: who reads it knows how many slots count."""
        return self
