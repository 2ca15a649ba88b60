"""The law of the text is the target's whatever is guessed, routed or merged: summed over all drafts and verdicts."""

from collections.abc import Callable
from typing import Any

import pytest
from choices import Toy, distance, law_of

from polydraft.drafters import (
    Drafter,
    MergedDrafter,
    ModelDrafter,
    NgramDrafter,
    PredictedDrafter,
    RecyclingDrafter,
    RoutedDrafter,
)
from polydraft.drafters.several.merge import RowHistory
from polydraft.schemes import IID, Given, Product, TopK, WithoutReplacement
from polydraft.trees import BestFirst, Chain, TreePolicy, Widths
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    NaiveMatch,
    Optimal,
    PathVerifier,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    TopDown,
)

TARGET, SMALL, SMALL_DRAFT = Toy(3, 0), Toy(2, 0), Toy(2, 1)
NEAR = 1e-12
TEXT = (NgramDrafter(3, 1, 2), RecyclingDrafter(2))
ALONE: dict[str, Callable[[], Drafter]] = {
    "several matches": lambda: NgramDrafter(3, 1, 3),
    "recycling": lambda: RecyclingDrafter(2),
    "prediction": lambda: PredictedDrafter([1, 0, 0, 1, 1, 0]),
    "merged": lambda: MergedDrafter(TEXT),
    "routed": lambda: RoutedDrafter(TEXT),
    "routed, moving fast": lambda: RoutedDrafter(TEXT, rate=50.0),
}
POLICIES = (Chain(2), Widths((2, 2)), BestFirst(3, depth=2, children=2))


@pytest.mark.parametrize("policy", POLICIES, ids=["chain", "widths", "best first"])
@pytest.mark.parametrize("name", ALONE)
def test_guesses_alone(name: str, policy: TreePolicy) -> None:
    law, failures = law_of(SMALL, ALONE[name](), TopDown(NaiveMatch(Given())), policy, [[1, 0, 1, 1, 0]], 3, steps=2)
    assert not failures
    assert distance(law, SMALL.texts([1, 0, 1, 1, 0], 3)) < NEAR


@pytest.mark.parametrize("name", ["recycling", "routed"])
def test_guesses_of_three_tokens_beside_a_neighbour(name: str) -> None:
    prompts = [[1, 0, 2], [2, 1, 0]]
    law, failures = law_of(TARGET, ALONE[name](), TopDown(NaiveMatch(Given())), Widths((2,)), prompts, 1)
    assert not failures
    assert distance(law, TARGET.texts(prompts[0], 1)) < NEAR


BESIDE: list[tuple[Callable[[], Drafter], PathVerifier, TreePolicy]] = [
    (lambda: RoutedDrafter(TEXT, ModelDrafter(SMALL_DRAFT)), BlockVerification(), Chain(2)),
    (lambda: RoutedDrafter(TEXT, ModelDrafter(SMALL_DRAFT), rate=50.0), BottomUp(Optimal()), Widths((2, 1))),
    (
        lambda: RoutedDrafter(TEXT, ModelDrafter(SMALL_DRAFT)),
        TopDown(RecursiveRejectionWithoutReplacement()),
        Widths((2, 1)),
    ),
    (lambda: RoutedDrafter(TEXT, ModelDrafter(SMALL_DRAFT)), TopDown(NaiveMatch(TopK())), Widths((2, 1))),
    (lambda: RoutedDrafter(TEXT, ModelDrafter(SMALL_DRAFT)), TopDown(RecursiveRejection(Product())), Widths((2, 1))),
    (lambda: MergedDrafter(TEXT, ModelDrafter(SMALL_DRAFT)), TopDown(RecursiveRejection(Product())), Widths((2, 2))),
    (lambda: MergedDrafter(TEXT, ModelDrafter(SMALL_DRAFT)), BottomUp(RecursiveRejection(Product())), Widths((2, 2))),
    (lambda: MergedDrafter(TEXT, ModelDrafter(SMALL_DRAFT)), TopDown(NaiveMatch(TopK())), Widths((2, 2))),
]


@pytest.mark.parametrize(("make", "rule", "policy"), BESIDE)
def test_guesses_beside_a_model(make: Callable[[], Drafter], rule: PathVerifier, policy: TreePolicy) -> None:
    prompt = [0, 1, 1, 0, 1]
    law, failures = law_of(SMALL, make(), rule, policy, [prompt], 3, steps=1)
    assert not failures
    assert distance(law, SMALL.texts(prompt, 3)) < NEAR


def test_all_steps_of_a_route_and_of_a_merge_before_a_model() -> None:
    rule = TopDown(RecursiveRejection(Product()))
    for make in (RoutedDrafter, MergedDrafter):
        law, failures = law_of(SMALL, make(TEXT, ModelDrafter(SMALL_DRAFT)), rule, Chain(2), [[0, 1, 0]], 2)
        assert not failures and distance(law, SMALL.texts([0, 1, 0], 2)) < NEAR


class Splitting(MergedDrafter):
    """A merge that notes how it split its nodes, by what finished steps had shown."""

    sound = True

    def _split(self, policy: Any, whole: Any, kept: Any, guesses: Any) -> Any:
        found = super()._split(policy, whole, kept, guesses)
        seen = self.__dict__.setdefault("seen", {})
        for one, drafts in zip(kept, found.drafts, strict=True):
            seen.setdefault(one, set()).add(drafts)
        return found


LEARNING: list[tuple[PathVerifier, TreePolicy]] = [
    (TopDown(RecursiveRejection(Product())), Chain(2)),
    (BottomUp(RecursiveRejection(Product())), Chain(2)),
    (TopDown(NaiveMatch(TopK())), Chain(2)),
    (TopDown(RecursiveRejection(Product())), BestFirst(2, depth=2, children=2)),
]


@pytest.mark.parametrize(("rule", "policy"), LEARNING)
def test_a_merge_whose_split_is_learnt_between_steps(rule: PathVerifier, policy: TreePolicy) -> None:
    """What one step drew of the other drafter changes how many of its drafts the next one has, and the law stays."""
    drafter, prompt = Splitting((NgramDrafter(),), ModelDrafter(SMALL_DRAFT), hope=0.95), [0, 1, 1, 0, 1]
    law, failures = law_of(SMALL, drafter, rule, policy, [prompt], 3)
    assert not failures and distance(law, SMALL.texts(prompt, 3)) < NEAR
    seen = drafter.__dict__["seen"]
    assert seen[RowHistory()] == {2}, "two of its drafts are hoped to be likelier than a match"
    later = [drafts for kept, drafts in seen.items() if kept.kept < kept.tried]
    assert later and all(1 in drafts for drafts in later), "one that was not kept makes a match likelier"


@pytest.mark.long(1)
@pytest.mark.parametrize("policy", [Chain(2), BestFirst(2, depth=2, children=2)], ids=["chain", "best first"])
def test_a_merge_whose_rows_split_differently(policy: TreePolicy) -> None:
    """The first row's match is sure and takes a place, so that what was drawn there for its neighbour is nobody's."""
    prompts = [[0, 1, 0, 1, 0], [1, 1, 1, 0, 0]]
    drafter = Splitting((NgramDrafter(4, 2),), ModelDrafter(SMALL_DRAFT), hope=0.9)
    rule = TopDown(RecursiveRejection(Product()))
    law, failures = law_of(SMALL, drafter, rule, policy, prompts, 2, steps=1)
    assert not failures and distance(law, SMALL.texts(prompts[0], 2)) < NEAR
    assert drafter.__dict__["seen"][RowHistory()] == {1, 2}


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement()])
def test_guesses_under_schemes_whose_siblings_are_drawn_together_are_paths(scheme: object) -> None:
    """The proof that a lone child with a one-hot row is a draw of any scheme; siblings would not be."""
    rule = TopDown(RecursiveRejection() if isinstance(scheme, IID) else RecursiveRejectionWithoutReplacement())
    drafter = RoutedDrafter((NgramDrafter(3, 1, 3),), ModelDrafter(SMALL_DRAFT), rate=1e-3)
    law, failures = law_of(SMALL, drafter, rule, Widths((3, 2)), [[0, 1, 0, 0, 1]], 3, steps=1)
    assert not failures and distance(law, SMALL.texts([0, 1, 0, 0, 1], 3)) < NEAR
