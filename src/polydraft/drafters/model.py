"""A smaller language model with the same tokens, drafting a tree level by level."""

from dataclasses import dataclass
from functools import partial

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters.protocol import Session, Text
from polydraft.drafters.scorer import TreeScorer
from polydraft.models import Cache, LanguageModel
from polydraft.probs import Noise, SamplingParams, shortlist
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
from polydraft.trees import Draft, Frontier, TreePolicy, Verdict, grow

SAMPLED = (IID, WithoutReplacement, TopK, TopThenSample, TopThenIID, ConditionalPoisson, SpecHub, Coupled, Product)
"""The schemes that draw from a model's draft rows."""


@dataclass(frozen=True, eq=False)
class ModelDraftState:
    """The draft model's cache and sampling settings."""

    cache: Cache
    params: SamplingParams
    vocab_size: int


@dataclass(frozen=True, eq=False)
class ModelDrafter:
    """Drafts with a causal language model that shares the target's tokens.

    Args:
        model: the draft model. Its vocabulary may be padded to another size than the target's.
        shortlist_size: draft rows are cut to this many likeliest tokens and renormalised; costs no exactness.
        params: the draft's own temperature and filters; None for the target's.

    Raises:
        VocabularyMismatch: at the start, if the vocabularies differ by more than padding.
    """

    model: LanguageModel
    shortlist_size: int = 64
    params: SamplingParams | None = None
    name = "model"
    reads_hidden: tuple[int, ...] = ()

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, "A draft model")

    def start(self, text: Text, session: Session) -> ModelDraftState:
        """Score the prompts but for their last two tokens."""
        cache = TreeScorer(self.model).start(text, session)
        return ModelDraftState(cache, self.params or session.params, session.vocab_size)

    def draft(self, state: ModelDraftState, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise) -> Draft:
        """Grow a tree: one forward pass per depth for all rows and nodes of that depth."""
        return grow(text.last(), policy, scheme, partial(self._propose, state, text, scheme), noise)

    def commit(self, state: ModelDraftState, text: Text, verdict: Verdict) -> ModelDraftState:
        """Keep the accepted nodes' keys."""
        TreeScorer(self.model).commit(state.cache, text, verdict)
        return state

    def join(self, state: ModelDraftState, row: int, other: ModelDraftState) -> ModelDraftState:
        """Take over the newcomer's keys."""
        state.cache.join(row, other.cache)
        return state

    def _propose(
        self, state: ModelDraftState, text: Text, scheme: Scheme, frontier: Frontier
    ) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
        logits = TreeScorer(self.model).score(state.cache, text, frontier)[..., : state.vocab_size]
        tokens, probs = shortlist(logits, state.params, self.shortlist_size)
        return tokens, probs.unsqueeze(-2) if isinstance(scheme, Product) else probs
