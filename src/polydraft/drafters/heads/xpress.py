"""XPress's path term: a causal mixing over the slots of a block, whose rows know the whole drafted path.

With z_j the hidden state of slot j (the anchor's is slot 0), prev_j the token before the one that slot j predicts, and
L lower triangular for each of r channels:

    a_j = in_proj [down_h z_j; down_g mean(z); token_embed(prev_j)]
    x_k = a_k + sum_{j <= k} L[:, k, j] a_j;   x <- x + mlp_down(silu(mlp_gate x) * mlp_up x)
    logits_k = base_k + readout x_k

Slot k follows from prev_0 to prev_k alone, so the law of a node's children is known from the path above it, and rows
are walked without a further pass. Engines find the likeliest block by Jacobi rounds instead: every slot is asked again
with the choices of the round before, and after as many rounds as a block has drafts nothing changes any more. That
block is the walk's at temperature 0. Above it the last round's rows are no law of what was chosen: the walk's are.

Sources: arXiv 2608.02438; vllm-project/speculators, `models/xpress/model_definitions.py` and `core.py`.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polydraft.drafters.heads.paths import FilledBlock, PathTerm, Place, Tokens

STD = 0.02
"""The standard deviation of new weights; the mixing starts at zero."""


class SeenSlots(NamedTuple):
    """What the term reads of a block's slots beside tokens, and how many slots stand before the first that drafts."""

    seen: Float[Tensor, "b B h"]
    waits: int


class XPress(PathTerm):
    """XPress's term. A node's state is a_0 to a_k, zeros behind them: r numbers for each slot.

    Where the anchor's slot does not draft, its prev is the token before the anchor, or the anchor itself in a text of
    one token. Below the block the last slot is drafted again, with the newest token in its a.

    Args:
        vocab_size: how many tokens the target has.
        rows: rows of the head's output.
        rank: r.
        width: width of slots.
        slots: how many a block has, the anchor's included.
        inner: width inside the gated layer.
    """

    def __init__(self, vocab_size: int, rows: int, rank: int, width: int, slots: int, inner: int) -> None:
        super().__init__()
        self.token_embed = nn.Embedding(vocab_size, rank)
        self.down_h = nn.Linear(width, rank, bias=False)
        self.down_g = nn.Linear(width, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, slots, slots))
        self.mlp_gate = nn.Linear(rank, inner, bias=False)
        self.mlp_up = nn.Linear(rank, inner, bias=False)
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, rows, bias=False)
        for module in self.children():
            nn.init.normal_(module.get_parameter("weight"), std=STD)
        self.rank, self.slots, self.inner = rank, slots, inner
        self.size = slots * rank
        self.known, self.rows = vocab_size, rows

    def begin(self, block: FilledBlock) -> tuple[Float[Tensor, "b 1 s"], SeenSlots]:
        """Return the state before the root's token, which knows the anchor's slot where that does not draft."""
        mean = block.slots.mean(1, keepdim=True).expand_as(block.slots)
        seen = torch.cat([self.down_h(block.slots), self.down_g(mean)], dim=-1)
        state, made = seen.new_zeros(len(seen), 1, self.size), SeenSlots(seen, block.waits)
        for slot in range(block.waits):
            state = self._with(state, slot, block.previous.unsqueeze(1), made)
        return state, made

    def read(self, state, tokens, embedded, place):
        """Return the nodes' states."""
        (slot,) = self._slots(place)
        return self._with(state, slot, tokens, place.made)

    def corrected(self, logits, state, place):
        """Return the nodes' logits."""
        mixing = self.mix_l.tril() + torch.eye(self.slots, device=state.device, dtype=state.dtype)
        rows = mixing[:, self._slots(place)].permute(1, 2, 0)
        mixed = (state.unflatten(-1, (self.slots, self.rank)) * rows).sum(-2)
        gated = nn.functional.silu(self.mlp_gate(mixed)) * self.mlp_up(mixed)
        return logits + self.readout(mixed + self.mlp_down(gated))

    def _slots(self, place: Place) -> list[int]:
        """Return the slots that nodes' children are drawn from, by their numbers in the block."""
        return [min(depth + place.made.waits, self.slots - 1) for depth in place.depth]

    def _with(
        self, state: Float[Tensor, "b f s"], slot: int, before: Tokens, made: SeenSlots
    ) -> Float[Tensor, "b f s"]:
        """Return states that know a slot, given the tokens before the one that it predicts."""
        seen = made.seen[:, slot : slot + 1].expand(-1, before.shape[1], -1)
        joined = self.in_proj(torch.cat([seen, self.token_embed(before)], dim=-1))
        at = slot * self.rank
        return torch.cat([state[..., :at], joined, state[..., at + self.rank :]], dim=-1)
