"""What every node rule promises besides exactness."""

import pytest
import torch
from torch import Tensor

from polydraft.schemes import IID, Given, Scheme, TopK, TopThenSample, WithoutReplacement
from polydraft.verifiers import (
    NaiveMatch,
    NodeVerifier,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SpeculativeSampling,
    TopDown,
    TopThenSampleRule,
)

ATOMS = 5
RULES: list[NodeVerifier] = [
    *(NaiveMatch(scheme) for scheme in (IID(), WithoutReplacement(), TopK(), TopThenSample(), Given())),
    SpeculativeSampling(),
    RecursiveRejection(),
    RecursiveRejectionWithoutReplacement(),
    TopThenSampleRule(),
]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}, {rule.scheme.name}")


def nodes(rule: NodeVerifier, *shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return drafts with ragged counts, draft rows and target rows for nodes of any batch shape."""
    stream = torch.Generator().manual_seed(0)
    k = 1 if isinstance(rule, SpeculativeSampling) else 3

    def law(size: int) -> Tensor:
        mass = torch.rand(*shape, size, generator=stream, dtype=torch.float64) ** 2
        return (mass / mass.sum(dim=-1, keepdim=True)).to(dtype)

    listed, target = law(ATOMS), law(ATOMS + 1)
    counts = torch.randint(0, k + 1, shape, generator=stream)
    uniforms = torch.rand(*shape, ATOMS, generator=stream, dtype=torch.float64)
    drafts = rule.scheme.sample(listed, counts, uniforms, k)
    return drafts, torch.cat([listed, torch.zeros_like(listed[..., :1])], dim=-1), target


@each_rule
def test_it_says_what_it_is(rule: NodeVerifier):
    assert rule.name
    assert isinstance(rule.scheme, Scheme)
    assert rule.lossless is True
    lifted = TopDown(rule)
    assert (lifted.name, lifted.scheme, lifted.lossless) == (rule.name, rule.scheme, True)


@each_rule
def test_a_batch_gives_what_its_rows_give(rule: NodeVerifier):
    drafts, draft_probs, target_probs = nodes(rule, 2, 3, 4)
    whole = rule.law(drafts, draft_probs, target_probs)
    assert whole.child.shape == drafts.shape
    assert whole.rest.shape == target_probs.shape
    for place in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
        at = tuple(place)
        alone = rule.law(drafts[at], draft_probs[at], target_probs[at])
        torch.testing.assert_close(whole.child[at], alone.child, rtol=0, atol=1e-15)
        torch.testing.assert_close(whole.rest[at], alone.rest, rtol=0, atol=1e-15)


@each_rule
def test_the_law_sums_to_one_for_ragged_drafts(rule: NodeVerifier):
    drafts, draft_probs, target_probs = nodes(rule, 40)
    law = rule.law(drafts, draft_probs, target_probs)
    assert {-1, 0} <= set(drafts.flatten().tolist()), "the case has absent drafts"
    assert bool((law.child >= 0).all() and (law.rest >= 0).all())
    assert not bool(law.child[drafts < 0].any())
    torch.testing.assert_close(law.child.sum(-1) + law.rest.sum(-1), torch.ones(40).double(), rtol=0, atol=1e-12)


@each_rule
def test_absent_drafts_at_the_end_change_nothing(rule: NodeVerifier):
    drafts, draft_probs, target_probs = nodes(rule, 40)
    if isinstance(rule, SpeculativeSampling):
        return
    one = rule.law(drafts, draft_probs, target_probs)
    padded = torch.nn.functional.pad(drafts, (0, 2), value=-1)
    two = rule.law(padded, draft_probs, target_probs)
    assert torch.equal(one.rest, two.rest)
    assert torch.equal(one.child, two.child[:, :-2])
    assert not bool(two.child[:, -2:].any())


@each_rule
def test_a_leaf_emits_the_target(rule: NodeVerifier):
    drafts, draft_probs, target_probs = nodes(rule, 8)
    for law_of_nothing in (draft_probs, torch.zeros_like(draft_probs)):
        law = rule.law(torch.full_like(drafts, -1), law_of_nothing, target_probs)
        assert not bool(law.child.any())
        torch.testing.assert_close(law.rest, target_probs, rtol=0, atol=1e-15)


@each_rule
def test_float32_stays_float32(rule: NodeVerifier):
    drafts, draft_probs, target_probs = nodes(rule, 40, dtype=torch.float32)
    law = rule.law(drafts, draft_probs, target_probs)
    exact = rule.law(drafts, draft_probs.double(), target_probs.double())
    assert law.child.dtype == law.rest.dtype == torch.float32
    torch.testing.assert_close(law.child.double(), exact.child, rtol=0, atol=1e-5)
    torch.testing.assert_close(law.rest.double(), exact.rest, rtol=0, atol=1e-5)


@each_rule
def test_the_law_is_a_function_and_leaves_its_arguments_alone(rule: NodeVerifier):
    arguments = nodes(rule, 40)
    before = [argument.clone() for argument in arguments]
    one = rule.law(*arguments)
    torch.manual_seed(5)
    two = rule.law(*arguments)
    assert torch.equal(one.child, two.child)
    assert torch.equal(one.rest, two.rest)
    assert all(torch.equal(old, new) for old, new in zip(before, arguments, strict=True))
