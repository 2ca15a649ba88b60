"""Medusa's heads: small networks on the target's last hidden state, one for every draft of a path (arXiv 2401.10774).

With h the target's state behind its last norm at token p, head i (from 0) predicts token p + i + 2:

    x_0 = h;   x_{j+1} = x_j + silu(W_j x_j + b_j)  for j < L;   logits = U x_L

The target's own head predicts token p + 1. Where that is the root of a tree, head i drafts the nodes of depth i + 1.
All nodes of a depth have the same row, whatever was drafted above them; so a row is fixed before its children are
drawn, which is all that exactness asks for, and no pass is run while a tree grows.

Source: FasterDecoding/Medusa, `medusa/model/medusa_model.py`; vllm-project/vllm, `model_executor/models/medusa.py`. The
authors' lists hold one block L times, so that their folders of more than one block repeat its weights. What a folder
holds is loaded, and such blocks go their own ways when they are trained on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.drafters.heads.ends import BoundEnds, HeadEnds
from polydraft.drafters.heads.reads import MadeFor, check_target
from polydraft.drafters.model import SAMPLED
from polydraft.drafters.protocol import Defaults, Drafter, DraftRequest, Needs, Session
from polydraft.drafters.rows import check_listed, draft_rows, listed
from polydraft.errors import InvalidParameter
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Step, Text
from polydraft.rows import per_row, shared
from polydraft.schemes import IID, Scheme, TopK, require_scheme
from polydraft.trees import BestFirst, Chain, Draft, Frontier, grow

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
            states: the target's last hidden states.
            shared: the target's output, for a head that has no rows of its own.
        """
        if self.lm_head is not None:
            own = self.lm_head.weight
            return self.lm_head(self(states.to(own)))
        own = next(self.parameters(), states)
        return shared(self(states.to(own)).to(states))


class MedusaHeads(nn.Module):
    """All heads of a drafter.

    Args:
        heads: the heads, that of the first draft first; all have output rows of their own, or none has.
        width: hidden width d.
        tokens: the heads' tokens, as rising ids of the target; None for all of them.
        vocab_size: how many tokens the target has, if that is known.

    Raises:
        InvalidParameter: there is no head, or the heads do not draft the same tokens.
    """

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
        self.heads, self.width = nn.ModuleList(heads), width
        self.vocab_size = self.rows if vocab_size is None and tokens is None else vocab_size
        self.register_buffer("tokens", tokens)

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[MedusaHead]:
        return (cast(MedusaHead, head) for head in self.heads)

    def head(self, draft: int) -> MedusaHead:
        """Return the head of a draft, from 0; below the last head that one again."""
        return cast(MedusaHead, self.heads[min(draft, len(self) - 1)])

    @property
    def known(self) -> Int[Tensor, " v"] | None:
        """The heads' tokens, as rising ids of the target; None for all of them."""
        return None if self.tokens is None else self.get_buffer("tokens")

    def ends(self) -> HeadEnds:
        """Return the output rows, those of the first head or the target's, and the tokens."""
        return HeadEnds(lm_head=self.head(0).lm_head, tokens=self.known)


@dataclass(frozen=True, eq=False)
class MedusaState:
    """What the heads read next.

    Args:
        heads: the heads.
        ends: their output and tokens, for a target.
        params: their sampling settings.
        vocab_size: the number of tokens that a row is drawn from.
        hidden: per row, the target's last hidden state at the last token that was read.
        place: that token's place in the text; -1 if nothing is known of the row.
    """

    heads: MedusaHeads = shared()
    ends: BoundEnds = shared()
    params: SamplingParams = shared()
    vocab_size: int = shared()
    hidden: Float[Tensor, "b d"] = per_row()
    place: Int[Tensor, "b"] = per_row(lambda place, length: place.where(place < length, -1))

    def resumes(self, fresh: "MedusaState") -> bool:
        """Tell whether both are of the same heads."""
        return self.heads is fresh.heads


@dataclass(frozen=True, eq=False)
class MedusaDrafter(Drafter):
    """Drafts with Medusa's heads: the row of a node is that of its depth.

    Trees may be deeper than there are heads: below the last head nodes are drafted from its row again, which is a law
    like any other, but a poor one. Where the state of the token before the root is not known, as in a text of one
    token, zeros are read in its place: likewise.

    Args:
        heads: the heads.
        shortlist_size: as for `ModelDrafter`.
        params: the heads' own temperature and filters; None for the target's.

    Raises:
        InvalidParameter: a shortlist without a token.
        TargetMismatch: at the start, heads for another target.
        VocabularyMismatch: at the start, heads with tokens that the target does not have.
    """

    heads: MedusaHeads
    shortlist_size: int | None = None
    params: SamplingParams | None = None
    name = "medusa"
    needs = Needs(("final",), passes=1)
    sound = True

    def __post_init__(self) -> None:
        check_listed(self.shortlist_size)

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft the likeliest paths at temperature 0, and a drawn chain above it, no deeper than there are heads."""
        if params.temperature:
            return Defaults(IID(), Chain(len(self.heads)))
        return Defaults(TopK(), BestFirst(16, depth=len(self.heads)))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, "A Medusa head")

    @torch.no_grad()
    def start(self, text: Text, session: Session) -> MedusaState:
        """Return a state in which nothing is known, and the ends for this target."""
        heads = self.heads
        target = check_target(session, self.needs.layers, heads.width, MadeFor(heads.vocab_size))
        ends = heads.ends().bound(target, heads.width)
        device = text.tokens.device
        like = ends.embed(torch.zeros(1, 1, dtype=torch.int64, device=device))  # in the target's precision
        rows = len(text.lengths)
        own = session.vocab_size if ends.tokens is None else len(ends.tokens)
        own = own if heads.rows is None else min(own, heads.rows)
        return MedusaState(
            heads,
            ends,
            self.params or session.params,
            own,
            like.new_zeros(rows, heads.width),
            torch.full((rows,), -1, device=device),
        )

    @torch.no_grad()
    def read(self, state: MedusaState, text: Text, features: Features | None) -> MedusaState:
        """Take the state of the last token that was read of every prompt."""
        return state if features is None else _fed(state, features)

    @torch.no_grad()
    def draft(self, state: MedusaState, request: DraftRequest) -> tuple[Draft, MedusaState]:
        """Grow a tree: each depth has the row of its head."""
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise
        if not policy.shape.counts:
            return Draft.nothing(text.last()), state
        size = listed(self.shortlist_size, scheme, policy, state.vocab_size)
        current = (state.place == text.lengths - 2).unsqueeze(-1)
        hidden = state.hidden.where(current, 0.0).unsqueeze(1)

        def propose(frontier: Frontier) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
            logits = state.heads.head(frontier.depth).logits(hidden, state.ends.output)[..., : state.vocab_size]
            tokens, probs = draft_rows(logits, state.params, size, scheme)
            wide = frontier.tokens.shape[1]
            return tokens.expand(-1, wide, -1), probs.expand(-1, wide, *probs.shape[2:])

        draft = grow(text.last(), policy, scheme, state.ends.named(propose), noise, trusted=True)
        return state.ends.marked(draft, size, state.vocab_size), state

    @torch.no_grad()
    def commit(self, state: MedusaState, step: Step) -> MedusaState:
        """Take the state of the last token that was accepted."""
        return _fed(state, step.features)


def _fed(state: MedusaState, features: Features) -> MedusaState:
    """Return the state with each row's last token among these, where it is not behind the one that is known."""
    place, column = features.places.max(dim=-1)
    states = features.states["final"]
    found = states.gather(1, column.view(-1, 1, 1).expand(-1, 1, states.shape[-1])).squeeze(1)
    newer = (place >= 0) & (place >= state.place)
    hidden = found.where(newer.unsqueeze(-1), state.hidden.to(found))
    return replace(state, hidden=hidden, place=place.where(newer, state.place))
