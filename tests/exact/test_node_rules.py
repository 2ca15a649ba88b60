"""Exactness of every node rule by enumeration: all drafts, and for each the rule's law of the emitted token."""

import pytest
import torch
from enumeration import best_acceptance, enumerated
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from zoo import ZOO, pairs, row

from polydraft.catalogue import every_scheme, node_rules
from polydraft.conformance.proved_rules import label
from polydraft.errors import UnpairedScheme
from polydraft.schemes import IID, ConditionalPoisson, Product, Scheme, TopThenIID, TopThenSample, WithoutReplacement
from polydraft.verifiers import (
    ImportanceWeighted,
    KSeq,
    NaiveMatch,
    NodeVerifier,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SpecHubRule,
    SpeculativeSampling,
    TopThenSampleRule,
    most_drafts,
    traits,
)

ELSEWHERE = ("optimal", "race")
"""The names of rules whose exactness is the subject of a file of their own."""
RULES = [
    (rule, k)
    for rule in (*node_rules(), ImportanceWeighted(free=2, alphabet=3))
    if rule.lossless and rule.name not in ELSEWHERE
    for k in range(1, min(3, most_drafts(rule)) + 1)
]
SCHEMES = [scheme for scheme in every_scheme() if scheme.independent and scheme != Product()]


def is_optimal(rule: NodeVerifier, k: int) -> bool:
    """Whether the rule's documentation promises the largest acceptance that its scheme allows."""
    if isinstance(rule, NaiveMatch):
        return rule.scheme.deterministic
    by_program = isinstance(rule, ImportanceWeighted) and rule.free is None and k == 2
    by_itself = k == 1 and traits(rule).best_alone
    return by_itself or by_program or isinstance(rule, TopThenSampleRule | SpecHubRule)


def named(rule: NodeVerifier, k: int) -> str:
    return f"{label(rule)}, {rule.scheme.name}, k={k}"


each_rule = pytest.mark.parametrize(("rule", "k"), RULES, ids=[named(*case) for case in RULES])
each_pair = pytest.mark.parametrize(("target", "draft"), ZOO.values(), ids=list(ZOO))


def check(rule: NodeVerifier, k: int, target: Tensor, draft: Tensor, tail: float) -> None:
    """Check that the law is a law, that the emitted token follows the target, and how much is accepted."""
    case = enumerated(rule, k, target, draft, tail)
    child, rest = case.outcome.child, case.outcome.rest
    assert float(case.probability.sum()) == pytest.approx(1, abs=1e-12)
    assert bool((child >= 0).all())
    assert bool((rest >= 0).all())
    torch.testing.assert_close(child.sum(-1) + rest.sum(-1), torch.ones(len(child)).double(), rtol=0, atol=1e-12)
    assert not bool(child[case.drafts < 0].any())
    assert case.error < 1e-9
    best = best_acceptance(case)
    assert case.acceptance <= best + 1e-8
    if is_optimal(rule, k):
        assert case.acceptance >= best - (1e-7 if isinstance(rule, ImportanceWeighted) else 1e-8)


@each_rule
@each_pair
def test_the_emitted_token_follows_the_target(rule: NodeVerifier, k: int, target: Tensor, draft: Tensor):
    for tail in (0.0, 0.3):
        check(rule, k, target, draft, tail)


@each_rule
@settings(max_examples=8)
@given(pair=pairs(), tail=st.sampled_from([0.0, 1e-30, 0.25, 1.0]))
def test_the_emitted_token_follows_the_target_for_any_rows(
    rule: NodeVerifier, k: int, pair: tuple[Tensor, Tensor], tail: float
):
    check(rule, k, *pair, tail)


def test_rules_that_are_not_optimal_stay_below_the_optimum():
    below = [RecursiveRejection(), RecursiveRejectionWithoutReplacement(), KSeq(), NaiveMatch(IID())]
    for rule in below:
        case = enumerated(rule, 2, *ZOO["tied draft"])
        assert case.acceptance < best_acceptance(case) - 0.005


@each_rule
def test_float32_with_subnormal_drafts(rule: NodeVerifier, k: int):
    target, draft = row(0.5, 0.25, 0.25).float(), row(1, 1e-42, 3e-42).float()
    assert bool((draft > 0).all())
    case = enumerated(rule, k, target, draft, 0.125)
    assert case.emitted.dtype == torch.float32
    assert case.error < 1e-6


def test_drafts_that_cover_the_target_are_always_accepted():
    target, draft = row(0.1, 0.9, 0), row(0.6, 0.3, 0.1)
    for rule in (RecursiveRejectionWithoutReplacement(), NaiveMatch(WithoutReplacement())):
        assert enumerated(rule, 3, target, draft).acceptance == pytest.approx(1, abs=1e-12)


def test_speculative_sampling_takes_one_draft():
    with pytest.raises(UnpairedScheme, match="has 2"):
        enumerated(SpeculativeSampling(), 2, *ZOO["ties"])


PARTICULAR: list[NodeVerifier] = [
    RecursiveRejection(),
    RecursiveRejectionWithoutReplacement(),
    TopThenSampleRule(),
    KSeq(),
    SpecHubRule(),
    ImportanceWeighted(),
]
LAST_IS_A_DRAW: list[Scheme] = [TopThenSample(), WithoutReplacement(), ConditionalPoisson()]
STILL_EXACT = {(TopThenSampleRule.name, scheme.name) for scheme in [*LAST_IS_A_DRAW, TopThenIID(1)]}
UNPAIRED = [
    (rule, scheme)
    for rule in PARTICULAR
    for scheme in SCHEMES
    if scheme != rule.scheme and (rule.name, scheme.name) not in STILL_EXACT
]


HUB_BITES = row(0.45, 0.35, 0.1, 0.1), row(0.4, 0.1, 0.25, 0.25)


@pytest.mark.parametrize(("rule", "scheme"), UNPAIRED, ids=lambda value: value.name)
def test_drafts_of_another_scheme_are_caught(rule: NodeVerifier, scheme: Scheme):
    cases = [HUB_BITES, *(ZOO[name] for name in ("duplicates bite", "tied draft", "long tail", "one-hot target"))]
    errors = [enumerated(rule, 2, target, draft, scheme=scheme).error for target, draft in cases]
    assert max(errors) > 0.02


@pytest.mark.parametrize("rule", [*PARTICULAR, SpeculativeSampling()], ids=lambda rule: rule.name)
def test_a_rule_refuses_a_scheme_it_is_not_exact_for(rule: NodeVerifier):
    for scheme in SCHEMES:
        if scheme != rule.scheme:
            with pytest.raises(UnpairedScheme, match=scheme.name):
                type(rule)(scheme=scheme)


@each_pair
def test_the_top_then_sample_rule_is_exact_wherever_the_last_draft_is_a_draw(target: Tensor, draft: Tensor):
    """It treats all drafts but the last as given, and given them the last is a draw from the others."""
    for k in (1, 2, 3):
        for scheme in LAST_IS_A_DRAW:
            assert enumerated(TopThenSampleRule(), k, target, draft, 0.3, scheme=scheme).error < 1e-9
