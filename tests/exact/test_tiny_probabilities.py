"""Draft probabilities down to the smallest number of float64: no rule and no law of theory raises or goes astray."""

from itertools import product

import pytest
import torch
from enumeration import enumerated, mean_shares
from torch import Tensor

from polydraft.catalogue import every_scheme, node_rules
from polydraft.conformance.proved_rules import label
from polydraft.schemes import Product, Scheme, SpecHub, TopThenIID
from polydraft.theory import containment_chain, drafted_sets, inclusion, optimal_acceptance, time_nodes
from polydraft.verifiers import NaiveMatch, Optimal, Race, ScalableVerifier, most_drafts

LEAST = 5e-324
FEW = [(LEAST, LEAST), (LEAST, 1e-310), (1e-310, 1e-320), (2.3e-308, LEAST), (1e-300, 1e-310), (1e-300, 1e-150)]
MANY = [*product((LEAST, 1e-318, 1e-310, 2.3e-308, 1e-300, 1e-200), repeat=2)]
SCHEMES: list[Scheme] = [*every_scheme(), TopThenIID(2)]
RULES = [
    *(rule for rule in node_rules() if isinstance(rule, ScalableVerifier) and rule.lossless),
    *(kind(TopThenIID(2)) for kind in (NaiveMatch, Optimal, Race)),
]


def rows(one: float, two: float) -> list[Tensor]:
    masses = ((1.0, one, two), (one, 1.0, two, two), (0.5, one, 0.5, two))
    return [torch.tensor(mass, dtype=torch.float64) for mass in masses]


def targets(draft: Tensor) -> list[Tensor]:
    even = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)[-len(draft) :]
    return [even / even.sum(), draft.flip(0)]


def check(rule: ScalableVerifier, target: Tensor, draft: Tensor) -> None:
    """Check the law, and the shares of a mass below one, for one draft to three."""
    most = min(3, most_drafts(rule))
    for k in range(1, most + 1):
        case = enumerated(rule, k, target, draft)
        law, says = case.outcome, f"{k} drafts of {draft.tolist()} for {target.tolist()}"
        assert case.error < 1e-9, says
        assert bool((law.child >= 0).all() and (law.rest >= 0).all()), says
        assert float((law.child.sum(dim=-1) + law.rest.sum(dim=-1) - 1).abs().max()) < 1e-9, says
        mass = 0.6 * case.target
        _, mean = mean_shares(rule, k, mass, case.draft)
        torch.testing.assert_close(mean, rule.marginal(case.draft, mass, torch.tensor(k)), rtol=0, atol=1e-9)
        assert bool((mean <= mass + 1e-9).all()), says


each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{label(rule)}, {rule.scheme.name}")


@pytest.mark.long(18)
@each_rule
def test_rules_are_exact_for_tiny_drafts(rule: ScalableVerifier) -> None:
    for one, two in FEW:
        for draft in rows(one, two):
            check(rule, targets(draft)[0], draft)


@pytest.mark.slow
@each_rule
def test_rules_are_exact_for_many_tiny_drafts(rule: ScalableVerifier) -> None:
    for one, two in MANY:
        for draft in rows(one, two):
            for target in targets(draft):
                check(rule, target, draft)


def contained(scheme: Scheme, draft: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return what `inclusion` and `containment_chain` do, by listing the drafts."""
    sets, size = drafted_sets(scheme, draft, k), draft.shape[-1]
    each = [sum(chance for drafted, chance in sets.items() if token in drafted) for token in range(size)]
    chain = [sum(chance for drafted, chance in sets.items() if drafted <= {*range(most)}) for most in range(size + 1)]
    return torch.tensor(each, dtype=torch.float64), torch.tensor(chain, dtype=torch.float64)


def check_theory(scheme: Scheme, draft: Tensor, k: int) -> None:
    drafted = torch.stack([draft, draft.flip(0)]) if isinstance(scheme, Product) else draft
    each, chain = contained(scheme, drafted, k)
    count, order = torch.tensor(k), torch.arange(len(draft))
    torch.testing.assert_close(inclusion(scheme, drafted, count), each, rtol=0, atol=1e-9)
    torch.testing.assert_close(containment_chain(scheme, drafted, order, count), chain, rtol=0, atol=1e-9)
    assert 0 <= float(optimal_acceptance(drafted, targets(draft)[0], scheme, k)) <= 1


each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


@each_scheme
def test_theory_says_of_tiny_drafts_what_listing_them_says(scheme: Scheme) -> None:
    for (one, two), k in product(FEW[::2], (2, 3)):
        for draft in rows(one, two):
            check_theory(scheme, draft, 2 if isinstance(scheme, SpecHub) else k)


@pytest.mark.slow
@each_scheme
def test_theory_says_of_many_tiny_drafts_what_listing_them_says(scheme: Scheme) -> None:
    for (one, two), k in product(MANY, (1, 2, 3, 4)):
        for draft in rows(one, two):
            check_theory(scheme, draft, min(k, 2) if isinstance(scheme, SpecHub) else k)


def test_nodes_reach_over_all_of_float64() -> None:
    """Sums of rates of 1e18 and 1e-305: the last ring is 1e323 times as late as the first."""
    rates = torch.tensor([2.0**60, 1e10, 1.0, LEAST * 2.0**60], dtype=torch.float64)
    for k in (3, 4):
        found = time_nodes(rates, torch.tensor(k), k)
        assert bool(found.time.isfinite().all() and (found.time.diff() > 0).all())
        assert bool(found.weight.isfinite().all() and (found.weight >= 0).all())
    for bad in (torch.full((4,), LEAST, dtype=torch.float64), torch.tensor([1.0, LEAST, LEAST, 0]).double()):
        found = time_nodes(bad, torch.tensor(3), 3)
        assert bool(found.time.isfinite().all() and found.weight.isfinite().all())
