"""Sub-layers chosen while a text is written: the law of the text, what a choice may not read, batches and rewinds."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from choices import Law, distance, law_of
from doubles import tiny_model
from key_views import text_of

import polydraft
from polydraft.drafters import DraftRequest, NestedDrafter, NgramDrafter, SelfDrafter, Session, SkippingDrafter, View
from polydraft.drafters.itself.skipping import ChosenSkips
from polydraft.engine.load import draft_for
from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models import HuggingFaceModel, LayerSet
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Reader, Text
from polydraft.rows import cut, put, reuse, select
from polydraft.schemes import IID, Given
from polydraft.trees import Chain, Draft, Piece, Pieces, TreePolicy, Widths
from polydraft.verifiers import NaiveMatch, Optimal, PathVerifier, SpeculativeSampling, TopDown

WHOLE, BRANCHING = TopDown(SpeculativeSampling()), TopDown(Optimal(IID()))
ONE, TWO = Chain(1), Chain(2)
PROMPT = [0, 1, 1, 0, 1]


@cache
def small() -> HuggingFaceModel:
    """Return a target in double precision whose law is far from even."""
    return HuggingFaceModel(tiny_model("llama", 2, seed=3, num_hidden_layers=2, dtype=torch.float64))


def texts(found: Sequence[int], missing: int, prompt: Sequence[int] = PROMPT) -> Law:
    """Return the law of so many more tokens behind a text, by the model's own passes."""
    if not missing:
        return {(): 1.0}
    with torch.no_grad():
        row = small().model(torch.tensor([[*prompt, *found]])).logits[0, -1].softmax(-1).tolist()
    law: Law = {}
    for token, chance in enumerate(row):
        law |= {(token, *text): chance * share for text, share in texts([*found, token], missing - 1, prompt).items()}
    return law


def law(drafter: Any, rule: PathVerifier = WHOLE, policy: TreePolicy = ONE, prompts: Any = (PROMPT,)) -> float:
    """Return how far the law of three tokens is from the target's, of which the first steps draft two."""
    target: Any = small()
    found, failures = law_of(target, drafter, rule, policy, [*prompts], 3, steps=2, rest=texts)
    assert not failures
    return distance(found, texts([], 3))


@pytest.mark.parametrize(
    ("rule", "policy"), [(WHOLE, Chain(1)), pytest.param(BRANCHING, Widths((2,)), marks=pytest.mark.slow)], ids=str
)
def test_over_all_draws_of_two_steps_the_law_is_the_targets(rule: PathVerifier, policy: TreePolicy) -> None:
    """Sub-layers are chosen at the first step and anew at the second."""
    assert law(SkippingDrafter(every=1), rule, policy) < 1e-12


@pytest.mark.slow
def test_beside_another_row_the_law_is_the_targets() -> None:
    assert law(SkippingDrafter(every=1), prompts=(PROMPT, [1, 1, 0, 1, 0])) < 1e-12


class ChoosingByTheDraft(SkippingDrafter):
    """Wrong: it chooses by the token that it has drawn, and reports the row of what it has chosen then."""

    def draft(self, state: Any, request: DraftRequest) -> tuple[Draft | Pieces, Any]:
        drawn, after = super().draft(state, request)
        assert isinstance(drawn, Draft)
        skipped = LayerSet(frozenset({int(drawn.tree.tokens[0, 1])}), frozenset({0}))
        view = SelfDrafter(View(layers=skipped))
        assert request.target is not None
        other = view.start(request.text, Session(state.params, 40, 2, request.target))
        return replace(drawn, probs=view.draft(other, request)[0].probs), after  # type: ignore[union-attr]


def test_a_choice_that_reads_what_was_drawn_biases_the_text() -> None:
    assert law(ChoosingByTheDraft(every=1)) > 1e-3


# What is chosen.

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 8], [2, 7, 1, 8, 2, 8]]


@cache
def model() -> HuggingFaceModel:
    return HuggingFaceModel(tiny_model("llama", num_hidden_layers=4, dtype=torch.float64))


def drafted(rows: Sequence[Sequence[int]], every: int = 1, policy: TreePolicy = TWO) -> tuple[Any, Any, Any]:
    """Return what is drafted behind texts, the state with which the step goes on, and the target's reader."""
    text, drafter = text_of(rows), SkippingDrafter(every=every)
    reader = Reader.new(model(), len(rows), 110).catch_up(text)[0]
    state = drafter.start(text, Session(SamplingParams(), 110, 24, reader))
    request = DraftRequest(text, IID(), policy, Noise.from_seed(1, len(rows)), reader)
    return *drafter.draft(state, request), reader


def test_each_row_chooses_by_its_own_text_whatever_stands_beside_it() -> None:
    pieces, state, _ = drafted(ROWS)
    assert isinstance(pieces, Pieces) and len({one.skipped for one in state.chosen}) > 1
    for row, own in enumerate(ROWS):
        _, alone, _ = drafted([own])
        assert alone.chosen[0] == state.chosen[row] and state.chosen[row].skipped
        assert state.chosen[row].end == len(own)


def test_a_draft_has_the_rows_of_the_view_that_it_chose() -> None:
    draft, state, reader = drafted(ROWS[:1])
    parts = [state.parts[number] for number in state.chosen[0].skipped]
    layers = LayerSet(
        frozenset(one.layer for one in parts if one.attention), frozenset(one.layer for one in parts if one.mlp)
    )
    text, view = text_of(ROWS[:1]), SelfDrafter(View(layers=layers))
    own = view.start(text, Session(SamplingParams(), 110, 24, reader))
    other, _ = view.draft(own, DraftRequest(text, IID(), Chain(2), Noise.from_seed(1, 1), reader))
    assert other.tree.tokens.equal(draft.tree.tokens)
    torch.testing.assert_close(other.probs, draft.probs)


def test_a_choice_stays_for_so_many_tokens() -> None:
    _, state, reader = drafted(ROWS[:1], every=3)
    longer = [*ROWS[0], 5]
    for count, same in ((2, True), (3, False)):
        text = text_of([[*longer, 3, 5, 8][: len(ROWS[0]) + count]])
        read = Reader.new(model(), 1, 110).catch_up(text)[0]
        request = DraftRequest(text, IID(), Chain(2), Noise.from_seed(1, 1), read)
        after = SkippingDrafter(every=3).draft(state, request)[1]
        assert (after.chosen == state.chosen) is same and reader


def test_choosing_leaves_the_targets_keys_as_they_are() -> None:
    _, _, reader = drafted(ROWS[:1])
    fresh: Any = Reader.new(model(), 1, 110).catch_up(text_of(ROWS[:1]))[0]
    for slot in range(len(ROWS[0]) - 1):
        assert all(
            torch.equal(*pair) for pair in zip(reader.cache.in_slot(slot), fresh.cache.in_slot(slot), strict=True)
        )


def test_a_step_that_is_taken_again_drafts_the_same() -> None:
    first, second = drafted(ROWS), drafted(ROWS)
    for one, other in zip(first[0].pieces, second[0].pieces, strict=True):
        assert isinstance(one, Piece) and one.draft.tree.tokens.equal(other.draft.tree.tokens)


def test_rows_of_a_state_and_rewinds() -> None:
    _, state, _ = drafted(ROWS)
    fresh = drafted([[1, 2]], policy=Chain(1))[1]
    assert select(state, [2]).chosen == (state.chosen[2],)
    assert put(state, 1, select(state, [0])).chosen[1] == state.chosen[0]
    assert cut(state, 0, 8).chosen[0] == state.chosen[0] and cut(state, 0, 7).chosen[0] == ChosenSkips()
    assert reuse(select(state, [0]), fresh, 8).chosen == fresh.chosen  # what steps taught stays behind


# Texts.


@pytest.mark.parametrize(("kind", "size"), [("llama", 3), ("gpt_neox", 2), ("mistral", 2)])
def test_greedy_texts_of_ragged_and_running_batches_are_plain_decoding(kind: str, size: int) -> None:
    target = tiny_model(kind, num_hidden_layers=3, dtype=torch.float64)
    prompts = [torch.tensor([row]) for row in ROWS]
    given: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0}
    plain = polydraft.generate_many(target, prompts, drafter=polydraft.NoDraft(), batch_size=size, **given)
    found = polydraft.generate_many(
        target, prompts, drafter=SkippingDrafter(every=4), policy=Chain(3), batch_size=size, **given
    )
    assert {one.name: one.tokens for one in found} == {one.name: one.tokens for one in plain}


@pytest.mark.parametrize("count", [1, 3])
def test_a_seed_fixes_a_text_whatever_stands_beside_it(count: int) -> None:
    target, ids = tiny_model("llama", num_hidden_layers=3, dtype=torch.float64), torch.tensor([ROWS[0]])
    given: dict[str, Any] = {"drafter": SkippingDrafter(every=2), "policy": Chain(2), "temperature": 1.0, "top_k": 0}

    def written(rows: int) -> list[int]:
        found: Any = polydraft.generate(target, ids, max_new_tokens=8, seed=4, num_return_sequences=rows, **given)
        return found.sequences[0].tolist()[: len(ROWS[0]) + 8]

    assert written(1) == written(count)


@pytest.mark.wrong_types
def test_in_a_stack_it_drafts_for_a_view_and_is_no_middle() -> None:
    """Rows that skip other sub-layers have no one model for which others could draft; below a view they are drafts."""
    target = tiny_model("llama", num_hidden_layers=3)
    with pytest.raises(
        InvalidParameter, match=r"one view of the target for all texts.*self:skip=auto chooses for each"
    ):
        draft_for("self:skip=auto < ngram", target)
    with pytest.raises(InvalidParameter, match=r"The middle must be .* not of type SkippingDrafter"):
        NestedDrafter(SkippingDrafter(), NgramDrafter(), TopDown(NaiveMatch(Given())), TWO)  # type: ignore[arg-type]
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    given: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 8, "eos_token_id": None}
    found = polydraft.generate(target, ids, drafter="self:int8@3 < self:skip=auto", **given)
    plain = polydraft.generate(target, ids, drafter="none", **given)
    assert torch.equal(found.sequences, plain.sequences)
    assert found.statistics.drafted and not found.statistics.fallback


# What is refused.


def test_words_and_what_is_refused() -> None:
    target = tiny_model("llama", num_hidden_layers=3)
    found: Any = draft_for("self:int8,skip=auto", target)
    assert found == SkippingDrafter("int8") or found.name == "self:int8,skip=auto"
    assert View.named("self:skip=auto") == View(chooses=True) and View(chooses=True).word == "self:skip=auto"
    for word in ("self:skip=auto,exit=2", "self:skip=auto,keys=recent:1+2", "self:skip=auto,skip=3"):
        with pytest.raises(InvalidParameter, match="name no other layers and no keys"):
            View.named(word)
    with pytest.raises(InvalidParameter, match="SkippingDrafter"):
        SelfDrafter(View(chooses=True))
    with pytest.raises(InvalidParameter, match="every must be a whole number of at least 1, but is 0"):
        SkippingDrafter(every=0)
    with pytest.raises(UnsupportedModel):
        draft_for("self:skip=auto", tiny_model("mamba"))
    assert isinstance(text_of(ROWS), Text)
