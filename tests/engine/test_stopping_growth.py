"""A planner stops a draft where it has become doubtful, by what it learnt of the drafter's own probabilities."""

import random

import pytest
import torch
from doubles import perturbed, tiny_model

from polydraft import Chain, ModelDrafter, Planner, Widths, generate
from polydraft.engine.lessons import Lesson
from polydraft.engine.planner import Opening, Spent
from polydraft.engine.planner.chances import Chances
from polydraft.engine.planner.sureness import Sureness, class_of
from polydraft.models import HuggingFaceModel
from polydraft.trees import TreePolicy, TreeShape

SURE, DOUBTFUL = 0.98, 0.3
"""Draft probabilities that a drafter may have, which are also the chances of these drafts."""


class Never(Planner):
    """A planner that is never asked."""

    @property
    def stops(self) -> bool:
        return False


def step(planner: Planner, level: float, stream: random.Random) -> tuple[int, float]:
    """Take a step with chains; return its tokens and seconds. Plain steps take one."""
    full, drafted, alive, tokens, judged = planner.shape.depth, 0, True, 1, list[tuple[int, float, float]]()
    stopped = False
    while drafted < full and not stopped:
        sure = SURE if stream.random() < 0.7 else DOUBTFUL
        drafted += 1
        won = stream.random() < sure
        if alive:
            judged.append((0, sure, float(won)))
        alive = alive and won
        tokens += alive
        if drafted < full and planner.stops:
            stopped = not planner.goes_on(drafted, torch.tensor([[sure]]))
    tried = tuple((depth, 0, one, 1.0) for depth, (_, _, one) in enumerate(judged))
    told = Lesson("", (), tried, tokens, drafted, tuple(judged), stopped)
    planner.note([told], Spent(level * drafted, 1.0, 0.0), 1 + drafted)
    return tokens, 1 + level * drafted


def speed(planner: Planner, level: float, seed: int, tokens: int = 6000) -> float:
    stream, written, spent = random.Random(seed), 0, 0.0
    planner.opens(Opening(length=10, left=tokens, rows=1, relative=level))
    while written < tokens:
        gained, seconds = step(planner, level, stream)
        written, spent = written + gained, spent + seconds
    return written / spent


@pytest.mark.parametrize(("level", "gain"), [(0.15, 1.1), (0.3, 1.1)])
def test_where_drafts_are_dear_stopping_them_is_faster(level: float, gain: float) -> None:
    trees: tuple[TreePolicy, ...] = (Chain(3), Chain(6), Chain(1))
    assert speed(Planner(trees), level, 1) > gain * speed(Never(trees), level, 1)


def test_a_draft_that_costs_next_to_nothing_is_not_asked() -> None:
    planner = Planner((Chain(4),))
    speed(planner, 0.005, 1, tokens=500)
    assert planner.current and not planner.stops


def test_a_sure_draft_goes_on_and_a_doubtful_one_stops() -> None:
    planner = Planner((Widths((2, 1, 1)),))
    planner.opens(Opening(length=10, left=100, rows=2, relative=0.3))
    judged = ((0, SURE, 1.0), (0, DOUBTFUL, 0.0), (1, DOUBTFUL, 0.0), (1, SURE, 0.0))
    lesson = Lesson("", (), ((0, 0, 1.0, 1.0), (1, 0, 1.0, 1.0), (2, 0, 0.8, 1.0)), 3, 3, judged)
    for _ in range(40):
        planner.note([lesson, lesson], Spent(0.9, 1.0, 0.0), 2 * planner.shape.size)
    assert planner.shape == Widths((2, 1, 1)).shape and planner.stops
    rows = [[SURE, 0.0], [SURE, 0.0]]
    assert planner.goes_on(1, torch.tensor(rows)) and planner.goes_on(2, torch.tensor(rows))
    assert not planner.goes_on(1, torch.tensor([[DOUBTFUL, 0.1]] * 2)), "where both texts are doubtful"
    assert planner.goes_on(1, torch.tensor(rows)), "the answer follows from finished steps and this draft alone"


def test_what_a_probability_means_is_learnt() -> None:
    sureness, mean = Sureness(), (0.6, 0.3)
    assert all(set(row) == {mean[rank]} for rank, row in enumerate(sureness.hazards((), mean)))
    for _ in range(200):
        sureness.learn([Lesson("", (), (), 1, 1, ((0, 0.1, 1.0), (0, 0.95, 0.0), (1, 0.5, 1.0)))])
    first, second = sureness.hazards((), mean)
    assert first[class_of(0.1)] > 0.95 and first[class_of(0.95)] < 0.05, "even where it is the wrong way round"
    assert second[class_of(0.5)] > 0.95 and second[class_of(0.1)] == mean[1]
    assert sureness.hazards(("another",), mean)[0][0] == mean[0]


def test_a_stopped_chain_is_no_rejection() -> None:
    told = [Lesson("", (), ((0, 0, 1.0, 1.0),), 2, 1, (), stopped) for stopped in (True, False)]
    chances = [Chances(), Chances()]
    for one, lesson in zip(chances, told, strict=True):
        one.learn([lesson] * 20, Chain(4).shape)
    stopped, short = (one.rates("", ())[1, 0] for one in chances)
    assert stopped > 0.7 > short


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stopped_trees_write_the_text(temperature: float) -> None:
    class Whims(Planner):
        asked = 0

        @property
        def shape(self) -> TreeShape:
            return self.shapes[1]

        @property
        def stops(self) -> bool:
            return True

        def goes_on(self, depth: int, chances: torch.Tensor) -> bool:
            self.asked += 1
            assert chances.shape[0] == 1 and bool(((chances > 0) & (chances <= 1)).all())
            return self.asked % 3 > 0

    target = tiny_model(seed=1)
    drafter = ModelDrafter(HuggingFaceModel(perturbed(target, 0.3)))
    options = {"temperature": temperature, "max_new_tokens": 40, "eos_token_id": None, "seed": 3}
    planner = Whims((Widths((2, 1, 1)),) if not temperature else (Chain(4),))
    found = generate(target, torch.tensor([[1, 2, 3]]), drafter=drafter, policy=planner, **options)
    assert planner.asked > 3 and found.sequences.shape[1] == 43
    if not temperature:
        plain = generate(target, torch.tensor([[1, 2, 3]]), drafter="none", **options)
        assert torch.equal(plain.sequences, found.sequences)
