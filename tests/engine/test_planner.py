"""The planner against arms of known speed, with a made-up clock: it finds the best, leaves the bad and comes back."""

import io
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from doubles import perturbed, tiny_model
from rich.console import Console

import polydraft
from polydraft.cli.generation.summaries import add_statistics
from polydraft.cli.printing import named_values
from polydraft.drafters import EnsembleDrafter, ModelDrafter
from polydraft.engine import Planner
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel
from polydraft.planning import Opening, Spent, relative_cost
from polydraft.planning.lessons import Lesson
from polydraft.probs import SamplingParams
from polydraft.trees import Chain, Fixed, Lookup, TreePolicy, TreeShape, Widths

TREES = (Chain(2), Chain(3), Chain(1))
Arm = Callable[[random.Random], tuple[float, float]]


def arm(win: float, depth: int, seconds: float) -> Arm:
    """A tree whose levels are each won with a probability after those before; times vary by a tenth."""

    def step(stream: random.Random) -> tuple[float, float]:
        tokens = 1
        while tokens <= depth and stream.random() < win:
            tokens += 1
        return tokens, seconds * stream.uniform(0.9, 1.1)

    return step


def lesson(gained: float, depth: int) -> Lesson:
    """What a step of a chain shows that brought so many tokens."""
    won = [1.0] * (int(gained) - 1) + [0.0] * (gained <= depth)
    return Lesson("", (), tuple((level, 0, one, 1.0) for level, one in enumerate(won)), int(gained), depth)


def taught(planner: Planner, gained: float, seconds: float) -> None:
    """Let a planner learn of a step: a level of drafts takes what a plain step of one second leaves."""
    shape = planner.shape
    target = min(seconds, 1.0 if seconds > 1 else seconds)
    planner.learn([lesson(gained, shape.depth)], Spent(seconds - target, target, 0.0), shape.size)


def speed(arms: list[Arm], planner: Planner, tokens: int, seed: int) -> float:
    """Return the tokens per second of a text written by the planner."""
    stream, written, spent = random.Random(seed), 0.0, 0.0
    while written < tokens:
        gained, seconds = arms[planner.current](stream)
        taught(planner, gained, seconds)
        written, spent = written + gained, spent + seconds
    return written / spent


def opened(trees: tuple[TreePolicy, ...] = TREES, relative: float = 0.1, left: int = 256) -> Planner:
    """A planner that is told of a text."""
    planner = Planner(trees)
    planner.texts_opened(opening(relative, left))
    return planner


def opening(relative: float = 0.1, left: int = 256, rows: int = 1) -> Opening:
    return Opening(length=10, left=left, rows=rows, relative=relative)


def world(win: float, level: float) -> list[Arm]:
    """Plain steps take one second; a level of drafts takes `level` more."""
    return [arm(0, 0, 1.0), *(arm(win, tree.shape.depth, 1 + level * tree.shape.depth) for tree in TREES)]


@pytest.mark.parametrize(("win", "level"), [(0.0, 0.25), (0.1, 0.4), (0.5, 1.0), (0.9, 1.1)])
def test_where_drafts_do_not_pay_little_is_lost(win: float, level: float) -> None:
    speeds = [speed(world(win, level), opened(relative=level), 256, seed) for seed in range(20)]
    assert sorted(speeds)[10] >= 0.97


@pytest.mark.parametrize(("win", "level"), [(0.85, 0.2), (0.6, 0.2), (0.7, 0.3)])
def test_where_drafts_pay_it_is_near_the_best_tree(win: float, level: float) -> None:
    best = max(
        sum(win**depth for depth in range(tree.shape.depth + 1)) / (1 + level * tree.shape.depth) for tree in TREES
    )
    planner = Planner(TREES)
    speed(world(win, level), planner, 2000, 1)
    assert speed(world(win, level), planner, 4000, 2) >= 0.95 * best


def test_it_comes_back_when_the_draft_becomes_good() -> None:
    planner = Planner(TREES)
    speed(world(0.0, 0.2), planner, 500, 1)
    assert planner.current == 0
    speed(world(0.9, 0.2), planner, 3000, 2)
    assert speed(world(0.9, 0.2), planner, 1000, 3) > 1.5


def test_a_hiccup_does_not_cost_a_tree_its_place() -> None:
    planner, stream = Planner(TREES), random.Random(1)
    arms, depths = world(0.9, 0.1), []
    for step in range(300):
        tokens, seconds = arms[planner.current](stream)
        first = planner.current and not planner.costs.measured(planner.shape)
        depths.append(planner.shape.depth)
        taught(planner, tokens, 20 * seconds if first and step else seconds)
    assert depths[-100:].count(3) > 90


def test_it_says_why_it_does_not_draft() -> None:
    """By numbers of its own: the share of a pass, how often drafts are accepted, what the best tree is worth."""
    planner = Planner(TREES)
    assert planner.why_idle == "", "nothing is known"
    planner.views_by("self:int8", lambda known: 0.9)
    speed(world(0.1, 0.9), planner, 1000, 1)
    assert planner._best == 0
    told = re.fullmatch(
        r"self:int8 is not asked: by what is known a level of its drafts takes ([\d.]+) of the target's pass, they are "
        r"accepted (\d+)% of the time, and with the best tree that would be ([\d.]+) times as fast as without\.",
        planner.why_idle,
    )
    best = planner.shapes[1 + int(np.argmax(planner._rates[1:]))]
    assert told is not None and int(told[2]) < 60
    level = planner.costs.full(best) / best.depth / planner.costs.plain
    assert float(told[1]) == pytest.approx(level, abs=0.005)
    assert float(told[3]) == pytest.approx(max(planner._rates[1:]) / planner._rates[0], abs=0.005)
    assert float(told[3]) < 1
    speed(world(0.9, 0.1), planner, 3000, 2)
    assert planner._best and planner.why_idle == ""


SAID = "self:int8 is not asked: it would lose."


class Idle(Planner):
    """Drafts nothing, and says so."""

    @property
    def why_idle(self) -> str:
        return SAID

    def learn(self, lessons: Sequence[Lesson], spent: Spent, scored: int) -> None:
        super().learn(lessons, spent, scored)
        self.current = 0


def test_statistics_json_and_the_printed_line_say_why_nothing_was_drafted() -> None:
    target, prompt = tiny_model(seed=1), [1, 2, 3]
    given = {"drafter": perturbed(target, 0.02), "policy": Idle(TREES), "max_new_tokens": 6, "temperature": 0.0}
    run = polydraft.stream(target, torch.tensor([prompt]), **given).exhaust()
    table = named_values()
    add_statistics(table, run.statistics)
    shown = io.StringIO()
    Console(file=shown, width=200).print(table)
    assert run.statistics.idle == run.statistics.as_dict()["idle"] == SAID in shown.getvalue()
    many = polydraft.generate_many(target, [prompt, prompt], **given)
    assert len([*many]) == 2 and many.statistics.idle == SAID
    plain = polydraft.stream(target, torch.tensor([prompt]), **{**given, "policy": 2}).exhaust()
    assert not plain.statistics.idle


def test_trials_lose_no_more_than_their_share() -> None:
    planner = Planner(TREES)
    speed(world(0.3, 0.5), planner, 3000, 1)
    assert planner.lost <= 0.02 * planner.spent


def test_the_text_is_plain_decodings_at_temperature_zero_whatever_is_chosen() -> None:
    target = tiny_model(seed=1)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    settings = {"attention_mask": torch.ones_like(prompt), "temperature": 0.0, "max_new_tokens": 120}
    plain = polydraft.stream(target, prompt, drafter=polydraft.NoDraft(), **settings).exhaust()
    planner = InTurns((Widths((1,)), Chain(3), Widths((2, 1))))
    for _ in range(3):
        run = polydraft.stream(target, prompt, drafter=perturbed(target, 0.02), policy=planner, **settings).exhaust()
        assert run.new_tokens == plain.new_tokens
    assert planner.steps > 0 and all(map(planner.costs.measured, planner.shapes[:2]))


class InTurns(Planner):
    """Drafts in every second step, whatever the clock says."""

    def learn(self, lessons: Sequence[Lesson], spent: Spent, scored: int) -> None:
        super().learn(lessons, spent, scored)
        self.current = self.steps % 2


def test_a_step_without_a_tree_costs_no_pass_of_the_draft_model() -> None:
    target, draft = tiny_model(seed=1), tiny_model(seed=2)
    calls: list[int] = []
    draft.register_forward_pre_hook(lambda *_: calls.append(1))
    planner = InTurns((Chain(2),))
    options = {"temperature": 0.0, "max_new_tokens": 40, "policy": planner}
    drafter = ModelDrafter(HuggingFaceModel(draft))
    run, kinds = polydraft.stream(target, torch.tensor([[1, 2, 3]]), drafter=drafter, **options), set()
    while not run.over:
        arm, before, left = planner.current, len(calls), 40 - len(run.new_tokens[0])
        next(run)
        if left > 1:  # for a last token nothing is drafted
            kinds.add((arm, len(calls) > before))
    assert kinds == {(0, False), (1, True)}


def test_a_dear_draft_model_is_not_even_shown_a_short_text() -> None:
    target, twin = tiny_model(seed=1), tiny_model(seed=1)
    calls: list[int] = []
    drafter = ModelDrafter(HuggingFaceModel(twin))  # which tries the model, once
    twin.register_forward_pre_hook(lambda *_: calls.append(1))
    settings = {"temperature": 0.0, "max_new_tokens": 30, "policy": Planner((Chain(3),))}
    run = polydraft.stream(target, torch.tensor([[1, 2, 3]]), drafter=drafter, **settings)
    next(run)
    assert not calls


def test_what_was_learnt_decides_how_the_next_text_begins() -> None:
    planner = Planner(TREES)
    speed(world(0.0, 0.4), planner, 200, 1)
    planner.texts_opened(opening(left=100))
    assert planner.current == 0
    speed(world(0.9, 0.1), planner := Planner(TREES), 200, 1)
    planner.texts_opened(opening(left=100))
    assert planner.current > 0


def test_relative_cost_is_that_of_the_weights() -> None:
    target, draft = HuggingFaceModel(tiny_model(seed=1)), HuggingFaceModel(tiny_model(seed=2, num_hidden_layers=1))
    assert 0 < relative_cost(target, ModelDrafter(draft)) < relative_cost(target, ModelDrafter(target)) == 1.5
    both = EnsembleDrafter(((draft, None), (draft, SamplingParams(temperature=2.0))))
    assert relative_cost(target, both) == relative_cost(target, ModelDrafter(draft)), "one model, read once"
    assert relative_cost(target, polydraft.NgramDrafter()) == 0


@pytest.mark.parametrize("trees", [(), (Fixed(TreeShape(())),)])
def test_a_planner_needs_trees(trees: tuple) -> None:
    with pytest.raises(InvalidParameter, match="at least one tree"):
        Planner(trees)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_hiccup_at_the_very_first_steps_does_not_decide(slow: int) -> None:
    """One of the first two steps, one with a tree and one without, takes four times as long."""
    for win, least in ((0.0, 0.95), (0.9, 1.5)):
        stream, planner, arms = random.Random(2), Planner(TREES), world(win, 0.25 if win == 0 else 0.1)
        planner.texts_opened(opening(left=400))
        written = spent = 0.0
        for step in range(120):
            tokens, seconds = arms[planner.current](stream)
            taught(planner, tokens, 4 * seconds if step == slow else seconds)
            written, spent = written + tokens, spent + seconds
        assert written / spent >= least


def test_what_a_dear_draft_model_had_to_read_does_not_make_trees_look_cheap() -> None:
    """Every level costs as much as a plain step and reading nothing, though a planner expects it to be dear."""
    planner, speeds = Planner(TREES), []
    for seed in range(24):
        planner.texts_opened(opening(1.5, 96))
        speeds.append(speed(world(0.85, 1.1), planner, 96, seed))
    assert sorted(speeds)[12] >= 0.97 and min(speeds) >= 0.9


def test_what_is_looked_up_is_the_same_when_an_interrupted_step_is_taken_again() -> None:
    planner = opened()
    speed(world(0.9, 0.1), planner, 200, 1)
    for number in range(40):
        length = 2 + number % 3
        answers = [planner.rows_with_lookup([chain(length, "lookup")]) for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        source = "lookup" if answers[0] else ""
        told = Lesson(source, (), ((0, 0, 0.0, 1.0),), 1, length if source else planner.shape.depth)
        planner.learn([told], Spent(0.0, 1.0, 0.0), 1 + told.depth)
    assert not planner.rows_with_lookup([chain(2, "lookup")]), "lookups that were never right are given up"
    planner.lost, planner.spent = 0.0, 1e6
    for _ in range(8):
        planner.learn([lesson(3, planner.shape.depth)], Spent(0.3, 1.0, 0.0), planner.shape.size)
    assert planner.rows_with_lookup([chain(2, "lookup")]) == (0,), "and tried again when a trial is due and affordable"


def test_a_planner_learns_apart_what_each_finder_brings() -> None:
    planner = opened()
    speed(world(0.6, 0.3), planner, 200, 1)
    for number in range(60):
        good = number % 2
        source, tried = ("suffix", ((0, 0, 1.0, 1.0), (1, 0, 1.0, 1.0))) if good else ("n-gram", ((0, 0, 0.0, 1.0),))
        told = Lesson(source, (), tried, 3 if good else 1, 2)
        planner.learn([told], Spent(0.0, 1.0, 0.0), 3)
    assert planner.rows_with_lookup([chain(2, "suffix")]) == (0,) and not planner.rows_with_lookup([chain(2, "n-gram")])


def test_what_is_looked_up_counts_by_its_nodes_and_by_the_chances_along_its_paths() -> None:
    """Each of four first guesses is right in a quarter of all cases; a chain of four brings less for the same pass."""
    planner, stream = opened(), random.Random(3)
    speed(world(0.3, 0.4), planner, 200, 1)
    for _ in range(80):
        right = stream.randrange(4)
        tried = tuple((0, rank, float(rank == right), 1.0) for rank in range(right + 1))
        planner.learn([Lesson("n-gram", (), tried, 2, 1)], Spent(0.0, 1.7, 0.0), 5)
    wide, deep = Lookup((-1,) * 4, "n-gram"), chain(4, "n-gram")
    assert planner._tokens_of_lookup(wide) == pytest.approx(2, abs=0.1) and planner._tokens_of_lookup(deep) < 1.6
    assert planner.rows_with_lookup([wide]) == (0,) and not planner.rows_with_lookup([deep])


def chain(length: int, source: str) -> Lookup:
    """A continuation without branches."""
    return Lookup(tuple(range(-1, length - 1)), source)


def looked(planner: Planner, took: float, right: bool, steps: int) -> int:
    """Write text plainly where four tokens are found in every step; return how often they were looked for."""
    count = 0
    for _ in range(steps):
        asks = planner.uses_lookups
        taken = asks and bool(planner.rows_with_lookup([chain(4, "suffix")]))
        count += asks
        tried = tuple((depth, 0, float(right), 1.0) for depth in range(4 if right else 1)) if taken else ()
        told = Lesson("suffix" if taken else "", (), tried, 5 if taken and right else 1, 4 if taken else 0)
        planner.current = planner._best = 0
        planner.learn([told], Spent(took if asks else 0.0, 1.2 if taken else 1.0, 0.0), 5 if taken else 1)
        planner.current = planner._best = 0
    return count


def test_nothing_is_looked_up_where_looking_takes_more_than_it_saves() -> None:
    planner = opened(relative=9.0)
    planner.current = planner._best = 0
    assert looked(planner, 0.3, False, 60) < 30
    spent, lost = planner.spent, planner.lost
    assert looked(planner, 0.3, False, 600) < 30 and planner.lost - lost < 0.01 * (planner.spent - spent)
    looked(planner, 0.3, True, 1500)
    assert looked(planner, 0.3, True, 100) == 100, "it comes back when what is found is right"
    cheap = opened(relative=9.0)
    assert looked(cheap, 0.1, True, 100) == 100


def full_batch(planner: Planner, steps: int, plain: float = 1.0, tree: float = 4.0) -> list[int]:
    """Take steps with 16 rows in which a tree brings two tokens of each for four times the time of a plain step."""
    taken = list[int]()
    for _ in range(steps):
        arm, shape = planner.current, planner.shape
        taken.append(arm)
        tried = ((0, 0, 1.0, 1.0), (1, 0, 0.0, 1.0))[: shape.depth]
        lessons = [Lesson("", (), tried, 1 + bool(arm), shape.depth)] * 16
        planner.learn(lessons, Spent(0.1 * bool(arm), tree if arm else plain, 0.0), 16 * shape.size)
    return taken


def test_a_full_batch_falls_back_to_plain_decoding_at_once_though_it_never_saw_a_plain_step_of_so_many_rows() -> None:
    planner = opened()
    speed(world(0.9, 0.1), planner, 400, 1)
    assert planner.current
    planner.texts_opened(opening(left=10_000, rows=16))
    assert 0 in full_batch(planner, 12)
    assert full_batch(planner, 100).count(0) > 95
    before = planner.steps
    planner.texts_opened(opening(left=10_000, rows=15))
    assert planner.current == 0 and planner.steps == before, "about as many rows take about as long"


def test_trees_are_chosen_for_as_many_rows_as_there_are_soon() -> None:
    """While prompts are read, a few rows take a step: what it takes is theirs, and nothing is drafted for so short."""
    planner = opened()
    speed(world(0.9, 0.1), planner, 400, 1)
    planner.texts_opened(opening(left=10_000, rows=16))
    full_batch(planner, 100)
    known = {rows: planner._of_rows[16].step(shape) for rows, shape in enumerate(planner.shapes)}
    planner.texts_opened(replace(opening(left=10_000, rows=1), soon=16))
    assert planner.current == 0 and planner.timed.rows == 1
    for _ in range(40):
        planner.learn([lesson(1, 0)], Spent(0.0, 0.2, 0.0), 1)
    assert planner.current == 0 and planner._of_rows[1].plain < 0.5, "the time of few rows is learnt apart"
    assert known == {rows: planner._of_rows[16].step(shape) for rows, shape in enumerate(planner.shapes)}
    planner.texts_opened(opening(left=10_000, rows=16))
    assert planner.current == 0


def test_a_plain_step_that_was_held_up_does_not_keep_a_slow_tree_for_ever() -> None:
    planner = opened()
    speed(world(0.9, 0.1), planner, 400, 1)
    planner.texts_opened(opening(left=10_000, rows=16))
    held = full_batch(planner, 12, plain=9.0)
    assert 0 in held and planner.current
    full_batch(planner, 1500)
    assert full_batch(planner, 100).count(0) > 90


def test_a_drafter_has_missed_no_more_than_a_text_in_progress_has() -> None:
    planner = opened()
    speed(world(0.0, 1.5), planner, 60, 1)
    assert planner.current == 0
    planner._unread = 400
    planner.texts_opened(replace(opening(), others=40))
    assert planner._unread == 40
    planner.texts_opened(replace(opening(), others=0))
    assert planner._unread == 10


def test_odd_times_cost_a_planner_no_step() -> None:
    """By a clock that was set back a plain step took less than nothing: no tree is sure to lose little against that."""
    planner = opened()
    planner.current = planner._best = 0
    planner.learn([lesson(1, 0)], Spent(0.0, 1.0, -1.05), 1)
    planner.texts_opened(opening())
    assert planner._best and planner.current == 0


def test_costs_of_a_view_go_by_the_length_of_its_texts_and_chances_by_the_view() -> None:
    planner = Planner(TREES)
    planner.views_by("all keys", lambda known: known / 1000)
    planner.texts_opened(replace(opening(), length=100))
    short, chances = planner.costs, planner.chances
    planner.texts_opened(replace(opening(), length=4000))
    assert (short.relative, planner.costs.relative) == (0.1, 4.0) and planner.costs.step(TREES[0].shape) > 4
    planner.views_by("few keys", lambda known: 0.2)
    planner.texts_opened(replace(opening(), length=100))
    assert planner.chances is not chances and planner.costs is not short and planner.costs.relative == 0.2
    planner.views_by("all keys", lambda known: known / 1000)
    planner.texts_opened(replace(opening(), length=120))
    assert planner.chances is chances and planner.costs is short
