"""Shares by value: exact on every shape and scheme, near the best shares of a node, caught where they look below."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from growing import DeepWorld as GrownWorld
from growing import among, every_growth, target_rows, written
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor
from tree_worlds import SHAPES, DeepWorld
from worlds import FastNoise, World, check_by_chi_square, completed
from zoo import ZOO, rows

from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.probs import Noise
from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Product,
    Scheme,
    SpecHub,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
    enumerate_drafts,
)
from polydraft.theory import tree_optimum
from polydraft.trees import BestFirst, Chain, Draft, Fixed, TreeShape, Widths, grow
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    Optimal,
    PathLaw,
    TraversalVerification,
    ValueCurves,
    Valued,
)
from polydraft.verifiers.selection import value_curves, valued_shares
from polydraft.verifiers.selection.value_curves import LEAF, curve, curves_of
from polydraft.verifiers.selection.valued_shares import PARTS, STEPS, DraftLaws, settled, shares_at
from polydraft.verifiers.trees.valued import SCHEMES as KINDS
from polydraft.verifiers.trees.valued import _Walk

SCHEMES: list[Scheme] = [kind(1) if kind is TopThenIID else kind() for kind in KINDS]
MORE = {
    **SHAPES,
    "3 then 2,1,0": TreeShape(((3,), (2, 1))),
    "2,1 then 1": TreeShape(((2,), (1, 1), (1,))),
    "2 then 1,2": TreeShape(((2,), (1, 2))),
}
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda one: one.name)
INNER, DEEP = curve(((),)), curve((((),),))


def of_rows(target: Tensor, draft: Tensor) -> DeepWorld:
    """Return a world whose rows are the same everywhere."""
    size = len(target)
    return DeepWorld(
        tuple(target.expand((size,) * depth + (size,)) for depth in range(4)),
        tuple(draft.expand((size,) * depth + (size,)) for depth in range(3)),
    )


def off(world: DeepWorld, shape: TreeShape, rule: Valued) -> float:
    draft, chance, table = world.every_tree(shape, rule.scheme)
    return float((world.text_law(draft, rule, table, chance) - world.joint).abs().max())


@pytest.mark.parametrize("name", MORE)
@each_scheme
def test_the_text_follows_the_target(scheme: Scheme, name: str):
    assert off(DeepWorld.random(7, 3 if MORE[name].size < 7 else 2, 0.3), MORE[name], Valued(scheme)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("case", ZOO)
@each_scheme
def test_the_text_follows_rows_that_break_things(scheme: Scheme, case: str):
    world = of_rows(*ZOO[case])
    assert off(world, TreeShape(((2,), (1,))), Valued(scheme)) < 1e-9


@pytest.mark.slow
@settings(max_examples=8)
@given(pair=st.tuples(rows(3), rows(3)), scheme=st.sampled_from(SCHEMES))
def test_the_text_follows_any_rows(pair: tuple[Tensor, Tensor], scheme: Scheme):
    for name in ("2,1", "3 then 1,0,0"):
        assert off(of_rows(*pair), SHAPES[name], Valued(scheme)) < 1e-9


def test_one_likely_token_without_replacement_keeps_the_digits_of_the_others():
    target = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    for rest in (1e-6, 1e-9, 1e-12, 1e-15):
        draft = torch.tensor([1 - 3 * rest, rest, 2 * rest], dtype=torch.float64)
        assert off(of_rows(target, draft), SHAPES["2 then 1,0"], Valued()) < 1e-9


@dataclass(frozen=True)
class Node:
    """All drafts of a node, and the program of its shares."""

    scheme: Scheme
    target: Tensor
    draft: Tensor
    slopes: np.ndarray

    @property
    def outcomes(self) -> tuple[Tensor, Tensor]:
        return enumerate_drafts(self.scheme, self.draft, len(self.slopes))

    def best(self) -> float:
        """Return the largest mean value of shares, by HiGHS."""
        drafts, chance = (one.tolist() for one in self.outcomes)
        places = [(s, r, u) for s, r, u in product(range(len(drafts)), range(len(self.slopes)), range(PARTS))]
        limits = np.zeros((len(drafts) + len(self.target), len(places)))
        for column, (s, r, _) in enumerate(places):
            limits[s, column] = limits[len(drafts) + drafts[s][r], column] = 1
        value = [-self.slopes[r, u] / STEPS for _, r, u in places]
        most = [(0, chance[s] / PARTS) for s, _, _ in places]
        exact = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
        masses = [*chance, *self.target.tolist()]
        return -linprog(value, limits, masses, bounds=most, method="highs", options=exact).fun

    def reached(self) -> float:
        """Return the value of the shares that the rule gives, and check that they are right on average."""
        drafts, count = self.outcomes[0].numpy(), len(self.slopes)
        taken, total, known = np.zeros(len(self.target)), 0.0, {}
        curves, child = np.concatenate([self.slopes[:1], self.slopes]), np.full((count + 1, count), -1)
        child[0] = np.arange(1, count + 1)
        for own, chance in zip(drafts, self.outcomes[1].tolist(), strict=True):
            rows, table = (one.numpy()[None].repeat(count + 1, 0) for one in (self.draft, self.target))
            walk = _Walk(self.scheme, curves, rows, table, own[None].repeat(count + 1, 0), child, known)
            walk.go_down()
            shares = walk.scale[1:]
            assert abs(walk.scale.sum() - 1) < 1e-9 and (walk.scale >= 0).all()
            np.add.at(taken, own, chance * shares)
            parts = np.clip(shares[:, None] - np.arange(PARTS) / PARTS, 0, 1 / PARTS)
            total += chance * float((parts * self.slopes).sum()) / STEPS
        assert (taken <= self.target.numpy() + 1e-12).all()
        if count < 3 or self.scheme != WithoutReplacement():
            np.testing.assert_allclose(taken + (1 - taken.sum()) * walk.left[0], self.target, rtol=0, atol=1e-12)
        return total


CHILDREN = [(INNER, LEAF), (INNER, INNER), (LEAF, INNER), (INNER, LEAF, LEAF), (INNER, INNER, INNER)]
each_node = pytest.mark.parametrize("children", CHILDREN, ids=str)
each_drawn = pytest.mark.parametrize("scheme", [IID(), WithoutReplacement(), TopThenSample(), Product()], ids=str)


def worlds_of(scheme: Scheme, children: tuple[tuple[int, ...], ...], seeds: range) -> list[Node]:
    if len(children) > 2 and scheme == WithoutReplacement():
        pytest.skip("the first draft is looked at apart, or the rule is the optimal one")
    made = [DeepWorld.random(seed, 5 if len(children) == 2 else 4) for seed in seeds]
    return [Node(scheme, world.target[0], world.drafts_of(scheme)[0], np.array(children)) for world in made]


@each_node
@each_drawn
def test_shares_are_the_best_of_all(scheme: Scheme, children: tuple[tuple[int, ...], ...], monkeypatch):
    """With finer steps of price and sweeps to their end, the program of a node is reached up to rounding."""
    monkeypatch.setattr(valued_shares, "SWEEPS", 20_000)
    monkeypatch.setattr(valued_shares, "SETTLED", 1e-13)
    for node in worlds_of(scheme, children, range(3)):
        finer = replace(node, slopes=4 * node.slopes)
        assert finer.reached() == pytest.approx(finer.best(), rel=1e-9)


@each_node
@each_drawn
def test_shares_are_near_the_best_after_the_sweeps_of_a_step(scheme: Scheme, children: tuple[tuple[int, ...], ...]):
    shares = [node.reached() / node.best() for node in worlds_of(scheme, children, range(8))]
    assert max(shares) < 1 + 1e-9 and np.mean(shares) > 0.998 and min(shares) > 0.99


def test_prices_settle_for_many_tokens():
    """What is taken is no more than the mass bears but for a little, and a token with a price has all of its mass."""
    stream = np.random.default_rng(0)
    logits = stream.normal(size=64) * 2
    draft, target = (np.exp(one) / np.exp(one).sum() for one in (logits, logits + stream.normal(size=64)))
    slopes, same = np.array([INNER, LEAF]), np.zeros(2, dtype=np.int64)
    for distinct in (False, True):
        prices, taken = settled(DraftLaws(draft[None], same[:1], same, distinct), slopes, target[None])
        assert float(np.maximum(taken - target, 0).sum()) < 1e-4
        assert float(np.abs(taken - target)[prices > 0].sum()) < 3e-4
        assert shares_at(prices[0, :2], slopes).sum() < 1 + 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement()], ids=lambda one: one.name)
@pytest.mark.parametrize("name", ["2 then 1,0", "2 then 2,0", "3 then 1,0,0"])
def test_more_is_kept_of_unequal_trees_than_by_any_other_rule(scheme: Scheme, name: str):
    shape, kept = SHAPES[name], dict[str, float]()
    for seed in range(6):
        world = DeepWorld.random(seed)
        best = tree_optimum(scheme, shape.counts, world.target, world.draft)
        for rule in (Valued(scheme), BottomUp(Optimal(scheme)), TraversalVerification(scheme)):
            share = world.accepted(shape, rule) / best
            assert share < 1 + 1e-9
            kept[rule.name] = kept.get(rule.name, 0) + share / 6
    ours = kept.pop("valued")
    assert ours > 0.96 and ours >= max(kept.values()) - 1e-4


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement(), TopThenSample()], ids=lambda one: one.name)
def test_siblings_with_children_share_a_unit(scheme: Scheme):
    """On equal trees nearly all of the program is kept, where trials one after the other keep 95 to 97 per cent."""
    shares = []
    for seed in range(4):
        world, shape = DeepWorld.random(seed), SHAPES["2,1"]
        best = tree_optimum(scheme, shape.counts, world.target, world.draft)
        shares.append(world.accepted(shape, Valued(scheme)) / best)
    assert 0.99 < np.mean(shares) < 1 + 1e-9


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement(), TopThenSample()], ids=lambda one: one.name)
def test_without_children_below_it_is_the_optimal_rule_and_on_chains_block_verification(scheme: Scheme):
    world = DeepWorld.random(3, 4)
    for shape, rule in ((TreeShape(((3,),)), BottomUp(Optimal(scheme))), (SHAPES["chain"], BlockVerification(scheme))):
        draft, _, table = world.every_tree(shape, scheme)
        ours, theirs = (one.path_law(draft, table) for one in (Valued(scheme), rule))
        if shape.max_children > 1 or scheme != TopThenSample():
            torch.testing.assert_close(ours.end, theirs.end, rtol=0, atol=1e-12)


@dataclass(frozen=True)
class LooksBelow(Valued):
    """A wrong rule: the first child has a curve only if a likely token was drawn below it."""

    def path_law(self, draft: Draft, target_probs: Tensor):
        below = draft.tree.children[0, 1, 0]
        likely = target_probs[torch.arange(len(target_probs)), 1].gather(-1, draft.tree.tokens[:, below, None]) > 0.4
        flat = ValueCurves((((0,), (0.0,) * PARTS),), draft.planned)
        plans = [rule.path_law(draft, target_probs) for rule in (Valued(self.scheme), Valued(self.scheme, flat))]
        one, other = plans
        return replace(one, end=one.end.where(likely, other.end), rest=one.rest.where(likely.unsqueeze(-1), other.rest))


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement()], ids=lambda one: one.name)
def test_a_curve_that_follows_what_was_drawn_below_is_caught(scheme: Scheme):
    world = DeepWorld.random(7, 3, 0.3)
    assert off(world, SHAPES["2 then 1,0"], LooksBelow(scheme)) > 1e-4
    assert off(world, SHAPES["2 then 1,0"], Valued(scheme)) < 1e-9


GROWING = BestFirst(drafts=4, depth=2, children=2, beam=2)


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement(), TopThenSample()], ids=lambda one: one.name)
def test_trees_that_grow_have_curves_by_where_a_node_stands(scheme: Scheme):
    """Composed, measured and strange ones: the text follows the target, and what is kept depends on them."""
    world = GrownWorld.random(5)
    draft, chance = every_growth(world, scheme, GROWING)
    assert draft.planned is None
    measured = Valued(scheme).measured(None, [(draft, target_rows(world, draft))])
    assert {(0,), (1,), (0, 0)} <= {path for path, _ in measured.curves.slopes}
    strange = ValueCurves((((0,), (0.0,) * PARTS), ((1,), (9.0, 7.0, 0.5, 0.0)), ((0, 0), (3.0,) * PARTS)))
    kept = []
    for rule in (Valued(scheme), measured, Valued(scheme, strange)):
        joint, accepted = written(world, rule, draft, chance)
        torch.testing.assert_close(joint, world.joint, rtol=0, atol=1e-9)
        kept.append(accepted)
    if scheme != TopThenSample():  # what two drafts keep of which the first is certain does not depend on these curves
        assert kept[2] < kept[1] - 1e-3


@dataclass(frozen=True)
class LearnsFromItself(Valued):
    """A wrong rule: a step's curves are measured on the step's own tree."""

    def path_law(self, draft: Draft, target_probs: Tensor) -> PathLaw:
        laws = []
        for row in range(len(target_probs)):
            own, table = among(draft, [row]), target_probs[row : row + 1]
            laws.append(Valued(self.scheme).measured(None, [(own, table)]).path_law(own, table))
        return PathLaw(torch.cat([law.end for law in laws]), torch.cat([law.rest for law in laws]))


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement()], ids=lambda one: one.name)
def test_curves_measured_on_the_very_step_are_caught(scheme: Scheme, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(value_curves, "OF_USUAL", 0.1)
    world = GrownWorld.random(5)
    draft, chance = every_growth(world, scheme, GROWING)
    for rule, caught in ((LearnsFromItself(scheme), True), (Valued(scheme), False)):
        off_by = float((written(world, rule, draft, chance)[0] - world.joint).abs().max())
        assert off_by > 1e-4 if caught else off_by < 1e-9


def test_a_curve_that_was_put_in_comes_out_again(monkeypatch: pytest.MonkeyPatch):
    """What is kept below is an exact function of the share, so that only what is guessed beside it makes an error."""
    steep = (2.0, 1.5, 0.5, 0.25)
    shares = torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    kept = [sum(s * min(max(x - u / PARTS, 0), 1 / PARTS) for u, s in enumerate(steep)) for x in shares]
    for guessed, error in ((value_curves.OF_USUAL, 0.04), (1e-6, 1e-8)):
        monkeypatch.setattr(value_curves, "OF_USUAL", guessed)
        found = ValueCurves().after(((0,), x, y) for x, y in zip(shares, kept, strict=True))
        assert dict(found.slopes)[0,] == pytest.approx(steep, abs=error)
    unseen = ValueCurves().after([((0,), 0.0, 0.0)])
    assert unseen.at((0,)) == pytest.approx(ValueCurves().at((0,)), abs=1e-12)


def test_curves_are_measured_on_trees_of_one_plan():
    world, shape = DeepWorld.random(3), SHAPES["2 then 1,0"]
    draft, _, table = world.every_tree(shape, IID())
    rule = Valued(IID()).measured(shape, [(draft, table)])
    assert rule.curves.shape == shape and off(world, shape, rule) < 1e-9
    other = SHAPES["2,1"]  # curves of another plan are not looked at
    assert world.accepted(other, rule) == world.accepted(other, Valued(IID()))
    with pytest.raises(InvalidParameter, match="on trees of one plan"):
        rule.measured(other, [(draft, table)])


@pytest.mark.parametrize("parts", [(1.0,) * 3, (0.5, 1.0, 0.5, 0.0), (1.0, 0.0, 0.0, -1.0), (float("nan"),) * 4])
def test_slopes_that_are_no_curve_are_refused(parts: tuple[float, ...]):
    with pytest.raises(InvalidParameter, match="must be 4 falling numbers in 0 to 64"):
        ValueCurves((((0,), parts),))


@pytest.mark.parametrize(("children", "least"), [((INNER, INNER, LEAF), 0.995), ((DEEP, INNER, LEAF), 0.99)], ids=str)
def test_of_three_successive_siblings_those_with_children_share_a_unit(children: tuple, least: float):
    """Tried one after the other they have 95 to 99 per cent of a node's best shares."""
    found = []
    for seed in range(4):
        world = DeepWorld.random(seed, 4)
        node = Node(WithoutReplacement(), world.target[0], world.draft[0], np.array(children))
        found.append(node.reached() / node.best())
    assert max(found) < 1 + 1e-9 and np.mean(found) > least


def test_the_plan_is_known_where_the_shape_is():
    world, noise = World.random(5), Noise.from_seed(0, 3)
    for policy in (Widths((2, 1)), Chain(2), Fixed(SHAPES["2 then 1,0"])):
        draft = grow(torch.zeros(3, dtype=torch.int64), policy, IID(), world.propose, noise)
        assert draft.planned == policy.shape


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda one: one.name)
def test_verdicts_of_grown_trees_follow_their_law(scheme: Scheme):
    """The text by chi-square with false-alarm rate 1e-6, the accepted length within five standard errors."""
    many, world, noise = 2**12, World.random(5), FastNoise.seeded(1, 2**12)

    def propose(frontier):
        listed, probs = world.propose(frontier)
        return listed, torch.stack([probs, probs.flip(-1)], dim=-2) if scheme.several_rows else probs

    draft = grow(torch.zeros(many, dtype=torch.int64), Fixed(SHAPES["2 then 2,0"]), scheme, propose, noise)
    table = world.target_rows(draft.tree)
    verdict = Valued(scheme).verify(draft, table, noise)
    check_by_chi_square(completed(world, verdict.tokens(draft.tree)), world.joint)
    law = Valued(scheme).path_law(draft, table).accepted(draft.tree)
    gap = float((verdict.length.double() - law).mean())
    assert abs(gap) < 5 * float((verdict.length.double() - law).std()) / many**0.5


def test_curves_are_concave_and_worth_more_the_more_is_below():
    chain = ()
    for _ in range(3):
        chain, shorter = (chain,), chain
        assert sum(curve(chain)) > sum(curve(shorter))
        assert list(curve(chain)) == sorted(curve(chain), reverse=True)
    assert curve(()) == LEAF and curve(((), ())) > curve(((),))
    curves = curves_of(SHAPES["3 then 1,0,0"])
    assert curves[1:].tolist() == [list(one) for one in (INNER, LEAF, LEAF, LEAF)]
    assert (curves % 2 == 0).all()


@pytest.mark.parametrize("scheme", [ConditionalPoisson(), SpecHub()], ids=lambda one: one.name)
def test_other_schemes_are_refused(scheme: Scheme):
    with pytest.raises(UnpairedScheme, match="shares by value"):
        Valued(scheme)
