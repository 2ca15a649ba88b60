"""A draft that is another loop's text: a small drafter drafts for a middle model, whose text the target verifies."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from polydraft.drafters.contract import (
    ChecksTarget,
    Decoder,
    Defaults,
    Drafter,
    DraftRequest,
    Needs,
    Session,
    Views,
    check_target,
    drafters_in,
    loop_inside,
)
from polydraft.drafters.model import ModelDrafter
from polydraft.errors import InvalidParameter, UnpairedScheme, VocabularyMismatch, shown
from polydraft.models import LanguageModel, check_same_size
from polydraft.probs import SamplingParams, sent
from polydraft.reading import Features, Reader, Step, Text
from polydraft.rows import cut, parts, shared
from polydraft.schemes import IID, Scheme
from polydraft.trees import MENDABLE, Chain, Draft, TokenTree, TreePolicy, TreeShape, topology

MOST_LEVELS = 3
"""The most drafters of a stack: what a fourth would bring costs more passes than it spares."""


@dataclass(frozen=True, eq=False)
class NestedState:
    """The middle's loop over the texts, who runs it, and the state of the drafter whose view the middle is."""

    decoder: Decoder = shared()
    loop: Any = parts()
    view: Any = parts()


@dataclass(frozen=True, eq=False)
class NestedDrafter(Drafter):
    """Drafts chains that a middle model writes, for which another drafter drafts (cascades of models, TriForce).

    The rule inside must be lossless: then each drafted token is a draw from the middle model's own row given those
    above it, and these rows are reported. So the chain is a draft like that of a draft model, and exact under every
    rule for chains. How many tokens the loop inside gains in a step does not matter: each row keeps its first `length`.

    The middle is a model, or a view of the target (`SelfDrafter`). A view reads the target's keys, so that no prompt is
    read twice; what the loop writes lies in the view's own slots, or behind the text in the target's. The drafter
    inside may be nested too, up to `MOST_LEVELS` drafters; one that looks at keys looks at the middle's.

    Where the drafter inside fails, the middle model goes on without it, with a warning. Where the middle model fails,
    what it wrote is verified, and no more is drafted. That is exact unless its pass failed because of tokens that were
    drafted for it: then what it writes elsewhere is not its law.

    A drafter inside that learns within a text, such as token recycling, learns from steps that were taken for slower
    neighbours: a row's text may then be another than alone, by the same law.

    Args:
        middle: the middle model, or the drafter whose view of the target it is.
        drafter: who drafts for it.
        verifier: the rule by which it keeps drafts.
        policy: the trees inside.
        length: tokens of a chain, at most as many as the policy asks for.
        params: the middle model's temperature and filters; None for the target's.

    Raises:
        InvalidParameter: the middle is neither, the rule inside is lossy, there are too many levels, a number is too
            small, or the drafter inside a view reads hidden states, which nobody notes there.
        VocabularyMismatch: at the start, if the middle has more tokens than the target, or fewer by more than padding.

    Source: vertical cascades, arXiv 2312.11462; TriForce, 2404.11912, whose published loop draws the token behind a
    rejection from the middle's law instead of the residual, which is not exact.
    """

    middle: LanguageModel | Views
    drafter: Drafter
    verifier: Any
    policy: TreePolicy
    length: int = 6
    params: SamplingParams | None = None
    name = "nested"
    needs: Needs = field(init=False)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InvalidParameter(f"length must be at least 1, but is {self.length}.")
        Chain(self.length)  # refuses longer ones than trees may be deep
        self._check_inside()
        if not self.verifier.lossless:
            raise InvalidParameter(f"The rule inside must be lossless, and {self.verifier.name} is not.")
        if not isinstance(self.middle, LanguageModel | Views):
            raise InvalidParameter(
                f"The middle must be a model, or a drafter with a view of the target, not {shown(self.middle)}."
            )
        check_levels(levels(self))
        inner = self.drafter.needs
        if self._view is not None and (inner.layers or inner.queries):
            raise InvalidParameter(
                f"{self.drafter.name} reads {'hidden states' if inner.layers else 'queries'}, which nobody notes in a "
                "view of the target; take another drafter inside, such as a draft model."
            )
        self.drafter.check(self.verifier.scheme)
        needs = Needs() if self._view is None else replace(self._view.needs, slots=self._slots, passes=None)
        object.__setattr__(self, "needs", needs)

    def _check_inside(self) -> None:
        given: dict[str, tuple[object, bool]] = {
            "drafter inside must be a drafter, as NgramDrafter() is": (self.drafter, isinstance(self.drafter, Drafter)),
            "rule inside must verify trees, as TopDown(NaiveMatch(Given())) does": (
                self.verifier,
                callable(getattr(self.verifier, "verify", None)),
            ),
            "trees inside must be a policy, as Chain(4) is": (self.policy, isinstance(self.policy, TreePolicy)),
        }
        for what, (value, is_fine) in given.items():
            if not is_fine or isinstance(value, type):
                raise InvalidParameter(f"The {what}, not {shown(value)}.")

    @property
    def _view(self) -> Views | None:
        """The drafter whose view the middle is; None if it is a model."""
        return self.middle if isinstance(self.middle, Views) else None

    @property
    def _slots(self) -> int:
        """How many slots a step inside needs behind a text."""
        inner = self.drafter.needs
        return self.policy.largest.size + inner.riders + inner.slots + 1

    def stretches(self, length: int) -> list[tuple[Drafter, int]]:
        """Return the middle, whose rows these are whoever drafts for it.

        Raises:
            InvalidParameter: it is a view with settings of its own.
        """
        if self._view is not None and self.params is not None:
            raise InvalidParameter("A view of the target that a stack samples by settings of its own is not measured.")
        rows = cast(Drafter, self._view) or ModelDrafter(cast(LanguageModel, self.middle), params=self.params)
        return [(rows, min(length, self.length))]

    def defaults(self, params: SamplingParams) -> Defaults:
        """Give the chain."""
        return Defaults(IID(), Chain(self.length))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` unless a lone draft is a draw from its row."""
        if not scheme.lone_draft_is_drawn or scheme.several_rows:
            raise UnpairedScheme(f"A nested loop writes chains of independent draws, not {scheme.name} drafts.")

    def check_target(self, target: LanguageModel) -> None:
        """Check the middle, and those inside, which draft for it."""
        if isinstance(self.middle, LanguageModel):
            self._check_tokens(self.middle, target.facts.vocab_size)
            seen = self.middle
        else:
            seen = self.middle.check_target(target) if isinstance(self.middle, ChecksTarget) else target
        check_target(self.drafter, cast(LanguageModel, seen))

    def start(self, text: Text, session: Session) -> NestedState:
        """Begin the middle model's loop, which has read nothing."""
        decoder, own = loop_inside(self.name, session, self.params or session.params)
        if self._view is not None:
            view = self._view.start(text, session)
            assert session.target is not None  # else there were no view
            return NestedState(decoder, self._loop(decoder, session.target, text, own), view)
        middle = cast(LanguageModel, self.middle)
        self._check_tokens(middle, session.vocab_size)
        return NestedState(decoder, self._loop(decoder, middle, text, own), None)

    def _check_tokens(self, middle: LanguageModel, known: int) -> None:
        own_size = middle.facts.vocab_size
        check_same_size(known, own_size)
        if own_size > known:
            raise VocabularyMismatch(
                f"The middle model has {own_size} tokens and the target {known}: what it writes beyond these could not "
                "be verified."
            )

    def _loop(self, decoder: Decoder, middle: LanguageModel | Reader, text: Text, session: Session) -> Any:
        return decoder.begin(middle, self.drafter, self.verifier, self.policy, text, session)

    def read(self, state: NestedState, text: Text, features: Features | None) -> NestedState:
        """Read the prompts but for their last tokens; a view has them from the target."""
        view = None if self._view is None else self._view.read(state.view, text, features)
        return replace(state, loop=state.decoder.read(state.loop, text), view=view)

    def draft(self, state: NestedState, request: DraftRequest) -> tuple[Draft, NestedState]:
        """Let the middle model write, as far as the row that gains least needs."""
        text, depth, target = request.text, min(self.length, request.policy.shape.depth), request.target
        if not depth:
            return Draft.nothing(text.last()), state
        loop, view = state.loop, state.view
        if self._view is None or target is None:
            draft, loop = self._written(state.decoder, loop, request, depth)
            return draft, replace(state, loop=loop)
        keys, view = self._view.viewed(view, text, target, depth * (1 + self.policy.largest.depth) + self._slots)
        draft, loop = self._written(state.decoder, state.decoder.lent(loop, keys), request, depth)
        return draft, replace(state, loop=state.decoder.lent(loop, None), view=view)

    def _written(self, decoder: Decoder, loop: Any, request: DraftRequest, depth: int) -> tuple[Draft, Any]:
        """Let the loop take steps until every row has a chain of so many tokens, or it fails."""
        text, failure = request.text, None
        loop = decoder.on(loop, text, request.noise.fork(0))
        tokens, laws = [list[int]() for _ in text.counts], [list[Tensor]() for _ in text.counts]
        while min(map(len, tokens)) < depth and failure is None:
            try:
                loop, step = decoder.step(loop, mends=True)
            except MENDABLE:
                raise
            except Exception as error:  # noqa: BLE001  of the middle model, before it wrote more
                failure = error
                continue
            written = step.verdict.tokens(step.tree).tolist()
            for row, kept in enumerate(step.verdict.kept):
                tokens[row] += written[row][: kept + 1]
                laws[row] += step.probs[row, [0, *step.verdict.path[row, :kept].tolist()]].unbind()
        if failure is not None and not any(tokens):
            raise failure
        draft = chain_of(text, [one[:depth] for one in tokens], [one[:depth] for one in laws])
        return replace(draft, failure=failure), loop

    def commit(self, state: NestedState, step: Step) -> NestedState:
        """Take back what was not kept."""
        loop, view = state.loop, state.view
        for row, (count, kept) in enumerate(zip(step.text.counts, step.verdict.kept, strict=True)):
            loop = cut(loop, row, count + kept)
        if self._view is not None:
            view = self._view.commit(view, step)
        return replace(state, loop=loop, view=view)


def check_levels(count: int) -> None:
    """Check that a stack has no more drafters than pay.

    Raises:
        InvalidParameter: it has.
    """
    if count > MOST_LEVELS:
        raise InvalidParameter(f"A stack has at most {MOST_LEVELS} drafters, but this one has {count}.")


def levels(drafter: Drafter) -> int:
    """Return how many drafters draft for one another: a drafter that nobody drafts for is one."""
    if isinstance(drafter, NestedDrafter):
        return 1 + levels(drafter.drafter)
    return max((levels(one) for one in drafters_in(drafter)[1:]), default=1)


def chain_of(text: Text, tokens: Sequence[Sequence[int]], laws: Sequence[Sequence[Tensor]]) -> Draft:
    """Return a chain for each row with the rows that its tokens were drawn from, over the whole vocabulary."""
    last, most = text.last(), max(map(len, tokens))
    drafted = torch.tensor([[*one, *(-1,) * (most - len(one))] for one in tokens])
    atoms = torch.cat([torch.full_like(last, -1).unsqueeze(-1), sent(drafted, last.device)], dim=1)
    none = torch.zeros_like(next(law for one in laws for law in one))
    probs = torch.stack([torch.stack([*one, *(none,) * (most + 1 - len(one))]) for one in laws])
    shape = topology(TreeShape(((1,),) * most), len(last), last.device)
    chain, valid = torch.cat([last.unsqueeze(-1), atoms[:, 1:].clamp_min(0)], dim=1), atoms >= 0
    valid[:, 0] = True
    listed = torch.arange(probs.shape[-1], device=last.device).expand(probs.shape)
    return Draft(TokenTree(chain, shape, valid), atoms, listed, probs, most_children=1)
