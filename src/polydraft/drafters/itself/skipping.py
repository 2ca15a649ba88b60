"""The target drafting for itself without sub-layers that it chooses while a text is written."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Needs, Session
from polydraft.drafters.itself.self_drafter import drawn_by
from polydraft.drafters.itself.skip_programme import SkipTable, skip_table, tokens_per_work
from polydraft.drafters.itself.view import View
from polydraft.drafters.model import SAMPLED
from polydraft.errors import InvalidParameter, is_whole, shown
from polydraft.models import LanguageModel, SubLayer, head_bytes, layer_set, logits_of, sublayers, walk, without
from polydraft.probs import SamplingParams, to_probs
from polydraft.reading import Step, Text, first_drafts
from polydraft.rows import per_row, shared
from polydraft.schemes import IID, Scheme, TopK, require_scheme
from polydraft.trees import Chain, Draft, Piece, Pieces

EVERY = 128
"""After so many tokens sub-layers are chosen anew: a choice takes about as long as ten of them."""
MOST_SAVED = 16
"""The most that is saved, in units of the cheapest sub-layer's work: so many states go through the model at once."""
CHECKED = 3
"""How many sets of the programme are checked on the text, beside the one in use."""
WRITTEN = 32
"""On how many tokens of it."""


@dataclass(frozen=True)
class ChosenSkips:
    """Which sub-layers a text is drafted without.

    Args:
        end: how many tokens the text had when they were chosen; -1 if they are to be.
        skipped: their numbers.
    """

    end: int = -1
    skipped: tuple[int, ...] = ()

    def cut(self, length: int) -> "ChosenSkips":
        """Return what is known of a text's first `length` tokens."""
        return self if self.end <= length else ChosenSkips()


@dataclass(frozen=True, eq=False)
class SkippingState:
    """The model, its sub-layers, and which of them each text is drafted without.

    Args:
        params: the sampling settings of the drafts.
        model: the target, or the one with its weights rounded.
        parts: its sub-layers.
        head: the bytes of its output head.
        chosen: per row, what was chosen.
    """

    params: SamplingParams = shared()
    model: LanguageModel = shared()
    parts: tuple[SubLayer, ...] = shared()
    head: int = shared()
    chosen: tuple[ChosenSkips, ...] = per_row(ChosenSkips.cut, learnt=True)

    def view(self, skipped: Sequence[int]) -> LanguageModel:
        """Return the model without these sub-layers."""
        return without(self.model, layer_set(self.parts[number] for number in skipped))


@dataclass(frozen=True, eq=False)
class SkippingDrafter(Drafter):
    """Draft with the target without some of its sub-layers, which each text chooses for itself, over the target's keys.

    A choice has two parts. A dynamic programme runs the last committed token through all sub-layers and keeps, for each
    amount of work that is saved, the states nearest to the target's own (`skip_table`). The sets with the most expected
    tokens per work, by the overlap of their rows with the target's at this token, and the set in use are then checked:
    one pass each over the newest tokens of the text tells how many of these the set's likeliest guess hits (matchness).
    The set with the most expected tokens per work by its hits is drafted with.

    **What it reads.** Committed text and the target's keys of it, before anything is drawn. So a node's row is fixed
    before the node's children are drawn, and the text has the target's law. Work is counted, not timed: the bytes of
    weights and keys that a pass reads, which grow with the text. So a seed fixes the text, whatever stands beside it.

    Sources: the programme is that of Chen et al., arXiv 2505.24196 (CLaSp), with the sub-layers and costs of Cha et
    al., arXiv 2602.20217 (KnapSpec). CLaSp reads the states that verification made of the last accepted token; here the
    programme makes them again, since between attention and inner layer nobody notes them. The check is that of Xia et
    al., arXiv 2410.06916 (SWIFT).

    Args:
        weights: "int8" or "int4"; empty for the target's own.
        every: behind how many committed tokens a text chooses anew.

    Raises:
        InvalidParameter: `every` is less than 1.
        UnsupportedModel: at the start, if the target has no fused pass, or no such weights.
    """

    weights: str = ""
    every: int = EVERY
    name: str = field(init=False)
    needs: Needs = field(init=False)
    sound = True

    def __post_init__(self) -> None:
        if not is_whole(self.every) or self.every < 1:
            raise InvalidParameter(f"every must be a whole number of at least 1, but is {shown(self.every)}.")
        object.__setattr__(self, "name", View(self.weights, chooses=True).word)
        object.__setattr__(self, "needs", Needs(target=True, slots=max(MOST_SAVED + 1, WRITTEN)))

    def stretches(self, length: int) -> NoReturn:
        """Raise `InvalidParameter`: where a text chooses its layers anew follows from its steps."""
        raise InvalidParameter(
            f"{self.name} chooses its layers anew as steps are taken; texts do not tell where, so it is not measured."
        )

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft a short chain, since each draft costs a pass of the view."""
        return Defaults(IID() if params.temperature else TopK(), Chain(4))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, "A target that drafts for itself")

    def start(self, text: Text, session: Session) -> SkippingState:
        """Return the state of texts that have chosen nothing yet."""
        if session.target is None:
            raise InvalidParameter(f"The drafter {self.name} needs the target's reader (Session.target), but has none.")
        model, own = self.check_target(session.target.model)
        chosen = (ChosenSkips(),) * len(text.lengths)
        return SkippingState(session.params, model, own, head_bytes(model), chosen)

    def check_target(self, target: LanguageModel) -> tuple[LanguageModel, tuple[SubLayer, ...]]:
        """Return the target with the weights that draft, and its sub-layers; errors are those of the start."""
        model = View(self.weights).model(target)
        return model, sublayers(model)

    def draft(self, state: SkippingState, request: DraftRequest) -> tuple[Draft | Pieces, SkippingState]:
        """Choose where it is time, then grow trees: in one pass a depth for all rows that skip the same."""
        text, policy = request.text, request.policy
        if not policy.shape.counts or request.target is None:
            return Draft.nothing(text.last()), state
        target = request.target.at(text)
        chosen = tuple(
            old if 0 <= old.end and text.counts[row] < old.end + self.every else self.chosen(state, request, row)
            for row, old in enumerate(state.chosen)
        )
        state = replace(state, chosen=chosen)
        if len({one.skipped for one in chosen}) == 1:
            return drawn_by(target.viewed(state.view(chosen[0].skipped)), request, state.params, []), state
        pieces = list[Piece]()
        for row, one in enumerate(chosen):
            own = replace(
                request, text=text.of([row]), policy=policy.select([row]), noise=request.noise.of([row]), target=None
            )
            view = target.select([row]).viewed(state.view(one.skipped))
            pieces.append(Piece((row,), drawn_by(view, own, state.params, [])))
        return Pieces(tuple(pieces)), state

    def chosen(self, state: SkippingState, request: DraftRequest, row: int) -> ChosenSkips:
        """Choose the sub-layers that a row's text is drafted without from now on."""
        assert request.target is not None
        known, length = request.text.counts[row] - 1, request.policy.shape.depth
        tokens, cache = request.text.tokens[row, : known + 1], request.target.at(request.text).select([row]).cache
        work = [part.work(known) for part in state.parts]
        scoring = sum(work) + state.head

        def expected(skipped: Sequence[int], overlap: float) -> float:
            saved = sum(work[number] for number in skipped)
            return tokens_per_work(overlap, scoring - saved, scoring, length)

        table = self._table(state, cache, int(tokens[known]), known, work)
        sets, overlaps = table.sets, _overlaps(state, table)
        found = {own: overlap for own, overlap in zip(sets, overlaps, strict=True) if own and len(own) < len(work)}
        best = sorted(found, key=lambda own: -expected(own, found[own]))[:CHECKED]
        before = state.chosen[row].skipped
        tried = tuple(dict.fromkeys((before, *best) if before else best))
        places = range(max(0, known - WRITTEN), known)
        if not places or len(tried) < 2:
            return ChosenSkips(known + 1, tried[0] if tried else ())

        def hits(skipped: Sequence[int]) -> float:
            guesses = first_drafts(state.view(skipped), cache, tokens, places, known).argmax(-1)
            return float((guesses == tokens[places.start + 1 : known + 1]).double().mean())

        return ChosenSkips(known + 1, max(tried, key=lambda own: expected(own, hits(own))))

    def _table(self, state: SkippingState, cache: Any, token: int, known: int, work: Sequence[int]) -> SkipTable:
        """Run the programme over a token, with costs in units of the cheapest sub-layer's work."""
        states, through = walk(state.model, cache, token, known, MOST_SAVED + 1)
        costs = [max(1, round(one / min(work))) for one in work]
        return skip_table(states[:1], costs, MOST_SAVED, lambda number, own: through(state.parts[number], own))

    def commit(self, state: SkippingState, step: Step) -> SkippingState:
        """Learn nothing: what is kept lies in the target's keys."""
        return state


def _overlaps(state: SkippingState, table: SkipTable) -> list[float]:
    """Return how much of the target's row at the token each set's row covers."""
    rows = to_probs(logits_of(state.model, table.states), state.params)
    return rows.minimum(rows[:1]).sum(-1).tolist()
