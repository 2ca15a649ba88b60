"""Drafting with EAGLE's heads: one short pass per depth, over the nodes of that depth.

Slot s of the cache holds the pair of token s and the target's state of the token before it; its position is s - 1. The
root's pair, like all committed ones, is made of the target's own states, and a drafted node's of what the head itself
made of the node above. So keys of drafted nodes are never kept: a step's features bring the target's own states, and
the next draft begins with one pass over the pairs that came since.

A text of one token has no pair. It is drafted for from its token beside a state of zeros, in slot 0, which no longer
text sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.drafters.heads.ancestry import parents_of, with_nodes
from polydraft.drafters.heads.cache import HeadCache
from polydraft.drafters.heads.eagle import EagleHead
from polydraft.drafters.heads.ends import BoundEnds, HeadEnds
from polydraft.drafters.heads.reads import MadeFor, check_target, joined_states
from polydraft.drafters.model import SAMPLED
from polydraft.drafters.protocol import Defaults, Drafter, DraftRequest, Needs, Session
from polydraft.drafters.rows import check_listed, draft_rows, listed
from polydraft.models import LanguageModel
from polydraft.probs import SamplingParams, sent
from polydraft.reading import Features, Step, Text
from polydraft.rows import counts, parts, shared, slots
from polydraft.schemes import IID, Scheme, TopK, require_scheme
from polydraft.trees import BestFirst, Chain, Draft, Frontier, grow, tree_mask

AT_ONCE = 512
"""How many pairs of a row are read in one pass; a longer one takes more memory for its mask and brings no more."""
CHAIN = Chain(5)
"""What is drafted above temperature 0."""
TREE = BestFirst(25)
"""What is drafted at temperature 0: as many nodes as EAGLE-1's own tree has."""


@dataclass(frozen=True, eq=False)
class EagleState:
    """What the head has of each row.

    Args:
        head: the head.
        cache: its keys, by slots.
        states: what enters a pair, by the place of the token that the target made it of; one place more for padding.
        given: per row, of how many tokens the target's states have come.
        done: per row, how many pairs of such states are in the cache, from slot 1.
        ends: its ends for the target.
        params: its sampling settings.
        vocab_size: its number of tokens.
    """

    head: EagleHead = shared()
    cache: HeadCache = parts()
    states: Float[Tensor, "b m d"] = slots()
    given: tuple[int, ...] = counts()
    done: tuple[int, ...] = counts(lag=1)
    ends: BoundEnds = shared()
    params: SamplingParams = shared()
    vocab_size: int = shared()

    def resumes(self, fresh: "EagleState") -> bool:
        """Tell whether both are of the same head."""
        return self.head is fresh.head


@dataclass(frozen=True, eq=False)
class EagleDrafter(Drafter):
    """Drafts with a head of EAGLE-1 or EAGLE-3.

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

    head: EagleHead
    ends: HeadEnds
    shortlist_size: int | None = None
    params: SamplingParams | None = None
    made_for: MadeFor = MadeFor()
    name = "eagle"
    sound = True

    def __post_init__(self) -> None:
        check_listed(self.shortlist_size)

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]  an attribute of most drafters
        """The target's hidden states that the head reads."""
        return Needs(self.head.reads)

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft the likeliest paths at temperature 0, and a drawn chain above it."""
        return Defaults(IID(), CHAIN) if params.temperature else Defaults(TopK(), TREE)

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, "An EAGLE head")

    @torch.no_grad()
    def start(self, text: Text, session: Session) -> EagleState:
        """Return an empty cache and the ends for this target."""
        head, rows = self.head, len(text.lengths)
        target = check_target(session, head.reads, head.target_width, self.made_for)
        ends = self._bound(target)
        cache = HeadCache.new(head.anatomy, head.depth, rows, session.capacity, head.like)
        states = head.like.new_zeros(rows, session.capacity + 1, head.anatomy.width)
        tokens = session.vocab_size if ends.tokens is None else len(ends.tokens)
        none = (0,) * rows
        return EagleState(head, cache, states, none, none, ends, self.params or session.params, tokens)

    @torch.no_grad()
    def read(self, state: EagleState, text: Text, features: Features | None) -> EagleState:
        """Make pairs of what was read of the prompts."""
        if features is None:
            return state
        state = self._given(state, features, [count - 1 for count in text.counts])
        return _caught_up(state, text)[1]

    @torch.no_grad()
    def draft(self, state: EagleState, request: DraftRequest) -> tuple[Draft, EagleState]:
        """Read the pairs that came since, and grow a tree from the last one: one pass per depth."""
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise
        if not policy.shape.counts:
            return Draft.nothing(text.last()), state
        root, state = _caught_up(state, text)
        size = listed(self.shortlist_size, scheme, policy, state.vocab_size)
        propose = partial(_Growing(state, text, root).propose, size=size, scheme=scheme)
        draft = grow(text.last(), policy, scheme, state.ends.named(propose), noise, trusted=True)
        return state.ends.marked(draft, size, state.vocab_size), state

    @torch.no_grad()
    def commit(self, state: EagleState, step: Step) -> EagleState:
        """Take over the target's own states of the tokens that were committed."""
        kept = (step.whole or step.verdict).kept
        return self._given(state, step.features, [a + b for a, b in zip(step.text.counts, kept, strict=True)])

    def _bound(self, target: LanguageModel) -> BoundEnds:
        """Return the ends, the target's output head being given states of its own precision."""
        ends = self.ends.bound(target, self.head.anatomy.width)
        if self.ends.lm_head is not None:
            return ends
        output, tokens = ends.output, torch.zeros(1, 1, dtype=torch.int64, device=target.device)
        dtype = target.embedded(tokens).dtype
        return replace(ends, output=lambda states: output(states.to(dtype)))

    def _given(self, state: EagleState, features: Features, given: Sequence[int]) -> EagleState:
        """Return the state with hidden states of the target put in their places."""
        fused = self.head.fused(joined_states(features, self.head.reads).to(self.head.like))
        last = state.states.shape[1] - 1
        rows = torch.arange(len(fused), device=fused.device).unsqueeze(-1)
        state.states[rows, features.places.where(features.places >= 0, last)] = fused.to(state.states.dtype)
        return replace(state, given=tuple(given))


def _caught_up(state: EagleState, text: Text) -> tuple[Float[Tensor, "b 1 d"], EagleState]:
    """Read all pairs of the target's own states that are not in the cache, and the last in any case.

    Returns:
        what the head made of each row's last pair; and the state with these pairs.
    """
    counts, device = text.counts, state.states.device
    first = [min(done + 1, count - 1) for done, count in zip(state.done, counts, strict=True)]
    width = max(count - start for count, start in zip(counts, first, strict=True))
    starts, known = _sent(first, device), _sent(state.given, device)
    found = state.states[:, :0]
    for begin in range(0, width, AT_ONCE):
        columns = torch.arange(begin, min(begin + AT_ONCE, width), device=device)
        slots = text.lengths.unsqueeze(-1) - width + columns
        slots = slots.where(slots >= starts, -1)
        stop = max(counts) - width + int(columns.shape[0]) + begin
        before = (slots - 1).clamp_min(0).unsqueeze(-1).expand(-1, -1, state.states.shape[-1])
        there = (slots >= 1) & (slots <= known)
        hidden = state.states.gather(1, before).where(there.unsqueeze(-1), 0)
        tokens = text.tokens.gather(1, slots.clamp_min(0)).where(slots >= 0, 0)
        order = torch.arange(stop, device=device)
        mask = (order <= slots.clamp_min(0).unsqueeze(-1)) & _visible(text, order)
        mask |= (slots < 1).unsqueeze(-1) & (order == 0)  # padding looks at something
        found = _passed(state, tokens, hidden, slots, mask)
    return found[:, -1:], replace(state, done=tuple(max(count - 1, 0) for count in counts))


def _passed(
    state: EagleState,
    tokens: Int[Tensor, "b n"],
    hidden: Float[Tensor, "b n d"],
    slots: Int[Tensor, "b n"],
    mask: Bool[Tensor, "b n m"],
    places: Int[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b n d"]:
    """Return what the head makes of pairs, whose keys go into their slots."""
    embedded = state.ends.embed(tokens).to(hidden)
    seen = [state.cache.writer(layer, slots, mask.shape[-1]) for layer in range(state.head.depth)]
    return state.head(embedded, hidden, (slots if places is None else places) - 1, seen, mask)


def _visible(text: Text, slots: Int[Tensor, " m"]) -> Bool[Tensor, "b 1 m"]:
    """Tell which slots may be seen at all: the first only in texts of one token."""
    return ((slots > 0) | (text.lengths == 1).unsqueeze(-1)).unsqueeze(1)


def _sent(numbers: Sequence[int], device: torch.device) -> Int[Tensor, "b 1"]:
    return sent(torch.tensor(list(numbers)), device).unsqueeze(-1)


@dataclass(eq=False)
class _Growing:
    """What the head made of all nodes that were proposed for, in their order; the root's first."""

    state: EagleState
    text: Text
    made: Float[Tensor, "b n d"]

    def propose(
        self, frontier: Frontier, size: int | None, scheme: Scheme
    ) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
        """Return the rows of one depth's nodes."""
        head = self.state.head
        if frontier.depth:
            made = self._passed(frontier)
            self.made = with_nodes(self.made, frontier, made)
        logits = self.state.ends.output(head.before_output(self.made[:, frontier.nodes.start :]))
        return draft_rows(logits[..., : self.state.vocab_size], self.state.params, size, scheme)

    def _passed(self, frontier: Frontier) -> Float[Tensor, "b f d"]:
        """Run the head over the nodes, each beside what it made of the node above."""
        above = self.made.gather(1, parents_of(frontier).expand(-1, -1, self.made.shape[-1]))
        roots, stop = self.text.lengths - 1, max(self.text.counts) - 1 + frontier.nodes.stop
        nodes = torch.arange(frontier.nodes.start, frontier.nodes.stop, device=roots.device)
        slots = roots.unsqueeze(-1) + nodes
        places = (roots + frontier.depth).unsqueeze(-1).expand_as(slots)
        mask = tree_mask(frontier.ancestors, roots, stop)
        mask = mask & _visible(self.text, torch.arange(stop, device=roots.device))
        return _passed(self.state, frontier.tokens, self.state.head.recycled(above), slots, mask, places)
