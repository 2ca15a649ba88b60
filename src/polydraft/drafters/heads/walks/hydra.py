"""Hydra: Medusa's heads, of which each also reads the tokens drafted above it (arXiv 2402.05109).

Head i drafts the children of nodes of depth i. With h the target's state and e its embeddings:

    x_0 = [h; e(t_0); ..; e(t_i)];   x_1 = R x_0 + r + silu(W x_0 + b);   x_{j+1} = x_j + silu(W' x_j + b');   U x_L + c

All blocks behind a head's first are one block. Hydra++ puts a layer between: h is then what one layer of Llama's kind
makes of the target's states of the text so far, behind its own norm. It reads accepted tokens alone, never a tree's.

Source: zankner/Hydra, `model/hydra_heads/mlp_head.py`, `prefix_mlp_head.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, arange, nn

from polydraft.drafters.heads.last_state_heads import LastStates, ResidualBlock
from polydraft.drafters.heads.sublayers import Anatomy, HeadCache, Layer, Norm
from polydraft.drafters.heads.walks.walked_head import WalkedHead
from polydraft.reading import Features, Text
from polydraft.rows import parts


class HydraHead(nn.Module):
    """One head: its first block, how often the second follows, and its output rows.

    Args:
        width: hidden width d.
        place: which head it is, from 0.
        layers: blocks, the first included.
        rows: how many output rows of its own; None for the target's.
    """

    def __init__(self, width: int, place: int, layers: int, rows: int | None) -> None:
        super().__init__()
        self.linear = nn.Linear((place + 2) * width, width)
        self.res_connection = nn.Linear((place + 2) * width, width)
        for weights in self.linear.parameters():
            nn.init.zeros_(weights)
        self.again, self.block = layers - 1, ResidualBlock(width) if layers > 1 else None
        self.lm_head = None if rows is None else nn.Linear(width, rows)

    def forward(self, states: Float[Tensor, "*b i"]) -> Float[Tensor, "*b d"]:
        """Return what goes to the output rows."""
        made = self.res_connection(states) + nn.functional.silu(self.linear(states))
        for _ in range(self.again):
            made = cast(ResidualBlock, self.block)(made)
        return made


@dataclass(frozen=True, eq=False)
class PrefixMemory:
    """What Hydra++ keeps: the keys of its layer, by places, and what the layer made of the last token."""

    cache: HeadCache = parts()
    last: LastStates = parts()

    def before_root(self, text: Text) -> Float[Tensor, "b 1 d"]:
        """Return what was made of the token before each root."""
        return self.last.before_root(text)


class Hydra(WalkedHead):
    """All heads of a drafter; a node's state is h and the embeddings of its path, with zeros behind them.

    Args:
        width: hidden width d.
        depths: how many heads.
        layers: blocks of each.
        rows: how many output rows each has of its own; None for the target's.
        prefix: sizes of Hydra++'s layer; None without one.
    """

    name = "hydra"
    title = "A Hydra head"
    embeds = True

    def __init__(self, width: int, depths: int, layers: int, rows: int | None, prefix: Anatomy | None = None) -> None:
        super().__init__()
        self.width = self.target_width = width
        self.depths, self.layers, self.own_rows, self.anatomy = depths, layers, rows, prefix
        self.heads = nn.ModuleList(HydraHead(width, place, layers, rows) for place in range(depths))
        self.prefix = None if prefix is None else Layer(prefix)
        self.norm = None if prefix is None else Norm(width, prefix.eps)

    def head(self, depth: int) -> HydraHead:
        """Return the head of a depth; below the last head that one again."""
        return cast(HydraHead, self.heads[min(depth, self.depths - 1)])

    def begin(self, hidden):
        """Return h, and room for the embeddings of a path."""
        return nn.functional.pad(hidden.to(next(self.parameters())), (0, self.depths * self.width))

    def read(self, states, tokens, embedded, depth):
        """Return the states with the node's embedding in its place; below the last head in the last one."""
        assert embedded is not None
        first = (1 + min(depth, self.depths - 1)) * self.width
        return torch.cat([states[..., :first], embedded, states[..., first + self.width :]], dim=-1)

    def rows(self, states, depth, output):
        """Return the rows of the depth's head."""
        head = self.head(depth)
        made = head(states[..., : head.linear.in_features])
        return output(made) if head.lm_head is None else head.lm_head(made)

    def memory(self, rows: int, capacity: int, like: Tensor) -> Any:
        """Return states of which nothing is known, and room for the layer's keys."""
        last = super().memory(rows, capacity, like)
        if self.anatomy is None:
            return last
        return PrefixMemory(HeadCache.new(self.anatomy, 1, rows, capacity, next(self.parameters())), last)

    def remember(self, memory: Any, features: Features, counts: Sequence[int]) -> Any:
        """Take the last states, or let the layer read those of all tokens and take what it makes of the last."""
        if self.prefix is None or self.norm is None or self.anatomy is None:
            return super().remember(memory, features, counts)
        places, states = features.places, features.states[self.reads[0]].to(self.norm.weight)
        order = arange(max(max(counts), 1), device=places.device)
        mask = order <= places.clamp_min(0).unsqueeze(-1)  # padding looks at something
        turn = self.anatomy.turn(places.clamp_min(0), states.dtype)
        made = self.norm(self.prefix(states, turn, memory.cache.writer(0, places, len(order)), mask))
        last = super().remember(memory.last, replace(features, states={self.reads[0]: made}), counts)
        return replace(memory, last=last)

    def taught(self, final, valid):
        """Return the same of whole texts, of which every token reads those before it."""
        if self.prefix is None or self.norm is None or self.anatomy is None:
            return final
        places = arange(final.shape[1], device=final.device).expand(final.shape[:2])
        mask = places.unsqueeze(-2) <= places.unsqueeze(-1)
        turn = self.anatomy.turn(places, final.dtype)
        return self.norm(self.prefix(final, turn, lambda keys, values: (keys, values), mask))
