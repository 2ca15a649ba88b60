"""ReDrafter: one recurrent state for all depths, whose rows the target's state and it make together (arXiv 2403.09919).

    s_0 = 0;   s <- silu(W e(t) + U s + b), or s <- e(t) + s;   y = [h; s], or A [h; s] + a
    y <- y + silu(W_j y + b_j)  for j < L;   logits = R y

e are the target's embeddings. The authors draft by a beam whose shared beginnings are a tree: that is best first, and
any tree and scheme will do. They leave out the temperature, keep the 50 likeliest tokens, and compare beams with drawn
chains in their sampling mode, which is not exact; here rows are those of the formula at the drafter's temperature.

Source: apple/ml-recurrent-drafter, `modeling_drafter.py`, `configuration_drafter.py`.
"""

from typing import cast

import torch
from torch import nn

from polydraft.drafters.heads.last_state_heads import ResidualBlock
from polydraft.drafters.heads.walks.walked_head import WalkedHead

DEPTHS = 5
"""How deep its trainer teaches, whatever the folder says."""


class RecurrentHead(WalkedHead):
    """A recurrent drafter.

    Args:
        width: the target's width.
        layers: how many residual blocks L.
        rows: how many output rows.
        inner: the width of y behind its projection; None for 2 d and no projection.
        recurrent: whether s has weights, or is a sum.
        depths: how deep it learnt to draft.
    """

    name = "redrafter"
    title = "A ReDrafter head"
    embeds = True

    def __init__(
        self,
        width: int,
        layers: int,
        rows: int,
        inner: int | None = None,
        *,
        recurrent: bool = True,
        depths: int = DEPTHS,
    ) -> None:
        super().__init__()
        self.width = self.target_width = width
        self.recurrent, self.inner, self.layers = recurrent, inner or 2 * width, layers
        self.depths, self.own_rows = depths, rows
        self.rnn_u = nn.Linear(width, width) if recurrent else None
        self.rnn_w = nn.Linear(width, width, bias=False) if recurrent else None
        self.input_proj = None if inner in (None, 2 * width) else nn.Linear(2 * width, self.inner)
        self.blocks = nn.ModuleList(ResidualBlock(self.inner) for _ in range(layers))
        self.lm_head = nn.Linear(self.inner, rows, bias=False)

    def begin(self, hidden):
        """Return h beside a state of zeros."""
        hidden = hidden.to(next(self.parameters()))
        return torch.cat([hidden, torch.zeros_like(hidden)], dim=-1)

    def read(self, states, tokens, embedded, depth):
        """Return h beside the next recurrent state."""
        assert embedded is not None
        hidden, state = states.chunk(2, dim=-1)
        if self.rnn_u is None or self.rnn_w is None:
            return torch.cat([hidden, embedded + state], dim=-1)
        return torch.cat([hidden, nn.functional.silu(self.rnn_w(embedded) + self.rnn_u(state))], dim=-1)

    def rows(self, states, depth, output):
        """Return the rows of both."""
        made = states if self.input_proj is None else self.input_proj(states)
        for block in self.blocks:
            made = cast(ResidualBlock, block)(made)
        return self.lm_head(made)
