"""A loop inside a drafter: its law over all draws, texts in ragged and running batches, and what it refuses."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from choices import Choices, Chosen, Toy, distance, law_of
from doubles import perturbed, tiny_model

import polydraft
from polydraft import (
    IID,
    BlockVerification,
    Chain,
    HuggingFaceModel,
    ModelDrafter,
    NestedDrafter,
    RecursiveRejection,
    SpeculativeSampling,
    TopDown,
    TopK,
    Widths,
)
from polydraft.drafters import DraftRequest, NgramDrafter
from polydraft.errors import InvalidParameter, UnpairedScheme, VocabularyMismatch
from polydraft.reading import Step
from polydraft.schemes import Given, Product
from polydraft.trees import TreePolicy
from polydraft.verifiers import Lenient, NaiveMatch, Optimal, PathVerifier

VOCAB, ROWS = 24, [[3, 1, 4, 1, 5], [9, 2, 6], [5]]
INSIDE = {
    "chains": (BlockVerification(), Chain(2)),
    "trees": (TopDown(Optimal(IID())), Widths((2, 1))),
    "nothing drafted well": (TopDown(SpeculativeSampling()), Chain(1)),
}


def of_choices(choices: Choices, inside: str, length: int) -> NestedDrafter:
    rule, policy = INSIDE[inside]
    return NestedDrafter(Toy(2, seed=1), ModelDrafter(Toy(2, seed=2)), Chosen(rule, choices), policy, length)


@pytest.mark.long(1)
@pytest.mark.parametrize("rule", [BlockVerification(), TopDown(SpeculativeSampling())], ids=["block", "token by token"])
@pytest.mark.parametrize("inside", INSIDE)
def test_over_all_draws_of_both_loops_the_law_is_the_targets(inside: str, rule: PathVerifier) -> None:
    """Its own drafts, its own verdicts, and the target's; the loop inside gains other numbers of tokens each time."""
    target = Toy(2)
    made = partial(of_choices, inside=inside, length=2)
    law, failures = law_of(target, made, rule, Chain(2), [[1, 0, 1]], 2, steps=1)
    assert distance(law, target.texts([1, 0, 1], 2)) < 1e-12 and not failures


@pytest.mark.slow
@pytest.mark.parametrize("rule", [BlockVerification(), TopDown(SpeculativeSampling())], ids=["block", "token by token"])
def test_neighbours_that_gain_more_or_less_leave_a_rows_law_alone(rule: PathVerifier) -> None:
    target = Toy(2)
    made = partial(of_choices, inside="nothing drafted well", length=2)
    law, failures = law_of(target, made, rule, Chain(2), [[1, 0, 1], [0, 1, 1]], 1, steps=1)
    assert distance(law, target.texts([1, 0, 1], 1)) < 1e-12 and not failures


class Raises(ModelDrafter):
    """Fails where the text or what was drawn ends in token 1: before it draws, behind that, or when it is told."""

    at = "before"

    def draft(self, state: Any, request: DraftRequest) -> Any:
        if self.at == "before" and request.text.counts[0] > 3 and int(request.text.last()[0]) == 1:
            raise OSError("no more")
        found = super().draft(state, request)
        if self.at == "behind" and int(found[0].tree.tokens[0, -1]) == 1:
            raise OSError("no more")
        return found

    def commit(self, state: Any, step: Step) -> Any:
        if self.at == "told" and int(step.verdict.next_token[0]) == 1:
            raise OSError("no more")
        return super().commit(state, step)


class Breaks(Toy):
    """A model without a pass where what was written ends in token 1, or without numbers at any such token."""

    raises = True

    def forward(self, tokens: Any, positions: Any, *given: Any, **named: Any) -> Any:
        bad = (tokens == 1) & (positions >= 3)
        if self.raises and bool(bad[:, 0].any()):
            raise OSError("no more")
        found = super().forward(tokens, positions, *given, **named)
        return replace(found, logits=found.logits.masked_fill(bad.unsqueeze(-1), torch.nan))


def failing(kind: str) -> tuple[Toy, ModelDrafter]:
    """Return a middle model and a small drafter, of which one fails in some steps."""
    middle, small = Toy(2, seed=1), ModelDrafter(Toy(2, seed=2))
    if kind in ("before", "behind", "told"):
        small = Raises(small.model)
        object.__setattr__(small, "at", kind)
    else:
        broken = Breaks(2, seed=1 if kind.startswith("middle") else 2)
        broken.raises = kind.endswith("raises")
        middle, small = (broken, small) if kind.startswith("middle") else (middle, ModelDrafter(broken))
    return middle, small


@pytest.mark.long(3)
@pytest.mark.filterwarnings("ignore:.*drafter inside a loop failed", "ignore:.*decoded without drafts")
@pytest.mark.parametrize("inside", [Chain(1), Chain(2)], ids=repr)
@pytest.mark.parametrize(
    "kind",
    ["before", "behind", "told", "small raises", "small has no numbers", "middle raises", "middle has no numbers"],
)
def test_an_error_that_follows_from_drawn_tokens_leaves_the_law_alone(kind: str, inside: TreePolicy) -> None:
    """What the middle model wrote before it is verified; what comes behind is as if never asked for."""
    target = Toy(2)
    middle, small = failing(kind)
    rule = BlockVerification()
    made = lambda choices: NestedDrafter(middle, small, Chosen(rule, choices), inside, 2)  # noqa: E731
    law, _ = law_of(target, made, rule, Chain(2), [[1, 0, 1]], 2, steps=1)
    assert distance(law, target.texts([1, 0, 1], 2)) < 1e-12


TWO = Chain(2)


def nested(target: Any, policy: TreePolicy = TWO, length: int = 4, **changes: Any) -> NestedDrafter:
    middle, small = HuggingFaceModel(perturbed(target, 0.1)), HuggingFaceModel(perturbed(target, 0.2))
    return NestedDrafter(middle, ModelDrafter(small), TopDown(RecursiveRejection()), policy, length, **changes)


@pytest.mark.long(1)
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("inside", [Chain(3), Widths((2, 1))], ids=repr)
def test_a_row_of_a_ragged_batch_is_the_text_that_it_is_alone(inside: TreePolicy, heat: float) -> None:
    target = tiny_model(vocab=VOCAB)
    drafter, padded, mask = nested(target, inside), torch.zeros(3, 5).long(), torch.zeros(3, 5).long()
    for row, tokens in enumerate(ROWS):
        padded[row, 5 - len(tokens) :], mask[row, 5 - len(tokens) :] = torch.tensor(tokens), 1
    given: dict[str, Any] = {"drafter": drafter, "temperature": heat, "seed": 3, "max_new_tokens": 16}
    found = polydraft.generate(target, padded, attention_mask=mask, **given)
    assert found.statistics.accepted > 0 and not found.statistics.fallback
    alone = polydraft.generate(target, ROWS[0], **given).sequences
    assert found.sequences[0].tolist() == alone[0].tolist()
    many = [*polydraft.generate_many(target, [*ROWS, *ROWS], batch_size=2, **given)]
    assert len(many) == 6 and not any(one.tokens == [] for one in many)
    if not heat:
        plain = polydraft.generate(target, padded, attention_mask=mask, **{**given, "drafter": "none"})
        assert torch.equal(plain.sequences, found.sequences)
        expected = {
            one.name: one.tokens
            for one in polydraft.generate_many(target, [*ROWS, *ROWS], **given | {"drafter": "none"})
        }
        assert {one.name: one.tokens for one in many} == expected


def test_a_conversation_goes_on_from_what_was_read() -> None:
    target = tiny_model(vocab=VOCAB)
    given: dict[str, Any] = {"drafter": nested(target), "temperature": 1.0, "seed": 5, "max_new_tokens": 8}
    first = polydraft.generate(target, ROWS[0], keep_past=True, **given)
    more = [*first.sequences[0].tolist(), 7, 2]
    fresh = polydraft.generate(target, more, **given)
    again = polydraft.generate(target, more, past=first.past, **given)
    assert fresh.sequences.tolist() == again.sequences.tolist() and again.statistics.prompt_known > 8


@pytest.mark.wrong_types
def test_what_it_refuses() -> None:
    target = tiny_model(vocab=VOCAB)
    with pytest.raises(InvalidParameter, match="length must be at least 1"):
        nested(target, length=0)
    middle = HuggingFaceModel(target)
    with pytest.raises(InvalidParameter, match="must be lossless"):
        NestedDrafter(middle, ModelDrafter(middle), TopDown(Lenient()), Chain(2))
    strange: list[tuple[Any, Any, Any, str]] = [
        ("ngram", BlockVerification(), Chain(2), "drafter inside must be a drafter.*not 'ngram'"),
        (NgramDrafter, TopDown(NaiveMatch(Given())), Chain(2), "drafter inside must be a drafter.*class NgramDrafter"),
        (NgramDrafter(), "naive", Chain(2), "rule inside must verify trees.*not 'naive'"),
        (NgramDrafter(), NaiveMatch(Given()), Chain(2), "rule inside must verify trees"),
        (NgramDrafter(), TopDown(NaiveMatch(Given())), "chain:2", "trees inside must be a policy.*not 'chain:2'"),
    ]
    for drafter, verifier, policy, said in strange:
        with pytest.raises(InvalidParameter, match=said):
            NestedDrafter(middle, drafter, verifier, policy)
    with pytest.raises(UnpairedScheme):
        NestedDrafter(middle, NgramDrafter(), BlockVerification(), Chain(2))
    for scheme in (TopK(), Product()):
        with pytest.raises(UnpairedScheme, match="chains of independent draws"):
            nested(target).check(scheme)
    with pytest.raises(UnpairedScheme):
        polydraft.generate(target, ROWS[0], drafter=nested(target), verifier=NaiveMatch(TopK()), max_new_tokens=4)
    other = nested(tiny_model(vocab=5000))
    with pytest.raises(VocabularyMismatch):
        polydraft.generate(target, ROWS[0], drafter=other, max_new_tokens=4)
    with pytest.raises(VocabularyMismatch, match="has 25 tokens and the target 24"):
        polydraft.generate(target, ROWS[0], drafter=nested(tiny_model(vocab=25)), max_new_tokens=4)
