"""Exactness and acceptance of the bottom-up lift, by enumerating every draft tree of depth two."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from worlds import FastNoise, World, check_by_chi_square, completed, every_tree, outcome, text_law, worlds
from zoo import ZOO

from polydraft.probs import to_atoms
from polydraft.schemes import IID, Scheme, WithoutReplacement
from polydraft.trees import Draft, TokenTree, Topology, Widths, grow
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    NaiveMatch,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    ScalableVerifier,
    SpeculativeSampling,
    TopDown,
    TraversalVerification,
)
from polydraft.verifiers.nodes.optimal import Optimal
from polydraft.verifiers.outcome_law import law_of_shares, present
from polydraft.verifiers.trees.lifts import Division

RULES: list[ScalableVerifier] = [
    NaiveMatch(IID()),
    NaiveMatch(WithoutReplacement()),
    RecursiveRejection(),
    RecursiveRejectionWithoutReplacement(),
    Optimal(IID()),
    Optimal(WithoutReplacement()),
]
SHAPES = ((2, 2), (1, 2), (2, 1))
CASES = [(SpeculativeSampling(), (1, 1)), *((rule, widths) for rule in RULES for widths in SHAPES)]
CHEAP = CASES[: 1 + 4 * len(SHAPES)]
NAMES = [f"{rule.name}, {rule.scheme.name}, {widths}" for rule, widths in CASES]
each_case = pytest.mark.parametrize(("rule", "widths"), CASES, ids=NAMES)
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}, {rule.scheme.name}")
INSTANCES = [(seed, 4, 3, 0.0) for seed in range(3)] + [(3, 3, 3, 0.6), (4, 4, 4, 0.15)]


@pytest.mark.long(9)
@each_case
def test_three_tokens_follow_the_target_and_no_fewer_are_accepted_than_from_the_top_down(
    rule: ScalableVerifier, widths: tuple[int, int]
):
    for seed, size, listed, likeness in INSTANCES:
        world = World.random(seed, size, listed, likeness)
        joint, accepted = outcome(world, BottomUp(rule), widths)
        torch.testing.assert_close(joint, world.joint, rtol=0, atol=1e-9)
        assert accepted >= outcome(world, TopDown(rule), widths)[1] - 1e-9


@each_rule
@settings(max_examples=6)
@given(world=worlds())
def test_three_tokens_follow_the_target_whatever_the_rows(rule: ScalableVerifier, world: World):
    for widths in SHAPES:
        torch.testing.assert_close(outcome(world, BottomUp(rule), widths)[0], world.joint, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("scheme", "instance"),
    [(IID(), (3, 3, 3, 0.6)), (IID(), (4, 4, 4, 0.15)), (WithoutReplacement(), (4, 4, 4, 0.15))],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_lift_of_the_optimal_rule_accepts_most(scheme: Scheme, instance: tuple[int, int, int, float]):
    """Recursive rejection top down, traversal, optimal top down, optimal bottom up: the last is above all others."""
    world = World.random(*instance)
    token_wise = RecursiveRejection() if scheme == IID() else RecursiveRejectionWithoutReplacement()
    others = (TopDown(token_wise), TraversalVerification(scheme), TopDown(Optimal(scheme)))
    accepted = [outcome(world, verifier, (2, 2))[1] for verifier in others]
    best = outcome(world, BottomUp(Optimal(scheme)), (2, 2))[1]
    assert best > max(accepted) + 1e-4
    assert accepted[0] < min(accepted[1:])


@dataclass(frozen=True)
class ForgetsSiblings(BottomUp):
    """A wrong lift: a child's scale is its share, though it is tried only if its siblings failed."""

    def divide(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, scale: Tensor) -> Division:
        part = super().divide(drafts, draft_probs, target_probs, scale)
        return part._replace(children=self.rule.shares(drafts, draft_probs, scale.unsqueeze(-1) * target_probs))


@dataclass(frozen=True)
class ForgetsFailure(BottomUp):
    """A wrong lift: a node below the root that is reached emits its rest for certain."""

    def divide(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, scale: Tensor) -> Division:
        return super().divide(drafts, draft_probs, target_probs, scale)._replace(scale=torch.ones_like(scale))


@pytest.mark.parametrize("wrong", [ForgetsSiblings, ForgetsFailure])
def test_wrong_lifts_are_caught(wrong: type[BottomUp]):
    world = World.random(2)
    joint, _ = outcome(world, wrong(RecursiveRejection()), (2, 2))
    assert float((joint - world.joint).abs().max()) > 0.003


def same_law(one: BottomUp | BlockVerification, two: BottomUp | TraversalVerification, widths: tuple[int, int]) -> None:
    for seed, size, listed, likeness in INSTANCES:
        world = World.random(seed, size, listed, likeness)
        draft, _ = every_tree(world, one.scheme, widths)
        laws = [verifier.path_law(draft, world.target_rows(draft.tree)) for verifier in (one, two)]
        torch.testing.assert_close(laws[0].end, laws[1].end, rtol=0, atol=1e-12)
        reached = laws[0].end > 1e-9
        torch.testing.assert_close(laws[0].rest[reached], laws[1].rest[reached], rtol=0, atol=1e-6)


def test_on_a_chain_the_lift_of_speculative_sampling_is_block_verification():
    same_law(BlockVerification(), BottomUp(SpeculativeSampling()), (1, 1))


def test_the_lift_of_recursive_rejection_is_traversal_verification_for_independent_drafts():
    for widths in SHAPES:
        same_law(BottomUp(RecursiveRejection()), TraversalVerification(IID()), widths)


@each_rule
def test_at_depth_one_the_lift_is_the_node_rule(rule: ScalableVerifier):
    for target, draft_row in ZOO.values():
        size = len(target)
        world = World(
            (target, target.expand(size, size), target.expand(size, size, size)),
            (torch.arange(size), torch.arange(size).expand(size, size)),
            (draft_row, draft_row.expand(size, size)),
        )
        trees, _ = every_tree(world, rule.scheme, (2, 1))
        draft = first_nodes(trees, 3)
        rows = target.expand(*draft.tree.tokens.shape, size)
        law = BottomUp(rule).path_law(draft, rows)
        drafts, draft_probs = draft.drafted_atoms()[:, 0], torch.nn.functional.pad(draft.probs[:, 0], (0, 1))
        atoms = to_atoms(rows[:, 0], draft.shortlist[:, 0])
        marginal = rule.marginal(draft_probs, atoms, present(drafts))
        node = law_of_shares(rule.shares(drafts, draft_probs, atoms), marginal, atoms)
        torch.testing.assert_close(law.end[:, 1:], node.child, rtol=0, atol=1e-12)
        torch.testing.assert_close(law.end[:, :1] * law.rest[:, 0], node.rest, rtol=0, atol=1e-12)


def first_nodes(draft: Draft, many: int) -> Draft:
    tree = TokenTree(draft.tree.tokens[:, :many], Topology(draft.tree.parents[:, :many]), draft.tree.valid[:, :many])
    return Draft(tree, draft.atoms[:, :many], draft.shortlist[:, :many], draft.probs[:, :many])


def copies(draft: Draft, row: int, many: int) -> Draft:
    pick = torch.full((many,), row)
    tree = TokenTree(draft.tree.tokens[pick], Topology(draft.tree.parents[pick]), draft.tree.valid[pick])
    return Draft(tree, draft.atoms[pick], draft.shortlist[pick], draft.probs[pick])


@pytest.mark.parametrize(("rule", "widths"), CHEAP, ids=NAMES[: len(CHEAP)])
def test_verdicts_of_grown_trees_follow_their_law(rule: ScalableVerifier, widths: tuple[int, int]):
    """The text by chi-square with false-alarm rate 1e-6, the accepted length within five standard errors."""
    many, world, noise, verifier = 2**12, World.random(5), FastNoise.seeded(1, 2**12), BottomUp(rule)
    draft = grow(torch.zeros(many, dtype=torch.int64), Widths(widths), rule.scheme, world.propose, noise)
    verdict = verifier.verify(draft, world.target_rows(draft.tree), noise)
    assert set(verdict.length.tolist()) == {0, 1, 2}
    check_by_chi_square(completed(world, verdict.tokens(draft.tree)), world.joint)
    expected = outcome(world, verifier, widths)[1]
    error = float(verdict.length.double().std()) / many**0.5
    assert abs(float(verdict.length.double().mean()) - expected) < 5 * error


def test_the_verdict_follows_the_law_given_the_draft():
    """For one tree, by chi-square with false-alarm rate 1e-6."""
    many, world, verifier = 2**13, World.random(4), BottomUp(RecursiveRejection())
    trees, probability = every_tree(world, IID(), (2, 2))
    law = verifier.path_law(trees, world.target_rows(trees.tree))
    likeliest = int(probability.argmax())
    draft = copies(trees, likeliest, many)
    verdict = verifier.verify(draft, world.target_rows(draft.tree), FastNoise.seeded(0, many))
    tokens = completed(world, verdict.tokens(draft.tree))
    check_by_chi_square(tokens, text_law(world, trees, law)[likeliest])
