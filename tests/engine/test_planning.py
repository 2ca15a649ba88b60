"""Plans: what was measured comes back from a file, damage is named, other models and machines are noticed."""

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles import perturbed, tiny_model, tiny_tokenizer

from polydraft.drafters import ModelDrafter, NoDraft
from polydraft.engine import Planner, generate, stream
from polydraft.engine.measured import StepSeconds
from polydraft.engine.tuning import Effort, planned, time_draft, time_target, tune
from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.models import HuggingFaceModel, Pair
from polydraft.planning import Curve, PairPlan, load_plan
from polydraft.planning.acceptance import Visit, tally
from polydraft.planning.costs import StepCosts
from polydraft.planning.plan import Machine, PairIdentity, searched
from polydraft.schemes import Given, TopK
from polydraft.trees import Chain, Fixed, TreeShape, Widths, expected_tokens
from polydraft.verifiers import BlockVerification, NaiveMatch, TopDown, TopThenSampleRule, Valued

tuning = import_module("polydraft.engine.tuning")  # the package gives the function under this name

VOCABULARY = 101
PROMPTS = [torch.tensor([[5, 17, 3, 44, 9]]), torch.tensor([[8, 8, 60]]), torch.tensor([[71, 2, 30, 12]])]
EFFORT = Effort(tokens=80, rounds=1)
SHORT = Effort(tokens=24, rounds=1)
GREEDY = TopDown(NaiveMatch(TopK()))
FLAT = Curve(((1, 1.0),))
"""A second per pass, whatever is in it."""


@pytest.fixture(scope="module")
def pair() -> Pair:
    """A pair whose draft is right some of the time."""
    target = tiny_model("llama", VOCABULARY)
    return Pair(target, perturbed(target, 0.1), tiny_tokenizer())


@pytest.fixture(scope="module")
def plan(pair: Pair) -> PairPlan:
    """A plan of the pair, tuned with the real clock."""
    return tune(pair, PROMPTS, effort=EFFORT, max_nodes=8, max_depth=4, names=("big", "small"))


def clock(patch: pytest.MonkeyPatch, target: Curve, draft: Curve) -> None:
    """Let passes take these times, and everything else none."""

    def still(run: Iterator[Any]) -> Iterator[StepSeconds]:
        return (StepSeconds(0.0, 0.0, 0.0) for _ in run)

    patch.setattr(tuning, "time_target", lambda *_, **__: target)
    patch.setattr(tuning, "time_draft", lambda *_, **__: (draft, 0.0))
    patch.setattr(tuning, "timed_steps", still)


@pytest.mark.slow
def test_a_planner_begins_with_what_a_plan_measured(pair: Pair, plan: PairPlan) -> None:
    tree = plan.at(0.0, "top-k", "naive match")
    assert tree is not None
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 20, "eos_token_id": None}
    plain = generate(pair.target, PROMPTS[0], drafter="none", **options)
    planner = Planner(plan=tree)
    found = generate(pair.target, PROMPTS[0], drafter=pair.draft, policy=planner, **options)
    assert torch.equal(found.sequences, plain.sequences) and planner.steps == found.statistics.steps - 1
    fresh = Planner(plan=tree)
    assert fresh.costs.step(TreeShape(())) == pytest.approx(tree.costs.of(TreeShape(())))


def test_a_curve_joins_its_points_goes_on_and_never_falls() -> None:
    curve = Curve.through({4: [6.0], 1: [3.0, 1.0, 2.0], 2: [1.0]})
    assert curve.points == ((1, 1.5), (2, 1.5), (4, 6.0))  # medians 2, 1, 6; the first two change places
    assert [curve(count) for count in (1, 2, 3, 4, 6)] == pytest.approx([1.5, 1.5, 3.75, 6.0, 10.5])
    assert Curve(((3, 2.0),))(1) == Curve(((3, 2.0),))(50) == 2.0
    noise = np.random.default_rng(0)
    for _ in range(50):
        rough = Curve.through({count: noise.normal(size=3).tolist() for count in (1, 2, 5, 9)})
        seconds = [rough(count) for count in range(1, 20)]
        assert seconds == sorted(seconds) and seconds[0] >= 0


@pytest.mark.parametrize(
    "points",
    [
        *((), ((0, 1.0),), ((2, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0)), ((1, 2.0), (2, 1.0))),
        *(((1, seconds),) for seconds in (-1.0, float("nan"), float("inf"))),
    ],
)
def test_a_curve_refuses_what_no_clock_shows(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(InvalidParameter, match="A cost curve needs ascending counts"):
        Curve(points)


def test_costs_of_a_step_add_up() -> None:
    costs = StepCosts(Curve(((1, 10.0), (11, 20.0))), Curve(((1, 1.0), (3, 2.0))), 0.5, 4.0, 3.0)
    assert costs.of(TreeShape(())) == 10.0 + 3.0
    shape = Widths((3, 1)).shape  # 7 nodes; levels of 1 and 3 nodes have children
    assert costs.of(shape) == pytest.approx((16.0 + 3.0) + (1.0 + 2.0) + 0.5 + (4.0 - 3.0))
    with pytest.raises(InvalidParameter, match=r"start must be a time >= 0, but is -0\.5"):
        replace(costs, start=-0.5)


def visit(depth: int, children: int, rank: int) -> Visit:
    """A node whose draft row is (0.5, 0.3, 0.2) and whose target's token has the draft's place 1."""
    return Visit(depth, children, rank, torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.0, 1.0, 0.0, 0.0]))


def test_counted_acceptance_is_by_depth_children_and_rank() -> None:
    found = [visit(0, 3, 1), visit(0, 3, -1), visit(0, 2, 0), visit(1, 1, 0)]
    counts = tally(BlockVerification(), found, 3)
    assert counts.nodes.tolist() == [[3, 3, 2], [1, 0, 0]]  # a node of three children shows also what one would do
    assert counts.accepted[0].tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 0]]
    assert counts.accepted[1].tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    rates = counts.rates()
    overall = 2 / (4 + 1)  # of one child: accepted twice at four nodes, and one node of nothing
    assert rates.at(0, 1) == pytest.approx([(1 + 100 * overall) / (3 + 100)])
    assert rates.at(1, 1) == pytest.approx([(1 + 100 * overall) / (1 + 100)])
    assert tally(BlockVerification(), [visit(0, 1, 0)], 2).rates().at(0, 2) == ()  # nothing was seen of two


def test_acceptance_of_a_node_rule_is_computed_not_counted() -> None:
    found = [visit(0, 1, -1)] * 4  # one child was drafted, and it was wrong
    counts = tally(GREEDY, found, 3)
    assert counts.nodes.tolist() == [[4, 4, 4]]
    assert counts.accepted[0].tolist() == [[0, 0, 0], [0, 4, 0], [0, 4, 0]]  # the second would have been right


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_predicted_tokens_per_call_are_those_of_a_run(pair: Pair, plan: PairPlan, temperature: float) -> None:
    tree = next(one for one in plan.trees if one.temperature == temperature)
    rule = TopDown(TopThenSampleRule()) if temperature else GREEDY
    options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": 100, "seed": 7}
    options |= {"top_k": 0} if temperature else {}
    for policy in (Widths((3, 2)), Chain(3)):
        runs = [
            stream(pair.target, one, drafter=pair.draft, verifier=rule, policy=policy, **options).exhaust()
            for one in PROMPTS
        ]
        tokens, calls = (sum(getattr(run.statistics, name) for run in runs) for name in ("new_tokens", "target_calls"))
        assert tree.predict(policy.shape).tokens == pytest.approx(tokens / calls, rel=0.2)


def test_a_free_perfect_draft_gets_the_deepest_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_model("llama", VOCABULARY)
    clock(monkeypatch, FLAT, Curve(((1, 1e-4),)))
    same = Pair(target, perturbed(target, 0.0), tiny_tokenizer())
    (tree,) = tune(same, PROMPTS, temperatures=[0.0], max_nodes=8, max_depth=5, effort=SHORT).trees
    assert tree.shape.depth == 5 and tree.chosen.tokens > 5.5
    run = stream(target, PROMPTS[0], drafter=same.draft, policy=Fixed(tree.shape), temperature=0, max_new_tokens=60)
    assert run.exhaust().statistics.block_efficiency == pytest.approx(6.0)


def test_a_useless_dear_draft_gets_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    useless = Pair(tiny_model("llama", VOCABULARY), tiny_model("llama", VOCABULARY, seed=9), tiny_tokenizer())
    clock(monkeypatch, FLAT, FLAT)
    plan = tune(useless, PROMPTS, effort=SHORT, max_nodes=8)
    assert [tree.shape for tree in plan.trees] == [TreeShape(())] * 2
    assert [tree.chosen for tree in plan.trees] == [tree.plain for tree in plan.trees]
    chosen = planned(plan, useless, PROMPTS[0], 0.0)
    assert isinstance(chosen["drafter"], NoDraft)
    plain = generate(useless.target, PROMPTS[0], drafter=NoDraft(), temperature=0, max_new_tokens=9)
    text = generate(useless.target, PROMPTS[0], temperature=0, max_new_tokens=9, **chosen)
    assert text.sequences.tolist() == plain.sequences.tolist()


def test_a_tree_is_at_least_as_good_as_the_default_and_as_plain_decoding(plan: PairPlan) -> None:
    for tree in plan.trees:
        assert tree.default is not None and tree.visits > 20
        assert tree.chosen.tokens_per_second >= max(tree.plain.tokens_per_second, tree.default.tokens_per_second * 0.97)
        assert tree.chosen.tokens == expected_tokens(tree.shape, tree.acceptance)
        assert tree.shape.size <= plan.max_nodes and tree.shape.depth <= plan.max_depth


def test_a_rule_of_one_draft_per_node_gets_a_chain(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, FLAT, Curve(((1, 0.01),)))
    plan = tune(pair, PROMPTS, temperatures=[0, 0.8], verifier=BlockVerification(), effort=SHORT, max_depth=4)
    assert all(tree.shape.max_children == 1 for tree in plan.trees) and plan.trees[1].shape.depth >= 2
    greedy, sampled = (tree.default for tree in plan.trees)
    assert greedy is None  # it has nodes of two children, which this rule cannot verify
    assert sampled is not None and sampled.tokens > 1


def test_shares_by_value_get_the_curves_of_their_tree(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock(monkeypatch, FLAT, Curve(((1, 0.01),)))
    plan = tune(pair, PROMPTS, temperatures=[0, 0.8], verifier=Valued(), effort=SHORT, max_nodes=6, max_depth=3)
    greedy, sampled = plan.trees
    assert greedy.curves is None and sampled.curves is not None and sampled.curves.shape == sampled.shape
    assert {len(path) for path, _ in sampled.curves.slopes} == {*range(1, sampled.shape.depth + 1)}
    path = tmp_path / "plan.json"
    plan.save(path)
    assert load_plan(path) == plan
    chosen = planned(plan, pair, PROMPTS[0], 0.8, verifier=Valued())
    assert chosen["verifier"] == Valued(curves=sampled.curves)
    assert generate(pair.target, PROMPTS[0], temperature=0.8, max_new_tokens=5, seed=0, **chosen).sequences.shape[1] > 5
    row = json.loads(path.read_text())
    row["trees"][1]["curves"] = [[[0], [1, 2, 3, 4]]]
    path.write_text(json.dumps(row))
    with pytest.raises(InvalidParameter, match=r"damaged: The curve at .* must be 4 falling"):
        load_plan(path)


def test_passes_are_timed_at_every_size_up_to_the_largest(pair: Pair) -> None:
    turns: list[tuple[int, int]] = []
    curve = time_target(
        HuggingFaceModel(pair.target), PROMPTS[0], 7, rounds=2, on_progress=lambda done, of: turns.append((done, of))
    )
    assert [count for count, _ in curve.points] == [1, 2, 4, 6, 7] and turns == [(1, 3), (2, 3), (3, 3)]
    drafter = ModelDrafter(HuggingFaceModel(pair.draft))
    level, start = time_draft(drafter, TopK(), PROMPTS[0], VOCABULARY, 5, rounds=1, on_progress=lambda *_: None)
    assert [count for count, _ in level.points] == [1, 2, 4, 5] and start >= 0


def test_a_saved_plan_comes_back_as_it_was(plan: PairPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert load_plan(path) == load_plan(str(path)) == plan
    before = path.read_text()
    load_plan(path).save(path)
    assert path.read_text() == before and [one.name for one in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(InvalidParameter, match="the plan cannot be written there: No such file"):
        plan.save(tmp_path / "nowhere" / "plan.json")


def test_rates_that_sum_to_one_are_read_back(plan: PairPlan, tmp_path: Path) -> None:
    thirds = (1.0,), (0.5, 0.5), (2 / 3 - 4e-6, 1 / 6 + 2e-6, 1 / 6 + 2e-6)
    certain = replace(plan.trees[0], shape=TreeShape(()), acceptance=replace(plan.trees[0].acceptance, rates=(thirds,)))
    replace(plan, trees=(certain,)).save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").trees == (certain,)


def change(*place: str | int, to: object) -> Callable[[dict], None]:
    """Return what sets one value of a plan; None takes it away."""

    def damage(row: Any) -> None:
        for key in place[:-1]:
            row = row[key]
        row[place[-1]] = to
        if to is None:
            del row[place[-1]]

    return damage


DAMAGE: dict[str, tuple[Callable[[dict], None], str]] = {
    "another format": (change("polydraft_plan", to=2), "has format 2, and this version of polydraft reads 1"),
    "no mark": (change("polydraft_plan", to=None), "this is no plan file"),
    "no machine": (change("machine", to=None), "damaged: machine is missing"),
    "no model": (change("pair", "draft", to=None), "damaged: draft is missing"),
    "a list for an object": (change("pair", to=[]), "damaged: list indices"),
    "a word for a number": (change("pair", "target", "parameters", to="many"), "damaged: invalid literal"),
    "an endless model": (change("pair", "target", "parameters", to=float("inf")), "damaged: cannot convert"),
    "a truth for a number": (change("context", to=True), "damaged: context must be an integer >= 1, but is True"),
    "no node": (change("max_nodes", to=1), "damaged: max_nodes must be an integer >= 2, but is 1"),
    "cold": (change("trees", 0, "temperature", to=-1), "damaged: temperature must be"),
    "half a child": (change("trees", 0, "tree", to=[[1.5]]), "damaged: a number of children must be an integer"),
    "no such tree": (change("trees", 0, "tree", to=[[1], [1, 1, 1]]), "damaged: "),
    "unknown rates": (change("trees", 0, "tree", to=[[9]]), "damaged: There are no acceptance rates of 9 children"),
    "rates above one": (change("trees", 0, "acceptance", to=[[[1.5]]]), "damaged: The acceptance rates of 1 children"),
    "no rate": (change("trees", 0, "acceptance", to=[[[float("nan")]]]), "damaged: The acceptance rates"),
    "falling times": (change("trees", 0, "seconds", "draft", to=[[1, 2], [2, 1]]), "damaged: A cost curve needs"),
    "times before zero": (change("trees", 0, "seconds", "start", to=-1), "damaged: start must be a time >= 0"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused_with_its_reason(case: str, plan: PairPlan, tmp_path: Path) -> None:
    damage, reason = DAMAGE[case]
    row = json.loads(json.dumps(plan.as_dict()))
    damage(row)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(row))
    with pytest.raises(InvalidParameter) as caught:
        load_plan(path)
    assert f"{path}: " in str(caught.value) and reason in str(caught.value)


def test_what_is_no_plan_is_refused(plan: PairPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(InvalidParameter, match="the plan cannot be read: No such file"):
        load_plan(path)
    plan.save(path)
    whole = path.read_bytes()
    for content in (*(whole[: len(whole) * part // 20] for part in range(20)), b"[1]", b"\xff\x00", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(InvalidParameter, match="this is no plan file; `polydraft tune` writes one"):
            load_plan(path)


def test_the_nearest_temperature_is_taken_but_never_zero_for_one_above(plan: PairPlan) -> None:
    greedy, sampled = plan.trees
    warm = replace(sampled, temperature=0.5)
    trees = replace(plan, trees=(greedy, warm, sampled))
    names = sampled.scheme, sampled.verifier
    assert [trees.at(heat, *names) for heat in (0.01, 0.7, 0.8, 3.0)] == [warm, warm, sampled, sampled]
    assert trees.at(0.0, *names) is None and trees.at(0.0, greedy.scheme, greedy.verifier) == greedy
    zero = replace(greedy, scheme=sampled.scheme, verifier=sampled.verifier)
    assert replace(plan, trees=(zero,)).at(0.01, *names) is None
    assert trees.at(1.0, sampled.scheme, "another rule") is None


def test_other_models_vocabularies_and_machines_are_told_apart(pair: Pair) -> None:
    mine = PairIdentity.of(pair, ("a", "b"))
    assert mine.differences(PairIdentity.of(pair, ("other", "names"))) == []
    retrained = PairIdentity.of(replace(pair, draft=perturbed(pair.target, 0.1, seed=1)), ("a", "b"))
    (said,) = mine.differences(retrained)
    assert said.startswith("draft model b (weights ") and said.count("weights") == 2
    smaller = PairIdentity.of(replace(pair, target=tiny_model("llama", VOCABULARY, num_hidden_layers=1)), ("a", "b"))
    (said,) = mine.differences(smaller)
    assert said.startswith("target a (") and said.count("parameters") == 2
    swapped = PairIdentity.of(replace(pair, tokenizer=tiny_tokenizer(("a", "b"))), ("a", "b"))
    assert mine.differences(swapped) == ["another vocabulary"]
    here = Machine.of(pair)
    assert here.differences(here) == [] and here.dtype == "float64"
    there = replace(here, threads=99, dtype="float16")
    assert here.differences(there) == [f"threads 99 there, {here.threads} here", "dtype float16 there, float64 here"]


def test_a_plan_that_fits_is_used_without_a_word(pair: Pair, plan: PairPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "tune", None)  # nothing is measured
    tree = replace(plan.trees[1], shape=Widths((2, 1)).shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = planned(replace(plan, trees=(tree,)), pair, PROMPTS[0], 0.6)
    assert chosen["policy"] == Fixed(tree.shape) and chosen["verifier"].name == tree.verifier
    text = generate(pair.target, PROMPTS[0], temperature=0.6, top_k=0, seed=1, max_new_tokens=12, **chosen)
    assert text.sequences.shape == (1, 17)


def test_a_plan_of_other_models_is_replaced(pair: Pair, plan: PairPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, FLAT, Curve(((1, 1e-4),)))
    target = perturbed(pair.target, 0.0)
    with torch.no_grad():
        next(target.parameters())[0, 0] += 1.0
    same = Pair(target, perturbed(target, 0.0), pair.tokenizer)
    with pytest.warns(RuntimeWarning, match=r"The plan does not fit \(target big \(weights .*measuring again on this"):
        chosen = planned(plan, same, PROMPTS[0], 0.0, names=("big", "small"))
    assert chosen["policy"].shape.depth == plan.max_depth  # the new draft is always right, the plan's was not


def test_a_plan_without_the_rule_or_temperature_is_replaced(
    pair: Pair, plan: PairPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(monkeypatch, FLAT, Curve(((1, 1e-4),)))
    cold = replace(plan, trees=plan.trees[:1])
    with pytest.warns(RuntimeWarning, match=f"no tree for {plan.trees[1].verifier} at temperature 0.7"):
        chosen = planned(cold, pair, PROMPTS[0], 0.7)
    assert chosen["verifier"].name == plan.trees[1].verifier
    with pytest.warns(RuntimeWarning, match="no tree for block verification at temperature 1"):
        assert planned(plan, pair, PROMPTS[0], 1.0, verifier=BlockVerification())["policy"].shape.max_children == 1


def test_of_another_machines_plan_the_acceptance_is_kept_and_the_times_are_not(
    pair: Pair, plan: PairPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = replace(plan.trees[0].acceptance, rates=(((0.0,),),))
    always = replace(plan.trees[0].acceptance, rates=(((1.0,),),))
    slow = StepCosts(FLAT, FLAT, 0.0, 0.0, 0.0)
    quick = replace(slow, draft=Curve(((1, 1e-4),)))
    clock(monkeypatch, quick.target, quick.draft)
    for rates, depth in ((never, 0), (always, plan.max_depth)):
        tree = replace(plan.trees[0], acceptance=rates, costs=slow, shape=TreeShape(()))
        there = replace(plan, machine=replace(plan.machine, processor="abacus"), trees=(tree,))
        with pytest.warns(RuntimeWarning, match="processor abacus there"):
            chosen = planned(there, pair, PROMPTS[0], 0.0)
        assert chosen["policy"].shape == searched(rates, quick, plan.max_nodes, plan.max_depth)
        assert chosen["policy"].shape.depth == depth


def test_what_cannot_be_tuned_is_refused(pair: Pair, plan: PairPlan) -> None:
    alone = replace(pair, draft=None)
    for call in (lambda: tune(alone, PROMPTS), lambda: planned(plan, alone, PROMPTS[0], 0.0)):
        with pytest.raises(InvalidParameter, match="there is no draft model"):
            call()
    for wrong in ({"prompts": []}, {"temperatures": []}):
        with pytest.raises(InvalidParameter, match="at least one prompt and one temperature"):
            tune(**{"pair": pair, "prompts": PROMPTS, **wrong})
    for wrong in ({"max_nodes": 1}, {"max_depth": 0}):
        with pytest.raises(InvalidParameter, match="must be allowed 2 nodes and depth 1"):
            tune(pair, PROMPTS, **wrong)
    for wrong in ({"tokens": 1}, {"rounds": 0}):
        with pytest.raises(InvalidParameter, match="must be at least"):
            Effort(**wrong)
    with pytest.raises(UnpairedScheme):
        tune(pair, PROMPTS, verifier=TopDown(NaiveMatch(Given())))
