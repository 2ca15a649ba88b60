"""How a block head's row for a node depends on the tokens drafted above it: one term per published head.

A block head's layers run once, before anything is drafted, so that they cannot know what was drawn above a slot. A
path term reads it: it holds a small state per node, which follows from the parent's state and the node's own token, and
what it makes of the whole block once per step. So the draft row of a node is a function of the block and of the node's
path, known without another pass:

    q(. | path) = softmax((output(mixed(h, s)) + correction(h, s)) / T),   s = state after the path's tokens

where h is the hidden state of the slot. A row is fixed before the node's children are drawn, which is all that
exactness asks for.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.drafters.heads.drafter import BoundEnds
from polydraft.models import kept_product

Tokens = Int[Tensor, "b f"]


@dataclass(frozen=True, eq=False)
class FilledBlock:
    """What is known of blocks before anything is drafted from them.

    Args:
        slots: the hidden states of all slots, the anchor's first.
        waits: how many slots stand before the first that drafts: 0 or 1.
        logits: of the slots that draft; None where the term changes slots before the output head (`mixes`).
        previous: the tokens before the anchors; the anchors themselves in texts of one token.
        context: what the layers read of these tokens; None unless the term asks for it (`anchored`).
        known: in which texts there is such a token.
        ends: the head's.
    """

    slots: Float[Tensor, "b B d"]
    waits: int
    logits: Float[Tensor, "b D V"] | None
    previous: Int[Tensor, "b"]
    context: Float[Tensor, "b d"] | None
    known: Bool[Tensor, "b"] | None
    ends: BoundEnds

    @property
    def drafting(self) -> Float[Tensor, "b D d"]:
        """The slots that draft, the first draft's first."""
        return self.slots[:, self.waits :]


@dataclass(frozen=True, eq=False)
class Place:
    """Where the children of nodes are drawn from.

    Args:
        hidden: the hidden states of the children's slots.
        depth: how many drafts lie above the children of each node; one number if it is the same for all.
        made: what the term made of the block.
    """

    hidden: Float[Tensor, "b f d"]
    depth: range
    made: Any


class PathTerm(nn.Module):
    """Rows that do not depend on the path, as in DFlash and JetSpec; what other terms derive from.

    Attributes:
        size: the width of a node's state.
        mixes: whether slots are changed before the output head, so that every node needs a product with it.
        embeds: whether tokens' input embeddings are read.
        anchored: whether the newest row of the layers' context is read.
        known: how many of the target's tokens a table of its own has; None if there is none.
        rows: how many output rows it changes; None if it changes none.
    """

    size: int = 0
    known: int | None = None
    rows: int | None = None
    mixes: bool = False
    embeds: bool = False
    anchored: bool = False

    @property
    def told(self) -> int:
        """How many numbers of a state a confidence head is told: all."""
        return self.size

    def tell(self, state: Float[Tensor, "b f s"]) -> Float[Tensor, "b f t"]:
        """Return what a confidence head reads of nodes' states beside the slot: all of them."""
        return state

    def begin(self, block: FilledBlock) -> tuple[Float[Tensor, "b 1 s"], Any]:
        """Return the state before the root's own token was read, and what was made of the block for all nodes."""
        return block.slots.new_zeros(len(block.slots), 1, self.size), None

    def read(
        self,
        state: Float[Tensor, "b f s"],
        tokens: Tokens,
        embedded: Float[Tensor, "b f d"] | None,
        place: Place,
    ) -> Float[Tensor, "b f s"]:
        """Return the states of nodes of one depth, given their parents' states and their own tokens.

        Args:
            embedded: their input embeddings, if the term `embeds`.
        """
        return state

    def mixed(self, state: Float[Tensor, "b f s"], place: Place) -> Float[Tensor, "b f d"]:
        """Return what goes to the output head."""
        return place.hidden

    def corrected(
        self, logits: Float[Tensor, "b f V"], state: Float[Tensor, "b f s"], place: Place
    ) -> Float[Tensor, "b f V"]:
        """Return the nodes' logits."""
        return logits


class Markov(PathTerm):
    """DSpark's term: a product of rank r of the last token, W2 W1[token] (block-drafters of DeepSpec, `markov_head`).

    Args:
        rows: rows of the head's output.
        rank: r.
    """

    def __init__(self, vocab_size: int, rows: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, rows, bias=False)
        for table in (self.markov_w1, self.markov_w2):
            nn.init.normal_(table.weight, std=0.02)
        self.rank = self.size = rank
        self.known, self.rows = vocab_size, rows

    def read(self, state, tokens, embedded, place):
        """Return the nodes' states."""
        return self.markov_w1(tokens)

    def corrected(self, logits, state, place):
        """Return the nodes' logits."""
        return logits + self.markov_w2(state)

    def gained(self, logits: Float[Tensor, "b #f V"], tokens: Tokens) -> Float[Tensor, "b f V"]:
        """Return the logits behind tokens, of rows that know nothing of them."""
        return logits + self.markov_w2(self.markov_w1(tokens)).to(logits.dtype)


class GatedMarkov(Markov):
    """DSpark's gated term: W2 (sigmoid(gate [h; e]) * e) with e = W1[token]."""

    def __init__(self, vocab_size: int, rows: int, rank: int, width: int) -> None:
        super().__init__(vocab_size, rows, rank)
        self.gate_proj = nn.Linear(width + rank, rank)

    def corrected(self, logits, state, place):
        """Return the nodes' logits."""
        gate = torch.sigmoid(self.gate_proj(torch.cat([place.hidden, state], dim=-1)))
        return logits + self.markov_w2(gate * state)


class RecurrentMarkov(Markov):
    """DSpark's recurrent term: [g; c; o] = joint [s; e; h], s' = sig(g) s + (1 - sig(g)) tanh(c), bias W2 tanh(o).

    A node's state is [s'; e; o], since the bias reads o and the confidence head reads e.
    """

    def __init__(self, vocab_size: int, rows: int, rank: int, width: int) -> None:
        super().__init__(vocab_size, rows, rank)
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)
        self.size = 3 * rank

    @property
    def told(self) -> int:
        """How many numbers of a state a confidence head is told: those of e."""
        return self.rank

    def tell(self, state):
        """Return what a confidence head reads of nodes' states: e, the last token's row."""
        return state[..., self.rank : 2 * self.rank]

    def read(self, state, tokens, embedded, place):
        """Return the nodes' states."""
        old, token = state[..., : self.rank], self.markov_w1(tokens)
        gate, new, out = self.joint_proj(torch.cat([old, token, place.hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.cat([gate * old + (1 - gate) * torch.tanh(new), token, out], dim=-1)

    def corrected(self, logits, state, place):
        """Return the nodes' logits."""
        return logits + self.markov_w2(torch.tanh(state[..., 2 * self.rank :]))


class Prefix(nn.Module):
    """A gated recurrent unit without biases over input embeddings, with the tensor names of `torch.nn.GRU`."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * size, width))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * size, size))
        for table in (self.weight_ih_l0, self.weight_hh_l0):
            nn.init.uniform_(table, -(size**-0.5), size**-0.5)

    def forward(self, state: Float[Tensor, "b f s"], given: Float[Tensor, "b f d"]) -> Float[Tensor, "b f s"]:
        """Return the next states (arXiv 1406.1078, equations 5 to 8, with torch's place of the reset gate)."""
        reset, update, new = kept_product(self, ("weight_ih_l0",), given).chunk(3, dim=-1)
        old_reset, old_update, old_new = kept_product(self, ("weight_hh_l0",), state).chunk(3, dim=-1)
        keep = torch.sigmoid(update + old_update)
        fresh = torch.tanh(new + torch.sigmoid(reset + old_reset) * old_new)
        return fresh + keep * (state - fresh)


class RecurrentTerm(PathTerm):
    """A term whose state is a recurrent one over the embeddings of the path."""

    embeds = True

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.prefix_gru, self.size = Prefix(width, size), size

    def read(self, state, tokens, embedded, place):
        """Return the nodes' states."""
        return self.prefix_gru(state, embedded)


class Domino(RecurrentTerm):
    """Domino's term: a recurrent state over the path's embeddings, and a small network from [h; g] to all rows.

    Args:
        size: width of the recurrent state.
        inner: width inside the small network.
        plain: how many drafts lie above the first that is corrected.
    """

    def __init__(self, width: int, rows: int, size: int, inner: int, plain: int) -> None:
        super().__init__(width, size)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + size, inner, bias=False), nn.SiLU(), nn.Linear(inner, rows, bias=False)
        )
        self.plain, self.rows = plain, rows

    def corrected(self, logits, state, place):
        """Return the nodes' logits."""
        late = torch.tensor(place.depth, device=logits.device).unsqueeze(-1) >= self.plain
        return logits + self.embed_proj(torch.cat([place.hidden, state], dim=-1)) * late


class Mixing(RecurrentTerm):
    """This package's own term: the recurrent state changes a slot before the output head, h + W2 silu(W1 [h; g]).

    It needs a product with the output head for every node, and no table of the vocabulary of its own.

    Args:
        inner: width inside the small network.
    """

    mixes = True

    def __init__(self, width: int, size: int, inner: int) -> None:
        super().__init__(width, size)
        last = nn.Linear(inner, width)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.mix = nn.Sequential(nn.Linear(width + size, inner, bias=False), nn.SiLU(), last)

    def mixed(self, state, place):
        """Return what goes to the output head."""
        return place.hidden + self.mix(torch.cat([place.hidden, state], dim=-1))


class Selector(PathTerm):
    """DFlash2's term: among the likeliest c tokens of a slot, U[c] + <A[token] * (W h), B[c]>; no other token.

    Args:
        rank: width of both codebooks.
        most: how many candidates a slot has.
    """

    def __init__(self, vocab_size: int, rows: int, rank: int, width: int, most: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank).normal_(std=0.02))
        self.successor_codebook = nn.Parameter(torch.zeros(rows, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        self.size, self.most = rank, most
        self.known, self.rows = vocab_size, rows

    def read(self, state, tokens, embedded, place):
        """Return the nodes' states."""
        return self.predecessor_codebook[tokens]

    def corrected(self, logits, state, place):
        """Return the nodes' logits."""
        best, places = logits.topk(min(self.most, logits.shape[-1]), dim=-1)
        asked = (state * self.hidden_projection(place.hidden)).unsqueeze(-2)
        scores = best + (asked * self.successor_codebook[places]).sum(-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, places, scores)
