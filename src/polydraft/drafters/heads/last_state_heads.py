"""Heads that read one state of the target, its last, at the token before the root: Medusa's.

With h the target's state behind its last norm at token p and t_0 the root's token at p + 1, Medusa's head i (from 0)
predicts token p + i + 2 (arXiv 2401.10774):

    x_0 = h;   x_{j+1} = x_j + silu(W_j x_j + b_j)  for j < L;   logits = U x_L

It drafts the nodes of depth i + 1. All nodes of a depth have the same row, whatever was drafted above them; so a row is
fixed before its children are drawn, which is all that exactness asks for, and no pass is run while a tree grows.
The authors' lists hold one block L times, so that their folders of more than one block repeat its weights. What a
folder holds is loaded, and such blocks go their own ways when they are trained on.

Sources: FasterDecoding/Medusa, `medusa/model/medusa_model.py`; vllm-project/vllm, `model_executor/models/medusa.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.drafters.contract import Defaults
from polydraft.drafters.heads.drafter import BoundEnds, HeadEnds, HeadNetwork, MadeFor, joined_states
from polydraft.errors import InvalidParameter
from polydraft.models import LanguageModel
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Text
from polydraft.rows import per_row
from polydraft.schemes import IID, TopK
from polydraft.trees import BestFirst, Chain, Frontier


@dataclass(frozen=True, eq=False)
class LastStates:
    """What a head reads next.

    Args:
        hidden: per row, the target's last hidden state at the last token that was read.
        place: that token's place in the text; -1 if nothing is known of the row.
    """

    hidden: Float[Tensor, "b d"] = per_row()
    place: Int[Tensor, "b"] = per_row(lambda place, length: place.where(place < length, -1))

    @classmethod
    def none(cls, rows: int, width: int, like: Tensor) -> "LastStates":
        """Return states of which nothing is known, in the precision of another tensor."""
        return cls(like.new_zeros(rows, width), torch.full((rows,), -1, device=like.device))

    def after(self, states: Float[Tensor, "b w d"], places: Int[Tensor, "b w"]) -> "LastStates":
        """Take the state of each row's last token among these, where it is not behind the one that is known."""
        place, column = places.max(dim=-1)
        found = states.gather(1, column.view(-1, 1, 1).expand(-1, 1, states.shape[-1])).squeeze(1)
        newer = (place >= 0) & (place >= self.place)
        hidden = found.where(newer.unsqueeze(-1), self.hidden.to(found))
        return replace(self, hidden=hidden, place=place.where(newer, self.place))

    def knows(self, text: Text) -> Bool[Tensor, "b"]:
        """Tell of which texts the state of the token before the root is known: not where there is no such token."""
        return (self.place >= 0) & (self.place == text.lengths - 2)

    def before_root(self, text: Text) -> Float[Tensor, "b 1 d"]:
        """Return the state of the token before each root; zeros where it is not known, as in a text of one token."""
        return self.hidden.where(self.knows(text).unsqueeze(-1), 0.0).unsqueeze(1)


class LastStateHead(HeadNetwork):
    """A head that reads the target's last hidden state of one token, that before the root, or several joined."""

    reads = ("final",)

    def memory(self, rows: int, capacity: int, like: Tensor) -> LastStates:
        """Return states of which nothing is known, in the target's precision."""
        return LastStates.none(rows, len(self.reads) * self.target_width, like)

    def remember(self, memory: LastStates, features: Features, counts: Sequence[int]) -> LastStates:
        """Take the state of each row's last token among these, where it is not behind the one that is known."""
        return memory.after(joined_states(features, self.reads), features.places)


Output = Callable[[Float[Tensor, "*b d"]], Float[Tensor, "*b v"]]


class ResidualBlock(nn.Module):
    """Return x + silu(W x + b); W and b start at zero, so that a new block changes nothing."""

    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)
        for weights in self.linear.parameters():
            nn.init.zeros_(weights)

    def forward(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Return the changed states."""
        return states + nn.functional.silu(self.linear(states))


class MedusaHead(nn.Module):
    """One head: residual blocks, then output rows.

    Args:
        width: hidden width d.
        layers: how many blocks L.
        lm_head: the output rows, which heads may share; None for the target's.
        bias: whether the blocks have biases.

    Raises:
        InvalidParameter: the output rows are of another width.
    """

    def __init__(self, width: int, layers: int = 1, lm_head: nn.Linear | None = None, *, bias: bool = True) -> None:
        super().__init__()
        if lm_head is not None and lm_head.in_features != width:
            raise InvalidParameter(f"A head of width {width} has output rows of width {lm_head.in_features}.")
        self.blocks = nn.ModuleList(ResidualBlock(width, bias=bias) for _ in range(layers))
        self.lm_head = lm_head

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        """The blocks' W and b."""
        return tuple(cast(ResidualBlock, block).linear for block in self.blocks)

    def forward(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """Return what goes to the output rows."""
        for block in self.blocks:
            states = block(states)
        return states

    def logits(self, states: Float[Tensor, "*b d"], shared: Output) -> Float[Tensor, "*b v"]:
        """Return the logits of this head's token.

        Args:
            shared: the target's output, for a head that has no rows of its own.
        """
        if self.lm_head is not None:
            own = self.lm_head.weight
            return self.lm_head(self(states.to(own)))
        own = next(self.parameters(), states)
        return shared(self(states.to(own)).to(states))


class MedusaHeads(LastStateHead):
    """All heads of a drafter: the row of a node is that of its depth.

    Trees may be deeper than there are heads: below the last head nodes are drafted from its row again, which is a law
    like any other, but a poor one.

    Args:
        heads: the heads, that of the first draft first; all have output rows of their own, or none has.
        width: hidden width d.
        tokens: the heads' tokens, as rising ids of the target; None for all of them.
        vocab_size: how many tokens the target has, if that is known.

    Raises:
        InvalidParameter: there is no head, or the heads do not draft the same tokens.
    """

    name = "medusa"
    title = "A Medusa head"
    tokens: Int[Tensor, " v"] | None

    def __init__(
        self,
        heads: Sequence[MedusaHead],
        width: int,
        tokens: Int[Tensor, " v"] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        rows = {None if head.lm_head is None else head.lm_head.out_features for head in heads}
        if len(rows) != 1:
            raise InvalidParameter(f"Medusa heads have one number of output rows, but these have {rows or 'no head'}.")
        (self.rows,) = rows
        if tokens is not None and self.rows not in (None, len(tokens)):
            raise InvalidParameter(f"Heads of {len(tokens)} tokens have {self.rows} output rows.")
        self.heads, self.width, self.target_width = nn.ModuleList(heads), width, width
        self.vocab_size = self.rows if vocab_size is None and tokens is None else vocab_size
        self.register_buffer("tokens", tokens)

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[MedusaHead]:
        return (cast(MedusaHead, head) for head in self.heads)

    def head(self, draft: int) -> MedusaHead:
        """Return the head of a draft, from 0; below the last head that one again."""
        return cast(MedusaHead, self.heads[min(draft, len(self) - 1)])

    def ends(self) -> HeadEnds:
        """Return the output rows, those of the first head or the target's, and the tokens."""
        return HeadEnds(lm_head=self.head(0).lm_head, tokens=self.tokens)

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft the likeliest paths at temperature 0, and a drawn chain above it, no deeper than there are heads."""
        if params.temperature:
            return Defaults(IID(), Chain(len(self)))
        return Defaults(TopK(), BestFirst(16, depth=len(self)))

    def check(self, target: LanguageModel, ends: HeadEnds) -> None:
        """Check that a target may have as many tokens as the heads were trained for."""
        MadeFor(self.vocab_size).check(target)

    def root(self, memory: LastStates, text: Text, ends: BoundEnds) -> "tuple[DepthPass, LastStates]":
        """Take the state of the token before the root."""
        return DepthPass(self, memory.before_root(text), ends), memory


@dataclass(frozen=True, eq=False)
class DepthPass:
    """The heads, and the states that they read."""

    heads: MedusaHeads
    hidden: Float[Tensor, "b 1 d"]
    ends: BoundEnds
    overlap = None

    def logits(self, frontier: Frontier) -> Float[Tensor, "b 1 V"]:
        """Return the logits of a depth, the same for all of its nodes."""
        return self.heads.head(frontier.depth).logits(self.hidden, self.ends.output)
