"""The target drafting for itself: its own weights, over few of its own keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Needs, Session
from polydraft.drafters.model import SAMPLED, draft_rows, listed
from polydraft.errors import InvalidParameter, UnsupportedModel, is_whole, shown
from polydraft.probs import SamplingParams
from polydraft.reading import Reader, Step, Text
from polydraft.rows import shared
from polydraft.schemes import IID, Scheme, TopK, require_scheme
from polydraft.trees import Chain, Draft, Frontier, grow


@dataclass(frozen=True)
class Recent:
    """Choose a text's first tokens, to which attention flows whatever they are, and its newest.

    Args:
        sinks: how many of the first; fewer where a text of the batch is short.
        window: how many of the newest.

    Source: Xiao et al., arXiv 2309.17453 (StreamingLLM); as drafts, arXiv 2408.11049 (MagicDec).
    """

    sinks: int = 16
    window: int = 240

    def __post_init__(self) -> None:
        for name, value, least in (("sinks", self.sinks, 0), ("window", self.window, 1)):
            if not is_whole(value) or value < least:
                raise InvalidParameter(f"{name} must be a whole number of at least {least}, but is {shown(value)}.")

    def choose(self, known: Sequence[int]) -> Int[Tensor, "b m"]:
        """Return slots of rows that know so many tokens, in rising order and equally many: those of the shortest."""
        count = min(self.sinks + self.window, *known)
        slots = torch.tensor(known).unsqueeze(-1) + torch.arange(-count, 0)
        sinks = torch.arange(min(self.sinks, count // 2))
        slots[:, : len(sinks)] = sinks
        return slots


@dataclass(frozen=True, eq=False)
class SelfDraftState:
    """The sampling settings of the drafts."""

    params: SamplingParams = shared()


@dataclass(frozen=True, eq=False)
class SelfDrafter(Drafter):
    """Draft with the target over a copy of some of its keys, taken as the tree begins.

    Which keys depends on how long the texts are, not on what is drafted, so the drafts' law is known before the first
    is drawn. A draft's own keys go into the copy, so that nothing of it is left in the target's.

    Rows of a batch keep equally many keys, as many as the shortest text has. So beside a text that is shorter than the
    keys a row drafts from fewer: its law stays, but the text that a seed gives it may be another one than alone.

    Args:
        keys: which tokens of a text are seen.

    Raises:
        UnsupportedModel: at the start, if the target's texts cannot branch: places are counted by slots, or states are
            no slots.
    """

    keys: Recent = Recent()
    name = "self"
    needs = Needs(target=True)
    sound = True

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft a short chain, since each draft costs a pass of the target."""
        return Defaults(IID() if params.temperature else TopK(), Chain(4))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, "A target that drafts for itself")

    def start(self, text: Text, session: Session) -> SelfDraftState:
        """Return the settings; keys are the target's."""
        if session.target is None or not session.target.model.facts.branches:
            raise UnsupportedModel("A target whose text cannot branch has no keys to draft from in part.")
        return SelfDraftState(session.params)

    def draft(self, state: SelfDraftState, request: DraftRequest) -> tuple[Draft, SelfDraftState]:
        """Grow a tree: one pass of the target per depth."""
        text, scheme, policy = request.text, request.scheme, request.policy
        if not policy.shape.counts or request.target is None:
            return Draft.nothing(text.last()), state
        whole = request.target.at(text)
        slots = self.keys.choose(whole.read).to(text.tokens.device)
        view = whole.compact(slots, policy.largest.size + 1)
        size = listed(None, scheme, policy, whole.model.facts.vocab_size)
        propose = partial(_proposed, view, text, state.params, size, scheme)
        return grow(text.last(), policy, scheme, propose, request.noise, trusted=True), state

    def commit(self, state: SelfDraftState, step: Step) -> SelfDraftState:
        """Return the settings: what is kept lies in the target's keys."""
        return state


def _proposed(
    view: Reader, text: Text, params: SamplingParams, size: int | None, scheme: Scheme, frontier: Frontier
) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
    return draft_rows(view.grow(text, frontier), params, size, scheme)
