"""Targets without a choice: the verdict that needs no arithmetic is the one that every lossless rule comes to."""

import pytest
import torch
from torch import Tensor
from worlds import FastNoise, World

from polydraft.errors import UnpairedScheme
from polydraft.schemes import IID, ConditionalPoisson, Given, TopK, TopThenSample, WithoutReplacement
from polydraft.trees import Draft, Fixed, TreeShape, grow
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    ImportanceWeighted,
    KSeq,
    NaiveMatch,
    Optimal,
    PathVerifier,
    Race,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SpecHubRule,
    SpeculativeSampling,
    TopDown,
    TopThenSampleRule,
    TraversalVerification,
    Valued,
)
from polydraft.verifiers.trees.lifts import certain_verdict

MANY = 120
BUSHY, CHAIN = TreeShape(((2,), (2, 2), (1, 0, 2))), TreeShape(((1,),) * 3)
RULES = [
    *(NaiveMatch(scheme) for scheme in (IID(), WithoutReplacement(), TopK(), Given())),
    *(Optimal(scheme) for scheme in (IID(), WithoutReplacement(), ConditionalPoisson(), TopThenSample())),
    Race(),
    ImportanceWeighted(),
    KSeq(),
    RecursiveRejection(),
    RecursiveRejectionWithoutReplacement(),
    SpecHubRule(),
    TopThenSampleRule(),
]
LIFTED = [BottomUp(rule) for rule in (Optimal(), Optimal(IID()), KSeq(), RecursiveRejection(), TopThenSampleRule())]
VERIFIERS: list[tuple[PathVerifier, TreeShape]] = [
    *((TopDown(rule), BUSHY) for rule in RULES),
    *((verifier, BUSHY) for verifier in LIFTED),
    (TraversalVerification(), BUSHY),
    (Valued(), BUSHY),
    (Valued(IID()), BUSHY),
    (TraversalVerification(IID()), BUSHY),
    (TopDown(SpeculativeSampling()), CHAIN),
    (BlockVerification(), CHAIN),
]
each = pytest.mark.parametrize(
    ("verifier", "shape"), VERIFIERS, ids=[f"{verifier.name}, {verifier.scheme.name}" for verifier, _ in VERIFIERS]
)


def trees(verifier: PathVerifier, shape: TreeShape) -> tuple[Draft, Tensor]:
    """Grow trees, and choose each node's certain token at random among all."""
    world, policy = World.random(3), Fixed(shape)
    roots = torch.zeros(MANY, dtype=torch.int64)
    draft = grow(roots, policy, verifier.scheme, world.propose, FastNoise.seeded(5, MANY))
    size = world.target[0].shape[-1]
    token = torch.randint(size, (MANY, shape.size), generator=torch.Generator().manual_seed(1))
    return draft, torch.nn.functional.one_hot(token, size).double()


@each
def test_the_verdict_is_the_one_that_the_rule_comes_to(verifier: PathVerifier, shape: TreeShape):
    draft, rows = trees(verifier, shape)
    verdict = certain_verdict(draft, rows)
    assert verdict is not None
    assert set(verdict.length.tolist()) == set(range(len(shape.counts) + 1))
    ends = torch.nn.functional.pad(verdict.path, (1, 0)).gather(-1, verdict.length.unsqueeze(-1))
    law = verifier.path_law(draft, rows)
    chance = law.end.gather(-1, ends)
    emitted = law.next_token(draft, rows)[torch.arange(MANY), ends[:, 0], verdict.next_token]
    torch.testing.assert_close(chance, torch.ones_like(chance), rtol=0, atol=1e-4)  # the race stops short of one
    torch.testing.assert_close(emitted, torch.ones_like(emitted), rtol=0, atol=1e-12)
    found = verifier.verify(draft, rows, FastNoise.seeded(6, MANY))
    assert torch.equal(found.path, verdict.path) and torch.equal(found.next_token, verdict.next_token)


def test_a_single_row_with_a_choice_is_no_certainty():
    draft, rows = trees(TopDown(RecursiveRejection()), BUSHY)
    for node in (0, BUSHY.size - 1):
        mixed = rows.clone()
        mixed[7, node] = 1 / rows.shape[-1]
        assert certain_verdict(draft, mixed) is None


def test_a_draft_that_the_target_does_not_know_is_no_match():
    """A draft model with more tokens than the target: its last ones must not be taken for the target's last."""
    draft, rows = trees(TopDown(SpeculativeSampling()), CHAIN)
    size = rows.shape[-1]
    draft.tree.tokens[:, 1:] = size + 2
    rows = torch.nn.functional.one_hot(torch.full(rows.shape[:-1], size - 1), size).double()
    verdict = certain_verdict(draft, rows)
    assert verdict is not None and not verdict.length.any()


@pytest.mark.parametrize("verifier", [TopDown(SpeculativeSampling()), BlockVerification()])
def test_what_verifies_chains_refuses_other_trees_here_too(verifier: PathVerifier):
    draft, rows = trees(TopDown(RecursiveRejection()), BUSHY)
    with pytest.raises(UnpairedScheme, match="but the tree has"):
        verifier.verify(draft, rows, FastNoise.seeded(6, MANY))
