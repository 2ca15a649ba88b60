"""One drafter for all heads: what differs between them is the network (`HeadNetwork`), and how a tree grows from it."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.drafters.heads.ends import BoundEnds, HeadEnds
from polydraft.drafters.heads.reads import MadeFor, check_target
from polydraft.drafters.model import SAMPLED
from polydraft.drafters.protocol import Defaults, Drafter, DraftRequest, Needs, Session
from polydraft.drafters.rows import check_listed, draft_rows, listed
from polydraft.models import LanguageModel, Layer
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Step, Text
from polydraft.rows import parts, shared
from polydraft.schemes import Scheme, require_scheme
from polydraft.trees import Draft, Frontier, Overlap, grow


class TreePass(Protocol):
    """What a network made of a text, from which a tree grows; it may keep what it makes of nodes."""

    @property
    def overlap(self) -> Overlap | None:
        """What the head thinks of the rows that it gave last; None if it thinks nothing."""
        ...

    def logits(self, frontier: Frontier) -> Float[Tensor, "b f V"]:
        """Return the logits of the nodes' children; one node may stand for all of a depth."""
        ...


class HeadNetwork(nn.Module):
    """What a head is, but for its ends and settings.

    Attributes:
        name: its drafter's name in tables.
        title: what errors call it.
        passes: of the network that a draft takes; None for one for each level.
        reads: which of the target's hidden states it reads, joined in this order.
        target_width: the width of these.
        width: its own hidden width, of embeddings and of what goes to the output rows.
    """

    name: str
    title: str
    passes: int | None = 1
    reads: tuple[Layer, ...]
    target_width: int
    width: int

    @abstractmethod
    def defaults(self, params: SamplingParams) -> Defaults:
        """Return the scheme and the trees that suit it under the target's sampling settings."""

    def check(self, target: LanguageModel, ends: HeadEnds) -> None:
        """Raise `VocabularyMismatch` if it cannot be for a target, whose states are as it reads them."""

    @abstractmethod
    def memory(self, rows: int, capacity: int, like: Tensor) -> Any:
        """Return what it keeps of texts of which nothing was read: a `RowWise` value, or a dataclass of marked fields.

        Args:
            rows: how many texts.
            capacity: how many tokens the longest has with its tree.
            like: an embedding, in the precision of the target.
        """

    @abstractmethod
    def remember(self, memory: Any, features: Features, counts: Sequence[int]) -> Any:
        """Take in hidden states of the target, which then has read so many tokens of each text."""

    def catch_up(self, memory: Any, text: Text, ends: BoundEnds) -> Any:
        """Run what may be run as soon as a prompt, or a part of it, was read."""
        return memory

    @abstractmethod
    def root(self, memory: Any, text: Text, ends: BoundEnds) -> tuple[TreePass, Any]:
        """Run what is to be run before the root's row, and return what a tree grows from."""


Network = TypeVar("Network", bound=HeadNetwork, covariant=True)


@dataclass(frozen=True, eq=False)
class HeadState:
    """What a head has of each text.

    Args:
        network: the head.
        memory: what it keeps of committed tokens.
        ends: its ends, for the target.
        params: its sampling settings.
        vocab_size: how many tokens its rows may have.
    """

    network: HeadNetwork = shared()
    memory: Any = parts()
    ends: BoundEnds = shared()
    params: SamplingParams = shared()
    vocab_size: int = shared()

    def resumes(self, fresh: "HeadState") -> bool:
        """Tell whether both are of the same head."""
        return self.network is fresh.network


@dataclass(frozen=True, eq=False)
class HeadDrafter(Drafter, Generic[Network]):
    """Drafts with a head, which was trained on the hidden states of its target.

    A node's row is fixed before its children are drawn, whatever the network: so every scheme and verifier applies.

    Args:
        network: the head.
        ends: what it has of its own at its ends.
        shortlist_size: as for `ModelDrafter`.
        params: the head's own temperature and filters; None for the target's.
        made_for: what its folder says of its target.

    Raises:
        InvalidParameter: a shortlist without a token.
        TargetMismatch: at the start, a head for another target.
        VocabularyMismatch: at the start, if the head has tokens that the target does not have, or lacks some.
    """

    network: Network
    ends: HeadEnds
    shortlist_size: int | None = None
    params: SamplingParams | None = None
    made_for: MadeFor = MadeFor()
    sound = True

    def __post_init__(self) -> None:
        check_listed(self.shortlist_size)

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  an attribute of most drafters
        """The network's."""
        return self.network.name

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]  likewise
        """The target's hidden states that the head reads."""
        return Needs(self.network.reads, passes=self.network.passes)

    def defaults(self, params: SamplingParams) -> Defaults:
        """Return what suits the network."""
        return self.network.defaults(params)

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, self.network.title)

    @torch.no_grad()
    def start(self, text: Text, session: Session) -> HeadState:
        """Return an empty memory and the ends for this target."""
        network = self.network
        target = check_target(session, network.reads, network.target_width, self.made_for)
        network.check(target, self.ends)
        ends = self.ends.bound(target, network.width)
        like = ends.embed(torch.zeros(1, 1, dtype=torch.int64, device=text.tokens.device))
        memory = network.memory(len(text.lengths), session.capacity, like)
        tokens = session.vocab_size if ends.tokens is None else len(ends.tokens)
        return HeadState(network, memory, ends, self.params or session.params, tokens)

    @torch.no_grad()
    def read(self, state: HeadState, text: Text, features: Features | None) -> HeadState:
        """Take in what was read of the prompts."""
        if features is None:
            return state
        network = state.network
        memory = network.remember(state.memory, features, [count - 1 for count in text.counts])
        return replace(state, memory=network.catch_up(memory, text, state.ends))

    @torch.no_grad()
    def draft(self, state: HeadState, request: DraftRequest) -> tuple[Draft, HeadState]:
        """Run the network once, and grow a tree from what it made."""
        text, scheme, policy = request.text, request.scheme, request.policy
        if not policy.shape.counts:
            return Draft.nothing(text.last()), state
        grown, memory = state.network.root(state.memory, text, state.ends)
        size = listed(self.shortlist_size, scheme, policy, state.vocab_size)

        def propose(frontier: Frontier) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
            logits, wide = grown.logits(frontier)[..., : state.vocab_size], frontier.tokens.shape[1]
            tokens, probs = draft_rows(logits, state.params, size, scheme)
            return tokens.expand(-1, wide, -1), probs.expand(-1, wide, *probs.shape[2:])

        named = state.ends.named(propose)
        draft = grow(text.last(), policy, scheme, named, request.noise, grown.overlap, trusted=True)
        return state.ends.marked(draft, size, state.vocab_size), replace(state, memory=memory)

    @torch.no_grad()
    def commit(self, state: HeadState, step: Step) -> HeadState:
        """Take in the target's own states of the tokens that were committed."""
        kept = (step.whole or step.verdict).kept
        known = [count + more for count, more in zip(step.text.counts, kept, strict=True)]
        return replace(state, memory=state.network.remember(state.memory, step.features, known))
