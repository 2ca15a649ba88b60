"""Exactness of traversal verification, by enumerating every draft tree of depth two."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from worlds import FastNoise, World, check_by_chi_square, completed, outcome, worlds

from polydraft.errors import UnpairedScheme
from polydraft.schemes import IID, Scheme, TopK, TopThenSample, WithoutReplacement
from polydraft.trees import Widths, grow
from polydraft.verifiers import (
    BlockVerification,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    TopDown,
    TraversalVerification,
)
from polydraft.verifiers.trees.lifts import Division

SHAPES = ((2, 2), (1, 2), (2, 1), (1, 1))
INSTANCES = [(seed, 4, 3, 0.0) for seed in range(3)] + [(3, 3, 3, 0.6), (4, 4, 4, 0.15)]
each_scheme = pytest.mark.parametrize("scheme", [IID(), WithoutReplacement()], ids=lambda scheme: scheme.name)


@each_scheme
@pytest.mark.parametrize("widths", SHAPES)
def test_three_tokens_follow_the_target_and_no_fewer_are_accepted_than_from_the_top_down(
    scheme: Scheme, widths: tuple[int, int]
):
    rule = RecursiveRejection() if isinstance(scheme, IID) else RecursiveRejectionWithoutReplacement()
    for instance in INSTANCES:
        world = World.random(*instance)
        joint, accepted = outcome(world, TraversalVerification(scheme), widths)
        torch.testing.assert_close(joint, world.joint, rtol=0, atol=1e-12)
        assert accepted >= outcome(world, TopDown(rule), widths)[1] - 1e-9


@each_scheme
@settings(max_examples=8)
@given(world=worlds())
def test_three_tokens_follow_the_target_whatever_the_rows(scheme: Scheme, world: World):
    for widths in ((2, 2), (1, 2)):
        joint, _ = outcome(world, TraversalVerification(scheme), widths)
        torch.testing.assert_close(joint, world.joint, rtol=0, atol=1e-9)


def test_three_children_without_replacement():
    world = World.random(6)
    joint, _ = outcome(world, TraversalVerification(), (3, 2))
    torch.testing.assert_close(joint, world.joint, rtol=0, atol=1e-12)


def test_on_a_chain_it_is_block_verification():
    for instance in INSTANCES:
        world = World.random(*instance)
        one, two = (outcome(world, v, (1, 1))[1] for v in (TraversalVerification(IID()), BlockVerification()))
        assert one == pytest.approx(two, abs=1e-12)


@dataclass(frozen=True)
class KeepsTheDraftRow(TraversalVerification):
    """A wrong rule: without replacement a failed child stays in the draft row."""

    def divide(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, scale: Tensor) -> Division:
        return TraversalVerification(IID()).divide(drafts, draft_probs, target_probs, scale)


def test_the_draft_row_must_lose_the_failed_child():
    world = World.random(2)
    joint, _ = outcome(world, KeepsTheDraftRow(), (2, 2))
    assert float((joint - world.joint).abs().max()) > 0.01


@each_scheme
def test_grown_and_verified_trees_follow_the_target(scheme: Scheme):
    """From drafting to the bonus token, by chi-square with false-alarm rate 1e-6."""
    many, world, noise = 2**13, World.random(5), FastNoise.seeded(1, 2**13)
    draft = grow(torch.zeros(many, dtype=torch.int64), Widths((2, 2)), scheme, world.propose, noise)
    verdict = TraversalVerification(scheme).verify(draft, world.target_rows(draft.tree), noise)
    assert set(verdict.length.tolist()) == {0, 1, 2}
    check_by_chi_square(completed(world, verdict.tokens(draft.tree)), world.joint)


@pytest.mark.parametrize("scheme", [TopK(), TopThenSample()], ids=lambda scheme: scheme.name)
def test_other_schemes_are_refused(scheme: Scheme):
    with pytest.raises(UnpairedScheme, match="Traversal"):
        TraversalVerification(scheme)
