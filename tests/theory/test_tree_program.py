"""The program of a whole tree: what is known of it, no exact rule above it, and what two papers claim against it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor
from tree_worlds import SHAPES, DeepWorld

import polydraft.theory.tree_program as tree_program
from polydraft.catalogue import tree_rules
from polydraft.errors import InvalidParameter, UnpairedScheme, VocabularyMismatch
from polydraft.schemes import IID, Coupled, Product, Scheme, TopK, TopThenSample, WithoutReplacement
from polydraft.theory import lp_acceptance, tree_optimum
from polydraft.theory.tree_program import drawn_trees, subtrees
from polydraft.trees import Draft, TreeShape
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    NaiveMatch,
    Optimal,
    PathLaw,
    PathVerifier,
    TopDown,
    TopThenSampleRule,
)
from polydraft.verifiers.trees.lifts import Division

WORLDS = range(3)
EXACT = [rule for rule in tree_rules() if rule.lossless and isinstance(rule, PathVerifier) and rule.scheme.independent]
LIFTS = [BottomUp(rule) for rule in (Optimal(IID()), Optimal(), TopThenSampleRule())]
each_shape = pytest.mark.parametrize("name", SHAPES)


def optimum(world: DeepWorld, shape: TreeShape, scheme: Scheme) -> float:
    return tree_optimum(scheme, shape.counts, world.target, world.drafts_of(scheme))


def test_shapes_are_read_level_by_level():
    assert subtrees(((2,), (1,))) == (((),), ())
    assert subtrees(((3,), (2, 0, 1), (0, 1))) == (((), ((),)), (), ((),))
    assert subtrees(()) == ()


def test_copies_of_a_text_are_one_and_chances_add_up():
    world = DeepWorld.random(0)
    for scheme in (IID(), WithoutReplacement(), Product()):
        trees = drawn_trees(scheme, ((2,), (1, 1)), world.drafts_of(scheme))
        assert sum(trees.values()) == pytest.approx(1, abs=1e-12)
    assert min(map(len, drawn_trees(IID(), ((2,),), world.draft))) == 1
    assert {*map(len, drawn_trees(TopK(), ((2,), (1,)), world.draft))} == {3}


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement(), TopThenSample(), Product()], ids=lambda one: one.name)
def test_on_one_level_it_is_the_transport(scheme: Scheme):
    for seed in WORLDS:
        world = DeepWorld.random(seed, 4)
        for k in (1, 2, 3):
            known = lp_acceptance(scheme, world.drafts_of(scheme)[0], world.target[0], k)
            assert optimum(world, TreeShape(((k,),)), scheme) == pytest.approx(known, abs=1e-9)


def test_on_a_chain_block_verification_reaches_it():
    shape = TreeShape(((1,), (1,), (1,)))
    for seed in WORLDS:
        world = DeepWorld.random(seed)
        assert world.accepted(shape, BlockVerification()) == pytest.approx(optimum(world, shape, IID()), abs=1e-9)


def test_certain_drafts_are_kept_as_often_as_the_target_writes_them():
    world = DeepWorld.random(1)
    kept = world.accepted(SHAPES["2,1"], TopDown(NaiveMatch(TopK())))
    assert optimum(world, SHAPES["2,1"], TopK()) == pytest.approx(kept, abs=1e-9)


def of_whole_trees(world: DeepWorld, shape: TreeShape, scheme: Scheme) -> float:
    """Solve the program with a flow for every node of every tree."""
    trees = drawn_trees(scheme, shape.counts, world.drafts_of(scheme))
    flows = [(place, text) for place, tree in enumerate(trees) for text in sorted(tree)]
    texts, chances = sorted({text for _, text in flows}), [*trees.values()]
    parents = sorted({(place, text[:-1]) for place, text in flows})
    limits, bounds = np.zeros((len(parents) + len(texts), len(flows))), np.zeros(len(parents) + len(texts))
    for row, (place, parent) in enumerate(parents):
        bounds[row] = 0 if parent else chances[place]
        for column, (own, text) in enumerate(flows):
            limits[row, column] = (own, text[:-1]) == (place, parent)
            limits[row, column] -= (own, text) == (place, parent)
    for row, text in enumerate(texts, len(parents)):
        share = float(world.target[len(text) - 1][text])
        bounds[row] = share if len(text) == 1 else 0
        for column, (_, other) in enumerate(flows):
            limits[row, column] = (other == text) - share * (other == text[:-1])
    return -linprog([-1.0] * len(flows), limits, bounds, method="highs").fun


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement(), TopThenSample()], ids=lambda one: one.name)
@pytest.mark.parametrize("name", ["2,1", "2 then 2,0", "2 then 1,0 then 1"])
def test_nothing_is_lost_by_deciding_level_by_level(scheme: Scheme, name: str):
    world = DeepWorld.random(5, 2)
    assert optimum(world, SHAPES[name], scheme) == pytest.approx(of_whole_trees(world, SHAPES[name], scheme), abs=1e-9)


@each_shape
@pytest.mark.parametrize("rule", [*EXACT, *LIFTS], ids=lambda rule: f"{rule.name}, {rule.scheme.name}")
def test_no_exact_rule_is_above_it(rule: PathVerifier, name: str):
    shape = SHAPES[name]
    if shape.max_children > getattr(rule, "most_drafts", 9):
        pytest.skip("the rule is for fewer drafts")
    for seed in WORLDS:
        world = DeepWorld.random(seed)
        assert world.accepted(shape, rule) <= optimum(world, shape, rule.scheme) * (1 + 1e-9)


@pytest.mark.parametrize("rule", LIFTS, ids=lambda rule: rule.name)
def test_the_worlds_tell_an_exact_text(rule: PathVerifier):
    for name in ("2 then 1,0", "2 then 1,0 then 1"):
        world = DeepWorld.random(4)
        draft, chance, rows = world.every_tree(SHAPES[name], rule.scheme)
        torch.testing.assert_close(world.text_law(draft, rule, rows, chance), world.joint, rtol=0, atol=1e-9)


class KeepsMore(BottomUp):
    """A wrong rule: it lets a child succeed as if no earlier sibling had been tried, and more often."""

    def divide(self, *given: Tensor, **options: bool) -> Division:
        part = super().divide(*given, **options)
        return part._replace(children=part.children.sqrt())


def test_a_rule_above_it_is_not_exact():
    world, shape, rule = DeepWorld.random(2), SHAPES["2 then 1,0"], KeepsMore(Optimal(IID()))
    assert world.accepted(shape, rule) > optimum(world, shape, IID()) * 1.01
    draft, chance, rows = world.every_tree(shape, IID())
    assert float((world.text_law(draft, rule, rows, chance) - world.joint).abs().max()) > 0.003


def test_wrong_arguments_are_named(monkeypatch: pytest.MonkeyPatch):
    world = DeepWorld.random(0)
    monkeypatch.setattr(tree_program, "MOST_TREES", 20)
    with pytest.raises(InvalidParameter, match="as many draft rows"):
        tree_optimum(IID(), ((1,),) * 5, world.target * 2, world.draft)
    with pytest.raises(InvalidParameter, match="as many target rows"):
        tree_optimum(IID(), ((1,),) * 2, world.target[:1], world.draft)
    with pytest.raises(InvalidParameter, match="over 20 trees"):
        tree_optimum(IID(), ((2,), (1, 1)), world.target, world.draft)
    with pytest.raises(UnpairedScheme, match="Listing trees"):
        tree_optimum(Coupled(), ((1,),), world.target, world.draft)
    with pytest.raises(VocabularyMismatch):
        tree_optimum(IID(), ((1,),), world.target, [row[..., :2] for row in world.draft])


# ---- UniVer, arXiv 2605.04543 ------------------------------------------------------------------------------------


class Published:
    """UniVer as its paper writes it, for a node with scale a: one drawn child, the others certain."""

    name, lossless, scheme = "UniVer", True, TopThenSample()

    def path_law(self, draft: Draft, target: Tensor) -> PathLaw:
        tree, (batch, nodes, size) = draft.tree, target.shape
        scale, success = torch.ones(batch, nodes).double(), torch.zeros(batch, nodes).double()
        rest = torch.zeros(batch, nodes, size + 1).double()
        for row in range(batch):
            for node in range(nodes):
                kids = [kid for kid in tree.children[row, node].tolist() if kid >= 0]
                self.node(draft, target[row, node], kids, row, node, scale, success, rest)
        order = tree.topology.post_order
        in_order = torch.zeros_like(success).scatter(-1, order, success)
        before = torch.nn.functional.pad((1 - in_order).cumprod(-1)[:, :-1], (1, 0), value=1.0)
        return PathLaw((before * in_order).gather(-1, order), rest)

    def node(self, draft, target, kids, row, node, scale, success, rest):
        a = scale[row, node]
        if not kids:
            success[row, node] = a
            rest[row, node, :-1] = target
            return
        tokens = [int(draft.tree.tokens[row, kid]) for kid in kids]
        left = draft.probs[row, node].clone()
        left[tokens[:-1]] = 0
        left = left / left.sum() if left.sum() > 0 else left
        over = (a * target - left).clamp_min(0)
        z = 1 - a + over.sum()
        last = (a * target[tokens[-1]] / left[tokens[-1]]).clamp_max(1)
        shares = [over[token] * (1 - last) / z for token in tokens[:-1]] + [last]
        for place, kid in enumerate(kids):
            scale[row, kid] = (shares[place] / max(1 - float(sum(shares[:place])), 1e-300)).clamp_max(1)
        failed = (1 - last) * (1 - a) / z
        success[row, node] = 1 - failed / (1 - sum(shares)) if sum(shares) < 1 else 1.0
        over[tokens[:-1]] = 0  # what the certain children have
        rest[row, node, :-1] = over / over.sum() if over.sum() > 0 else target


@each_shape
def test_univer_is_the_lift_of_the_rule_for_a_drawn_last_draft(name: str):
    for seed in WORLDS:
        world = DeepWorld.random(seed)
        draft, _, rows = world.every_tree(SHAPES[name], TopThenSample())
        ours, theirs = (rule.path_law(draft, rows) for rule in (BottomUp(TopThenSampleRule()), Published()))
        torch.testing.assert_close(ours.end, theirs.end, rtol=0, atol=1e-9)


def two_tokens() -> DeepWorld:
    """Return the smallest world in which UniVer misses the program: two tokens, two levels."""
    half, third = (torch.tensor(row, dtype=torch.float64) for row in ((0.5, 0.5), (0.75, 0.25)))
    world = DeepWorld.random(0, 2)
    return replace(world, target=(half, third.expand(2, 2), *world.target[2:]), draft=(half, half.expand(2, 2)))


def test_univer_is_below_the_program_where_siblings_have_children():
    world, shape = two_tokens(), SHAPES["2,1"]
    assert optimum(world, shape, TopThenSample()) == pytest.approx(2, abs=1e-9)
    assert world.accepted(shape, BottomUp(TopThenSampleRule())) == pytest.approx(1.875, abs=1e-9)


# ---- SpecTr-GBV, arXiv 2604.25925 --------------------------------------------------------------------------------


def claimed(world: DeepWorld, paths: int, length: int) -> float:
    """Return the sum over texts of target [1 - (1 - min(draft / target, 1))^paths], the claimed optimum."""
    target = draft = torch.ones((), dtype=torch.float64)
    total = 0.0
    for depth in range(length):
        target, draft = target.unsqueeze(-1) * world.target[depth], draft.unsqueeze(-1) * world.draft[depth]
        total += float((target * (1 - (1 - (draft / target).clamp_max(1)) ** paths)).sum())
    return total


def test_the_optimum_claimed_for_independent_paths_is_none():
    """An exact rule keeps more than the claim says that any can: two tokens, one level, two drafts."""
    target, draft = (torch.tensor(row, dtype=torch.float64) for row in ((0.7, 0.3), (0.3, 0.7)))
    world, shape = DeepWorld((target,), (draft,)), TreeShape(((2,),))
    assert claimed(world, 2, 1) == pytest.approx(27 / 35)
    assert optimum(world, shape, IID()) == pytest.approx(0.81, abs=1e-9)
    world = replace(DeepWorld.random(0, 2), target=(target,), draft=(draft,))
    drafts, chance = (
        torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]),
        torch.tensor([0.09, 0.21, 0.21, 0.49], dtype=torch.float64),
    )
    rows = [torch.nn.functional.pad(row, (0, 1)).expand(4, -1) for row in (draft, target)]
    law = Optimal(IID()).law(drafts, *rows)
    torch.testing.assert_close(chance @ law.emitted(drafts), rows[1][0], rtol=0, atol=1e-12)
    assert float(chance @ law.child.sum(-1)) == pytest.approx(0.81, abs=1e-12)


def written_by_its_code(target: Tensor, draft: Tensor, paths: int) -> tuple[Tensor, Tensor]:
    """Return how often a token is accepted, and written, on one level, where no later target is changed.

    The paths' drafts are tried one after the other, each with the probability of its token alone; after the last the
    next token comes from another law: github.com/junemily/SpecTr-GBV, src/engine.py at e399f44.
    """
    ratio = (draft / target).clamp_max(1)
    test = target * (1 - (1 - ratio) ** paths) / (1 - (1 - draft) ** paths)
    once = float((draft * test).sum())
    accepted = draft * test * (1 - (1 - once) ** paths) / once
    rest = target * (1 - ratio**paths)
    return accepted, accepted + (1 - once) ** paths * rest / rest.sum()


def test_spectr_gbv_as_published_writes_another_law():
    """Of two tokens one is accepted more often than the target has it, which no correction makes good."""
    target, draft = (torch.tensor(row, dtype=torch.float64) for row in ((0.7, 0.3), (0.3, 0.7)))
    accepted, written = written_by_its_code(target, draft, 2)
    assert float(accepted[1]) > 0.34 and float((written - target).abs().sum() / 2) == pytest.approx(0.0443, abs=5e-5)
    torch.testing.assert_close(written_by_its_code(target, draft, 1)[1], target, rtol=0, atol=1e-12)
    off = []
    for seed in range(20):
        world = DeepWorld.random(seed)
        off.append(
            float((written_by_its_code(world.target[0], world.draft[0], 2)[1] - world.target[0]).abs().sum() / 2)
        )
    assert min(off) > 1e-4 and sum(off) / 20 == pytest.approx(0.032, abs=0.004)


def test_the_claimed_optimum_is_below_the_program_on_one_level():
    for seed in range(20):
        world = DeepWorld.random(seed)
        assert claimed(world, 1, 1) == pytest.approx(optimum(world, TreeShape(((1,),)), IID()), abs=1e-9)
        assert claimed(world, 2, 1) < optimum(world, TreeShape(((2,),)), IID()) - 1e-4
