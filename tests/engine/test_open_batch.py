"""Texts that come and go in a batch without empty rows are what they would be alone."""

from functools import cache

import pytest
import torch
from doubles import perturbed, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import (
    Chain,
    Fixed,
    HuggingFaceModel,
    LookaheadDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDraft,
    OuroborosDrafter,
    SamplingParams,
    TreeShape,
)
from polydraft.drafters import Drafter, JacobiBlockDrafter, ParallelDrafter
from polydraft.engine import Ending, Method, Observer, Request, RunningBatch, Statistics, TargetLaw
from polydraft.engine.choices import Choices, chosen_method
from polydraft.errors import ContextOverflow
from polydraft.planning import Opening, Spent
from polydraft.planning.lessons import Lesson
from polydraft.probs import Noise
from polydraft.trees import LearningPolicy, Lookup, TreePolicy

VOCAB, NEW, ROOM = 30, 12, 100
POLICY = Fixed(TreeShape(((3,), (2, 1, 0), (1,))))
COMMON = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
PROMPTS = (
    [3, 1, 4, 1, 5, 9, 2],
    [7],
    [*COMMON, 2, 7],
    [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7, 4, 9],
    [*COMMON, 5, 8, 5],
    [9, 9],
    COMMON,
    [*COMMON, 2, 7, 1],
)


@cache
def target(kind: str = "llama") -> PreTrainedModel:
    return tiny_model(kind, VOCAB)


def drafters(kind: str = "llama") -> dict[str, Drafter]:
    draft = HuggingFaceModel(perturbed(target(kind), 0.05))
    if kind != "llama":
        return {"n-gram": NgramDrafter(), "model": ModelDrafter(draft)}
    return {
        "none": NoDraft(),
        "n-gram": NgramDrafter(),
        "lookahead": LookaheadDrafter(3, 4, 3, pool_from_prompt=True),
        "ouroboros": OuroborosDrafter(draft, 3, 2, 3, 4, 3),
        "model": ModelDrafter(draft),
        "pard": ParallelDrafter(draft, 29),
        "guesses": JacobiBlockDrafter(draft, 6),
    }


class Written:
    """Texts written by a running batch: prompt after prompt joins, at most two in each step."""

    def __init__(
        self, methods: list[Method], heat: float, *, size: int, chunk: int | None, keeps: int, kind: str = "llama"
    ) -> None:
        model = HuggingFaceModel(target(kind))
        plain = chosen_method(Choices("none"), model, SamplingParams())
        self.batch = RunningBatch(model, plain, size, ROOM, chunk=chunk, keeps=keeps)
        self.texts: dict[int, list[int]] = {}
        self.known: list[int] = []
        law, left = TargetLaw(SamplingParams(heat)), list(enumerate(PROMPTS))
        while left or self.batch.running or self.batch.reading:
            for _ in range(2):
                if left and self.batch.free:
                    place, prompt = left.pop(0)
                    method = methods[place % len(methods)]
                    noise = Noise.from_seed(11 + place, 1)
                    ending = Ending(len(prompt) + NEW - place % 5)
                    self.known.append(self.batch.join(Request(place, torch.tensor(prompt), law, ending, noise, method)))
            self._step()

    def _step(self) -> None:
        taken = self.batch.step()
        for name, gained in taken.gains().items() if taken else ():
            self.texts.setdefault(int(str(name)), []).extend(gained.tokens)
        self.batch.sweep()
        if self.batch.target.facts.branches:
            assert len(self.batch.batch) == len(self.batch.running)  # no row is empty


def alone(place: int, method: Method, heat: float, kind: str = "llama") -> list[int]:
    prompt: Tensor = torch.tensor([PROMPTS[place]])
    output = polydraft.generate(
        target(kind),
        prompt,
        attention_mask=torch.ones_like(prompt),
        drafter=method.drafter,
        verifier=method.verifier,
        policy=method.policy,
        max_new_tokens=NEW - place % 5,
        seed=11 + place,
        temperature=heat,
        top_k=0,
    )
    return output.sequences[0, prompt.shape[1] :].tolist()


def method_of(name: str, heat: float, kind: str = "llama") -> Method:
    policy = POLICY if name in ("none", "model", "pard") and kind == "llama" else None
    model = HuggingFaceModel(target(kind))
    return chosen_method(Choices(drafters(kind).get(name, name), None, policy), model, SamplingParams(temperature=heat))


@pytest.mark.long(3)
@pytest.mark.parametrize("heat", [0.0, 0.9])
@pytest.mark.parametrize(
    ("size", "chunk", "keeps"), [(1, None, 0), pytest.param(3, 4, 0, marks=pytest.mark.slow), (3, 4, 3), (8, 2, 8)]
)
@pytest.mark.parametrize("name", drafters())
def test_every_text_is_what_it_is_alone(name: str, size: int, chunk: int | None, keeps: int, heat: float) -> None:
    method = method_of(name, heat)
    written = Written([method], heat, size=size, chunk=chunk, keeps=keeps)
    assert written.texts == {place: alone(place, method, heat) for place in range(len(PROMPTS))}
    if not keeps:
        assert not any(written.known)


@pytest.mark.long(3)
@pytest.mark.parametrize("heat", [0.0, 0.9])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_texts_with_methods_of_their_own_stand_beside_each_other(heat: float, order: int) -> None:
    names = ("model", "n-gram", "route", "lookahead", "merge", "suffix", "jacobi")
    methods = [method_of(name, heat) for name in (*names[order:], *names[:order])]
    written = Written(methods, heat, size=4, chunk=3, keeps=8)
    assert written.texts == {place: alone(place, methods[place % 7], heat) for place in range(len(PROMPTS))}
    assert any(written.known)


@pytest.mark.parametrize("name", ["n-gram", "model"])
def test_where_models_cannot_branch_rows_keep_their_places(name: str) -> None:
    method = method_of(name, 0.9, "bloom")
    written = Written([method], 0.9, size=3, chunk=4, keeps=3, kind="bloom")
    assert written.texts == {place: alone(place, method, 0.9, "bloom") for place in range(len(PROMPTS))}


def test_what_prompts_begin_with_is_read_once() -> None:
    written = Written([method_of("model", 0.9)], 0.9, size=1, chunk=None, keeps=2)
    assert written.known == [0, 0, 0, 0, len(COMMON), 0, len(COMMON) - 1, len(COMMON)]


def test_a_text_can_leave_at_any_time() -> None:
    method = method_of("model", 0.9)
    batch = RunningBatch(HuggingFaceModel(target()), method, 3, ROOM, chunk=4)
    texts = dict[object, list[int]]()
    for place in (0, 2, 3):
        prompt = PROMPTS[place]
        noise, ending = Noise.from_seed(11 + place, 1), Ending(len(prompt) + NEW - place % 5)
        law, tokens = TargetLaw(SamplingParams(0.9)), torch.tensor(prompt)
        batch.join(Request(place, tokens, law, ending, noise))
    with pytest.raises(IndexError):
        batch.join(batch.reading[0])
    for number in range(40):
        taken = batch.step()
        for name, gained in taken.gains().items() if taken else ():
            texts.setdefault(name, []).extend(gained.tokens)
        batch.sweep()
        if number == 3:
            batch.leave(0)
            batch.leave("nobody")
    assert texts[3] == alone(3, method, 0.9) and texts[2] == alone(2, method, 0.9)
    assert len(texts[0]) < NEW and batch.free == 3 and len(batch.batch) == 0
    with pytest.raises(ContextOverflow):
        tokens = torch.tensor([1])
        batch.join(Request(9, tokens, TargetLaw(), Ending(ROOM), Noise.from_seed(0, 1)))


@pytest.mark.parametrize("chunk", [None, 2, 4])
@pytest.mark.parametrize("name", ["none", "n-gram", "model"])
def test_the_step_that_ends_a_prompt_brings_its_first_token(name: str, chunk: int | None) -> None:
    batch = RunningBatch(HuggingFaceModel(target()), method_of(name, 0.9), 4, ROOM, chunk=chunk)
    law, left = TargetLaw(SamplingParams(0.9)), [*range(5)]
    first, beside = dict[object, int](), 0
    while left or batch.reading:
        if left and batch.free:
            place = left.pop(0)
            tokens, noise = torch.tensor(PROMPTS[place]), Noise.from_seed(place, 1)
            kin = "kin" if place % 2 else None
            batch.join(Request(place, tokens, law, Ending(60), noise), kin=kin)
        assert chunk is not None or not batch.reading, "without chunks a prompt is read as it joins"
        unread = {one.name for one in (*batch.reading, *batch.running)} - first.keys()
        taken = batch.step()
        read = unread - {one.name for one in batch.reading}
        gains = taken.gains() if taken else {}
        assert all(len(gains[one].tokens) >= 1 for one in read), (read, gains)
        assert not read & first.keys()
        first |= {one: len(gains[one].tokens) for one in read}
        beside += bool(gains.keys() - read and read)
        batch.sweep()
        if len(first) == 3:
            batch.leave(0)
    assert [*sorted(map(str, first))] == [*map(str, range(5))] and beside


class Told(LearningPolicy):
    """A planner that takes one chain and keeps what it is told."""

    weighs_lookups = True

    def __init__(self) -> None:
        self.shape = Chain(2).shape
        self.opened: list[Opening] = []
        self.told: list[tuple[list[tuple[str, ...]], Spent, int]] = []

    def suited(self, usual: TreePolicy) -> None:
        pass

    @property
    def uses_lookups(self) -> bool:
        return True

    def rows_with_lookup(self, found: list[Lookup]) -> tuple[int, ...]:
        return ()

    def texts_opened(self, opening: Opening) -> None:
        self.opened.append(opening)

    def learn(self, lessons: tuple[Lesson, ...], spent: Spent, scored: int) -> None:
        self.told.append(([one.law for one in lessons], spent, scored))


def test_planners_of_one_batch_learn_from_their_own_texts() -> None:
    model, heats = HuggingFaceModel(target()), (0.9, 0.5, 0.9, 0.7)
    plain = chosen_method(Choices("none"), model, SamplingParams())
    observer, planners = Observer(model), (Told(), Told())
    draft = HuggingFaceModel(perturbed(target(), 0.05))
    made = [chosen_method(Choices(ModelDrafter(draft), None, one), model, SamplingParams(0.9)) for one in planners]
    methods = [observer.watched(one) for one in made]
    batch = RunningBatch(model, plain, 4, ROOM, observer=observer)
    for place, heat in enumerate(heats):
        tokens, law, ending = torch.tensor(PROMPTS[place]), TargetLaw(SamplingParams(heat)), Ending(30)
        whose = methods[heat != 0.9] if place < 3 else None
        batch.join(Request(place, tokens, law, ending, Noise.from_seed(place, 1), whose))
    observer.opens(methods[1], 9, 30, 4, TargetLaw(SamplingParams(0.5)))
    assert not planners[0].opened and planners[1].opened[0].law == ("temperature=0.5",)
    statistics = Statistics()
    for _ in range(5):
        observer.begins()
        with observer.counting(statistics):
            step = batch.step()
        assert step is not None
        observer.note(step.block, statistics)
        observer.learn(step.block)
    for planner, laws in zip(planners, ([("temperature=0.9",)] * 2, [("temperature=0.5",)]), strict=True):
        assert [told for told, _, _ in planner.told] == [laws] * 5
        assert {scored for _, _, scored in planner.told} == {4 * 3}
    (_, first, _), (_, second, _) = planners[0].told[-1], planners[1].told[-1]
    assert first.target == second.target and first.rest == second.rest
    shares = [spent.draft * rows / 4 for rows, one in zip((2, 1), planners, strict=True) for _, spent, _ in one.told]
    assert 0.5 * statistics.seconds["draft"] < sum(shares) < statistics.seconds["draft"]  # the rest is nobody's
