"""One drafter for all heads: what differs between them is the network (`HeadNetwork`), and how a tree grows from it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, arange, cat, nn

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Needs, Session
from polydraft.drafters.heads.ends import BoundEnds, HeadEnds
from polydraft.drafters.model import SAMPLED, check_listed, draft_rows, listed
from polydraft.errors import InvalidParameter, TargetMismatch
from polydraft.models import LanguageModel, Layer
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Step, Text
from polydraft.rows import parts, shared
from polydraft.schemes import Scheme, require_scheme
from polydraft.trees import Draft, Frontier, Overlap, grow


def parents_of(frontier: Frontier) -> Int[Tensor, "b f 1"]:
    """Return the number of each node's parent; 0 for the root, which has none."""
    earlier = frontier.ancestors[..., : frontier.nodes.start]
    order = arange(1, earlier.shape[-1] + 1, device=earlier.device)
    last = (earlier * order).amax(-1) - 1 if earlier.shape[-1] else earlier.sum(-1)
    return last.clamp_min(0).unsqueeze(-1)


def with_nodes(
    known: Float[Tensor, "b n d"], frontier: Frontier, values: Float[Tensor, "b f d"]
) -> Float[Tensor, "b m d"]:
    """Return what is known of all nodes, by their numbers: zeros for leaves, which are never proposed for."""
    before = known[:, : frontier.nodes.start]
    missing = frontier.nodes.start - before.shape[1]
    return cat([nn.functional.pad(before, (0, 0, 0, missing)), values], dim=1)


MOST_PADDING, SHARE = 1024, 64
"""A target may have so many tokens more or fewer than a head's folder says, and no more than one in so many."""


@dataclass(frozen=True)
class MadeFor:
    """What a head's folder says of the target that it was trained for.

    Args:
        vocab_size: how many tokens it has; None where nothing is said.
        layers: how many layers; likewise.
    """

    vocab_size: int | None = None
    layers: int | None = None

    def check(self, target: LanguageModel) -> None:
        """Check that a target can be the one that is meant.

        Numbers of layers must be equal. Vocabularies need not: the same model's tables are padded to a multiple of 64
        or more by one tool and not by another (Qwen2.5 has 151936 or 152064 rows for 151665 tokens), and tokens are
        added to a target after a head was trained. Heads never draft such tokens, and what they draft is still the
        target's own. That a head's tables know all tokens that it may have to read is checked by their sizes.

        Raises:
            TargetMismatch: it has another number of layers, or a vocabulary that no padding explains.
        """
        found = target.facts.vocab_size
        if self.vocab_size is not None and abs(self.vocab_size - found) > min(MOST_PADDING, self.vocab_size // SHARE):
            raise TargetMismatch(
                f"The head was trained for a target of {self.vocab_size} tokens and this one has {found}: it is "
                "another target."
            )
        depth = target.facts.layers
        if None not in (self.layers, depth) and self.layers != depth:
            raise TargetMismatch(
                f"The head was trained for a target of {self.layers} layers and this one has {depth}: it is another "
                "target."
            )


def joined_states(features: Features, layers: Sequence[Layer]) -> Float[Tensor, "b w r"]:
    """Return the hidden states of several layers joined, in this order."""
    return torch.cat([features.states[layer] for layer in layers], dim=-1)


def check_target(session: Session, layers: Sequence[Layer], width: int, made_for: MadeFor) -> LanguageModel:
    """Return the target of a session, if a head that reads these layers can have been trained for it.

    Args:
        session: the session.
        layers: what the head reads.
        width: how wide these states are.
        made_for: what its folder says of its target.

    Raises:
        TargetMismatch: it has not these layers, is not as wide, or is another one by what the folder says.
    """
    if session.target is None:
        raise InvalidParameter("A draft head reads its target's hidden states, and there is no target.")
    target = session.target.model
    depth, found = target.facts.layers, target.facts.width
    beyond = [layer for layer in layers if layer != "final" and layer > depth] if depth is not None else []
    if beyond:
        raise TargetMismatch(
            f"The head reads the output of {beyond[0]} layers and the target has {depth}: it was trained for another "
            "target."
        )
    if found is not None and found != width:
        raise TargetMismatch(
            f"The head reads states {width} wide and the target's are {found}: it was trained for another target."
        )
    made_for.check(target)
    return target


class TreePass(Protocol):
    """What a network made of a text, from which a tree grows; it may keep what it makes of nodes."""

    @property
    def overlap(self) -> Overlap | None:
        """What the head thinks of the rows that it gave last; None if it thinks nothing."""
        ...

    def logits(self, frontier: Frontier) -> Float[Tensor, "b f V"]:
        """Return the logits of the nodes' children; one node may stand for all of a depth."""
        ...


class HeadNetwork(nn.Module, ABC):
    """What a head is, but for its ends and settings; derive from it.

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
