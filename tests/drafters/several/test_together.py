"""Routes and merges in generation: the text of plain decoding, alone and in batches; the law; what is refused."""

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from doubles import perturbed, tiny_model

import polydraft
from polydraft.conformance import check
from polydraft.drafters import (
    Drafter,
    JacobiDrafter,
    LookaheadDrafter,
    LookupFirst,
    MergedDrafter,
    ModelDrafter,
    Needs,
    NgramDrafter,
    OuroborosDrafter,
    PredictedDrafter,
    RecyclingDrafter,
    RoutedDrafter,
    SuffixDrafter,
)
from polydraft.drafters.text.guess import Guess, given
from polydraft.engine import Planner
from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.models import HuggingFaceModel
from polydraft.reading import Text
from polydraft.schemes import IID, Given, Product, TopK
from polydraft.trees import BestFirst, Chain, Confident, TreePolicy, Widths, branched

VOCAB = 20
TARGET = tiny_model("llama", VOCAB)
DRAFT = perturbed(TARGET, 0.05)
IDS = torch.tensor([[3, 1, 4, 3, 1, 4], [5, 8, 5, 8, 5, 8], [7, 7, 2, 1, 9, 6]])
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 40}
TEXT = (NgramDrafter(3, 1, 2), SuffixDrafter(), RecyclingDrafter())


def model() -> ModelDrafter:
    return ModelDrafter(HuggingFaceModel(DRAFT))


MAKERS = {
    "route": lambda: RoutedDrafter(TEXT),
    "route-first": lambda: RoutedDrafter(TEXT, model()),
    "merge": lambda: MergedDrafter(TEXT),
    "merge-beside": lambda: MergedDrafter(TEXT, model()),
    "a merge beside ouroboros": lambda: MergedDrafter(TEXT[:1], OuroborosDrafter(model(), 3, level=3)),
    "a route between a merge's members and a model with lookups": lambda: RoutedDrafter(
        TEXT[:1], polydraft.LookupFirst(model())
    ),
}


@pytest.mark.long(10)
@pytest.mark.parametrize("policy", [None, Chain(4), Widths((3, 2, 1)), BestFirst(8)], ids=repr)
@pytest.mark.parametrize("name", MAKERS)
def test_greedy_text_is_that_of_plain_decoding(name: str, policy: Any) -> None:
    plain = polydraft.generate(TARGET, IDS, drafter="none", **GREEDY)
    found = polydraft.generate(TARGET, IDS, drafter=MAKERS[name](), policy=policy, **GREEDY)
    assert torch.equal(found.sequences, plain.sequences)
    assert found.statistics.block_efficiency > 1.1 and not found.statistics.fallback
    most = {None: 99, Chain(4): 4, Widths((3, 2, 1)): 15, BestFirst(8): 8}[policy]
    assert found.statistics.drafted <= most * found.statistics.target_calls


class Derived(ModelDrafter):
    """May draft otherwise, so that its drafts are checked."""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", [Chain(4), Widths((3, 2, 1)), BestFirst(8)], ids=repr)
def test_a_node_may_have_guesses_beside_all_drafts_of_a_checked_drafter(policy: TreePolicy, temperature: float) -> None:
    options = {**GREEDY, "temperature": temperature, "policy": policy, "seed": 3}
    sound, other = (MergedDrafter(TEXT, kind(HuggingFaceModel(DRAFT))) for kind in (ModelDrafter, Derived))
    expected, found = (polydraft.generate(TARGET, IDS, drafter=one, **options) for one in (sound, other))
    assert torch.equal(found.sequences, expected.sequences)
    assert not found.statistics.fallback and found.statistics.drafted == expected.statistics.drafted


@pytest.mark.long(1)
@pytest.mark.parametrize("name", MAKERS)
def test_texts_of_a_running_batch_are_those_of_single_calls(name: str) -> None:
    prompts = {place: row[: 3 + place % 4] for place, row in enumerate([*IDS, *IDS.flip(1)])}
    drafter = MAKERS[name]()
    for temperature in (0.0, 0.8):
        options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": 14}
        many = polydraft.generate_many(TARGET, prompts, batch_size=2, drafter=drafter, seed=5, **options)
        for one in many:
            ids = prompts[one.name].unsqueeze(0)
            alone = polydraft.generate(TARGET, ids, drafter=drafter, seed=one.seed, **options)
            assert one.tokens == alone.sequences[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["route", "merge", "route-first", "merge-beside"])
def test_a_text_goes_on_from_a_past(name: str) -> None:
    drafter = MAKERS[name]()
    first = polydraft.generate(TARGET, IDS[:1], drafter=drafter, keep_past=True, **GREEDY)
    longer = torch.cat([first.sequences, torch.tensor([[4, 4, 2]])], dim=1)
    on = polydraft.generate(TARGET, longer, drafter=drafter, past=first.past, **GREEDY)
    assert torch.equal(on.sequences, polydraft.generate(TARGET, longer, drafter="none", **GREEDY).sequences)


@pytest.mark.long(1)
@pytest.mark.parametrize("kind", [RoutedDrafter, MergedDrafter])
def test_members_that_cannot_go_on_from_a_past_begin_anew(kind: type) -> None:
    plain = polydraft.generate(TARGET, IDS[:1], drafter="none", **GREEDY)
    for before, after in permutations([NgramDrafter(), SuffixDrafter(), RecyclingDrafter(), JacobiDrafter()], 2):
        for other in (None, model()):
            first = polydraft.generate(TARGET, IDS[:1], drafter=kind((before,), other), keep_past=True, **GREEDY)
            on = polydraft.generate(TARGET, IDS[:1], drafter=kind((after,), other), past=first.past, **GREEDY)
            assert torch.equal(on.sequences, plain.sequences) and not on.statistics.fallback


def test_a_past_does_not_bring_the_prediction_of_another_call() -> None:
    plain = polydraft.generate(TARGET, IDS[:1], drafter="none", **GREEDY)
    answer, asked = plain.sequences[0, IDS.shape[1] :].tolist(), {**GREEDY, "drafter": model()}
    first = polydraft.generate(TARGET, IDS[:1], prediction=[7] * 40, keep_past=True, **asked)
    fresh = polydraft.generate(TARGET, IDS[:1], prediction=answer, **asked)
    on = polydraft.generate(TARGET, IDS[:1], prediction=answer, past=first.past, **asked)
    assert on.statistics.sources["prediction"] == fresh.statistics.sources["prediction"]
    assert on.statistics.sources["prediction"][1] > 30 and on.statistics.prompt_known


@pytest.mark.slow
def test_a_route_may_come_and_go_between_turns() -> None:
    plain = polydraft.generate(TARGET, IDS[:1], drafter="none", **GREEDY)
    alone = model()
    for other in (alone, polydraft.LookupFirst(alone)):
        for before, after in permutations([other, RoutedDrafter(TEXT, other), MergedDrafter(TEXT, alone)], 2):
            first = polydraft.generate(TARGET, IDS[:1], drafter=before, keep_past=True, **GREEDY)
            for told in ({}, {"prediction": [1, 2, 3]}):
                on = polydraft.generate(TARGET, IDS[:1], drafter=after, past=first.past, **told, **GREEDY)
                assert torch.equal(on.sequences, plain.sequences) and not on.statistics.fallback


def test_drafts_are_counted_by_who_made_them() -> None:
    found = polydraft.generate(TARGET, IDS, drafter=RoutedDrafter(TEXT, model()), **GREEDY).statistics
    assert {*found.sources} <= {"ngram", "suffix", "recycling", "model"} and len(found.sources) > 1
    assert sum(drafted for drafted, _ in found.sources.values()) == found.drafted
    assert sum(accepted for _, accepted in found.sources.values()) == found.accepted
    assert found.as_dict()["sources"]


@pytest.mark.long(1)
@pytest.mark.parametrize("name", ["route", "merge", "merge-beside"])
def test_the_sampled_law_is_the_targets(name: str) -> None:
    drafter = MAKERS[name]()

    def sampled(prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        made = polydraft.generate(
            TARGET, ids, drafter=drafter, temperature=1.0, top_k=0, max_new_tokens=3, seed=seeds[0]
        )
        return made.sequences[:, ids.shape[1] :].tolist()

    report = check(sampled, TARGET, [[1, 2, 3, 4, 1, 2]], batch_size=250, most_samples=1000)
    assert report.passed, str(report)


@pytest.mark.wrong_types
def test_what_cannot_be_together_is_refused_by_name() -> None:
    for kind in (RoutedDrafter, MergedDrafter):
        for members in ((), (model(),), [NgramDrafter()], (LookaheadDrafter(),)):
            with pytest.raises(InvalidParameter, match="text drafter"):
                kind(members)
        for members in (TARGET, [TARGET], (TARGET,)):  # not what they hold, over many lines
            with pytest.raises(InvalidParameter, match=r"of type (LlamaForCausalLM|list)") as refusal:
                kind(members)  # type: ignore[arg-type]
            assert "\n" not in str(refusal.value)
    with pytest.raises(InvalidParameter, match="rate and sure must be positive"):
        RoutedDrafter(TEXT, rate=0)
    with pytest.raises(InvalidParameter, match="hope must be between 0 and 1"):
        MergedDrafter(TEXT, hope=1.0)
    with pytest.raises(InvalidParameter, match="no place for the riders of lookahead"):
        MergedDrafter(TEXT, LookaheadDrafter())
    for value in ("a", float("nan"), float("inf"), None):
        for name in ("rate", "sure", "price", "overhead"):
            with pytest.raises(InvalidParameter, match="rate and sure must be positive"):
                RoutedDrafter(TEXT, **{name: value})
        with pytest.raises(InvalidParameter, match="hope must be between 0 and 1"):
            MergedDrafter(TEXT, hope=value)  # type: ignore[arg-type]
    for kind in (RoutedDrafter, MergedDrafter):
        with pytest.raises(InvalidParameter, match="takes a drafter such as"):
            kind(TEXT, "model")
    merged = MergedDrafter(TEXT, model())
    with pytest.raises(UnpairedScheme, match="deterministic or"):
        merged.check(IID())
    merged.check(TopK())
    merged.check(Product())
    for alone in (RoutedDrafter(TEXT), MergedDrafter(TEXT)):
        alone.check(Given())
        with pytest.raises(UnpairedScheme, match="works with drafts that are given"):
            alone.check(IID())


def test_a_merge_refuses_trees_that_have_no_budget() -> None:
    drafter = MergedDrafter(TEXT, model())
    with pytest.warns(RuntimeWarning, match="splits trees of a fixed shape or of a budget"):
        polydraft.generate(TARGET, IDS[:1], drafter=drafter, policy=Confident((1, 1), 0.3), verifier=None, **GREEDY)


def test_a_prediction_goes_before_any_drafter() -> None:
    plain = polydraft.generate(TARGET, IDS, drafter="none", **GREEDY)
    answers = plain.sequences[:, IDS.shape[1] :].tolist()
    asked: tuple[Drafter | str | None, ...] = (None, "ngram", model(), RoutedDrafter(TEXT), PredictedDrafter([1, 2]))
    for drafter in asked:
        found = polydraft.generate(TARGET, IDS, drafter=drafter, prediction=answers, **GREEDY)
        assert torch.equal(found.sequences, plain.sequences)
        assert found.statistics.sources["prediction"][1] > 30
    many = polydraft.generate_many(
        TARGET,
        list(IDS),
        batch_size=2,
        per_prompt={1: {"prediction": answers[1]}, 2: {"prediction": answers[0]}},
        **GREEDY,
    )
    found_many = {one.name: one for one in many}
    assert [found_many[place].tokens for place in range(3)] == answers
    assert found_many[1].target_calls < 8
    with pytest.raises(InvalidParameter, match="prediction is to be drafted, but the drafter none drafts nothing"):
        polydraft.generate(TARGET, IDS, drafter="none", prediction=[1], **GREEDY)
    with pytest.raises(InvalidParameter, match="2 predictions for 3 rows"):
        polydraft.generate(TARGET, IDS, prediction=[[1], [2]], **GREEDY)
    with pytest.raises(InvalidParameter, match="the token 20, but the target has 20 tokens"):
        polydraft.generate(TARGET, IDS, prediction=[1, VOCAB], **GREEDY)
    with pytest.raises(InvalidParameter, match="must be a text or token ids"):
        polydraft.generate(TARGET, IDS, prediction=b"text", **GREEDY)
    with pytest.raises(InvalidParameter, match="tokenizer is missing"):
        polydraft.generate(TARGET, IDS, prediction="text", **GREEDY)


def test_a_merge_keeps_what_is_known_of_rows_that_are_no_law() -> None:
    text = Text(IDS[:2], torch.tensor([6, 6]))
    first, second = (given(text, [Guess.chain(np.array([1])), Guess.chain(np.array([2]))], TopK()) for _ in range(2))
    for flags in ((torch.tensor([True, False]), None), (None, torch.tensor([True, False]))):
        both = branched(replace(first, sound=flags[0]), replace(second, sound=flags[1]), TopK())
        assert both.draft.sound is not None and both.draft.sound.tolist() == [True, False]
    assert branched(first, second, TopK()).draft.sound is None


@pytest.mark.parametrize("passes", [1, 3])
def test_a_route_counts_the_passes_that_the_other_drafter_takes(passes: int) -> None:
    class Counting(ModelDrafter):
        needs = Needs(passes=passes)

    target = tiny_model(seed=1)
    other = Counting(HuggingFaceModel(perturbed(target, 0.2)))
    seen = list[float]()

    class Seeing(RoutedDrafter):
        def commit(self, state: Any, step: Any) -> Any:
            seen.append(state.rounds[0].seconds)
            return super().commit(state, step)

    route = Seeing((NgramDrafter(),), other, price=0.5, overhead=0.25)
    polydraft.generate(target, torch.tensor([[1, 2, 3]]), drafter=route, policy=3, max_new_tokens=4, temperature=0)
    assert seen and all(one == pytest.approx(1.25 + passes + 0.5 * 3) for one in seen)  # both models are equally large


class Blind(Planner):
    """A planner that takes one tree in every step and wants nothing looked up in every other one."""

    def __init__(self, tree: TreePolicy) -> None:
        super().__init__((tree,))
        self.asked = list[bool]()

    def learn(self, *told: Any) -> None:
        super().learn(*told)
        self.current = 1

    @property
    def uses_lookups(self) -> bool:
        return self.steps % 2 == 1

    def rows_with_lookup(self, found: Any) -> tuple[int, ...]:
        self.asked.append(self.uses_lookups)
        return tuple(row for row, one in enumerate(found) if one.parents)


@pytest.mark.parametrize("kind", ["route", "route alone", "lookup"])
def test_where_nothing_is_to_be_looked_up_nobody_guesses_and_the_other_drafter_drafts(kind: str) -> None:
    guessed, planner = list[bool](), Blind(Chain(3))

    class Guessing(NgramDrafter):
        def guesses(self, state: Any, text: Any, bounds: Any) -> Any:
            guessed.append(planner.uses_lookups)
            return super().guesses(state, text, bounds)

    other = model()
    route = RoutedDrafter((Guessing(),), None if kind == "route alone" else other)
    drafter = LookupFirst(other, 1) if kind == "lookup" else route
    found = polydraft.generate(TARGET, IDS, drafter=drafter, policy=planner, **GREEDY)
    plain = polydraft.generate(TARGET, IDS, drafter="none", **GREEDY)
    assert torch.equal(found.sequences, plain.sequences)
    assert planner.asked and all(planner.asked) and all(guessed) and bool(guessed) == (kind != "lookup")
    assert found.statistics.steps > len(planner.asked)
