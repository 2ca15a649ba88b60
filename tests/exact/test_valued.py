"""Shares by value: exact on every shape and scheme, near the best shares of a node, caught where they look below."""

from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor
from tree_worlds import SHAPES, DeepWorld
from worlds import FastNoise, World, check_by_chi_square, completed
from zoo import ZOO, rows

from polydraft.errors import UnpairedScheme
from polydraft.probs import Noise
from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Given,
    Product,
    Scheme,
    SpecHub,
    TopK,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
    enumerate_drafts,
)
from polydraft.theory import tree_optimum
from polydraft.trees import BestFirst, Chain, Draft, Fixed, TreeShape, Widths, grow
from polydraft.verifiers import BlockVerification, BottomUp, Optimal, TraversalVerification, Valued
from polydraft.verifiers.selection.value_curves import LEAF, curve, slopes_of
from polydraft.verifiers.selection.valued_shares import PARTS, STEPS, settled, shares_at

SCHEMES: list[Scheme] = [
    *(IID(), WithoutReplacement(), TopThenIID(1), TopThenSample(), TopK(), Given(), Product()),
]
MORE = {**SHAPES, "3 then 2,1,0": TreeShape(((3,), (2, 1))), "2,1 then 1": TreeShape(((2,), (1, 1), (1,)))}
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda one: one.name)
INNER = curve(((),))


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
        return -linprog(value, limits, [*chance, *self.target.tolist()], bounds=most, method="highs").fun

    def reached(self) -> float:
        """Return the value of the shares that the rule gives, and check what it says of their average."""
        rule, drafts = Valued(self.scheme), self.outcomes[0].numpy()
        taken, total = np.zeros(len(self.target)), 0.0
        for own, chance in zip(drafts, self.outcomes[1].tolist(), strict=True):
            given_rows = self.draft.numpy(), self.target.numpy(), len(own), own
            shares, accepted = rule._at_node(self.slopes, *given_rows)
            assert shares.sum() < 1 + 1e-9 and (shares >= 0).all()
            np.add.at(taken, own, chance * shares)
            parts = np.clip(shares[:, None] - np.arange(PARTS) / PARTS, 0, 1 / PARTS)
            total += chance * float((parts * self.slopes).sum()) / STEPS
        np.testing.assert_allclose(taken, accepted, rtol=0, atol=1e-12)
        assert (accepted <= self.target.numpy() + 1e-12).all()
        return total


@pytest.mark.parametrize("children", [(INNER, LEAF), (INNER, INNER), (LEAF, INNER), (INNER, LEAF, LEAF)], ids=str)
@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement(), TopThenSample(), Product()], ids=lambda one: one.name)
def test_shares_are_within_half_a_percent_of_the_best(scheme: Scheme, children: tuple[tuple[int, ...], ...]):
    """Mean over worlds, and none far off; three drafts without replacement go another way."""
    if len(children) > 2 and scheme == WithoutReplacement():
        pytest.skip("the first draft is tried apart")
    shares = []
    for seed in range(4):
        world = DeepWorld.random(seed, 5 if len(children) == 2 else 4)
        node = Node(scheme, world.target[0], world.drafts_of(scheme)[0], np.array(children))
        shares.append(node.reached() / node.best())
    assert max(shares) < 1 + 1e-9 and np.mean(shares) > 0.995 and min(shares) > 0.98


def test_prices_settle_for_many_tokens():
    """What is taken is no more than the mass bears but for a little, and a token with a price has all of its mass."""
    stream = np.random.default_rng(0)
    logits = stream.normal(size=64) * 2
    draft, target = (np.exp(one) / np.exp(one).sum() for one in (logits, logits + stream.normal(size=64)))
    slopes = np.array([INNER, LEAF])
    for distinct in (False, True):
        prices, taken = settled(draft[None].repeat(2, 0), slopes, target, distinct=distinct)
        assert float(np.maximum(taken - target, 0).sum()) < 0.01
        priced = prices.below + prices.above > 0
        assert float(np.abs(taken - target)[priced].sum()) < 0.02
        assert shares_at(prices, slopes, np.array([0, 1])).sum() < 1 + 1e-12


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
    assert ours > 0.965 and ours >= max(kept.values()) - 1e-12


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
        plans = [
            Valued(self.scheme).path_law(replace(draft, planned=plan), target_probs) for plan in (draft.planned, None)
        ]
        one, other = plans
        return replace(one, end=one.end.where(likely, other.end), rest=one.rest.where(likely.unsqueeze(-1), other.rest))


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement()], ids=lambda one: one.name)
def test_a_curve_that_follows_what_was_drawn_below_is_caught(scheme: Scheme):
    world = DeepWorld.random(7, 3, 0.3)
    assert off(world, SHAPES["2 then 1,0"], LooksBelow(scheme)) > 1e-4
    assert off(world, SHAPES["2 then 1,0"], Valued(scheme)) < 1e-9


def test_trees_whose_shape_follows_from_their_drafts_have_the_shares_of_the_optimal_rule():
    world, noise = World.random(5), Noise.from_seed(0, 200)
    draft = grow(torch.zeros(200, dtype=torch.int64), BestFirst(4, 2, 2), WithoutReplacement(), world.propose, noise)
    assert draft.planned is None
    table = world.target_rows(draft.tree)
    ours, theirs = (one.path_law(draft, table) for one in (Valued(), BottomUp(Optimal())))
    torch.testing.assert_close(ours.end, theirs.end, rtol=0, atol=1e-12)


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
    tables, kinds = slopes_of(SHAPES["3 then 1,0,0"], 3)
    assert kinds == (1, 0, 0, 0, 0) and tables[1].tolist() == [list(INNER), list(LEAF), list(LEAF)]
    assert prod(table.shape[0] for table in tables) == 9


@pytest.mark.parametrize("scheme", [ConditionalPoisson(), SpecHub()], ids=lambda one: one.name)
def test_other_schemes_are_refused(scheme: Scheme):
    with pytest.raises(UnpairedScheme, match="shares by value"):
        Valued(scheme)
