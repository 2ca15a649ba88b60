"""Acceptance, shares and marginals: computed values against enumeration over all drafts, and against the optimum."""

import math
from itertools import pairwise

import pytest
import torch
from enumeration import atoms_of, enumerated, mean_shares
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from zoo import ZOO, pairs, row

from polydraft.errors import InvalidParameter, NotConverged
from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Given,
    Product,
    SpecHub,
    TopK,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
)
from polydraft.theory import containment, optimal_set
from polydraft.verifiers import (
    ImportanceWeighted,
    KSeq,
    Lenient,
    NaiveMatch,
    NodeVerifier,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    ScalableVerifier,
    SpecHubRule,
    SpeculativeSampling,
    TopBeta,
    TopThenSampleRule,
    TypicalAcceptance,
)
from polydraft.verifiers.nodes.k_seq import threshold

SCALES = (1.0, 0.6, 0.1)
NAIVE: list[ScalableVerifier] = [
    NaiveMatch(scheme)
    for scheme in (IID(), WithoutReplacement(), TopK(), TopThenSample(), Given(), TopThenIID(1), ConditionalPoisson())
]
INDEPENDENT: list[ScalableVerifier] = [RecursiveRejection(), RecursiveRejection(Product()), KSeq()]
WEIGHTED: list[ScalableVerifier] = [ImportanceWeighted(free=2, alphabet=3), ImportanceWeighted(Product(), free=None)]
SCALABLE: list[tuple[ScalableVerifier, int]] = [
    (SpeculativeSampling(), 1),
    *((rule, k) for rule in (NaiveMatch(SpecHub()), SpecHubRule()) for k in (1, 2)),
    *((rule, k) for rule in [*NAIVE, NaiveMatch(Product()), *INDEPENDENT, *WEIGHTED] for k in (1, 2, 3)),
    *((rule, k) for rule in (RecursiveRejectionWithoutReplacement(), TopThenSampleRule()) for k in (1, 2, 3, 4)),
]
LOSSY: list[tuple[NodeVerifier, int]] = [
    *((TypicalAcceptance(scheme), k) for scheme in (TopK(), IID(), WithoutReplacement()) for k in (1, 3)),
    *((TopBeta(scheme, beta=2, tau=1.0), k) for scheme in (TopK(), IID()) for k in (1, 3)),
    *((Lenient(lenience), k) for lenience in (0.3, 1.0) for k in (1, 2, 3)),
]
named = {"ids": lambda value: f"{value.name}, {value.scheme.name}" if isinstance(value, NodeVerifier) else None}


def check_acceptance(rule: NodeVerifier, k: int, target: Tensor, draft: Tensor) -> None:
    case = enumerated(rule, k, target, draft, 0.3)
    accepted = rule.acceptance(case.draft, case.target, torch.tensor(k))
    assert float(accepted) == pytest.approx(case.acceptance, abs=1e-9)


def check_shares(rule: ScalableVerifier, k: int, target: Tensor, draft: Tensor) -> None:
    """The shares are a sub-probability for all drafts, and average to the marginal, which stays below the mass."""
    target, rows = atoms_of(target, draft, 0.3, rule.scheme)
    for scale in SCALES:
        mass = target * scale
        shares, by_token = mean_shares(rule, k, mass, rows)
        marginal = rule.marginal(rows, mass, torch.tensor(k))
        assert bool((shares >= 0).all())
        assert bool((shares.sum(dim=-1) <= 1 + 1e-12).all())
        torch.testing.assert_close(by_token, marginal, rtol=0, atol=1e-9)
        assert bool((marginal <= mass + 1e-12).all())


@pytest.mark.parametrize(("rule", "k"), [*SCALABLE, *LOSSY], **named)
def test_acceptance_is_what_enumeration_gives(rule: NodeVerifier, k: int):
    for target, draft in ZOO.values():
        check_acceptance(rule, k, target, draft)


@pytest.mark.parametrize(("rule", "k"), SCALABLE, **named)
def test_shares_average_to_the_marginal(rule: ScalableVerifier, k: int):
    for target, draft in ZOO.values():
        check_shares(rule, k, target, draft)


@pytest.mark.parametrize(("rule", "k"), [case for case in SCALABLE if case[1] == 3], **named)
@settings(max_examples=6)
@given(pair=pairs(most=5))
def test_acceptance_and_shares_for_any_rows(rule: ScalableVerifier, k: int, pair: tuple[Tensor, Tensor]):
    check_acceptance(rule, k, *pair)
    check_shares(rule, k, *pair)


def random_rows(size: int, many: int, seed: int = 0, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Return target and draft rows of softmaxes of correlated normal logits, with a tail atom."""
    stream = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(many, size, generator=stream, dtype=torch.float64)
    noise = torch.randn(many, size + 1, generator=stream, dtype=torch.float64)
    target = (torch.nn.functional.pad(logits, (0, 1)) + noise).softmax(dim=-1)
    return target, torch.nn.functional.pad(logits.softmax(dim=-1), (0, 1))


def test_acceptance_of_a_whole_shortlist():
    """At K = 64 nothing can be enumerated: k = 3 and 4 must lie between k - 1 drafts and the optimum."""
    target, draft = random_rows(64, 3)
    rule, below = RecursiveRejectionWithoutReplacement(), torch.zeros(3).double()
    for k in (1, 2, 3, 4):
        counts = torch.full((3,), k)
        accepted = rule.acceptance(draft, target, counts)
        best = optimal_set(WithoutReplacement(), draft, target, counts).acceptance
        assert bool((below < accepted).all() and (accepted <= best + 1e-9).all())
        torch.testing.assert_close(rule.marginal(draft, target, counts).sum(dim=-1), accepted, rtol=0, atol=1e-9)
        below = accepted


def test_the_residual_depends_on_rejected_drafts_through_one_number():
    """It is norm((target - M draft)+), and a rejection adds |(target - M draft)+| / (1 - draft(R)) to M."""
    target, draft = random_rows(6, 1)
    for drafts in torch.cartesian_prod(*[torch.arange(6)] * 3):
        if len(drafts.unique()) == 3:
            shares = RecursiveRejectionWithoutReplacement().law(drafts, draft[0], target[0])
            if float(shares.rest.sum()) > 1e-12:
                dose, used = 0.0, 0.0
                for one in drafts:
                    dose += float((target[0] - dose * draft[0]).clamp_min(0).sum()) / (1 - used)
                    used += float(draft[0, one])
                left = (target[0] - dose * draft[0]).clamp_min(0)
                torch.testing.assert_close(shares.rest / shares.rest.sum(), left / left.sum(), rtol=0, atol=1e-12)


def test_too_many_sequences_are_refused_and_a_tolerance_lets_them_pass():
    target, draft = random_rows(48, 1, spread=0.3)
    with pytest.raises(NotConverged, match="fewer drafts"):
        RecursiveRejectionWithoutReplacement().acceptance(draft, target, torch.tensor([6]))


def test_few_likely_sequences_are_followed_to_six_drafts():
    """Twelve tokens, most of them unlikely: what is left out is below the tolerance."""
    target, draft = random_rows(7, 2, spread=3.0)
    six = RecursiveRejectionWithoutReplacement().acceptance(draft, target, torch.full((2,), 6))
    seven = RecursiveRejectionWithoutReplacement().acceptance(draft, target, torch.full((2,), 7))
    assert bool((six <= seven).all())
    torch.testing.assert_close(seven, 1 - target[:, -1], rtol=0, atol=1e-9)


def test_seven_drafts_of_seven_tokens_accept_all_of_the_shortlist():
    target, draft = random_rows(7, 2, spread=3.0)
    counts = torch.full((2,), 9)
    marginal = RecursiveRejectionWithoutReplacement().marginal(draft, target, counts)
    torch.testing.assert_close(marginal[:, :-1], target[:, :-1], rtol=0, atol=1e-9)


def test_k_seq_reaches_its_share_of_the_optimum():
    """At least 1 - 1/e (arXiv 2310.15141, theorem 2), and never more than the optimum."""
    for spread in (0.5, 2.0, 4.0):
        target, draft = random_rows(64, 20, spread=spread)
        for k in (1, 2, 4, 8):
            counts = torch.full((20,), k)
            accepted = KSeq().acceptance(draft, target, counts)
            best = optimal_set(IID(), draft, target, counts).acceptance
            assert bool((accepted >= (1 - 1 / math.e) * best).all())
            assert bool((accepted <= best + 1e-12).all())


def test_the_threshold_of_k_seq_solves_its_equation():
    target, draft = random_rows(64, 20)
    counts = torch.arange(1, 21)
    rho = threshold(draft, target, counts)
    beta = torch.minimum(target / rho.unsqueeze(-1), draft).sum(dim=-1)
    torch.testing.assert_close(1 - (1 - beta) ** counts, rho * beta, rtol=0, atol=1e-12)
    assert bool((rho >= 1).all() and (rho <= counts).all())


@pytest.mark.parametrize("alphabet", [None, 40])
def test_the_exact_program_reaches_the_optimum_of_two_drafts(alphabet: int | None):
    """K = 24 atoms and two i.i.d. drafts: theorem 3 of arXiv 2410.18234 against the program over all pairs."""
    target, draft = random_rows(24, 4)
    counts = torch.full((4,), 2)
    accepted = ImportanceWeighted(free=None, alphabet=alphabet).acceptance(draft, target, counts)
    best = optimal_set(IID(), draft, target, counts).acceptance
    torch.testing.assert_close(accepted, best, rtol=0, atol=1e-6)


def test_the_truncated_program_gains_with_every_free_token():
    target, draft = random_rows(24, 6)
    counts = torch.full((6,), 2)
    accepted = [ImportanceWeighted(free=free).acceptance(draft, target, counts) for free in (0, 5, 10, None)]
    for less, more in pairwise(accepted):
        assert bool((less <= more + 1e-6).all())
    assert bool((accepted[0] < accepted[-1] - 1e-3).any())


def test_two_different_draft_rows_reach_their_optimum():
    """The program with a weight per unordered pair equals the min cut 1 + min_H [target(H) - q_1(H) q_2(H)]."""
    stream = torch.Generator().manual_seed(3)
    sets = torch.cartesian_prod(*[torch.tensor([False, True])] * 7)
    for _ in range(5):
        target = torch.rand(7, generator=stream, dtype=torch.float64) ** 3
        rows = torch.rand(2, 6, generator=stream, dtype=torch.float64) ** 3
        target, rows = target / target.sum(), torch.nn.functional.pad(rows / rows.sum(dim=-1, keepdim=True), (0, 1))
        cut = [float((target * one).sum() - (rows * one).sum(dim=-1).prod()) for one in sets]
        accepted = ImportanceWeighted(Product(), free=None).acceptance(rows, target, torch.tensor(2))
        assert float(accepted) == pytest.approx(1 + min(cut), abs=1e-7)


def test_a_tournament_gains_with_every_draft_and_stays_below_the_optimum():
    target, draft = random_rows(16, 4)
    accepted = [ImportanceWeighted(free=None).acceptance(draft, target, torch.full((4,), k)) for k in (1, 2, 3, 4)]
    for k, (less, more) in enumerate(pairwise(accepted), start=2):
        best = optimal_set(IID(), draft, target, torch.full((4,), k)).acceptance
        assert bool((less <= more + 1e-7).all() and (less < more - 1e-3).any() and (more <= best + 1e-7).all())


def test_spechub_accepts_what_top_then_sample_accepts():
    target, draft = random_rows(32, 50)
    counts = torch.arange(50) % 3
    ours, greedy = (rule.acceptance(draft, target, counts) for rule in (SpecHubRule(), TopThenSampleRule()))
    torch.testing.assert_close(ours, greedy, rtol=0, atol=1e-12)
    best = optimal_set(SpecHub(), draft, target, torch.full((50,), 2)).acceptance
    torch.testing.assert_close(SpecHubRule().acceptance(draft, target, torch.full((50,), 2)), best, rtol=0, atol=1e-12)


def test_recursive_rejection_has_the_closed_form_of_its_residuals():
    """Two drafts: 1 - (1 - b_1)(1 - b_2), with b_2 the overlap of the draft row and the normalised residual."""
    target, draft = random_rows(64, 5)
    first = torch.minimum(target, draft).sum(dim=-1)
    left = (target - draft).clamp_min(0)
    second = torch.minimum(left / left.sum(dim=-1, keepdim=True), draft).sum(dim=-1)
    accepted = RecursiveRejection().acceptance(draft, target, torch.full((5,), 2))
    torch.testing.assert_close(accepted, 1 - (1 - first) * (1 - second), rtol=0, atol=1e-12)


LOSSY_RULES: list[NodeVerifier] = [TypicalAcceptance(IID()), TopBeta(IID()), Lenient(0.5)]


@pytest.mark.parametrize("rule", LOSSY_RULES, ids=lambda rule: rule.name)
def test_a_lossy_rule_is_a_law_that_is_not_the_targets(rule: NodeVerifier):
    worst = 0.0
    for target, draft in ZOO.values():
        case = enumerated(rule, 2, target, draft, 0.1)
        total = case.outcome.child.sum(dim=-1) + case.outcome.rest.sum(dim=-1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-12)
        assert float(case.emitted.sum()) == pytest.approx(1, abs=1e-12)
        worst = max(worst, case.error)
    assert worst > 0.05


def test_thresholds_at_a_one_hot_target_are_exact():
    for rule in (TypicalAcceptance(IID()), TopBeta(IID()), Lenient(0.5)):
        assert enumerated(rule, 2, *ZOO["one-hot target"]).error < 1e-12


def test_typical_acceptance_by_hand():
    """Entropy of (1/2, 1/4, 1/8, 1/8) is 1.75 ln 2: the threshold is min(0.5, 0.5 2^-1.75) = 0.1487."""
    target, draft = row(0.5, 0.25, 0.125, 0.125), row(0.25, 0.25, 0.25, 0.25)
    rule = TypicalAcceptance(IID(), epsilon=0.5, delta=0.5)
    assert rule.accepts(target).tolist() == [True, True, False, False]
    assert float(rule.acceptance(draft, target, torch.tensor(2))) == pytest.approx(0.75)
    law = rule.law(torch.tensor([3, 1, 0]), draft, target)
    assert law.child.tolist() == [0, 0, 1]
    assert not bool(law.rest.any())
    assert torch.equal(rule.law(torch.tensor([3, 2, -1]), draft, target).rest, target)


def test_top_beta_by_hand():
    target = row(0.5, 0.2, 0.2, 0.1)
    assert TopBeta(beta=2, tau=5.0).accepts(target).tolist() == [True, True, True, False], "ties pass together"
    assert TopBeta(beta=4, tau=math.log(2.6)).accepts(target).tolist() == [True, True, True, False]
    assert TopBeta(beta=4, tau=math.log(2.4)).accepts(target).tolist() == [True, False, False, False]


def test_lenience_bounds_what_a_token_gains():
    """A single draft emits no token more often than target / l (arXiv 2211.17192, appendix A.5)."""
    target, draft = random_rows(6, 1)
    for lenience in (0.25, 0.5, 0.9):
        case = enumerated(Lenient(lenience), 1, target[0, :-1] / target[0, :-1].sum(), draft[0, :-1])
        assert bool((case.emitted <= case.target / lenience + 1e-12).all())
        overlap = torch.minimum(case.target / lenience, case.draft).sum()
        assert case.acceptance == pytest.approx(float(overlap), abs=1e-12)


def test_lenience_one_is_recursive_rejection():
    for target, draft in ZOO.values():
        one, two = (enumerated(rule, 3, target, draft, 0.1) for rule in (Lenient(1.0), RecursiveRejection()))
        torch.testing.assert_close(one.outcome.child, two.outcome.child, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: Lenient(0.0), "lenience"),
        (lambda: Lenient(1.1), "lenience"),
        (lambda: TypicalAcceptance(epsilon=0.0), "epsilon"),
        (lambda: TypicalAcceptance(delta=-1.0), "delta"),
        (lambda: TopBeta(beta=0), "beta"),
        (lambda: TopBeta(tau=-1.0), "tau"),
    ],
)
def test_a_parameter_outside_its_range_is_refused(build, name: str):
    with pytest.raises(InvalidParameter, match=name):
        build()


class HalvedShares(RecursiveRejection):
    """A wrong rule: it accepts half of what its marginal says."""

    def shares(self, drafts: Tensor, draft_probs: Tensor, target_mass: Tensor) -> Tensor:
        return super().shares(drafts, draft_probs, target_mass) / 2


class CountsOneMore(RecursiveRejection):
    """A wrong acceptance: that of one draft more."""

    def acceptance(self, draft_probs: Tensor, target_probs: Tensor, counts: Tensor) -> Tensor:
        return super().acceptance(draft_probs, target_probs, counts + 1)


def test_wrong_shares_and_acceptance_are_caught():
    check_shares(RecursiveRejection(), 2, *ZOO["tied draft"])
    with pytest.raises(AssertionError):
        check_shares(HalvedShares(), 2, *ZOO["tied draft"])
    with pytest.raises(AssertionError):
        check_acceptance(CountsOneMore(), 2, *ZOO["tied draft"])


@settings(max_examples=20)
@given(pair=pairs(), k=st.integers(1, 3))
def test_naive_acceptance_is_the_mean_mass_of_the_drafted_set(pair: tuple[Tensor, Tensor], k: int):
    """sum_x target(x) (1 - Q(all but x)), from the containment of the complement."""
    target, draft = atoms_of(*pair, 0.2, IID())
    others = ~torch.eye(len(target), dtype=torch.bool)
    missed = containment(IID(), draft.expand(len(draft), -1), others, torch.full((len(draft),), k))
    accepted = NaiveMatch(IID()).acceptance(draft, target, torch.tensor(k))
    assert float(accepted) == pytest.approx(float((target * (1 - missed)).sum()), abs=1e-12)
