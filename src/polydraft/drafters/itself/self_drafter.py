"""The target drafting for itself, by a view of it over its own keys."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Needs, Session
from polydraft.drafters.itself.few_keys import UNCHOSEN, FewKeys, NewestQueries, with_newest
from polydraft.drafters.itself.view import View
from polydraft.drafters.model import SAMPLED, draft_rows, listed
from polydraft.errors import InvalidParameter, shown
from polydraft.models import LanguageModel, load_draft
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Reader, Step, Text
from polydraft.rows import parts, per_row, shared
from polydraft.schemes import IID, Scheme, TopK, require_scheme
from polydraft.trees import Chain, Draft, Frontier, Resume, grow


@dataclass(frozen=True, eq=False)
class SelfDraftState:
    """The view's model and, of a view over few keys, the copies and what the next choice of them reads.

    Args:
        params: the sampling settings of the drafts.
        model: the target as the view sees it.
        capacity: slots that the longest text and one tree need.
        most: of how many tokens queries are kept.
        own: the copies.
        queries: per row, those of the newest tokens.
    """

    params: SamplingParams = shared()
    model: LanguageModel = shared()
    capacity: int = shared()
    most: int = shared()
    own: FewKeys = parts()
    queries: tuple[NewestQueries, ...] = per_row(NewestQueries.cut)

    def resumes(self, fresh: "SelfDraftState") -> bool:
        """Tell whether both keep queries of equally many tokens, which follow from the text alone."""
        return self.most == fresh.most

    def has_queries(self, known: int) -> bool:
        """Tell whether the queries that choose among the keys of so many tokens are kept, of one text."""
        own = self.queries[0].cut(known)
        return own.states is not None and own.end == known and len(own.states) >= min(self.most, known)


@dataclass(frozen=True, eq=False)
class SelfDrafter(Drafter):
    """Draft with a view of the target, over the target's own keys.

    There is no second prompt to read and no second cache. A view of all keys writes those of its drafts into free slots
    behind the committed text, which verification writes again; so nothing of a draft survives it. A view of few keys
    writes behind copies of them, which follow the text and are chosen anew every few hundred tokens.

    What the view sees follows from committed text and finished steps, not from what is drafted, so the drafts' law is
    known before the first is drawn. Each row of a batch has copies and choices of its own: what a seed writes does not
    depend on the rows beside it.

    Args:
        view: the view.
        resumes: whether the full pass goes on from the states at the view's exit. The last drafts must run through its
            layers first, so that it spares no weights, and some per cent of a step (docs/itself.md).

    Raises:
        InvalidParameter: the view is none, or it resumes where there are no such states; or, at the start, if more keys
            are chosen than the target's context has.
        UnsupportedModel: at the start, if the target's texts cannot branch: places are counted by slots, or states are
            no slots; or if the target has no such view, or hands out no queries, by which keys are chosen.
    """

    view: View
    resumes: bool = False
    name: str = field(init=False)
    needs: Needs = field(init=False)
    sound = True

    def __post_init__(self) -> None:
        if not isinstance(self.view, View):
            raise InvalidParameter(f'A view must be a View, as View.named("self:int8") is, not {shown(self.view)}.')
        if self.view.adapter:
            raise InvalidParameter(f"{self.view.word} has an adapter; load_adapter(folder, target) drafts with it.")
        if self.view.chooses:
            raise InvalidParameter(f"{self.view.word} chooses while it drafts; SkippingDrafter() does so.")
        if self.resumes:
            self.view.check_resumes()
        object.__setattr__(self, "name", self.view.word)
        object.__setattr__(self, "needs", Needs(target=True, queries=self.view.queries))

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft a short chain, since each draft costs a pass of the view."""
        return Defaults(IID() if params.temperature else TopK(), Chain(4))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, "A target that drafts for itself")

    def start(self, text: Text, session: Session) -> SelfDraftState:
        """Return the state of texts whose keys are to be chosen; where all are seen, they are the target's."""
        if session.target is None:
            raise InvalidParameter(f"The drafter {self.name} needs the target's reader (Session.target), but has none.")
        rows, model = len(text.lengths), self.check_target(session.target.model)
        own, queries = FewKeys((UNCHOSEN,) * rows), (NewestQueries(),) * rows
        return SelfDraftState(session.params, model, session.capacity, self.view.queries, own, queries)

    def check_target(self, target: LanguageModel) -> LanguageModel:
        """Return the target as it is seen here; errors are those of the start."""
        model = self.view.model(target)
        if self.resumes:
            target.last_layers(self.view.layers.exit or 0)
        return model

    def read(self, state: SelfDraftState, text: Text, features: Features | None) -> SelfDraftState:
        """Take note of the queries of prompts."""
        return _noted(state, features)

    def draft(self, state: SelfDraftState, request: DraftRequest) -> tuple[Draft, SelfDraftState]:
        """Grow a tree: one pass of the view per depth, over few keys when these have followed the text."""
        text, policy = request.text, request.policy
        if not policy.shape.counts or request.target is None:
            return Draft.nothing(text.last()), state
        exit, (view, state) = self.view.layers.exit, self.viewed(state, text, request.target, policy.largest.size)
        view = replace(view, layers=(exit,) if self.resumes and exit else ())
        levels = list[tuple[range, Tensor]]()
        draft = drawn_by(view, request, state.params, levels)
        if self.resumes and exit and draft.failure is None:
            draft = replace(draft, resume=Resume(exit, _at_exit(view, text, draft, levels)))
        return draft, state

    def viewed(self, state: SelfDraftState, text: Text, target: Reader, room: int) -> tuple[Reader, SelfDraftState]:
        """Return the target as it is seen here; over few of its keys, when the copies have followed the text."""
        whole, keys = target.at(text), self.view.keys
        if keys is None:
            return whole.viewed(state.model), state
        own, view = state.own.following(keys, whole, state.queries, room, state.capacity, state.model)
        return view, replace(state, own=own)

    def commit(self, state: SelfDraftState, step: Step) -> SelfDraftState:
        """Take note of the queries of root and accepted tokens; what is kept lies in the target's keys."""
        return _noted(state, step.features)


def _noted(state: SelfDraftState, features: Features | None) -> SelfDraftState:
    if not state.most or features is None:
        return state
    return replace(state, queries=with_newest(state.queries, features, state.most))


def drawn_by(view: Reader, request: DraftRequest, params: SamplingParams, levels: list[tuple[range, Tensor]]) -> Draft:
    """Grow a tree by a view's rows, and note the hidden states that it hands out, by its nodes.

    Args:
        view: the view's reader, which has read all but the last tokens.
        request: what is asked for.
        params: the sampling settings of the drafts.
        levels: where the states are noted, level by level.
    """
    scheme, policy = request.scheme, request.policy
    size = listed(None, scheme, policy, view.model.facts.vocab_size)
    propose = partial(_proposed, view, request.text, params, size, scheme, levels)
    draft = grow(request.text.last(), policy, scheme, propose, request.noise, trusted=True)
    return draft.as_whole() if size is None else draft


def own_model(drafter: object, target: nn.Module) -> nn.Module | None:
    """Return the draft model with keys of its own that a view's word means too, for what needs one; None for none."""
    if not isinstance(drafter, SelfDrafter) or not drafter.view.is_model:
        return None
    return load_draft(drafter.view.word, cast(Any, target))


def _proposed(
    view: Reader,
    text: Text,
    params: SamplingParams,
    size: int | None,
    scheme: Scheme,
    levels: list[tuple[range, Tensor]],
    frontier: Frontier,
) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
    passed = view.nodes(text, frontier)
    for states in passed.hidden.values():
        levels.append((frontier.nodes, states[:, -len(frontier.nodes) :]))
    return draft_rows(passed.logits, params, size, scheme)


def _at_exit(
    view: Reader, text: Text, draft: Draft, levels: Sequence[tuple[range, Float[Tensor, "b _ d"]]]
) -> Float[Tensor, "_ _ d"]:
    """Return the states of root and nodes behind the view's last layer, in the tree's order, as their keys are.

    The last nodes have not run yet. Where there are others of which this is so, or nodes have changed their places,
    all run again.
    """
    tree, known = draft.tree, [number for nodes, _ in levels for number in nodes]
    count, (exit,) = tree.tokens.shape[1], view.layers
    if draft.scored is not None or known != [*range(len(known))]:
        return view.score(text, tree)[0].nodes[exit]
    found = [states for _, states in levels]
    if len(known) < count:
        last = Frontier(
            range(len(known), count),
            tree.tokens[:, len(known) :],
            tree.topology.height,
            tree.ancestors[:, len(known) :],
        )
        found.append(view.nodes(text, last).hidden[exit])
    return torch.cat(found, dim=1)
