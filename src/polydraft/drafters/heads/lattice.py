"""Drafting with a block head: one pass fills all slots, and a tree of any width is drawn from them.

The layers run once per step. A node's row is that of its depth's slot, changed by the path term for the tokens above
the node (`paths.py`), which costs small products for each level. So the law of every path is known, wide trees cost
next to nothing to draft, and every scheme and verifier applies: the row of a node is fixed before its children are
drawn.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters.heads.ancestry import parents_of, with_nodes
from polydraft.drafters.heads.block import BlockHead
from polydraft.drafters.heads.cache import HeadCache
from polydraft.drafters.heads.ends import BoundEnds, HeadEnds
from polydraft.drafters.heads.reads import MadeFor, check_target, joined_states
from polydraft.drafters.model import SAMPLED
from polydraft.drafters.protocol import Defaults, Drafter, DraftRequest, Needs, Session
from polydraft.drafters.rows import check_listed, draft_rows, listed
from polydraft.errors import VocabularyMismatch
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Step, Text
from polydraft.rows import parts, shared
from polydraft.schemes import IID, Scheme, TopK, require_scheme
from polydraft.trees import BestFirst, Chain, Draft, Frontier, grow


@dataclass(frozen=True, eq=False)
class BlockState:
    """The head's keys of the committed tokens, its ends for a target, its sampling settings and number of tokens."""

    head: BlockHead = shared()
    cache: HeadCache = parts()
    ends: BoundEnds = shared()
    params: SamplingParams = shared()
    vocab_size: int = shared()

    def resumes(self, fresh: "BlockState") -> bool:
        """Tell whether both are of the same head."""
        return self.head is fresh.head


@dataclass(frozen=True, eq=False)
class BlockDrafter(Drafter):
    """Drafts with a block head, such as DFlash, DSpark, JetSpec, Domino or DFlash2.

    Trees may be deeper than the block: below it nodes are drafted from the last slot again, which is a law like any
    other, but a poor one.

    Args:
        head: the head.
        ends: what it has of its own at its ends.
        shortlist_size: as for `ModelDrafter`.
        params: the head's own temperature and filters; None for the target's.
        made_for: what its folder says of its target.

    Raises:
        InvalidParameter: a shortlist without a token.
        TargetMismatch: at the start, a head for another target.
        VocabularyMismatch: at the start, if the head has tokens that the target does not have.
    """

    head: BlockHead
    ends: HeadEnds
    shortlist_size: int | None = None
    params: SamplingParams | None = None
    made_for: MadeFor = MadeFor()
    name = "block head"
    sound = True

    def __post_init__(self) -> None:
        check_listed(self.shortlist_size)

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]  an attribute of most drafters
        """The target's hidden states that the head reads."""
        return Needs(self.head.shape.reads, passes=1)

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft the likeliest paths at temperature 0, and a drawn chain above it (docs/performance.md)."""
        if params.temperature:
            return Defaults(IID(), Chain(self.head.shape.drafts))
        return Defaults(TopK(), BestFirst(8))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, "A block head")

    @torch.no_grad()
    def start(self, text: Text, session: Session) -> BlockState:
        """Return an empty cache and the ends for this target."""
        shape = self.head.shape
        target = check_target(session, shape.reads, shape.target_width, self.made_for)
        if shape.mask_id is not None and shape.mask_id >= target.vocab_size:
            raise VocabularyMismatch(
                f"The head's mask is token {shape.mask_id} and the target has {target.vocab_size} tokens: it was "
                "trained for another target."
            )
        ends = self.ends.bound(target, shape.anatomy.width)
        self._check_path(target.vocab_size)
        room = session.capacity + shape.block
        cache = HeadCache.new(shape.anatomy, shape.layers, len(text.lengths), room, self.head.fc.weight)
        tokens = session.vocab_size if ends.tokens is None else len(ends.tokens)
        return BlockState(self.head, cache, ends, self.params or session.params, tokens)

    @torch.no_grad()
    def read(self, state: BlockState, text: Text, features: Features | None) -> BlockState:
        """Make keys of what was read of the prompts."""
        return state if features is None else self._with(state, features)

    @torch.no_grad()
    def draft(self, state: BlockState, request: DraftRequest) -> tuple[Draft, BlockState]:
        """Fill the slots in one pass and grow a tree from them."""
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise
        if not policy.shape.counts:
            return Draft.nothing(text.last()), state
        growing = _Growing.of(state, self._slots(state, text))
        size = listed(self.shortlist_size, scheme, policy, state.vocab_size)
        propose = state.ends.named(partial(growing.propose, size=size, scheme=scheme))
        overlap = None if self.head.confidence is None else growing.overlap
        draft = grow(text.last(), policy, scheme, propose, noise, overlap, trusted=True)
        return state.ends.marked(draft, size, state.vocab_size), state

    @torch.no_grad()
    def commit(self, state: BlockState, step: Step) -> BlockState:
        """Make keys of the tokens that were committed, from the target's own hidden states."""
        return self._with(state, step.features)

    def _check_path(self, vocab_size: int) -> None:
        """Check that the path term knows all tokens of the target, and changes as many rows as are drafted from."""
        path, ends = self.head.path, self.ends
        rows = vocab_size if ends.tokens is None else len(ends.get_buffer("tokens"))
        rows = rows if ends.lm_head is None else ends.lm_head.out_features
        if path.known is not None and path.known < vocab_size:
            raise VocabularyMismatch(
                f"The head's path term knows {path.known} tokens and the target has {vocab_size}: it was trained for "
                "another target."
            )
        if path.rows is not None and path.rows != rows:
            raise VocabularyMismatch(
                f"The head's path term has {path.rows} rows for {rows} tokens to draft: it was trained for another "
                "target."
            )

    def _with(self, state: BlockState, features: Features) -> BlockState:
        states = joined_states(features, self.head.shape.reads).to(self.head.fc.weight)
        for layer, (keys, values) in enumerate(self.head.context(states, features.places.clamp_min(0))):
            state.cache.write(layer, features.places, keys, values)
        return state

    def _slots(self, state: BlockState, text: Text) -> Float[Tensor, "b D d"]:
        """Return the hidden states of the slots that draft."""
        head, shape, device = self.head, self.head.shape, text.tokens.device
        anchors = (text.lengths - 1).unsqueeze(-1)
        places = anchors + torch.arange(shape.block, device=device)
        stop = max(text.counts) - 1 + shape.block
        keys = torch.arange(stop, device=device).unsqueeze(0)
        masks = [head.sees(layer, places, keys, anchors) for layer in range(shape.layers)]
        embedded = state.ends.embed(text.last().unsqueeze(-1)).squeeze(1).to(head.fc.weight)
        filled = shape.mask_id
        mask = None if filled is None else state.ends.embed(torch.full((1, 1), filled, device=device))[0, 0]
        writers = [state.cache.writer(layer, places, stop) for layer in range(shape.layers)]
        return head.drafting(head.slots(head.query(embedded, mask), places, writers, masks))


@dataclass(eq=False)
class _Growing:
    """The slots of a step, and the path states of all nodes that were proposed for, in their order."""

    state: BlockState
    slots: Float[Tensor, "b D d"]
    base: Float[Tensor, "b D V"] | None
    paths: Float[Tensor, "b n s"]

    @classmethod
    def of(cls, state: BlockState, slots: Float[Tensor, "b D d"]) -> "_Growing":
        base = None if state.head.path.mixes else state.ends.output(slots)
        return cls(state, slots, base, state.head.path.begin(slots)[:, :0])

    def propose(
        self, frontier: Frontier, size: int | None, scheme: Scheme
    ) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
        """Return the rows of one depth's nodes."""
        path, ends = self.state.head.path, self.state.ends
        slot = min(frontier.depth, self.slots.shape[1] - 1)
        wide = frontier.tokens.shape[1]
        hidden = self.slots[:, slot : slot + 1].expand(-1, wide, -1)
        embedded = ends.embed(frontier.tokens).to(hidden) if path.embeds else None
        states = path.read(self._above(frontier), frontier.tokens, embedded, hidden)
        self.paths = with_nodes(self.paths, frontier, states)
        if self.base is None:
            logits = ends.output(path.mixed(states, hidden))
        else:
            logits = self.base[:, slot : slot + 1].expand(-1, wide, -1)
        logits = path.corrected(logits, states, hidden, range(slot, slot + 1))
        return draft_rows(logits, self.state.params, size, scheme)

    def overlap(self, frontier: Frontier) -> Float[Tensor, "b f"]:
        """Return what the confidence head says of the rows that were proposed last."""
        slot = min(frontier.depth, self.slots.shape[1] - 1)
        states = self.paths[:, frontier.nodes.start : frontier.nodes.stop]
        return self.state.head.sure(self.slots[:, slot : slot + 1].expand(-1, states.shape[1], -1), states)

    def _above(self, frontier: Frontier) -> Float[Tensor, "b f s"]:
        """Return the states of the nodes' parents; before the root's token the first state."""
        if not frontier.nodes.start:
            return self.state.head.path.begin(self.slots)
        return self.paths.gather(1, parents_of(frontier).expand(-1, -1, self.paths.shape[-1]))
