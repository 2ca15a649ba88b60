"""Several draft models, or one at several temperatures, drafting one tree together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Session, owned_models
from polydraft.drafters.model import CHAIN, GREEDY, runnable
from polydraft.errors import InvalidParameter, is_whole, shown
from polydraft.models import LanguageModel, check_same_size, same_model
from polydraft.probs import SamplingParams, to_probs
from polydraft.reading import Features, Reader, Step, Text, reader_of
from polydraft.rows import parts, shared
from polydraft.schemes import Product, Scheme, require_scheme
from polydraft.trees import Draft, Frontier, grow

Member = tuple[LanguageModel, SamplingParams | None]
"""A draft model and its own temperature and filters; None for the target's."""
Drafting = LanguageModel | nn.Module
"""A draft model as users have it."""


@dataclass(frozen=True, eq=False)
class EnsembleState:
    """One reader per model, one setting per member, and the target's number of tokens."""

    readers: tuple[Reader, ...] = parts()
    params: tuple[SamplingParams, ...] = shared()
    vocab_size: int = shared()

    def resumes(self, fresh: "EnsembleState") -> bool:
        """Tell whether both are of the same models."""
        models = [[one.model for one in own.readers] for own in (self, fresh)]
        return len(models[0]) == len(models[1]) and all(map(same_model, *models))


@dataclass(frozen=True, eq=False, init=False)
class EnsembleDrafter(Drafter):
    """Drafts under `Product`: child j of every node is a draw from the row of member j mod J, whatever the others drew.

    Different models err differently, and a second temperature hedges the first: two drafts from different rows can
    cover a target that two drafts from one row do not. All members' rows of a node live on one shortlist, the union of
    each model's likeliest tokens; each row is renormalised there, which costs no exactness. Members that are the same
    object share their forward passes and their cache.

    Args:
        members: draft models with their settings, or alone for the target's settings, in drafting order. At temperature
            0 a member drafts its likeliest token.
        shortlist_size: tokens of the common shortlist, shared equally among the models.

    Raises:
        InvalidParameter: no members, something else among them, or a shortlist with less than one token per model.
        VocabularyMismatch: at the start, if a vocabulary differs from the target's by more than padding.

    Source: Khisti et al., arXiv 2410.18234, section 5.2 (drafts from different temperatures).
    """

    members: tuple[Member, ...]
    shortlist_size: int
    name = "ensemble"
    sound = True

    def __init__(
        self, members: Sequence[Drafting | tuple[Drafting, SamplingParams | None]], shortlist_size: int = 64
    ) -> None:
        if isinstance(shortlist_size, nn.Module | LanguageModel):
            raise InvalidParameter("An ensemble takes its models as one list: EnsembleDrafter([first, second]).")
        object.__setattr__(self, "members", _members(members))
        object.__setattr__(self, "shortlist_size", shortlist_size)
        if not is_whole(shortlist_size) or shortlist_size < len(owned_models(self)):
            raise InvalidParameter(
                f"shortlist_size must be at least the number of models, {len(owned_models(self))}, "
                f"but is {shown(shortlist_size)}."
            )

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draw from every member's row, on the trees that suit a draft model."""
        return Defaults(Product(), CHAIN if params.temperature else GREEDY)

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` unless the scheme is `Product`."""
        require_scheme(scheme, (Product,), "An ensemble of draft models")

    def start(self, text: Text, session: Session) -> EnsembleState:
        """Return readers that have read nothing, one per model."""
        for model in owned_models(self):
            check_same_size(session.vocab_size, model.facts.vocab_size)
        readers = tuple(reader_of(model, len(text.lengths), session.capacity) for model in owned_models(self))
        params = tuple(own or session.params for _, own in self.members)
        return EnsembleState(readers, params, session.vocab_size)

    def read(self, state: EnsembleState, text: Text, features: Features | None) -> EnsembleState:
        """Read the prompts but for their last tokens, once per model."""
        return replace(state, readers=tuple(one.catch_up(text)[0] for one in state.readers))

    def draft(self, state: EnsembleState, request: DraftRequest) -> tuple[Draft, EnsembleState]:
        """Grow a tree: one forward pass per depth and model, for all rows and nodes of that depth."""
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise
        if not policy.shape.counts:
            return Draft.nothing(text.last()), state
        draft = grow(text.last(), policy, scheme, partial(self._propose, state, text), noise, trusted=True)
        return draft, replace(state, readers=tuple(one.grown(text, draft) for one in state.readers))

    def commit(self, state: EnsembleState, step: Step) -> EnsembleState:
        """Keep the accepted nodes' keys in every cache."""
        return replace(state, readers=tuple(one.keep(step.text, step.verdict, grown=True) for one in state.readers))

    def _propose(
        self, state: EnsembleState, text: Text, frontier: Frontier
    ) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f J K"]]:
        logits = [one.grow(text, frontier)[..., : state.vocab_size] for one in state.readers]
        tokens = common_shortlist(logits, self.shortlist_size)
        listed = {id(one): at_tokens(row, tokens) for one, row in zip(owned_models(self), logits, strict=True)}
        rows = [to_probs(listed[id(model)], own) for (model, _), own in zip(self.members, state.params, strict=True)]
        return tokens, torch.stack(rows, dim=-2)


def _members(given: object) -> tuple[Member, ...]:
    """Return draft models with their settings, each model once.

    Raises:
        InvalidParameter: they are something else, or there is none.
    """
    listed = cast(Sequence[object], given) if isinstance(given, list | tuple) else (given,)
    pairs = [cast(tuple[object, ...], one) if isinstance(one, list | tuple) else (one, None) for one in listed]
    odd = [one for one in pairs if len(one) != 2 or not isinstance(one[1], SamplingParams | None)]
    if odd:
        raise InvalidParameter(
            "An ensemble's members must be draft models, alone or as (model, SamplingParams(...)), but one is "
            f"({', '.join(map(shown, odd[0]))})."
        )
    if not pairs:
        raise InvalidParameter("An ensemble needs at least one draft model, but has none.")
    models = {id(one): runnable(one) for one, _ in pairs}
    return tuple((models[id(one)], cast(SamplingParams | None, own)) for one, own in pairs)


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
