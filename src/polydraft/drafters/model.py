"""A smaller language model with the same tokens, drafting a tree level by level."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters.protocol import Session, Text
from polydraft.drafters.scorer import TreeScorer
from polydraft.errors import InvalidParameter
from polydraft.models import Cache, LanguageModel, same_model
from polydraft.probs import Noise, SamplingParams, shortlist, whole_row
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
from polydraft.trees import Draft, Frontier, TreePolicy, Verdict, grow, is_dynamic

SAMPLED = (IID, WithoutReplacement, TopK, TopThenSample, TopThenIID, ConditionalPoisson, SpecHub, Coupled, Product)
"""The schemes that draw from a model's draft rows."""
LISTED = 256
"""How many tokens nodes with several drafts draw from."""
MOST_WHOLE = 1 << 15
"""Rows of larger vocabularies are always cut: what whole ones cost and bring there has not been measured."""


@dataclass(frozen=True, eq=False)
class ModelDraftState:
    """The draft model, its cache and sampling settings, and the number of steps since the last that drafted."""

    model: LanguageModel
    cache: Cache
    params: SamplingParams
    vocab_size: int
    behind: int = 0


@dataclass(frozen=True, eq=False)
class ModelDrafter:
    """Drafts with a causal language model that shares the target's tokens.

    Args:
        model: the draft model. Its vocabulary may be padded to another size than the target's.
        shortlist_size: draft rows are cut to this many likeliest tokens and renormalised. Costs no exactness, but
            acceptance at high temperatures, and more tokens cost time (docs/choosing.md). Schemes that take the
            likeliest tokens for certain need no more of them than a node has children. None for `LISTED`, or for all
            tokens in chains of sampled drafts, where listing costs more than it spares, up to `MOST_WHOLE` of them.
        params: the draft's own temperature and filters; None for the target's.

    Raises:
        InvalidParameter: a shortlist without a token.
        VocabularyMismatch: at the start, if the vocabularies differ by more than padding.
    """

    model: LanguageModel
    shortlist_size: int | None = None
    params: SamplingParams | None = None
    name = "model"
    reads_hidden: tuple[int, ...] = ()
    sound = True

    def __post_init__(self) -> None:
        if self.shortlist_size is not None and self.shortlist_size < 1:
            raise InvalidParameter(f"shortlist_size must be at least 1, or None, but is {self.shortlist_size}.")

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, "A draft model")

    def start(self, text: Text, session: Session) -> ModelDraftState:
        """Score the prompts but for their last two tokens."""
        cache = TreeScorer(self.model).start(text, session)
        behind = TreeScorer.behind(text, session)
        return ModelDraftState(self.model, cache, self.params or session.params, session.vocab_size, behind)

    def resume(self, state: Any, before: Text, text: Text, known: int, session: Session) -> ModelDraftState:
        """Score what is new in a text, but for its last two tokens."""
        if not (isinstance(state, ModelDraftState) and same_model(state.model, self.model)):
            return self.start(text, session)
        held = TreeScorer.held(before, state.behind, text, known)
        cache = TreeScorer(self.model).start(text, session, state.cache, held)
        behind = TreeScorer.behind(text, session, held)
        return ModelDraftState(self.model, cache, self.params or session.params, session.vocab_size, behind)

    def draft(self, state: ModelDraftState, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise) -> Draft:
        """Grow a tree: one forward pass per depth for all rows and nodes of that depth."""
        if not policy.shape.counts:
            return Draft.nothing(text.last())
        size = self._listed(scheme, policy, state.vocab_size)
        draft = grow(text.last(), policy, scheme, partial(self._propose, state, text, scheme, size), noise)
        if draft.failure is None:  # else nothing will be drafted from these keys again
            TreeScorer(self.model).settle(state.cache, text, draft)
        complete = size is None and self.model.vocab_size >= state.vocab_size
        return replace(draft, whole=True) if complete else draft

    def commit(self, state: ModelDraftState, text: Text, verdict: Verdict) -> ModelDraftState:
        """Keep the accepted nodes' keys; after a step without drafts there are none."""
        if verdict.path.shape[-1] == 0:
            return replace(state, behind=state.behind + 1)
        TreeScorer(self.model).commit(state.cache, text, verdict)
        return replace(state, behind=0) if state.behind else state

    def join(self, state: ModelDraftState, row: int, other: ModelDraftState) -> ModelDraftState:
        """Take over the newcomer's keys."""
        state.cache.join(row, other.cache)
        return replace(state, behind=max(state.behind, other.behind))

    def _listed(self, scheme: Scheme, policy: TreePolicy, vocab_size: int) -> int | None:
        """Return how many tokens of each row are drawn from; None for all."""
        size = LISTED if self.shortlist_size is None else self.shortlist_size
        children = policy.shape.max_children
        if is_dynamic(policy):
            return size
        if scheme.deterministic:
            return min(size, max(children, 1))
        return None if self.shortlist_size is None and children == 1 and vocab_size <= MOST_WHOLE else size

    def _propose(
        self, state: ModelDraftState, text: Text, scheme: Scheme, size: int | None, frontier: Frontier
    ) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
        logits = TreeScorer(self.model).score(state.cache, text, frontier, state.behind)[..., : state.vocab_size]
        tokens, probs = whole_row(logits, state.params) if size is None else shortlist(logits, state.params, size)
        return tokens, probs.unsqueeze(-2) if isinstance(scheme, Product) else probs
