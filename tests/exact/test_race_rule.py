"""The race by enumeration: exact for any rates, accepting what it computes, near the optimum; degenerate rows."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from enumeration import Enumeration, atoms_of, enumerated, mean_shares
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
    enumerate_drafts,
)
from polydraft.theory import optimal_set
from polydraft.verifiers import KSeq, Race, RecursiveRejection, SpeculativeSampling
from polydraft.verifiers.nodes.race import WIDEST, RaceLaw, race_shares
from polydraft.verifiers.outcome_law import onto_first_copies

SCHEMES: list[Scheme] = [
    IID(),
    Product(),
    TopThenIID(1),
    TopThenIID(2),
    TopThenSample(),
    TopK(),
    Given(),
]
CASES = [
    *((scheme, k) for scheme in SCHEMES for k in (1, 2, 3) if k == 2 or not scheme.deterministic),
    (IID(), 4),
    (SpecHub(), 2),
]
each_case = pytest.mark.parametrize(("scheme", "k"), CASES, ids=[f"{scheme.name}, k={k}" for scheme, k in CASES])
each_scheme = pytest.mark.parametrize("scheme", [*SCHEMES, SpecHub()], ids=lambda scheme: scheme.name)


def laws(seed: int, *shape: int, power: float = 3.0) -> Tensor:
    mass = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** power
    return mass / mass.sum(dim=-1, keepdim=True)


def most_drafts(scheme: Scheme) -> int:
    return 2 if isinstance(scheme, SpecHub) else 4


def optimum(scheme: Scheme, case: Enumeration, k: int) -> float:
    return float(optimal_set(scheme, case.draft, case.target, torch.tensor(k)).acceptance)


def check(scheme: Scheme, k: int, target: Tensor, draft: Tensor, tail: float) -> None:
    rule = Race(scheme)
    case = enumerated(rule, k, target, draft, tail)
    child, rest = case.outcome.child, case.outcome.rest
    assert bool((child >= 0).all() and (rest >= 0).all())
    assert not bool(child[case.drafts < 0].any())
    torch.testing.assert_close(child.sum(-1) + rest.sum(-1), torch.ones(len(child)).double(), rtol=0, atol=1e-12)
    assert case.error < 1e-9
    computed = float(rule.acceptance(case.draft, case.target, torch.tensor(k)))
    assert computed == pytest.approx(case.acceptance, abs=1e-10)
    assert computed <= optimum(scheme, case, k) + 1e-10


@each_case
def test_it_is_exact_and_accepts_what_it_computes(scheme: Scheme, k: int):
    for number, (target, draft) in enumerate(ZOO.values()):
        if (number + k) % (2 if k == 2 else 4) == 0:
            check(scheme, k, target, draft, tail=0.3 * (number % 4 < 2))


@each_case
@settings(max_examples=2)
@given(pair=pairs(most=5), tail=st.sampled_from([0.0, 1e-30, 0.25, 1.0]))
def test_it_is_exact_and_accepts_what_it_computes_for_any_rows(
    scheme: Scheme, k: int, pair: tuple[Tensor, Tensor], tail: float
):
    check(scheme, k, *pair, tail)


@each_case
def test_shares_of_a_scaled_target_add_up_to_the_marginal(scheme: Scheme, k: int):
    rule = Race(scheme)
    for name in ("tied draft", "zeros", "long tail", "duplicates bite", "1e-30 in the draft"):
        target, draft = atoms_of(*ZOO[name], 0.25, scheme)
        for scale in (1e-12, 0.1, 0.9):
            shares, mean = mean_shares(rule, k, scale * target, draft)
            marginal = rule.marginal(draft, scale * target, torch.tensor(k))
            torch.testing.assert_close(mean, marginal, rtol=0, atol=1e-10)
            assert bool((marginal <= scale * target).all())
            assert bool((shares.sum(dim=-1) <= 1 + 1e-12).all())


# Any rates will do.


def selected(scheme: Scheme, draft: Tensor, log_rates: Tensor, k: int) -> Tensor:
    """Return how often each token wins the race, by listing all drafts."""
    drafts, chance = enumerate_drafts(scheme, draft[..., :-1], k)
    logs = log_rates[drafts.clamp_min(0)].masked_fill(drafts < 0, -torch.inf)
    wins = chance.unsqueeze(-1) * logs.softmax(dim=-1).where(drafts >= 0, 0.0)
    return torch.zeros_like(log_rates).index_add(0, drafts.clamp_min(0).flatten(), wins.flatten())


def often(scheme: Scheme, draft: Tensor, k: int, log_rates: Tensor) -> Tensor:
    """Return how often the race takes each token, by its integral."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(RaceLaw.of(scheme, draft.numpy(), k).taken(log_rates.numpy()))


def shares_of(drafts: Tensor, log_rates: Tensor, taken: Tensor, target: Tensor) -> Tensor:
    """Return the shares of every list of drafts."""
    with np.errstate(all="ignore"):
        tables = (log_rates.numpy(), taken.numpy(), target.numpy())
        shares = [race_shares(one, *tables)[0] for one in drafts.numpy()]
    return onto_first_copies(torch.from_numpy(np.stack(shares)), drafts)


def rates(kind: str, size: int) -> Tensor:
    """Return logarithms of rates in [-WIDEST, 0]."""
    even = torch.linspace(-WIDEST, 0, size, dtype=torch.float64)
    ends = even.where(even == 0, -WIDEST)
    return {"equal": even * 0, "spread": even.flip(0), "one ahead": ends}[kind]


@each_case
@pytest.mark.parametrize("kind", ["spread", "one ahead"])
def test_the_integral_is_how_often_a_token_wins(scheme: Scheme, k: int, kind: str):
    for target, draft in ZOO.values():
        _, rows = atoms_of(target, draft, 0.2, scheme)
        logs = rates(kind, rows.shape[-1])
        taken = often(scheme, rows, k, logs)
        torch.testing.assert_close(taken, selected(scheme, rows, logs, k), rtol=0, atol=1e-12)


@each_case
@pytest.mark.parametrize("kind", ["equal", "spread", "one ahead"])
def test_any_rates_are_exact(scheme: Scheme, k: int, kind: str):
    for name in ("duplicates bite", "zeros", "long tail", "one-hot target", "disjoint supports"):
        target, rows = atoms_of(*ZOO[name], 0.2, scheme)
        drafts, chance = enumerate_drafts(scheme, rows[..., :-1], k)
        logs = rates(kind, len(target))
        taken = often(scheme, rows, k, logs)
        shares = shares_of(drafts, logs, taken, target)
        accepted = torch.zeros_like(target).index_add(
            0, drafts.clamp_min(0).flatten(), (chance.unsqueeze(-1) * shares).flatten()
        )
        torch.testing.assert_close(accepted, torch.minimum(target, taken), rtol=0, atol=1e-12)


def test_a_token_wins_as_often_as_the_mean_logarithm_of_the_sum_of_rates_grows():
    """The derivative of L in docs/theory/race.md: d E[log sum_j a(x_j)] / d log a(i) = r(i)."""
    _, draft = atoms_of(*ZOO["duplicates bite"], 0.2, IID())
    drafts, chance = enumerate_drafts(IID(), draft[:-1], 3)
    logs = torch.tensor([-1.0, -3.0, 0.0, -7.0, -2.0], dtype=torch.float64, requires_grad=True)
    (chance @ logs[drafts].logsumexp(dim=-1)).backward()
    taken = often(IID(), draft, 3, logs.detach())
    torch.testing.assert_close(logs.grad, taken, rtol=0, atol=1e-12)


def test_wrong_averages_are_caught():
    """Shares computed for the averages of equal rates, although the rates differ, emit another law."""
    target, draft = atoms_of(*ZOO["duplicates bite"], 0.0, IID())
    drafts, chance = enumerate_drafts(IID(), draft[:-1], 2)
    logs = rates("spread", len(target)) / WIDEST
    shares = shares_of(drafts, logs, draft, target)
    accepted = torch.zeros_like(target).index_add(0, drafts.flatten(), (chance.unsqueeze(-1) * shares).flatten())
    assert float((accepted - torch.minimum(target, draft)).abs().max()) > 0.01


# How much it accepts.


@each_scheme
def test_one_draft_is_speculative_sampling(scheme: Scheme):
    if scheme in (TopThenIID(1), TopThenIID(2), TopK(), Given()):
        return  # one draft of these is no draw
    for target, draft in ZOO.values():
        ours = enumerated(Race(scheme), 1, target, draft, 0.2)
        classic = enumerated(SpeculativeSampling(), 1, target, draft, 0.2)
        torch.testing.assert_close(ours.outcome.child, classic.outcome.child, rtol=0, atol=1e-9)
        torch.testing.assert_close(ours.outcome.rest, classic.outcome.rest, rtol=0, atol=1e-9)
        assert ours.acceptance == pytest.approx(float(torch.minimum(ours.target, classic.draft).sum()), abs=1e-11)


def shortlists(seed: int, number: int = 4, size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Return draft rows, a second draft row for each, and target rows."""
    stream = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(number, size, generator=stream, dtype=torch.float64)
    noise = torch.randn(number, size, generator=stream, dtype=torch.float64)
    rows = (logits.softmax(dim=-1), (logits / 1.5).softmax(dim=-1), (logits + noise).softmax(dim=-1))
    one, two, target = (torch.nn.functional.pad(each, (0, 1)) for each in rows)
    return one, two, target


def accepted_by_k(scheme: Scheme, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return acceptance and optimum of 64 tokens for 1, 2 and 4 drafts."""
    one, two, target = shortlists(seed)
    draft = torch.stack([one, two], dim=-2) if isinstance(scheme, Product) else one
    found: list[tuple[Tensor, Tensor]] = []
    for k in (1, 2, 4):
        counts = torch.full((len(target),), k)
        best = optimal_set(scheme, draft, target, counts).acceptance
        found.append((Race(scheme).acceptance(draft, target, counts), best))
    return found


@pytest.mark.parametrize("scheme", [IID(), TopThenIID(1), TopThenIID(2), Product()], ids=lambda scheme: scheme.name)
def test_a_shortlist_of_64_comes_within_a_thousandth_of_the_optimum_and_more_drafts_are_accepted_more(scheme: Scheme):
    found = accepted_by_k(scheme, 0)
    for accepted, best in found:
        assert bool((accepted <= best + 1e-10).all())
        assert bool((accepted > best - 1e-3).all())
    for (less, _), (more, _) in pairwise(found):
        assert bool((more >= less - 1e-4).all() and (more > less + 0.01).any())


def test_independent_drafts_are_accepted_more_often_than_by_recursive_rejection_and_k_seq():
    one, _, target = shortlists(1)
    for k in (2, 4, 8):
        counts = torch.full((len(target),), k)
        accepted = Race().acceptance(one, target, counts)
        for rule in (RecursiveRejection(), KSeq()):
            theirs = rule.acceptance(one, target, counts)
            assert bool((accepted > theirs).all()) and float((accepted - theirs).mean()) > 0.005


def test_ratios_of_rates_are_bounded_so_that_the_optimum_need_not_be_reached():
    """The optimum is a priority of one token over another; see docs/theory/race.md."""
    gaps = []
    for seed in range(12):
        target, draft = laws(seed, 2, 4)
        case = enumerated(Race(), 2, target, draft)
        gaps.append(optimum(IID(), case, 2) - case.acceptance)
    assert -1e-10 < min(gaps)
    assert 1e-9 < max(gaps) < 5e-3


# Degenerate rows have a defined answer.


INDEPENDENT: list[Scheme] = [IID(), Product(), TopThenIID(1)]


@pytest.mark.parametrize("scheme", INDEPENDENT, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("k", [1, 3])
class TestDegenerateRows:
    def test_disjoint_supports_accept_nothing_and_emit_the_target(self, scheme: Scheme, k: int):
        target, draft = row(0, 0, 0, 0, 0.3, 0.7), row(0.25, 0.4, 0.1, 0.25, 0, 0)
        rows = torch.stack([draft, draft]) if isinstance(scheme, Product) else draft
        drafts, _ = enumerate_drafts(scheme, rows, k)
        rows, target = torch.nn.functional.pad(rows, (0, 1)), torch.nn.functional.pad(target, (0, 1))
        law = Race(scheme).law(drafts, rows.expand(len(drafts), *rows.shape), target.expand(len(drafts), -1))
        assert not bool(law.child.any())
        torch.testing.assert_close(law.rest, target.expand(len(drafts), -1), rtol=0, atol=1e-12)

    def test_a_one_hot_draft_is_accepted_with_its_mass(self, scheme: Scheme, k: int):
        target, draft = row(0.4, 0.3, 0.3), row(0, 1, 0)
        rows = torch.stack([draft, draft]) if isinstance(scheme, Product) else draft
        case = enumerated_rows(Race(scheme), k, target, rows)
        assert case.acceptance == pytest.approx(0.3, abs=1e-12)

    def test_a_one_hot_target_is_accepted_wherever_it_is_drafted(self, scheme: Scheme, k: int):
        case = enumerated(Race(scheme), k, *ZOO["one-hot target"])
        drafted = float(case.probability @ (case.drafts == 1).any(dim=-1).double())
        assert case.acceptance == pytest.approx(drafted, abs=2e-5)
        assert not bool(case.outcome.child[case.drafts != 1].any())

    def test_a_row_without_mass_emits_the_target(self, scheme: Scheme, k: int):
        nothing = torch.zeros(2, 4) if isinstance(scheme, Product) else torch.zeros(4)
        target = row(0.1, 0.2, 0.3, 0.4)
        law = Race(scheme).law(torch.full((k,), -1), nothing.double(), target)
        assert not bool(law.child.any())
        torch.testing.assert_close(law.rest, target, rtol=0, atol=1e-12)
        assert float(Race(scheme).acceptance(nothing.double(), target, torch.tensor(k))) == 0


def enumerated_rows(rule: Race, k: int, target: Tensor, rows: Tensor) -> Enumeration:
    drafts, probability = enumerate_drafts(rule.scheme, rows, k)
    rows, target = torch.nn.functional.pad(rows, (0, 1)), torch.nn.functional.pad(target, (0, 1))
    law = rule.law(drafts, rows.expand(len(drafts), *rows.shape), target.expand(len(drafts), -1))
    return Enumeration(target, rows, drafts, probability, law)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_equal_rows_are_always_accepted(k: int):
    for target, _ in [*ZOO.values()][::3]:
        for scheme, rows in ((IID(), target), (Product(), torch.stack([target, target]))):
            assert enumerated_rows(Race(scheme), k, target, rows).acceptance == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("scheme", [TopThenIID(3), TopThenSample(), TopK(), Given()], ids=lambda scheme: scheme.name)
def test_as_many_drafts_as_the_support_accept_its_mass(scheme: Scheme):
    """All three tokens are drafted for certain, or the last is the only one left."""
    case = enumerated(Race(scheme), 3, row(0.1, 0.5, 0.2, 0.2), row(0.6, 0.3, 0.1, 0))
    assert case.error < 1e-12
    assert case.acceptance == pytest.approx(0.8, abs=1e-9)


# Batches.


@each_scheme
def test_counts_may_differ_by_row_and_a_batch_gives_what_its_rows_give(scheme: Scheme):
    k = most_drafts(scheme)
    draft, target = torch.nn.functional.pad(laws(3, 2, 3, 7), (0, 1)), laws(4, 2, 3, 8)
    draft[0, 0, 3:] = 0
    if isinstance(scheme, Product):
        draft = torch.stack([draft, torch.nn.functional.pad(laws(5, 2, 3, 7), (0, 1))], dim=-2)
    counts = torch.arange(6).view(2, 3) % (k + 1)
    uniforms = torch.rand(2, 3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drafts = scheme.sample(draft[..., :-1], counts, uniforms, k)
    rule = Race(scheme)
    whole = rule.law(torch.nn.functional.pad(drafts, (0, 1), value=-1), draft, target)
    accepted = rule.acceptance(draft, target, counts)
    assert not bool(whole.child[..., -1].any() or accepted[counts == 0].any())
    torch.testing.assert_close(whole.rest[counts == 0], target[counts == 0], rtol=0, atol=1e-15)
    for place in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        at = tuple(place)
        alone = rule.law(drafts[at], draft[at], target[at])
        torch.testing.assert_close(whole.child[at][:-1], alone.child, rtol=0, atol=1e-11)
        torch.testing.assert_close(whole.rest[at], alone.rest, rtol=0, atol=1e-11)
        torch.testing.assert_close(accepted[at], rule.acceptance(draft[at], target[at], counts[at]), rtol=0, atol=1e-11)


@each_scheme
def test_float32_rows_give_float32_laws(scheme: Scheme):
    k = min(3, most_drafts(scheme))
    target, draft = (one.float() for one in (row(0.5, 0.2, 0.2, 0.1), row(0.1, 0.3, 0.4, 0.2)))
    case = enumerated(Race(scheme), k, target, draft, 0.125)
    assert case.outcome.child.dtype == case.outcome.rest.dtype == torch.float32
    assert case.error < 1e-6
    tiny = enumerated(Race(scheme), k, row(0.5, 0.25, 0.25).float(), row(1, 1e-42, 3e-42).float(), 0.125)
    assert tiny.error < 1e-6


def test_dependent_drafts_are_refused():
    for scheme in (WithoutReplacement(), ConditionalPoisson()):
        with pytest.raises(UnpairedScheme, match=f"The race, unlike Optimal, .* not {scheme.name}"):
            Race(scheme)
