"""A planner stops a draft where it has become doubtful, by what it learnt of the drafter's own probabilities."""

import random

import pytest
import torch
from doubles import perturbed, tiny_model

from polydraft import (
    BlockVerification,
    Chain,
    Confident,
    ModelDrafter,
    NaiveMatch,
    Planner,
    TopDown,
    Widths,
    generate,
)
from polydraft.drafters import Drafter, DraftRequest, NoDraft, Session
from polydraft.engine import Method, Observer
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel
from polydraft.planning import Opening, Spent
from polydraft.planning.chances import Chances, class_of
from polydraft.planning.lessons import Lesson, keeps_overlaps
from polydraft.reading import Step, Text
from polydraft.schemes import Scheme, TopK
from polydraft.trees import Draft, Frontier, GrowingPolicy, TreePolicy, TreeShape, grow
from polydraft.trees.growing import Drawn
from polydraft.verifiers import TreeVerifier

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
            stopped = not planner.grows_on(drafted, torch.tensor([[sure]]))
    tried = tuple((depth, 0, one, 1.0) for depth, (_, _, one) in enumerate(judged))
    told = Lesson("", (), tried, tokens, drafted, tuple(judged), stopped)
    planner.learn([told], Spent(level * drafted, 1.0, 0.0), 1 + drafted)
    return tokens, 1 + level * drafted


def speed(planner: Planner, level: float, seed: int, tokens: int = 6000) -> float:
    stream, written, spent = random.Random(seed), 0, 0.0
    planner.texts_opened(Opening(length=10, left=tokens, rows=1, relative=level))
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
    planner.texts_opened(Opening(length=10, left=100, rows=2, relative=0.3))
    judged = ((0, SURE, 1.0), (0, DOUBTFUL, 0.0), (1, DOUBTFUL, 0.0), (1, SURE, 0.0))
    lesson = Lesson("", (), ((0, 0, 1.0, 1.0), (1, 0, 1.0, 1.0), (2, 0, 0.8, 1.0)), 3, 3, judged)
    for _ in range(40):
        planner.learn([lesson, lesson], Spent(0.9, 1.0, 0.0), 2 * planner.shape.size)
    assert planner.shape == Widths((2, 1, 1)).shape and planner.stops
    rows = [[SURE, 0.0], [SURE, 0.0]]
    assert planner.grows_on(1, torch.tensor(rows)) and planner.grows_on(2, torch.tensor(rows))
    assert not planner.grows_on(1, torch.tensor([[DOUBTFUL, 0.1]] * 2)), "where both texts are doubtful"
    assert planner.grows_on(1, torch.tensor(rows)), "the answer follows from finished steps and this draft alone"


def test_what_a_probability_means_is_learnt() -> None:
    chances, mean = Chances(), (0.6, 0.3)
    assert all(set(row) == {mean[rank]} for rank, row in enumerate(chances.hazards((), mean)))
    for _ in range(200):
        chances.learn([Lesson("", (), (), 1, 1, ((0, 0.1, 1.0), (0, 0.95, 0.0), (1, 0.5, 1.0)))], TreeShape(()))
    first, second = chances.hazards((), mean)
    assert first[class_of(0.1)] > 0.95 and first[class_of(0.95)] < 0.05, "even where it is the wrong way round"
    assert second[class_of(0.5)] > 0.95 and second[class_of(0.1)] == mean[1]
    assert chances.hazards(("another",), mean)[0][0] == mean[0]


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

        def grows_on(self, depth: int, chances: torch.Tensor) -> bool:
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


class Eager(Planner):
    """Takes its first tree in every step."""

    @property
    def shape(self) -> TreeShape:
        return self.shapes[1]


def test_trees_deeper_than_what_is_told_apart_are_planned() -> None:
    target = tiny_model(seed=1)
    drafter = ModelDrafter(HuggingFaceModel(perturbed(target, 0.3)))
    options = {"temperature": 0.0, "max_new_tokens": 40, "eos_token_id": None}
    plain = generate(target, torch.tensor([[1, 2, 3]]), drafter="none", **options)
    for one in (drafter, "ngram"):
        planner = Eager((Chain(17), Chain(1)))
        assert len(planner._now().need) == 17 and all(need > 0 for need in planner._now().need)
        found = generate(target, torch.tensor([[1, 2, 3]]), drafter=one, policy=planner, **options)
        assert torch.equal(found.sequences, plain.sequences)


def test_levels_that_never_bring_anything_are_not_reached() -> None:
    planner = Eager((Chain(4),))
    planner.texts_opened(Opening(length=10, left=100, rows=1, relative=0.3))
    deep = tuple((depth, 0, 0.0, 5.0) for depth in range(1, 16))
    for law in ((), ("another",)):
        for _ in range(60):
            planner.learn([Lesson("", law, ((0, 0, float(not law), 5.0), *deep), 1, 4)], Spent(0.9, 1.0, 0.0), 5)
        planner.chances._rates[("", law)] = planner.chances.rates("", law) * 0
        planner._going = None
        assert planner.stops and not planner.grows_on(1, torch.tensor([[SURE]]))
        planner.learn([Lesson("", law, (), 2, 1, (), True)], Spent(0.9, 1.0, 0.0), 2)


def test_the_time_of_a_level_is_that_of_the_deepest_draft_of_the_batch() -> None:
    planner = Eager((Chain(5),))
    planner.texts_opened(Opening(length=10, left=100, rows=2, relative=0.2))
    for _ in range(60):
        short, full = Lesson("", (), (), 2, 1, (), True), lesson_of(5)
        planner.learn([short, full], Spent(1.0, 1.0, 0.0), 12)
    assert planner.costs.full(Chain(5).shape) == pytest.approx(1.0, rel=0.01)


def lesson_of(depth: int) -> Lesson:
    return Lesson("", (), tuple((level, 0, 1.0, 1.0) for level in range(depth)), depth + 1, depth)


def test_what_the_drafter_thinks_is_seen_in_greedy_chains_too() -> None:
    seen = set[float]()

    class Curious(Eager):
        @property
        def stops(self) -> bool:
            return True

        def grows_on(self, depth: int, chances: torch.Tensor) -> bool:
            seen.update(chances.flatten().tolist())
            return True

    target = tiny_model(seed=1)
    drafter = ModelDrafter(HuggingFaceModel(perturbed(target, 0.3)))
    options = {"temperature": 0.0, "max_new_tokens": 30, "eos_token_id": None}
    generate(target, torch.tensor([[1, 2, 3]]), drafter=drafter, policy=Curious((Chain(4),)), **options)
    assert len(seen) > 3 and min(seen) < 0.9


def test_a_rule_keeps_what_it_says_of_itself_when_it_is_timed() -> None:
    def timed(rule: TreeVerifier) -> TreeVerifier:
        observer = Observer(HuggingFaceModel(tiny_model()), time=True)
        return observer.watched(Method(NoDraft(), rule, Planner((Chain(1),)))).verifier

    assert keeps_overlaps(timed(BlockVerification()))
    assert not keeps_overlaps(timed(TopDown(NaiveMatch(TopK()))))


def test_ids_that_the_target_does_not_know_cost_a_planner_its_drafts_and_nothing_else() -> None:
    class Beyond(Drafter):
        """Drafts an id of nobody's, from laws of its own."""

        name = "beyond"

        def check(self, scheme: Scheme) -> None:
            pass

        def start(self, text: Text, session: Session) -> None:
            return None

        def draft(self, state: None, request: DraftRequest) -> tuple[Draft, None]:
            text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise

            def propose(frontier: Frontier) -> tuple[torch.Tensor, torch.Tensor]:
                listed = torch.arange(32).expand(*frontier.tokens.shape, 32)
                return listed, torch.full(listed.shape, 1 / 40).index_fill(-1, torch.tensor([31]), 9 / 40)

            if not policy.shape.counts:
                return Draft.nothing(text.last()), None
            return grow(text.last(), policy, scheme, propose, noise), None

        def commit(self, state: None, step: Step) -> None:
            return None

    target = tiny_model(seed=1)
    options = {"temperature": 0.0, "max_new_tokens": 20, "eos_token_id": None}
    plain = generate(target, torch.tensor([[1, 2, 3]]), drafter="none", **options)
    for verifier in (TopDown(NaiveMatch(TopK())), BlockVerification()):
        options |= {"verifier": verifier, "policy": Eager((Chain(3),))}
        with pytest.warns(RuntimeWarning, match="has the token"):
            found = generate(target, torch.tensor([[1, 2, 3]]), drafter=Beyond(), **options)
        assert torch.equal(found.sequences, plain.sequences)


@pytest.mark.wrong_types
def test_a_growing_policy_that_lacks_something_is_told_what() -> None:
    class Old:
        shape = Chain(3).shape

        def opened(self, drawn: object) -> None: ...

        def counts(self, opened: object) -> None: ...

    class Unfinished(GrowingPolicy):
        shape = Chain(3).shape

        def opened(self, drawn: object) -> None: ...

    with pytest.raises(InvalidParameter, match="Old has a tree's shape, but its class derives neither"):
        generate(tiny_model(seed=1), torch.tensor([[1, 2]]), drafter=tiny_model(seed=2), policy=Old(), max_new_tokens=3)
    with pytest.raises(TypeError, match=r"Unfinished .*counts"):
        Unfinished()


def test_a_confidence_that_is_never_enough_ends_growth() -> None:
    class Negative:
        def of(self, drawn: Drawn) -> torch.Tensor:
            return -drawn.chance

    target = tiny_model(seed=1)
    drafter = ModelDrafter(HuggingFaceModel(perturbed(target, 0.3)))
    options = {"temperature": 0.0, "max_new_tokens": 20, "eos_token_id": None}
    policy = Confident((2, 1, 1), 0.0, Negative())
    found = generate(target, torch.tensor([[1, 2, 3]]), drafter=drafter, policy=policy, **options)
    assert not found.statistics.fallback and found.statistics.drafted > 2
