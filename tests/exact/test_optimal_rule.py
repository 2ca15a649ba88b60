"""The optimal rule by enumeration: exact, as good as the linear program, its shares adding up to its marginal."""

from dataclasses import dataclass

import pytest
import torch
from enumeration import atoms_of, best_acceptance, enumerated, mean_shares
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from zoo import ZOO, pairs, row

from polydraft.errors import UnpairedScheme
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
)
from polydraft.theory import lp_acceptance, optimal_acceptance, optimal_set
from polydraft.verifiers import Optimal, RecursiveRejectionWithoutReplacement, SpeculativeSampling, TopThenSampleRule

SCHEMES: list[Scheme] = [
    IID(),
    WithoutReplacement(),
    ConditionalPoisson(),
    TopThenIID(1),
    TopThenIID(2),
    TopThenSample(),
    TopK(),
    Given(),
]
CASES = [*((scheme, k) for scheme in SCHEMES for k in (1, 2, 3, 4)), (SpecHub(), 1), (SpecHub(), 2)]
each_case = pytest.mark.parametrize(("scheme", "k"), CASES, ids=[f"{scheme.name}, k={k}" for scheme, k in CASES])
each_scheme = pytest.mark.parametrize("scheme", [*SCHEMES, SpecHub()], ids=lambda scheme: scheme.name)


def laws(seed: int, *shape: int, power: float = 3.0) -> Tensor:
    mass = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** power
    return mass / mass.sum(dim=-1, keepdim=True)


def most_drafts(scheme: Scheme) -> int:
    return 2 if isinstance(scheme, SpecHub) else 4


def check(scheme: Scheme, k: int, target: Tensor, draft: Tensor, tail: float) -> None:
    case = enumerated(Optimal(scheme), k, target, draft, tail)
    child, rest = case.outcome.child, case.outcome.rest
    assert bool((child >= 0).all() and (rest >= 0).all())
    torch.testing.assert_close(child.sum(-1) + rest.sum(-1), torch.ones(len(child)).double(), rtol=0, atol=1e-12)
    assert case.error < 1e-9
    scanned = optimal_set(scheme, case.draft, case.target, torch.tensor(k)).acceptance
    assert case.acceptance == pytest.approx(float(scanned), abs=1e-9)
    assert case.acceptance == pytest.approx(best_acceptance(case), abs=1e-7)  # the solver's own tolerance


@each_scheme
@pytest.mark.parametrize("k", [2, 3])
def test_it_is_exact_and_optimal(scheme: Scheme, k: int):
    k = min(k, most_drafts(scheme))
    for number, (target, draft) in enumerate(ZOO.values()):
        check(scheme, k, target, draft, tail=0.3 * ((number + k) % 2))


@pytest.mark.long(17)
@each_case
@settings(max_examples=5)
@given(pair=pairs(most=5), tail=st.sampled_from([0.0, 1e-30, 0.25, 1.0]))
def test_it_is_exact_and_optimal_for_any_rows(scheme: Scheme, k: int, pair: tuple[Tensor, Tensor], tail: float):
    check(scheme, k, *pair, tail)


@pytest.mark.long(17)
@each_case
@settings(max_examples=5)
@given(pair=pairs(most=5), tail=st.sampled_from([0.0, 0.25]), scale=st.sampled_from([1e-12, 0.1, 0.5, 0.9, 1.0]))
def test_shares_of_a_scaled_target_add_up_to_the_marginal_and_to_the_optimum(
    scheme: Scheme, k: int, pair: tuple[Tensor, Tensor], tail: float, scale: float
):
    rule = Optimal(scheme)
    target, draft = atoms_of(*pair, tail, scheme)
    shares, mean = mean_shares(rule, k, scale * target, draft)
    marginal = rule.marginal(draft, scale * target, torch.tensor(k))
    torch.testing.assert_close(mean, marginal, rtol=0, atol=1e-10)
    assert bool((marginal <= scale * target).all())
    assert bool((shares.sum(dim=-1) <= 1 + 1e-12).all())
    acceptance = float(rule.acceptance(draft, scale * target, torch.tensor(k)))
    assert float(marginal.sum()) == pytest.approx(acceptance, abs=1e-12)
    assert acceptance == pytest.approx(lp_acceptance(scheme, draft, scale * target, k), abs=1e-7)


@each_scheme
def test_long_walks_end_in_the_optimum(scheme: Scheme):
    """Rows without slack: target and draft are close, the target is on the shortlist, and walks have many rounds."""
    k = min(3, most_drafts(scheme))
    for seed in range(2):
        draft = laws(seed, 8, power=1.5)
        target = draft * (1 + 0.3 * laws(seed + 50, 8, power=1.0) * 8)
        check(scheme, k, target / target.sum(), draft, 0.0)


@dataclass(frozen=True)
class WithTheMassOfTheOptimum(Optimal):
    """A wrong rule: the residual is that of the target clipped at half the draft."""

    def marginal(self, draft_probs: Tensor, target_mass: Tensor, counts: Tensor) -> Tensor:
        return torch.minimum(target_mass, draft_probs / 2)


def test_a_wrong_marginal_is_caught():
    target, draft = atoms_of(*ZOO["tied draft"], 0.0, IID())
    rule = WithTheMassOfTheOptimum(IID())
    mean = mean_shares(rule, 2, target, draft)[1]
    assert float((mean - rule.marginal(draft, target, torch.tensor(2))).abs().max()) > 0.02


def test_drafts_of_another_scheme_are_caught():
    for scheme in (IID(), WithoutReplacement(), ConditionalPoisson(), TopThenIID(1)):
        for other in (IID(), WithoutReplacement(), ConditionalPoisson(), TopThenIID(1)):
            pairs_of_rows = ZOO.values() if scheme != other else ()
            errors = [enumerated(Optimal(scheme), 2, *pair, scheme=other).error for pair in pairs_of_rows]
            assert scheme == other or max(errors) > 0.01


def test_the_optimum_is_far_above_recursive_rejection():
    """Twelve tokens and three successive drafts."""
    target, draft = laws(25, 2, 12, power=1.0)
    optimal = enumerated(Optimal(WithoutReplacement()), 3, target, draft)
    recursive = enumerated(RecursiveRejectionWithoutReplacement(), 3, target, draft)
    assert optimal.error < 1e-9
    assert optimal.acceptance == pytest.approx(
        float(optimal_acceptance(draft, target, WithoutReplacement(), 3)), abs=1e-9
    )
    assert (optimal.acceptance, recursive.acceptance) == pytest.approx((0.9782, 0.8248), abs=1e-4)


def test_one_draft_is_speculative_sampling():
    for scheme in (IID(), WithoutReplacement(), ConditionalPoisson(), TopThenSample(), SpecHub()):
        for target, draft in ZOO.values():
            ours, classic = (
                enumerated(rule, 1, target, draft, 0.2) for rule in (Optimal(scheme), SpeculativeSampling())
            )
            likely = ours.probability > 1e-12  # an error in the law of rarer drafts is below rounding on average
            for part in ("child", "rest"):
                one, two = (getattr(case.outcome, part)[likely] for case in (ours, classic))
                torch.testing.assert_close(one, two, rtol=0, atol=1e-9)


def test_the_top_then_sample_rule_accepts_as_often():
    for pair in ZOO.values():
        ours, theirs = (enumerated(rule, 3, *pair, 0.1) for rule in (Optimal(TopThenSample()), TopThenSampleRule()))
        assert ours.acceptance == pytest.approx(theirs.acceptance, abs=1e-9)


@each_scheme
def test_counts_may_differ_by_row_and_a_batch_gives_what_its_rows_give(scheme: Scheme):
    k = min(4, most_drafts(scheme))
    draft, target = torch.nn.functional.pad(laws(3, 2, 10, 7), (0, 1)), laws(4, 2, 10, 8)
    draft[0, 0, 3:] = 0
    counts = torch.arange(20).view(2, 10) % (k + 1)
    uniforms = torch.rand(2, 10, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drafts = scheme.sample(draft[..., :-1], counts, uniforms, k)
    rule = Optimal(scheme)
    whole = rule.law(torch.nn.functional.pad(drafts, (0, 1), value=-1), draft, target)
    assert not bool(whole.child[..., -1].any())
    torch.testing.assert_close(whole.rest[counts == 0], target[counts == 0], rtol=0, atol=1e-15)
    for place in torch.cartesian_prod(torch.arange(2), torch.arange(10)).tolist():
        at = tuple(place)
        alone = rule.law(drafts[at], draft[at], target[at])
        torch.testing.assert_close(whole.child[at][:-1], alone.child, rtol=0, atol=1e-11)
        torch.testing.assert_close(whole.rest[at], alone.rest, rtol=0, atol=1e-11)


@each_scheme
def test_float32_rows_give_float32_laws(scheme: Scheme):
    k = min(3, most_drafts(scheme))
    target, draft = (one.float() for one in (row(0.5, 0.2, 0.2, 0.1), row(0.1, 0.3, 0.4, 0.2)))
    case = enumerated(Optimal(scheme), k, target, draft, 0.125)
    assert case.outcome.child.dtype == case.outcome.rest.dtype == torch.float32
    assert case.error < 1e-6
    tiny = enumerated(Optimal(scheme), k, row(0.5, 0.25, 0.25).float(), row(1, 1e-42, 3e-42).float(), 0.125)
    assert tiny.error < 1e-6


def test_a_repeated_draft_has_one_share():
    target, draft = row(0.1, 0.5, 0.4, 0), row(0.5, 0.3, 0.2, 0)
    shares = Optimal(IID()).shares(torch.tensor([[1, 2, 1, 1]]), draft.unsqueeze(0), target.unsqueeze(0))
    assert bool((shares[0, 2:] == 0).all())
    assert bool((shares[0, :2] > 0).all())


def test_whole_vocabularies_and_many_drafts_are_within_reach():
    draft, target = laws(5, 1, 3000, power=8.0), laws(6, 1, 3000, power=8.0)
    for scheme in (IID(), WithoutReplacement(), TopThenIID(2)):
        drafts = scheme.sample(draft, torch.tensor([6]), torch.full((1, 3000), 0.3, dtype=torch.float64), 6)
        law = Optimal(scheme).law(drafts, draft, target)
        assert float(law.child.sum() + law.rest.sum()) == pytest.approx(1, abs=1e-9)


def test_schemes_without_an_order_are_refused():
    with pytest.raises(UnpairedScheme, match="not product"):
        Optimal(Product())
