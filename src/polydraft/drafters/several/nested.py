"""A draft that is another loop's text: a small drafter drafts for a middle model, whose text the target verifies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polydraft.drafters.contract import Decoder, Defaults, Drafter, DraftRequest, Session, loop_inside
from polydraft.errors import InvalidParameter, UnpairedScheme, VocabularyMismatch
from polydraft.models import LanguageModel, check_same_size
from polydraft.probs import SamplingParams, sent
from polydraft.reading import Features, Step, Text
from polydraft.rows import cut, parts, shared
from polydraft.schemes import IID, Scheme
from polydraft.trees import MENDABLE, Chain, Draft, TokenTree, TreePolicy, TreeShape, topology


@dataclass(frozen=True, eq=False)
class NestedState:
    """The middle model's loop over the texts, and who runs it."""

    decoder: Decoder = shared()
    loop: Any = parts()


@dataclass(frozen=True, eq=False)
class NestedDrafter(Drafter):
    """Drafts chains that a middle model writes, for which another drafter drafts (cascades of models, TriForce).

    The rule inside must be lossless: then each drafted token is a draw from the middle model's own row given those
    above it, and these rows are reported. So the chain is a draft like that of a draft model, and exact under every
    rule for chains. How many tokens the loop inside gains in a step does not matter: each row keeps its first `length`.

    Where the drafter inside fails, the middle model goes on without it, with a warning. Where the middle model fails,
    what it wrote is verified, and no more is drafted. That is exact unless its pass failed because of tokens that were
    drafted for it: then what it writes elsewhere is not its law.

    A drafter inside that learns within a text, such as token recycling, learns from steps that were taken for slower
    neighbours: a row's text may then be another than alone, by the same law.

    Args:
        middle: the middle model.
        drafter: who drafts for it.
        verifier: the rule by which it keeps drafts.
        policy: the trees inside.
        length: tokens of a chain, at most as many as the policy asks for.
        params: the middle model's temperature and filters; None for the target's.

    Raises:
        InvalidParameter: the rule inside is lossy, or a number too small.
        VocabularyMismatch: at the start, if the middle has more tokens than the target, or fewer by more than padding.

    Source: vertical cascades, arXiv 2312.11462; TriForce, 2404.11912.
    """

    middle: LanguageModel
    drafter: Drafter
    verifier: Any
    policy: TreePolicy
    length: int = 6
    params: SamplingParams | None = None
    name = "nested"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InvalidParameter(f"length must be at least 1, but is {self.length}.")
        if not self.verifier.lossless:
            raise InvalidParameter(f"The rule inside must be lossless, and {self.verifier.name} is not.")
        self.drafter.check(self.verifier.scheme)

    def defaults(self, params: SamplingParams) -> Defaults:
        """Give the chain."""
        return Defaults(IID(), Chain(self.length))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` unless a lone draft is a draw from its row."""
        if not scheme.lone_draft_is_drawn or scheme.several_rows:
            raise UnpairedScheme(f"A nested loop writes chains of independent draws, not {scheme.name} drafts.")

    def start(self, text: Text, session: Session) -> NestedState:
        """Begin the middle model's loop, which has read nothing."""
        own_size = self.middle.facts.vocab_size
        check_same_size(session.vocab_size, own_size)
        if own_size > session.vocab_size:
            raise VocabularyMismatch(
                f"The middle model has {own_size} tokens and the target {session.vocab_size}: what it writes beyond "
                "these could not be verified."
            )
        decoder, own = loop_inside(self.name, session, self.params or session.params)
        return NestedState(decoder, decoder.begin(self.middle, self.drafter, self.verifier, self.policy, text, own))

    def read(self, state: NestedState, text: Text, features: Features | None) -> NestedState:
        """Read the prompts but for their last tokens."""
        return replace(state, loop=state.decoder.read(state.loop, text))

    def draft(self, state: NestedState, request: DraftRequest) -> tuple[Draft, NestedState]:
        """Let the middle model write, as far as the row that gains least needs."""
        text, depth = request.text, min(self.length, request.policy.shape.depth)
        if not depth:
            return Draft.nothing(text.last()), state
        loop, failure = state.decoder.on(state.loop, text, request.noise.fork(0)), None
        tokens, laws = [list[int]() for _ in text.counts], [list[Tensor]() for _ in text.counts]
        while min(map(len, tokens)) < depth and failure is None:
            try:
                loop, step = state.decoder.step(loop, mends=True)
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
        return replace(draft, failure=failure), replace(state, loop=loop)

    def commit(self, state: NestedState, step: Step) -> NestedState:
        """Take back what was not kept."""
        loop = state.loop
        for row, (count, kept) in enumerate(zip(step.text.counts, step.verdict.kept, strict=True)):
            loop = cut(loop, row, count + kept)
        return replace(state, loop=loop)


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
