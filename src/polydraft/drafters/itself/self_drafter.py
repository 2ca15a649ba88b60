"""The target drafting for itself, by a view of it over its own keys."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Needs, Session
from polydraft.drafters.itself.view import View
from polydraft.drafters.model import SAMPLED, draft_rows, listed
from polydraft.errors import InvalidParameter
from polydraft.models import LanguageModel, load_draft
from polydraft.probs import SamplingParams
from polydraft.reading import Reader, Step, Text
from polydraft.rows import shared
from polydraft.schemes import IID, Scheme, TopK, require_scheme
from polydraft.trees import Chain, Draft, Frontier, Resume, grow


@dataclass(frozen=True, eq=False)
class SelfDraftState:
    """The sampling settings of the drafts, and the model of the view."""

    params: SamplingParams = shared()
    model: LanguageModel = shared()


@dataclass(frozen=True, eq=False)
class SelfDrafter(Drafter):
    """Draft with a view of the target, over the target's own keys.

    There is no second prompt to read and no second cache. A view of all keys writes those of its drafts into free slots
    behind the committed text, which verification writes again; so nothing of a draft survives it. A view of few keys
    writes into a copy of them, taken as the tree begins.

    What the view sees depends on the committed text, not on what is drafted, so the drafts' law is known before the
    first is drawn. Rows of a batch keep equally many keys where they keep few, as many as the shortest text has. So
    beside a text that is shorter than these a row drafts from fewer: its law stays, but the text that a seed gives it
    may be another one than alone.

    Args:
        view: the view.
        resumes: whether the full pass goes on from the states at the view's exit. The last drafts must run through its
            layers first, which costs what it spares but for late exits.

    Raises:
        InvalidParameter: it resumes where there are no such states.
        UnsupportedModel: at the start, if the target's texts cannot branch: places are counted by slots, or states are
            no slots; or if the target has no such view.
    """

    view: View
    resumes: bool = False
    name: str = field(init=False)
    needs = Needs(target=True)
    sound = True

    def __post_init__(self) -> None:
        if self.resumes:
            self.view.check_resumes()
        object.__setattr__(self, "name", self.view.word)

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft a short chain, since each draft costs a pass of the view."""
        return Defaults(IID() if params.temperature else TopK(), Chain(4))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, "A target that drafts for itself")

    def start(self, text: Text, session: Session) -> SelfDraftState:
        """Return the settings and the view's model; keys are the target's."""
        if session.target is None:
            raise InvalidParameter(f"The drafter {self.name} needs the target's reader (Session.target), but has none.")
        target = session.target.model
        if self.resumes:
            target.last_layers(self.view.layers.exit or 0)
        return SelfDraftState(session.params, self.view.model(target))

    def draft(self, state: SelfDraftState, request: DraftRequest) -> tuple[Draft, SelfDraftState]:
        """Grow a tree: one pass of the view per depth."""
        text, scheme, policy = request.text, request.scheme, request.policy
        if not policy.shape.counts or request.target is None:
            return Draft.nothing(text.last()), state
        view = request.target.at(text)
        if self.view.keys is not None:
            slots = self.view.keys.choose(view.read).to(text.tokens.device)
            view = view.compact(slots, policy.largest.size + 1)
        exit = self.view.layers.exit
        view = replace(view.viewed(state.model), layers=(exit,) if self.resumes and exit else ())
        size = listed(None, scheme, policy, state.model.facts.vocab_size)
        levels = list[tuple[range, Tensor]]()
        propose = partial(_proposed, view, text, state.params, size, scheme, levels)
        draft = grow(text.last(), policy, scheme, propose, request.noise, trusted=True)
        draft = draft.as_whole() if size is None else draft
        if self.resumes and exit and draft.failure is None:
            draft = replace(draft, resume=Resume(exit, _at_exit(view, text, draft, levels)))
        return draft, state

    def commit(self, state: SelfDraftState, step: Step) -> SelfDraftState:
        """Return the settings: what is kept lies in the target's keys."""
        return state


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
    view: Reader, text: Text, draft: Draft, levels: Sequence[tuple[range, Float[Tensor, "b f d"]]]
) -> Float[Tensor, "b n d"]:
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
