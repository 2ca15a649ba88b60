"""A draft model that fills a block of guesses in one pass: Jacobi's iteration, verified by another model."""

from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Needs, Session
from polydraft.drafters.model import SAMPLED, check_listed, runnable
from polydraft.drafters.parallel import behind, slot_draft
from polydraft.drafters.text.guess import rows_of
from polydraft.drafters.text.jacobi import filled
from polydraft.errors import InvalidParameter, UnsupportedModel, is_whole, shown
from polydraft.models import LanguageModel, check_same_size, module_of, same_model
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Reader, Step, Text
from polydraft.rows import parts, per_row, scratch, shared
from polydraft.schemes import IID, Scheme, TopK, require_scheme
from polydraft.trees import BestFirst, Chain, Draft

DEPTH = 8
"""How deep it drafts unless something else is said: half of the usual block."""


class Guesses(NamedTuple):
    """What a row's next tokens were thought to be where its text had `end` tokens."""

    end: int = 0
    tokens: tuple[int, ...] = ()

    def behind(self, length: int) -> tuple[int, ...]:
        """Return those behind a text of so many tokens that goes on from there."""
        return self.tokens[length - self.end :] if length >= self.end else ()

    def cut(self, length: int) -> "Guesses":
        """Return what is left where the text is cut to so many tokens."""
        return self if self.end <= length else Guesses()


@dataclass(frozen=True, eq=False)
class JacobiBlockState:
    """The draft model's reader, its settings, the target's number of tokens, and each row's guesses.

    In a step `before` says what the guesses were before its draft.
    """

    reader: Reader = parts()
    params: SamplingParams = shared()
    vocab_size: int = shared()
    guesses: tuple[Guesses, ...] = per_row(Guesses.cut, learnt=True)
    before: tuple[Guesses, ...] = scratch(())

    def resumes(self, fresh: "JacobiBlockState") -> bool:
        """Tell whether both are of one model."""
        return same_model(self.reader.model, fresh.reader.model)


@dataclass(frozen=True, eq=False)
class JacobiBlockDrafter(Drafter):
    """Drafts with a causal model that was tuned to mend blocks of guesses (CLLM), for the model that it was.

    One pass reads what is unread, then n - 1 guesses behind it, n being the block. Row d of it is the draft row of
    every node of depth d + 1, whatever is drafted above. Its likeliest tokens are the next guesses, which move on by as
    many places as the step wrote. So rows follow from the committed text and the row's own finished steps, each is
    fixed before a child is drawn from it, and every scheme and rule applies. A place without a guess takes the token n
    places before. There are always n guesses, however deep the tree, so that no row hangs on its neighbours' trees.

    Args:
        model: the draft model, or the module that it runs.
        block: how many tokens it learnt to mend at once, and the deepest tree.
        passes: of a draft; each later one reads what the one before found likeliest.
        shortlist_size: as for `ModelDrafter`.
        params: the draft's own temperature and filters; None for the target's.

    Raises:
        InvalidParameter: a shortlist without a token, something that is no model, a block that its context has no room
            for, or no pass.
        UnsupportedModel: a model with an encoder, or one that cannot branch, so that it cannot forget guesses.
        VocabularyMismatch: at the start, if the vocabularies differ by more than padding.

    Source: CLLM (arXiv 2403.00835), whose blocks nothing verifies; Santilli et al., 2305.10427.
    """

    model: LanguageModel
    block: int = 16
    passes: int = 1
    shortlist_size: int | None = None
    params: SamplingParams | None = None
    name = "jacobi-block"
    sound = True

    def __post_init__(self) -> None:
        check_listed(self.shortlist_size)
        object.__setattr__(self, "model", runnable(self.model))
        kind, facts = type(module_of(self.model) or self.model).__name__, self.model.facts
        if not is_whole(self.block) or not 1 <= self.block < facts.context:
            raise InvalidParameter(
                f"A block has 1 to {facts.context - 1} tokens, as {kind} reads {facts.context}, but "
                f"{shown(self.block)} are asked for."
            )
        if not is_whole(self.passes) or self.passes < 1:
            raise InvalidParameter(f"passes must be at least 1, but is {shown(self.passes)}.")
        if facts.encodes or not facts.branches:
            why = "reads with an encoder" if facts.encodes else "cannot take back what it has read"
            raise UnsupportedModel(
                f"{kind} {why}, so it cannot draft by guesses; take a draft model whose layers all keep keys."
            )

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]  an attribute of most drafters
        """What it needs beside the texts: its passes."""
        return Needs(passes=self.passes)

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft the likeliest paths at temperature 0, and a drawn chain above it."""
        depth = min(DEPTH, self.block)
        return Defaults(IID(), Chain(depth)) if params.temperature else Defaults(TopK(), BestFirst(depth))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, "A draft model that fills blocks")

    def stretches(self, length: int) -> NoReturn:
        """Raise `InvalidParameter`: the guesses that rows follow from are those of earlier steps."""
        raise InvalidParameter(
            f"The {self.name} drafter goes by guesses of earlier steps; texts do not tell them, so it is not measured."
        )

    def start(self, text: Text, session: Session) -> JacobiBlockState:
        """Return a reader that has read nothing, and no guesses."""
        check_same_size(session.vocab_size, self.model.facts.vocab_size)
        count = len(text.lengths)
        reader = Reader.new(self.model, count, session.capacity + self.block)  # a block may be deeper than the trees
        return JacobiBlockState(reader, self.params or session.params, session.vocab_size, (Guesses(),) * count)

    def read(self, state: JacobiBlockState, text: Text, features: Features | None) -> JacobiBlockState:
        """Read the prompts but for their last tokens."""
        return replace(state, reader=state.reader.catch_up(text)[0])

    def draft(self, state: JacobiBlockState, request: DraftRequest) -> tuple[Draft, JacobiBlockState]:
        """Mend the guesses in one pass or more, and grow a tree from the rows of the last one."""
        text = request.text
        root = Draft.nothing(text.last())
        if not request.policy.shape.depth:
            return root, state
        guesses, reader, rows = self._guesses(state, text), state.reader, torch.empty(0)
        for _ in range(self.passes):
            asked = behind(guesses[:, : self.block - 1])
            scored, reader = state.reader.score(text, root.tree, replace(root, riders=asked))
            rows = scored.logits if scored.riders is None else torch.cat([scored.logits, scored.riders], dim=1)
            guesses = rows[..., : state.vocab_size].argmax(-1)
        draft = slot_draft(rows, request, state.params, self.shortlist_size, state.vocab_size)
        own = tuple(Guesses(end, tuple(row)) for end, row in zip(text.counts, guesses.tolist(), strict=True))
        return draft, replace(state, reader=reader, guesses=own, before=state.guesses)

    def commit(self, state: JacobiBlockState, step: Step) -> JacobiBlockState:
        """Keep the guesses, which say where they stand; of the drafts nothing was read.

        Rows for which another drafter drafted are as before the draft, as if nobody had asked: whether somebody does
        hangs on their neighbours.
        """
        both = zip(state.before or state.guesses, state.guesses, strict=True)
        own = (before if row in step.others else now for row, (before, now) in enumerate(both))
        return replace(state, guesses=tuple(own), before=())

    def _guesses(self, state: JacobiBlockState, text: Text) -> Int[Tensor, "b n"]:
        """Return the guesses for the places of a block behind every row's text."""
        known = (one.behind(end) for one, end in zip(state.guesses, text.counts, strict=True))
        own = [filled(row, some, self.block) for row, some in zip(rows_of(text), known, strict=True)]
        return torch.as_tensor([one.tolist() for one in own], device=text.tokens.device)
