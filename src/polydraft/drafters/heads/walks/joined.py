"""A walk of our own that reads several layers of the target: an LSTM over the path, beside what they say together.

With h_1, h_2, .. the target's states at the token before the root, such as a low, a middle and a high layer's, e its
embeddings, and t the node's token:

    h = A [h_1 / rms h_1; h_2 / rms h_2; ..];   s_0 = h;   cell_0 = 0;   a = W e(t)
    f, i, o = sigmoid(F s + a), sigmoid(I s + a), sigmoid(O s + a);   g = gelu(ln_1(G s + a))
    cell <- f cell + i g;   s <- o gelu(ln_2(cell));   logits = U N(s + Q h)

The layers are joined as EAGLE-3 does (arXiv 2503.01840), and the step is that of Arctic's speculator whose gates share
a table. But all depths have one set of weights, and tables and rows U are the target's: so a level costs six products
of the hidden width and one with the rows that are drafted.
"""

from typing import cast

import torch
from torch import nn

from polydraft.drafters.heads.sublayers import Norm
from polydraft.drafters.heads.walks.speculators import GatedStep
from polydraft.drafters.heads.walks.walked_head import WalkedHead
from polydraft.models import Layer


class JoinedWalk(WalkedHead):
    """A walk of joined layers; a node's state is s, the cell and h.

    Args:
        width: the target's width.
        depths: how deep it learns to draft.
        reads: which of the target's states it reads, joined in this order.
    """

    name = "joined walk"
    title = "A walk of joined layers"
    embeds = True

    def __init__(self, width: int, depths: int, reads: tuple[Layer, ...]) -> None:
        super().__init__()
        self.width = self.target_width = width
        self.depths, self.reads = depths, reads
        self.fc = nn.Linear(len(reads) * width, width, bias=False)
        self.token_proj = nn.Linear(width, width, bias=False)
        self.step = GatedStep(width, width)
        self.hidden_proj = nn.Linear(width, width, bias=False)
        self.norm = Norm(width)

    def begin(self, hidden):
        """Return h as s, no cell, and h."""
        parts = hidden.to(self.fc.weight).unflatten(-1, (-1, self.target_width))
        joined = self.fc(nn.functional.rms_norm(parts, parts.shape[-1:], eps=1e-6).flatten(-2))
        return torch.cat([joined, torch.zeros_like(joined), joined], dim=-1)

    def read(self, states, tokens, embedded, depth):
        """Return the next s and cell, and h again."""
        assert embedded is not None
        state, cell, joined = states.chunk(3, dim=-1)
        read = self.token_proj(embedded)
        return torch.cat([*self.step(state, cell, dict.fromkeys(self.step.proj, read)), joined], dim=-1)

    def rows(self, states, depth, output):
        """Return the target's rows of s and h."""
        state, _, joined = states.chunk(3, dim=-1)
        return output(cast(torch.Tensor, self.norm(state + self.hidden_proj(joined))))
