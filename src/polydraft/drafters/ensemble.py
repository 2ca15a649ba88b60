"""Several draft models, or one at several temperatures, drafting one tree together."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters.protocol import Session, Text
from polydraft.drafters.scorer import TreeScorer
from polydraft.errors import InvalidParameter
from polydraft.models import Cache, LanguageModel, same_model
from polydraft.probs import Noise, SamplingParams, to_probs
from polydraft.schemes import Product, Scheme, require_scheme
from polydraft.trees import Draft, Frontier, TreePolicy, Verdict, grow

Member = tuple[LanguageModel, SamplingParams | None]
"""A draft model and its own temperature and filters; None for the target's."""


@dataclass(frozen=True, eq=False)
class EnsembleState:
    """One cache per model, one setting per member, and the number of steps since the last that drafted."""

    models: tuple[LanguageModel, ...]
    caches: tuple[Cache, ...]
    params: tuple[SamplingParams, ...]
    vocab_size: int
    behind: int = 0


@dataclass(frozen=True, eq=False)
class EnsembleDrafter:
    """Drafts under `Product`: child j of every node is a draw from the row of member j mod J, whatever the others drew.

    Different models err differently, and a second temperature hedges the first: two drafts from different rows can
    cover a target that two drafts from one row do not. All members' rows of a node live on one shortlist, the union of
    each model's likeliest tokens; each row is renormalised there, which costs no exactness. Members that are the same
    object share their forward passes and their cache.

    Args:
        members: draft models with their settings, in drafting order. At temperature 0 a member drafts its likeliest
            token.
        shortlist_size: tokens of the common shortlist, shared equally among the models.

    Raises:
        InvalidParameter: no members, or a shortlist with less than one token per model.
        VocabularyMismatch: at the start, if a vocabulary differs from the target's by more than padding.

    Source: Khisti et al., arXiv 2410.18234, section 5.2 (drafts from different temperatures).
    """

    members: tuple[Member, ...]
    shortlist_size: int = 64
    name = "ensemble"
    reads_hidden: tuple[int, ...] = ()
    sound = True

    def __post_init__(self) -> None:
        if not self.members:
            raise InvalidParameter("An ensemble needs at least one draft model, but has none.")
        if self.shortlist_size < len(self._scorers()):
            raise InvalidParameter(
                f"shortlist_size must be at least the number of models, {len(self._scorers())}, "
                f"but is {self.shortlist_size}."
            )

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` unless the scheme is `Product`."""
        require_scheme(scheme, (Product,), "An ensemble of draft models")

    def start(self, text: Text, session: Session) -> EnsembleState:
        """Score the prompts but for their last two tokens, once per model."""
        return self._state([scorer.start(text, session) for scorer in self._scorers()], text, session)

    def resume(self, state: Any, before: Text, text: Text, known: int, session: Session) -> EnsembleState:
        """Score what is new in a text, but for its last two tokens, once per model."""
        scorers = self._scorers()
        if not isinstance(state, EnsembleState) or len(state.models) != len(scorers):
            return self.start(text, session)
        if not all(same_model(one.model, model) for one, model in zip(scorers, state.models, strict=True)):
            return self.start(text, session)
        held = TreeScorer.held(before, state.behind, text, known)
        caches = [scorer.start(text, session, cache, held) for scorer, cache in zip(scorers, state.caches, strict=True)]
        return self._state(caches, text, session, held)

    def draft(self, state: EnsembleState, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise) -> Draft:
        """Grow a tree: one forward pass per depth and model, for all rows and nodes of that depth."""
        draft = grow(text.last(), policy, scheme, partial(self._propose, state, text), noise)
        if draft.failure is None:  # else nothing will be drafted from these keys again
            for scorer, cache in zip(self._scorers(), state.caches, strict=True):
                scorer.settle(cache, text, draft)
        return draft

    def commit(self, state: EnsembleState, text: Text, verdict: Verdict) -> EnsembleState:
        """Keep the accepted nodes' keys in every cache; after a step without drafts there are none."""
        if verdict.path.shape[-1] == 0:
            return replace(state, behind=state.behind + 1)
        for scorer, cache in zip(self._scorers(), state.caches, strict=True):
            scorer.commit(cache, text, verdict)
        return replace(state, behind=0) if state.behind else state

    def join(self, state: EnsembleState, row: int, other: EnsembleState) -> EnsembleState:
        """Take over the newcomer's keys in every cache."""
        for cache, fresh in zip(state.caches, other.caches, strict=True):
            cache.join(row, fresh)
        return replace(state, behind=max(state.behind, other.behind))

    def _state(self, caches: list[Cache], text: Text, session: Session, held: int = 0) -> EnsembleState:
        models = tuple(scorer.model for scorer in self._scorers())
        params = tuple(own or session.params for _, own in self.members)
        behind = TreeScorer.behind(text, session, held)
        return EnsembleState(models, tuple(caches), params, session.vocab_size, behind)

    def _scorers(self) -> list[TreeScorer]:
        """Return one scorer per model, in the order of their first members."""
        models = {id(model): model for model, _ in self.members}
        return [TreeScorer(model) for model in models.values()]

    def _propose(
        self, state: EnsembleState, text: Text, frontier: Frontier
    ) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f J K"]]:
        scorers = self._scorers()
        logits = [
            scorer.score(cache, text, frontier, state.behind)[..., : state.vocab_size]
            for scorer, cache in zip(scorers, state.caches, strict=True)
        ]
        tokens = common_shortlist(logits, self.shortlist_size)
        listed = {id(one.model): at_tokens(row, tokens) for one, row in zip(scorers, logits, strict=True)}
        rows = [to_probs(listed[id(model)], own) for (model, _), own in zip(self.members, state.params, strict=True)]
        return tokens, torch.stack(rows, dim=-2)


def common_shortlist(logits: list[Float[Tensor, "b f _"]], size: int) -> Int[Tensor, "b f K"]:
    """Return the union of every model's `size` / models likeliest tokens, distinct, -1 in the places left over."""
    share = size // len(logits)
    tokens = torch.cat([row.topk(min(share, row.shape[-1]), dim=-1).indices for row in logits], dim=-1)
    if len(logits) == 1:
        return tokens
    repeated = torch.tril(tokens.unsqueeze(-1) == tokens.unsqueeze(-2), diagonal=-1).any(dim=-1)
    return tokens.masked_fill(repeated, -1)


def at_tokens(logits: Float[Tensor, "b f V"], tokens: Int[Tensor, "b f K"]) -> Float[Tensor, "b f K"]:
    """Return the logits of these tokens; minus infinity at empty places and beyond the vocabulary."""
    known = (tokens >= 0) & (tokens < logits.shape[-1])
    return logits.gather(-1, tokens.clamp(0, logits.shape[-1] - 1)).masked_fill(~known, -torch.inf)
