"""A planner's two parts, each alone: what drafts bring, and what steps take."""

import pytest

from polydraft.engine import Goodput
from polydraft.errors import InvalidParameter
from polydraft.planning import Costs, Opening, Spent
from polydraft.planning.chances import MOST_LAWS, Chances, tokens_found, tokens_of
from polydraft.planning.costs import Curve, StepCosts, costs_for
from polydraft.planning.lessons import Lesson
from polydraft.trees import Acceptance, Chain, TreeShape, Widths, expected_tokens

PLAIN, GREEDY, PENALTY = TreeShape(()), ("temperature=0",), ("RepetitionPenalty", "temperature=0")


def lesson(won: list[float], law: tuple[str, ...] = GREEDY, source: str = "") -> Lesson:
    tried = tuple((depth, 0, chance, 1.0) for depth, chance in enumerate(won))
    return Lesson(source, law, tried, 1 + int(sum(won)), len(won))


def test_expected_tokens_are_those_of_the_rates() -> None:
    shape = Widths((3, 2, 1)).shape
    rates = Chances().rates("", GREEDY)
    known = tuple(tuple(tuple(rates[depth, : k + 1].tolist()) for k in range(3)) for depth in range(3))
    assert tokens_of(shape, rates) == pytest.approx(expected_tokens(shape, Acceptance(known)))
    assert tokens_of(PLAIN, rates) == 1
    found = [above - 1 for above in shape.parents[1:]]
    assert tokens_found(found, rates) == pytest.approx(tokens_of(shape, rates)) and tokens_found((), rates) == 1
    assert tokens_found((-1, -1, 1), rates) == pytest.approx(1 + rates[0, 0] + rates[0, 1] * (1 + rates[1, 0]))


def test_rates_come_to_what_is_seen_at_each_depth_and_rank() -> None:
    chances = Chances()
    for number in range(400):
        tried = ((0, 0, float(number % 4 < 2), 1.0), (0, 1, float(number % 2), 1.0), (1, 0, 0.9, 1.0))
        chances.learn([Lesson("", GREEDY, tried, 2, 2)], PLAIN)
    rates = chances.rates("", GREEDY)
    assert rates[0, 0] == pytest.approx(0.5, abs=0.07) and rates[0, 1] == pytest.approx(0.25, abs=0.07)
    assert rates[1, 0] == pytest.approx(0.9, abs=0.07)


def test_each_law_and_each_source_has_chances_of_its_own() -> None:
    chances = Chances()
    for _ in range(60):
        chances.learn([lesson([1.0, 1.0])], PLAIN)
    good = chances.rates("", GREEDY)[0, 0]
    for _ in range(200):
        chances.learn([lesson([0.0, 0.0], PENALTY), lesson([0.0], source="lookup")], PLAIN)
    assert chances.rates("", GREEDY)[0, 0] == good > 0.9
    assert chances.rates("", PENALTY)[0, 0] < 0.1 and chances.rates("lookup", GREEDY)[0, 0] < 0.1
    assert chances.rates("", ("temperature=0.5",))[0, 0] > 0.8, "a new law is hoped to be like one without processors"


def test_laws_that_were_not_met_for_long_are_forgotten() -> None:
    chances = Chances()
    laws = [(f"temperature={heat}",) for heat in range(2 * MOST_LAWS)]
    sure = [Lesson("", law, ((0, 0, 0.0, 1.0),), 1, 1, ((0, 0.5, 0.0),)) for law in laws]
    for law, own in zip(laws, sure, strict=True):
        for _ in range(40):
            chances.learn([own, sure[0]], PLAIN)
        assert len(chances._seen) <= MOST_LAWS and len(chances._judged) <= MOST_LAWS
        assert chances.rates("", law)[0, 0] < 0.1 and chances.rates("", laws[0])[0, 0] < 0.1
    assert {law for _, law in chances._seen} == {laws[0], *laws[-MOST_LAWS + 1 :]}
    Chances().learn(sure, PLAIN)  # more laws at once than are remembered


def test_what_a_plan_measured_is_known_from_the_beginning() -> None:
    known = Acceptance((((0.6,), (0.6, 0.2)),))
    rates = Chances(known).rates("", GREEDY)
    assert rates[0, :2].tolist() == pytest.approx([0.6, 0.2]) and rates[5, 0] == pytest.approx(0.6)


def test_a_drafter_that_finds_nothing_counts_as_rejected() -> None:
    chances, before = Chances(), Chances().rates("", GREEDY)[0, 0]
    for _ in range(50):
        chances.learn([Lesson("", GREEDY, (), 1, 0)], Chain(4).shape)
    assert chances.rates("", GREEDY)[0, 0] < 0.2 < before
    plain = Chances()
    plain.learn([Lesson("", GREEDY, (), 1, 0)], PLAIN)
    assert plain.rates("", GREEDY)[0, 0] == before


def test_costs_are_those_of_the_table_and_between_its_sizes() -> None:
    costs, tree, longer = Costs(1, 0.1), Chain(3).shape, Chain(6).shape
    assert not costs.measured(tree)
    for _ in range(5):
        costs.learn(Spent(0.3, 1.0, 0.2), 4, tree)
        costs.learn(Spent(0.0, 0.8, 0.1), 1, PLAIN)
        costs.learn(Spent(0.0, 1.4, 0.2), 8, PLAIN)
    assert costs.measured(tree) and costs.step(tree) == pytest.approx(1.5) and costs.step(PLAIN) == pytest.approx(0.9)
    assert costs.target(6) == pytest.approx(1.2) and costs.target(2) == pytest.approx(1.0)
    assert costs.draft(longer) == pytest.approx(0.3 / 3.1 * 6.1)
    assert costs.step(longer) == pytest.approx(costs.target(7) + costs.draft(longer) + 0.2)


def test_the_rest_of_a_step_is_learnt_apart_for_each_finder() -> None:
    costs, tree = Costs(2, 0.1), Chain(3).shape
    for _ in range(20):
        costs.learn(Spent(0.3, 1.0, 0.2), 8, tree, finders=["", ""])
        costs.learn(Spent(0.0, 1.0, 0.6), 8, PLAIN, finders=["suffix", "suffix"])
        costs.learn(Spent(0.0, 0.5, 0.1), 2, PLAIN, finders=[None, None])
    suffix = costs.rest(["suffix"])
    assert costs.rest([""]) == pytest.approx(0.2) and suffix == pytest.approx(0.6, rel=0.03)
    assert costs.rest([None]) == pytest.approx(0.1) and costs.rest(["", "suffix"]) == (0.2 + suffix) / 2
    assert costs.step(tree) == pytest.approx(1.5), "what is looked up costs trees nothing"
    assert costs.rest(["n-gram"]) == suffix, "one that is new may be as dear as the dearest"
    for _ in range(40):
        costs.learn(Spent(0.0, 1.0, 0.5), 8, PLAIN, finders=["n-gram", None])
    assert costs.rest(["n-gram", None]) == pytest.approx(0.5, rel=0.05)
    assert costs.for_rows(3).rest(["suffix"]) == suffix


def test_a_hiccup_does_not_stay() -> None:
    costs, tree = Costs(1, 0.1), Chain(3).shape
    costs.learn(Spent(0.3, 9.0, 0.2), 4, tree)
    costs.learn(Spent(0.3, 1.0, 0.2), 4, tree)
    assert costs.target(4) == pytest.approx(1.0)
    for _ in range(5):
        costs.learn(Spent(0.3, 1.0, 0.2), 4, tree)
    costs.learn(Spent(0.3, 100.0, 0.2), 4, tree)
    assert costs.target(4) < 1.1
    costs.learn(Spent(0.0, 50.0, 0.1), 1, PLAIN)
    assert costs.target(1) <= costs.target(4), "a pass takes no longer than one over more tokens"


def test_reading_what_was_missed_is_no_cost_of_a_tree() -> None:
    costs, tree = Costs(1, 0.5), Chain(1).shape
    costs.learn(Spent(0.0, 1.0, 0.1), 1, PLAIN)
    costs.learn(Spent(5.0, 1.0, 0.1), 2, tree, unread=400)
    assert costs.reading(400) == pytest.approx(5.0) and costs.draft(tree) <= 0.6


def test_a_plans_costs_are_known_from_the_beginning() -> None:
    known = StepCosts(Curve(((1, 1.0), (9, 2.0))), Curve(((1, 0.1), (4, 0.2))), 0.05, 0.3, 0.1)
    costs = Costs(1, 9.9, known)
    assert costs.step(PLAIN) == pytest.approx(1.1)
    assert costs.step(Widths((4, 1)).shape) == pytest.approx(2.0 + 0.05 + 0.3 + 0.3)
    assert Costs(2, 0.1, known).target(2) == pytest.approx(1 + 1 / 64), "it was measured for one row"


def test_goodput_takes_the_chain_with_most_tokens_a_second() -> None:
    policy = Goodput(6)
    policy.texts_opened(Opening(10, 100, 1, 0.1))
    for _ in range(30):
        length = policy.shape.depth
        policy.learn([lesson([1.0] * length)], Spent(0.1 * length, 1.0, 0.0), 1 + length)
    assert policy.shape.depth == 6 and policy.acceptance > 0.95
    for _ in range(200):
        length = policy.shape.depth
        policy.learn([lesson([0.0] * min(1, length))], Spent(0.1 * length, 1.0, 0.0), 1 + length)
    assert policy.shape == PLAIN
    policy.texts_opened(Opening(10, 100, 1, 0.1))
    assert policy.shape.depth > 0, "a new generation begins with the first guess"
    with pytest.raises(InvalidParameter, match="longest must be an integer of at least 1"):
        Goodput(0)


def test_a_few_rows_more_are_expected_to_take_what_the_last_ones_took() -> None:
    kept, chain = dict[int, Costs](), Chain(3).shape
    four = costs_for(kept, 4, 0.2)
    for _ in range(5):
        four.learn(Spent(0.5, 2.0, 0.25), 16, chain)
        four.learn(Spent(0.0, 1.0, 0.125), 4, PLAIN)
    five, twelve = costs_for(kept, 5, 0.2), costs_for(kept, 12, 0.2)
    assert costs_for(kept, 5, 0.2) is five and costs_for(kept, 4, 0.2) is four
    assert five.measured(chain) and five.draft(chain) == pytest.approx(0.5)
    assert five.plain < five.step(PLAIN) < four.step(chain) < five.step(chain) < 1.3 * four.step(chain)
    assert not twelve.measured(chain) and twelve.plain == Costs(12, 0.2).plain
    five.learn(Spent(0.9, 2.4, 0.25), 20, chain)
    assert four.draft(chain) == pytest.approx(0.5), "what is learnt from then on is its own"
