"""Exactness of every node rule by enumeration: all drafts, and for each the rule's law of the emitted token."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor
from zoo import ZOO, pairs, row

from polydraft.errors import UnpairedScheme
from polydraft.schemes import IID, Given, Scheme, TopK, TopThenSample, WithoutReplacement, enumerate_drafts
from polydraft.verifiers import (
    NaiveMatch,
    NodeVerifier,
    OutcomeLaw,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SpeculativeSampling,
    TopThenSampleRule,
)

SCHEMES: list[Scheme] = [IID(), WithoutReplacement(), TopK(), TopThenSample(), Given()]
SEVERAL_DRAFTS: list[NodeVerifier] = [
    *(NaiveMatch(scheme) for scheme in SCHEMES),
    RecursiveRejection(),
    RecursiveRejectionWithoutReplacement(),
    TopThenSampleRule(),
]
RULES = [(rule, k) for rule in SEVERAL_DRAFTS for k in (1, 2, 3)] + [(SpeculativeSampling(), 1)]


def is_optimal(rule: NodeVerifier, k: int) -> bool:
    """Whether the rule's documentation promises the largest acceptance that its scheme allows."""
    if isinstance(rule, NaiveMatch):
        return rule.scheme.deterministic
    return k == 1 or isinstance(rule, TopThenSampleRule)


def named(rule: NodeVerifier, k: int) -> str:
    return f"{rule.name}, {rule.scheme.name}, k={k}"


each_rule = pytest.mark.parametrize(("rule", "k"), RULES, ids=[named(*case) for case in RULES])
each_pair = pytest.mark.parametrize(("target", "draft"), ZOO.values(), ids=list(ZOO))


@dataclass(frozen=True)
class Enumeration:
    """Everything that can happen at one node: the drafts, their probabilities and the outcome law given each."""

    target: Tensor
    drafts: Tensor
    probability: Tensor
    outcome: OutcomeLaw

    @property
    def emitted(self) -> Tensor:
        return self.probability @ self.outcome.emitted(self.drafts)

    @property
    def error(self) -> float:
        return float((self.emitted - self.target).abs().max())

    @property
    def acceptance(self) -> float:
        return float(self.probability @ self.outcome.child.sum(dim=-1))


def enumerated(
    rule: NodeVerifier, k: int, target: Tensor, draft: Tensor, tail: float = 0.0, scheme: Scheme | None = None
) -> Enumeration:
    """Enumerate a node whose target has mass `tail` off the shortlist; by default with the rule's own scheme."""
    drafts, probability = enumerate_drafts(scheme or rule.scheme, draft, k)
    target = torch.cat([target * (1 - tail), torch.full_like(target[:1], tail)])
    atoms = torch.cat([draft, torch.zeros_like(draft[:1])])
    outcome = rule.law(drafts, atoms.expand(len(drafts), -1), target.expand(len(drafts), -1))
    return Enumeration(target, drafts, probability, outcome)


def best_acceptance(case: Enumeration) -> float:
    """Solve the transport of drafted sets to target tokens: a linear program over pairs (set, token in it)."""
    sets: dict[frozenset[int], float] = {}
    for drafts, probability in zip(case.drafts.tolist(), case.probability.tolist(), strict=True):
        drafted = frozenset(drafts) - {-1}
        sets[drafted] = sets.get(drafted, 0.0) + probability
    moves = [(place, token) for place, drafted in enumerate(sets) for token in drafted]
    at_most = [*sets.values(), *case.target.tolist()]
    limits = torch.zeros(len(at_most), len(moves), dtype=torch.float64)
    for column, (place, token) in enumerate(moves):
        limits[place, column] = limits[len(sets) + token, column] = 1
    solution = linprog([-1.0] * len(moves), limits.numpy(), at_most, method="highs")
    assert solution.status == 0
    return -solution.fun


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
        assert case.acceptance >= best - 1e-8


@each_rule
@each_pair
def test_the_emitted_token_follows_the_target(rule: NodeVerifier, k: int, target: Tensor, draft: Tensor):
    for tail in (0.0, 0.3):
        check(rule, k, target, draft, tail)


@each_rule
@settings(max_examples=20)
@given(pair=pairs(), tail=st.sampled_from([0.0, 1e-30, 0.25, 1.0]))
def test_the_emitted_token_follows_the_target_for_any_rows(
    rule: NodeVerifier, k: int, pair: tuple[Tensor, Tensor], tail: float
):
    check(rule, k, *pair, tail)


def test_recursive_rejection_is_below_the_optimum_for_two_drafts():
    for rule in (RecursiveRejection(), RecursiveRejectionWithoutReplacement()):
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


@dataclass(frozen=True)
class SkipsDuplicates(RecursiveRejection):
    """A wrong rule: a repeated draft is passed over without updating the residual."""

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        repeats = torch.tril(drafts.unsqueeze(-1) == drafts.unsqueeze(-2), diagonal=-1).any(dim=-1)
        return super().law(drafts.masked_fill(repeats, -1), draft_probs, target_probs)


def test_skipping_duplicates_is_caught():
    case = enumerated(SkipsDuplicates(), 2, *ZOO["duplicates bite"])
    assert case.emitted.tolist() == pytest.approx([0.05, 0.28, 0.3727, 0.2973, 0], abs=5e-5)
    assert case.error > 0.02


UNPAIRED = [
    (rule, scheme)
    for rule in (RecursiveRejection(), RecursiveRejectionWithoutReplacement(), TopThenSampleRule())
    for scheme in SCHEMES
    if scheme != rule.scheme and (rule, scheme) != (TopThenSampleRule(), WithoutReplacement())
]


@pytest.mark.parametrize(("rule", "scheme"), UNPAIRED, ids=lambda value: value.name)
def test_drafts_of_another_scheme_are_caught(rule: NodeVerifier, scheme: Scheme):
    errors = [enumerated(rule, 2, target, draft, scheme=scheme).error for target, draft in ZOO.values()]
    assert max(errors) > 0.02


@each_pair
def test_the_top_then_sample_rule_is_exact_without_replacement_too(target: Tensor, draft: Tensor):
    """It treats all drafts but the last as given, and given them the last is a draw from the others."""
    for k in (1, 2, 3):
        assert enumerated(TopThenSampleRule(), k, target, draft, 0.3, scheme=WithoutReplacement()).error < 1e-9
