"""A smaller language model that drafts a tree level by level, its draft rows, and plain decoding without drafts."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Session
from polydraft.errors import InvalidParameter, InvalidProbabilities, is_whole, shown
from polydraft.models import HOME, ElsewhereModel, HuggingFaceModel, LanguageModel, check_same_size, same_model
from polydraft.probs import SamplingParams, shortlist, usable, whole_row
from polydraft.reading import Features, Reader, Step, Text, reader_of
from polydraft.rows import parts, shared
from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Coupled,
    Product,
    Scheme,
    SpecHub,
    TopK,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
    require_scheme,
)
from polydraft.trees import Chain, Draft, Fixed, Frontier, GrowingPolicy, TreePolicy, TreeShape, grow

SAMPLED = (IID, WithoutReplacement, TopK, TopThenSample, TopThenIID, ConditionalPoisson, SpecHub, Coupled, Product)
"""The schemes that draw from a model's draft rows."""
GREEDY = Fixed(TreeShape(((3,), (2, 1, 0), (2, 1, 0), (1, 1, 0), (1, 1), (1, 0))))
"""The tree that gave the embedded pair most tokens per second at temperature 0, on two CPU cores."""
CHAIN = Chain(5)
"""What did above it: on a CPU second drafts cost more than they are accepted for."""


def model_defaults(params: SamplingParams) -> Defaults:
    """Return what suits a draft model: its likeliest tokens at temperature 0, and a drawn chain above it."""
    return Defaults(IID(), CHAIN) if params.temperature else Defaults(TopK(), GREEDY)


def runnable(model: object) -> LanguageModel:
    """Return a draft model as drafters run it, whether it is one already or a module.

    Raises:
        InvalidParameter: this is no model; the text says what to pass.
    """
    if isinstance(model, LanguageModel):
        return model
    return HuggingFaceModel(model) if getattr(model, HOME, None) is None else ElsewhereModel(model)


@dataclass(frozen=True, eq=False)
class ModelDraftState:
    """The draft model's reader, its sampling settings, and the target's number of tokens."""

    reader: Reader = parts()
    params: SamplingParams = shared()
    vocab_size: int = shared()

    def resumes(self, fresh: "ModelDraftState") -> bool:
        """Tell whether both are of one model."""
        return same_model(self.reader.model, fresh.reader.model)


@dataclass(frozen=True, eq=False)
class ModelDrafter(Drafter):
    """Drafts with a causal language model that shares the target's tokens.

    Args:
        model: the draft model, or the module that it runs. Its vocabulary may be padded to another size than the
            target's.
        shortlist_size: draft rows are cut to this many likeliest tokens and renormalised. Costs no exactness, but
            acceptance at high temperatures, and more tokens cost time (docs/choosing.md). Schemes that take the
            likeliest tokens for certain need no more of them than a node has children. None for `LISTED`, or for all
            tokens in chains of sampled drafts, where listing costs more than it spares, up to `MOST_WHOLE` of them.
        params: the draft's own temperature and filters; None for the target's.

    Raises:
        InvalidParameter: a shortlist without a token, or something that is no model.
        VocabularyMismatch: at the start, if the vocabularies differ by more than padding.
    """

    model: LanguageModel
    shortlist_size: int | None = None
    params: SamplingParams | None = None
    name = "model"
    sound = True

    def __post_init__(self) -> None:
        check_listed(self.shortlist_size)
        object.__setattr__(self, "model", runnable(self.model))

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft the likeliest tokens at temperature 0, and a drawn chain above it (docs/performance.md)."""
        return model_defaults(params)

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, "A draft model")

    def start(self, text: Text, session: Session) -> ModelDraftState:
        """Return a reader that has read nothing."""
        check_same_size(session.vocab_size, self.model.facts.vocab_size)
        sources = session.sources if self.model.facts.encodes else None
        reader = reader_of(self.model, len(text.lengths), session.capacity, (), sources)
        return ModelDraftState(reader, self.params or session.params, session.vocab_size)

    def read(self, state: ModelDraftState, text: Text, features: Features | None) -> ModelDraftState:
        """Read the prompts but for their last tokens."""
        return replace(state, reader=state.reader.catch_up(text)[0])

    def draft(self, state: ModelDraftState, request: DraftRequest) -> tuple[Draft, ModelDraftState]:
        """Grow a tree: one forward pass per depth for all rows and nodes of that depth."""
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise
        if not policy.shape.counts:
            return Draft.nothing(text.last()), state
        size = listed(self.shortlist_size, scheme, policy, state.vocab_size)
        draft = grow(
            text.last(), policy, scheme, partial(self._propose, state, text, scheme, size), noise, trusted=True
        )
        complete = size is None and self.model.facts.vocab_size >= state.vocab_size
        draft = draft.as_whole() if complete else draft
        return draft, replace(state, reader=state.reader.grown(text, draft))

    def commit(self, state: ModelDraftState, step: Step) -> ModelDraftState:
        """Keep the accepted nodes' keys."""
        return replace(state, reader=state.reader.keep(step.text, step.verdict, grown=True))

    def _propose(
        self, state: ModelDraftState, text: Text, scheme: Scheme, size: int | None, frontier: Frontier
    ) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
        logits = state.reader.nodes(text, frontier).logits[..., : state.vocab_size]
        return draft_rows(logits, state.params, size, scheme)


@dataclass(frozen=True)
class NoDraft(Drafter):
    """Proposes nothing: every step yields one token from the target. The baseline of every comparison."""

    name = "none"
    sound = True
    proposes = False

    def check(self, scheme: Scheme) -> None:
        """Accept every scheme: there is nothing to draw."""

    def start(self, text: Text, session: Session) -> None:
        """Return no state."""

    def draft(self, state: None, request: DraftRequest) -> tuple[Draft, None]:
        """Return the root alone."""
        return Draft.nothing(request.text.last()), None

    def commit(self, state: None, step: Step) -> None:
        """Return no state."""


LISTED = 256
"""How many tokens nodes with several drafts draw from."""
MOST_WHOLE = 1 << 15
"""Rows of larger vocabularies are always cut: what whole ones cost and bring there has not been measured."""


def check_listed(size: int | None) -> None:
    """Check the length of shortlists that a user asks for.

    Raises:
        InvalidParameter: a shortlist without a token.
    """
    if size is not None and (not is_whole(size) or size < 1):
        raise InvalidParameter(f"shortlist_size must be at least 1, or None, but is {shown(size)}.")


def listed(asked: int | None, scheme: Scheme, policy: TreePolicy, vocab_size: int) -> int | None:
    """Return how many tokens of each row are drawn from; None for all.

    Args:
        asked: what the user asked for; None for `LISTED`, or for all tokens in chains of sampled drafts, where listing
            costs more than it spares, up to `MOST_WHOLE` of them.
        scheme: how drafts are drawn; certain ones need no more tokens than a node has children.
        policy: the trees.
        vocab_size: the target's number of tokens.
    """
    size = LISTED if asked is None else asked
    children = policy.shape.max_children
    if isinstance(policy, GrowingPolicy):
        return size
    if scheme.deterministic and not policy.stops:  # who stops looks at chances
        return min(size, max(children, 1))
    return None if asked is None and children == 1 and vocab_size <= MOST_WHOLE else size


def draft_rows(
    logits: Float[Tensor, "b f V"], params: SamplingParams, size: int | None, scheme: Scheme
) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
    """Return the shortlists of nodes and their draft probabilities, as `grow` takes them.

    A row that is no law becomes one of zeros, below which nothing is drafted; so one text of a batch may lose its
    drafts, and the others keep theirs.

    Args:
        logits: the drafter's.
        params: its sampling settings.
        size: tokens listed; None for all.
        scheme: under `Product` a node's only row is one of several.
    """
    listing = whole_row if size is None else partial(shortlist, size=size)
    tokens, probs = _usable_rows(logits, partial(listing, params=params))
    return tokens, probs.unsqueeze(-2) if scheme.several_rows else probs


def _usable_rows(
    logits: Float[Tensor, "b f V"], listing: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f K"]]:
    if logits.device.type == "cpu":  # another device would have to be waited for
        with suppress(InvalidProbabilities):
            return listing(logits, check=True)
    logits, fine = usable(logits)
    tokens, probs = listing(logits, check=False)
    return tokens, probs * fine.unsqueeze(-1)
