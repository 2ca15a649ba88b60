"""One drafter for all heads: what differs between them is the network (`HeadNetwork`), and how a tree grows from it.

A head has two ends, its own or the target's: the embeddings that it reads and the rows that it drafts from.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, arange, cat, nn

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Needs, Session
from polydraft.drafters.model import SAMPLED, check_listed, draft_rows, listed
from polydraft.errors import InvalidParameter, TargetMismatch, VocabularyMismatch
from polydraft.models import LanguageModel, Layer, linear_of, module_of, weight_of, weights_of
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Step, Text
from polydraft.rows import parts, shared
from polydraft.schemes import Scheme, require_scheme
from polydraft.trees import Draft, Frontier, Overlap, grow

_ROWS: WeakKeyDictionary[nn.Module, tuple[Tensor, object, nn.Linear]] = WeakKeyDictionary()
"""By target: the tokens of the head that was bound last, what both were then, and the target's rows of these tokens."""


@dataclass(frozen=True, eq=False)
class BoundEnds:
    """A head's ends, for one target.

    Args:
        tokens: the head's tokens, as ids of the target; None where they are the same.
    """

    embed: Callable[[Int[Tensor, "b n"]], Float[Tensor, "b n d"]]
    output: Callable[[Float[Tensor, "b n d"]], Float[Tensor, "b n v"]]
    tokens: Int[Tensor, " v"] | None


class HeadEnds(nn.Module):
    """What a head has of its own at its ends; the target's is taken for the rest.

    Args:
        embed_tokens: input embeddings; None for the target's.
        lm_head: output rows of the head's tokens; None for the target's.
        tokens: the head's tokens, as rising ids of the target; None for all of them.
        scale: what embeddings are multiplied by.
        multiplier: what logits are multiplied by.
        softcap: logits become softcap * tanh(logits / softcap); None leaves them.

    Raises:
        InvalidParameter: there are not as many output rows as tokens.
    """

    tokens: Int[Tensor, " v"] | None

    def __init__(
        self,
        embed_tokens: nn.Embedding | None = None,
        lm_head: nn.Linear | None = None,
        tokens: Int[Tensor, " v"] | None = None,
        scale: float = 1.0,
        multiplier: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = embed_tokens, lm_head
        self.register_buffer("tokens", tokens)
        self.scale, self.multiplier, self.softcap = scale, multiplier, softcap
        if lm_head is not None and tokens is not None and lm_head.out_features != len(tokens):
            raise InvalidParameter(f"A head of {len(tokens)} tokens has {lm_head.out_features} output rows.")

    def bound(self, target: LanguageModel, width: int, dtype: torch.dtype) -> BoundEnds:
        """Return the ends for a target, of a head of this hidden width and precision.

        Raises:
            TargetMismatch: the target's embeddings have another width, and the head has none of its own.
            VocabularyMismatch: the head has tokens that the target does not have.
        """
        like = target.embedded(torch.zeros(1, 1, dtype=torch.int64, device=target.facts.device))
        self._check(target, width, like)
        embed: Callable[[Tensor], Tensor] = target.embedded if self.embed_tokens is None else self.embed_tokens
        if self.lm_head is not None:
            output: Callable[[Tensor], Tensor] = self.lm_head
        else:
            rows = target.unembedded if self.tokens is None else _rows(target, self.tokens, dtype)
            precision = like.dtype if self.tokens is None else dtype
            output = lambda states: rows(states.to(precision))  # noqa: E731
        return BoundEnds(
            embed if self.scale == 1 else lambda ids: embed(ids) * self.scale,
            output if self.multiplier == 1 and self.softcap is None else lambda states: self._shaped(output(states)),
            self.tokens,
        )

    def _shaped(self, logits: Float[Tensor, "b n v"]) -> Float[Tensor, "b n v"]:
        logits = logits * self.multiplier
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _check(self, target: LanguageModel, width: int, like: Tensor) -> None:
        known = target.facts.vocab_size
        if self.embed_tokens is None:
            if like.shape[-1] != width:
                raise TargetMismatch(
                    f"The head is {width} wide and the target's embeddings {like.shape[-1]}: it was trained for "
                    "another target."
                )
        elif self.embed_tokens.num_embeddings < known:
            raise VocabularyMismatch(
                f"The head knows {self.embed_tokens.num_embeddings} tokens and the target has {known}: it "
                "was trained for another target."
            )
        most = None if self.tokens is None else int(self.tokens.max()) + 1
        rows = self.lm_head.out_features if self.lm_head is not None and most is None else most
        if rows is not None and rows > known:
            raise VocabularyMismatch(
                f"The head drafts {rows} tokens and the target has {known}: it was trained for another target."
            )


def _rows(target: LanguageModel, tokens: Int[Tensor, " v"], dtype: torch.dtype) -> nn.Linear:
    """Return the target's output rows of a head's tokens: copied once, and anew when the target's have changed."""
    module = module_of(target)
    head = None if module is None else cast(Any, module).get_output_embeddings()
    if module is None or not isinstance(head, nn.Linear):
        return linear_of(target.output_rows(tokens).to(dtype))
    state, known = (weights_of(head), weight_of(tokens), dtype), _ROWS.get(module)
    if known is None or known[0] is not tokens or known[1] != state:
        known = _ROWS[module] = tokens, state, linear_of(target.output_rows(tokens).to(dtype))
    return known[2]


def of_parents(known: Float[Tensor, "b n d"], frontier: Frontier) -> Float[Tensor, "b f d"]:
    """Return what is known of each node's parent, by the nodes' numbers; of node 0 for the root, which has none."""
    earlier = frontier.ancestors[..., : frontier.nodes.start]
    order = arange(1, earlier.shape[-1] + 1, device=earlier.device)
    last = (earlier * order).amax(-1) - 1 if earlier.shape[-1] else earlier.sum(-1)
    return known.gather(1, last.clamp_min(0).unsqueeze(-1).expand(-1, -1, known.shape[-1]))


def with_nodes(
    known: Shaped[Tensor, "b n d"], frontier: Frontier, values: Shaped[Tensor, "b f d"]
) -> Shaped[Tensor, "b m d"]:
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
    """What a head has of each text."""

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
        network, target = self.network, self._target(session)
        network.check(target, self.ends)
        ends = self.ends.bound(target, network.width, next(network.parameters()).dtype)
        like = ends.embed(torch.zeros(1, 1, dtype=torch.int64, device=text.tokens.device))
        memory = network.memory(len(text.lengths), session.capacity, like)
        tokens = session.vocab_size if ends.tokens is None else len(ends.tokens)
        return HeadState(network, memory, ends, self.params or session.params, tokens)

    def _target(self, session: Session) -> LanguageModel:
        """Return the target, if the head can have been trained for it."""
        if session.target is None:
            raise InvalidParameter("A draft head reads its target's hidden states, and there is no target.")
        target, wanted = session.target.model, self.network.target_width
        depth, width = target.facts.layers, target.facts.width
        beyond = [layer for layer in self.network.reads if layer != "final" and depth is not None and layer > depth]
        if beyond:
            raise TargetMismatch(
                f"The head reads the output of {beyond[0]} layers and the target has {depth}: it was trained for "
                "another target."
            )
        if width is not None and width != wanted:
            raise TargetMismatch(
                f"The head reads states {wanted} wide and the target's are {width}: it was trained for another target."
            )
        self.made_for.check(target)
        return target

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
        named, size = state.ends.tokens, listed(self.shortlist_size, scheme, policy, state.vocab_size)

        def propose(frontier: Frontier) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
            logits, wide = grown.logits(frontier)[..., : state.vocab_size], frontier.tokens.shape[1]
            places, probs = draft_rows(logits, state.params, size, scheme)
            tokens = places if named is None else named[places]
            return tokens.expand(-1, wide, -1), probs.expand(-1, wide, *probs.shape[2:])

        draft = grow(text.last(), policy, scheme, propose, request.noise, grown.overlap, trusted=True)
        if size is None and named is None and draft.shortlist.shape[-1] == state.vocab_size:
            draft = draft.as_whole()  # which spares its verifier a search
        return draft, replace(state, memory=memory)

    @torch.no_grad()
    def commit(self, state: HeadState, step: Step) -> HeadState:
        """Take in the target's own states of the tokens that were committed."""
        kept = (step.whole or step.verdict).kept
        known = [count + more for count, more in zip(step.text.counts, kept, strict=True)]
        return replace(state, memory=state.network.remember(state.memory, step.features, known))
