"""What every node rule promises besides exactness."""

import pytest
import torch
from torch import Tensor

from polydraft.catalogue import node_rules, rule_words, tables
from polydraft.conformance.proved_rules import label
from polydraft.schemes import IID, Product, Scheme, TopThenIID
from polydraft.verifiers import (
    NodeVerifier,
    ScalableVerifier,
    TopBeta,
    TopDown,
    TypicalAcceptance,
    most_drafts,
)

ATOMS = 5
RULES: list[NodeVerifier] = [*node_rules(), TypicalAcceptance(IID()), TopBeta(beta=2, tau=1.0)]
SCALABLE = [rule for rule in RULES if isinstance(rule, ScalableVerifier)]


def named(rule: NodeVerifier) -> str:
    return f"{label(rule)}, {rule.scheme.name}"


each_rule = pytest.mark.parametrize("rule", RULES, ids=named)
each_scalable = pytest.mark.parametrize("rule", SCALABLE, ids=named)


def nodes(rule: NodeVerifier, *shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return drafts with ragged counts, draft rows and target rows for nodes of any batch shape."""
    stream = torch.Generator().manual_seed(0)
    k = min(3, most_drafts(rule))

    def law(size: int) -> Tensor:
        mass = torch.rand(*shape, size, generator=stream, dtype=torch.float64) ** 2
        return (mass / mass.sum(dim=-1, keepdim=True)).to(dtype)

    listed, target = law(ATOMS), law(ATOMS + 1)
    if isinstance(rule.scheme, Product):
        listed = torch.stack([listed, law(ATOMS)], dim=-2)
    counts = torch.randint(0, k + 1, shape, generator=stream)
    uniforms = torch.rand(*shape, ATOMS, generator=stream, dtype=torch.float64)
    drafts = rule.scheme.sample(listed, counts, uniforms, k)
    return drafts, torch.cat([listed, torch.zeros_like(listed[..., :1])], dim=-1), target


@each_rule
def test_it_says_what_it_is(rule: NodeVerifier):
    assert rule.name
    assert isinstance(rule.scheme, Scheme)
    assert isinstance(rule.lossless, bool)
    lifted = TopDown(rule)
    assert (lifted.name, lifted.scheme, lifted.lossless) == (rule.name, rule.scheme, rule.lossless)


def test_no_rule_of_ours_becomes_lossy_or_loses_its_lift_unseen():
    ours = {"naive", "speculative", "recursive", "recursive-wo", "top-then-sample", "k-seq", "spec-hub"}
    ours |= {"importance-weighted", "race", "optimal"}
    lifted = {line.word for line in tables.RULES if isinstance(line.usual, ScalableVerifier)}
    assert ours <= lifted & {*rule_words(lossless=True)}
    assert {"block", "traversal", "by-shape", "shared-noise"} <= {*rule_words(lossless=True)}


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
    if most_drafts(rule) == 1:
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


@each_rule
def test_the_acceptance_of_a_batch_is_that_of_its_rows(rule: NodeVerifier):
    drafts, draft_probs, target_probs = nodes(rule, 3, 4)
    counts = (drafts >= 0).sum(dim=-1)
    whole = rule.acceptance(draft_probs, target_probs, counts)
    assert whole.shape == counts.shape
    assert 0 in counts.tolist()[0] + counts.tolist()[1] + counts.tolist()[2]
    assert not bool(whole[counts == 0].any())
    assert bool((whole >= 0).all() and (whole <= 1 + 1e-12).all())
    for place in torch.cartesian_prod(torch.arange(3), torch.arange(4)).tolist():
        at = tuple(place)
        alone = rule.acceptance(draft_probs[at], target_probs[at], counts[at])
        torch.testing.assert_close(whole[at], alone, rtol=0, atol=1e-12)


@each_rule
def test_more_drafts_than_the_support_are_as_many_as_the_support(rule: NodeVerifier):
    """A scheme without repeats returns fewer drafts only where there are no more tokens."""
    _, draft_probs, target_probs = nodes(rule, 6)
    two_tokens = draft_probs * torch.tensor([0, 1, 0, 1, 0, 0])
    two_tokens = two_tokens / two_tokens.sum(dim=-1, keepdim=True)
    most = min(3, most_drafts(rule))
    many, few = torch.full((6,), most), torch.full((6,), min(2, most))
    if isinstance(rule.scheme, IID | Product | TopThenIID):
        return
    one, two = (rule.acceptance(two_tokens, target_probs, counts) for counts in (many, few))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@each_rule
def test_acceptance_in_float32(rule: NodeVerifier):
    drafts, draft_probs, target_probs = nodes(rule, 12, dtype=torch.float32)
    counts = (drafts >= 0).sum(dim=-1)
    accepted = rule.acceptance(draft_probs, target_probs, counts)
    exact = rule.acceptance(draft_probs.double(), target_probs.double(), counts)
    assert accepted.dtype == torch.float32
    torch.testing.assert_close(accepted.double(), exact, rtol=0, atol=1e-5)


@each_scalable
def test_shares_and_marginal_of_a_batch_are_those_of_its_rows(rule: ScalableVerifier):
    drafts, draft_probs, target_probs = nodes(rule, 12, dtype=torch.float32)
    mass = target_probs * torch.linspace(0.05, 1, 12).unsqueeze(-1)
    counts = (drafts >= 0).sum(dim=-1)
    shares, marginal = rule.shares(drafts, draft_probs, mass), rule.marginal(draft_probs, mass, counts)
    assert shares.dtype == marginal.dtype == torch.float32
    assert not bool(shares[drafts < 0].any())
    assert not bool(marginal[counts == 0].any())
    for row in range(12):
        alone = rule.shares(drafts[row], draft_probs[row], mass[row])
        torch.testing.assert_close(shares[row], alone, rtol=0, atol=1e-6)
        alone = rule.marginal(draft_probs[row], mass[row], counts[row])
        torch.testing.assert_close(marginal[row], alone, rtol=0, atol=1e-6)


@each_scalable
def test_a_repeated_token_has_one_positive_share(rule: ScalableVerifier):
    if not isinstance(rule.scheme, IID | Product) or most_drafts(rule) < 3:
        return
    _, draft_probs, target_probs = nodes(rule, 30)
    drafts = torch.tensor([2, 2, 1]).expand(30, 3)
    assert not bool(rule.shares(drafts, draft_probs, target_probs * 0.7)[:, 1].any())
