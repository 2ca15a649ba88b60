"""The optimal acceptance against transport, all subsets, closed forms and anchors; its answers to bad input."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from zoo import ZOO, pairs, row, rows

from polydraft.errors import InvalidParameter, InvalidProbabilities, NotConverged, VocabularyMismatch
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
from polydraft.theory import (
    containment,
    containment_chain,
    flow_acceptance,
    lp_acceptance,
    minimising_order,
    optimal_acceptance,
    optimal_set,
    top_then_sample_acceptance,
    two_draft_acceptance,
    two_drafts_suffice,
)

SCHEMES: list[Scheme] = [
    IID(),
    WithoutReplacement(),
    TopK(),
    TopThenSample(),
    TopThenIID(1),
    TopThenIID(2),
    ConditionalPoisson(),
    SpecHub(),
    Given(),
]
CASES = [(scheme, k) for scheme in SCHEMES for k in (1, 2, 3) if k < 3 or not isinstance(scheme, SpecHub)]
each_case = pytest.mark.parametrize(("scheme", "k"), CASES, ids=lambda value: str(getattr(value, "name", value)))
SCALES = (1.0, 0.7, 0.1)


def subsets(size: int) -> Tensor:
    return torch.tensor([*product([False, True], repeat=size)])


def over_all_subsets(scheme: Scheme, draft: Tensor, target: Tensor, k: int) -> float:
    """Return 1 + min_H [target(H) - Q(H)] over all sets H, not only prefixes."""
    members = subsets(target.shape[-1])
    held = containment(scheme, draft.expand(len(members), *draft.shape), members, torch.full((len(members),), k))
    return 1 + float((members.double() @ target - held).min())


def found(scheme: Scheme, draft: Tensor, target: Tensor, k: int) -> float:
    return float(optimal_set(scheme, draft, target, torch.tensor(k)).acceptance)


@pytest.mark.long(13)
@each_case
def test_the_optimum_is_the_largest_transport_and_the_minimum_over_all_sets(scheme: Scheme, k: int):
    for target, draft in ZOO.values():
        for scale in SCALES:
            best = flow_acceptance(scheme, draft, scale * target, k)
            assert found(scheme, draft, scale * target, k) == pytest.approx(best, abs=1e-12)
            assert over_all_subsets(scheme, draft, scale * target, k) == pytest.approx(best, abs=1e-12)


@pytest.mark.long(13)
@each_case
@settings(max_examples=12)
@given(pair=pairs(2, 5), scale=st.sampled_from(SCALES))
def test_the_optimum_is_the_largest_transport_for_any_rows(
    scheme: Scheme, k: int, pair: tuple[Tensor, Tensor], scale: float
):
    target, draft = pair
    best = flow_acceptance(scheme, draft, scale * target, k)
    assert found(scheme, draft, scale * target, k) == pytest.approx(best, abs=1e-12)


@pytest.mark.long(10)
@each_case
def test_the_linear_program_agrees(scheme: Scheme, k: int):
    for target, draft in [*ZOO.values()][::2]:
        for scale in SCALES:
            best = found(scheme, draft, scale * target, k)
            assert lp_acceptance(scheme, draft, scale * target, k) == pytest.approx(best, abs=1e-9)


def test_a_scaled_target_keeps_the_drafts_whole():
    """The optimum is 1 + min(m(H) - Q(H)), not |m| + min(m(H) - Q(H)): the drafts are not scaled with the target."""
    target, draft = row(0.1, 0.6, 0.2, 0.1), row(0.25, 0.25, 0.25, 0.25)
    for scheme in (IID(), WithoutReplacement()):
        scaled = found(scheme, draft, 0.5 * target, 2)
        assert scaled == pytest.approx(lp_acceptance(scheme, draft, 0.5 * target, 2), abs=1e-9)
        assert scaled > 0.5 * found(scheme, draft, target, 2) + 0.01


def test_tokens_drafted_for_certain_come_first_whatever_their_ratio():
    """By ratio alone the top token, the last here, would keep every smaller set out."""
    draft, target = row(0.2, 0.19, 0.19, 0.19, 0.115, 0.115), row(0.5, 0, 0, 0, 0.25, 0.25)
    assert found(TopThenSample(), draft, target, 2) == pytest.approx(0.5 + 0.2875, abs=1e-12)
    assert flow_acceptance(TopThenSample(), draft, target, 2) == pytest.approx(0.5 + 0.2875, abs=1e-12)


def test_the_optimal_set_is_what_it_says():
    stream = torch.Generator().manual_seed(0)
    draft, target = (torch.rand(2, 5, 7, generator=stream).double() ** 4 for _ in range(2))
    draft, target = draft / draft.sum(-1, keepdim=True), target / target.sum(-1, keepdim=True)
    counts = torch.randint(0, 4, (2, 5), generator=stream)
    for scheme in (IID(), WithoutReplacement(), ConditionalPoisson(), TopThenIID(1)):
        best = optimal_set(scheme, draft, target, counts)
        rank = torch.arange(7)
        members = torch.zeros(2, 5, 7, dtype=torch.bool).scatter(-1, best.order, rank < best.size.unsqueeze(-1))
        torch.testing.assert_close((members * target).sum(-1), best.target_mass, rtol=0, atol=1e-14)
        torch.testing.assert_close(containment(scheme, draft, members, counts), best.containment, rtol=0, atol=1e-12)
        torch.testing.assert_close(1 + best.target_mass - best.containment, best.acceptance, rtol=0, atol=1e-14)
        assert torch.equal(best.acceptance == 0, counts == 0)


# Closed forms.


@settings(max_examples=60)
@given(pair=pairs(2, 5))
def test_two_independent_drafts_have_the_closed_form_of_khisti(pair: tuple[Tensor, Tensor]):
    target, draft = pair
    closed = float(two_draft_acceptance(draft, target))
    members = subsets(len(draft)).double()
    inside, outside = members @ draft, (1 - members) @ draft
    literally = float((members @ target + outside**2 + 2 * inside * outside).min())
    assert closed == pytest.approx(literally, abs=1e-12)
    assert closed == pytest.approx(found(IID(), draft, target, 2), abs=1e-12)
    assert closed == pytest.approx(lp_acceptance(IID(), draft, target, 2), abs=1e-9)
    always = bool((members @ target >= inside**2 - 1e-12).all())
    assert bool(two_drafts_suffice(draft, target)) == always == (closed >= 1 - 1e-12)


def test_khistis_example_of_two_tokens():
    """With q = (1/2, 1/2) two drafts suffice iff 1/4 <= p_1 <= 3/4, and one draft only at p_1 = 1/2."""
    half = row(0.5, 0.5)
    for first in np.linspace(0, 1, 21).tolist():
        target = row(first, 1 - first)
        suffice = 0.25 <= first <= 0.75
        assert bool(two_drafts_suffice(half, target)) == suffice
        assert (float(optimal_acceptance(half, target, IID(), 2)) >= 1 - 1e-12) == suffice
        assert (float(optimal_acceptance(half, target, IID(), 1)) >= 1 - 1e-12) == (first == 0.5)


@settings(max_examples=60)
@given(pair=pairs(2, 5), k=st.integers(1, 4))
def test_greedy_drafts_have_hus_closed_form(pair: tuple[Tensor, Tensor], k: int):
    target, draft = pair
    closed = float(top_then_sample_acceptance(draft, target, k))
    assert closed == pytest.approx(found(TopThenSample(), draft, target, k), abs=1e-12)
    if k == 2:
        assert closed == pytest.approx(found(SpecHub(), draft, target, k), abs=1e-12)


def test_one_draft_is_accepted_with_the_overlap_and_deterministic_ones_with_their_mass():
    for target, draft in ZOO.values():
        overlap = float(torch.minimum(target, draft / draft.sum()).sum())
        for scheme in (IID(), WithoutReplacement(), ConditionalPoisson(), TopThenSample()):
            assert found(scheme, draft, target, 1) == pytest.approx(overlap, abs=1e-12)
        likeliest = draft.sort(descending=True, stable=True).indices[: int((draft > 0).sum())]
        for k in (1, 2, 3):
            assert found(TopK(), draft, target, k) == pytest.approx(float(target[likeliest[:k]].sum()), abs=1e-12)
            listed = (draft > 0).nonzero().flatten()[:k]
            assert found(Given(), draft, target, k) == pytest.approx(float(target[listed].sum()), abs=1e-12)


# The successive law and the formula that is published for it.


def random_pair(stream: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    spread = float(torch.empty(()).uniform_(0.5, 3, generator=stream))
    draft, target = (torch.softmax(spread * torch.randn(size, generator=stream).double(), dim=-1) for _ in range(2))
    return draft, target


def test_the_published_formula_misses_the_optimum_without_replacement_in_most_instances():
    """arXiv 2502.18779 gives e_k(q; H) / e_k(q), the law of `ConditionalPoisson`; the linear program decides."""
    stream = torch.Generator().manual_seed(0)
    errors: list[float] = []
    for _ in range(60):
        draft, target = random_pair(stream, 4)
        best = lp_acceptance(WithoutReplacement(), draft, target, 2)
        assert found(WithoutReplacement(), draft, target, 2) == pytest.approx(best, abs=1e-9)
        errors.append(abs(found(ConditionalPoisson(), draft, target, 2) - best))
    wrong = sum(error > 1e-6 for error in errors)
    assert wrong > 30
    assert max(errors) > 0.02


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement(), ConditionalPoisson()], ids=lambda one: one.name)
def test_prefixes_are_enough_because_containment_grows_faster_the_larger_the_set(scheme: Scheme):
    """(Q(H) - Q(H - i)) / q_i <= (Q(H + l) - Q(H)) / q_l for i in H and l off H: what the prefix scan rests on."""
    stream = torch.Generator().manual_seed(1)
    members = subsets(6)
    index = members.long() @ (2 ** torch.arange(5, -1, -1))
    for k in (2, 3, 4):
        draft, _ = random_pair(stream, 6)
        held = containment(scheme, draft.expand(64, 6), members, torch.full((64,), k))[index.argsort()]
        for i, other in product(range(6), range(6)):
            chosen = index[members[:, i] & ~members[:, other]]
            inner = (held[chosen] - held[chosen - 2 ** (5 - i)]) * draft[other]
            outer = (held[chosen + 2 ** (5 - other)] - held[chosen]) * draft[i]
            assert i == other or bool((inner <= outer + 1e-12).all())


def test_anchor_figures_over_32000_tokens():
    stream = np.random.default_rng(1)
    logits = torch.from_numpy(stream.normal(size=32000) * 3)
    draft = logits.softmax(dim=-1)
    target = (logits + torch.from_numpy(stream.normal(size=32000))).softmax(dim=-1)
    assert float(optimal_acceptance(draft, target, IID(), 1)) == pytest.approx(0.569815, abs=5e-7)
    for k, without, independent in [(2, 0.724856, 0.720672), (4, 0.849499, 0.840944), (8, 0.943664, 0.928410)]:
        assert float(optimal_acceptance(draft, target, WithoutReplacement(), k)) == pytest.approx(without, abs=5e-7)
        assert float(optimal_acceptance(draft, target, IID(), k)) == pytest.approx(independent, abs=5e-7)


# Product drafts: no prefix scan.


@settings(max_examples=40)
@given(
    case=st.integers(2, 4).flatmap(lambda size: st.tuples(rows(size), st.lists(rows(size), min_size=1, max_size=3))),
    k=st.integers(1, 4),
    scale=st.sampled_from(SCALES),
)
def test_product_drafts_reach_the_largest_transport(case: tuple[Tensor, list[Tensor]], k: int, scale: float):
    target, drafts = case
    draft = torch.stack(drafts)
    best = flow_acceptance(Product(), draft, scale * target, k)
    assert found(Product(), draft, scale * target, k) == pytest.approx(best, abs=1e-9)


def test_prefixes_by_ratio_are_not_enough_for_product_drafts():
    draft = torch.stack(
        [
            row(0.002, 0.003, 0.012, 0.972, 0.008, 0.003),
            row(0.008, 0.004, 0.197, 0.004, 0.787, 0),
            row(0.234, 0.67, 0.006, 0, 0.068, 0.022),
        ]
    )
    target = row(0.1, 0.009, 0.101, 0, 0.781, 0.009)
    order = (draft.mean(dim=0) / target).argsort(descending=True)
    chain = containment_chain(Product(), draft, order, torch.tensor(3))
    by_prefix = 1 + float((target[order].cumsum(-1) - chain[1:]).min().clamp_max(0))
    assert found(Product(), draft, target, 3) == pytest.approx(over_all_subsets(Product(), draft, target, 3), abs=1e-12)
    assert found(Product(), draft, target, 3) < by_prefix - 0.02


def test_product_drafts_of_equal_rows_are_independent_drafts():
    for target, draft in ZOO.values():
        for k in (1, 2, 3):
            both = torch.stack([draft, draft])
            assert found(Product(), both, target, k) == pytest.approx(found(IID(), draft, target, k), abs=1e-10)


def test_product_batches_and_a_shortlist_of_65():
    stream = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2, 1, 65, generator=stream).double()
    draft = (logits + torch.randn(2, 3, 65, generator=stream).double()).softmax(dim=-1)
    target = logits.squeeze(1).softmax(dim=-1)
    both = optimal_acceptance(draft, target, Product(), 3)
    for place in (0, 1):
        assert float(both[place]) == pytest.approx(found(Product(), draft[place], target[place], 3), abs=1e-12)
    single = torch.stack([optimal_acceptance(draft[:, j], target, IID(), 1) for j in range(3)])
    assert bool((both > single.amax(dim=0)).all())


@each_case
def test_the_search_over_all_sets_finds_nothing_below_the_prefixes(scheme: Scheme, k: int):
    stream = torch.Generator().manual_seed(k)
    for _ in range(3):
        draft, target = random_pair(stream, 12)
        order = minimising_order(scheme, draft, target, torch.tensor(k))
        chain = containment_chain(scheme, draft, order, torch.tensor(k))
        gap = float((torch.cat([torch.zeros(1), target[order].cumsum(-1)]) - chain).min())
        assert 1 + gap == pytest.approx(found(scheme, draft, target, k), abs=1e-9)


def test_a_search_that_is_cut_short_says_so():
    stream = torch.Generator().manual_seed(0)
    draft = torch.softmax(torch.randn(3, 30, generator=stream).double(), dim=-1)
    target = torch.softmax(torch.randn(30, generator=stream).double(), dim=-1)
    with pytest.raises(NotConverged, match="only known within"):
        minimising_order(Product(), draft, target, torch.tensor(3), rounds=2)


# Degenerate rows and bad input.


@pytest.mark.long(13)
@each_case
@settings(max_examples=10)
@given(pair=pairs(3, 5))
def test_degenerate_rows_have_a_defined_answer(scheme: Scheme, k: int, pair: tuple[Tensor, Tensor]):
    target, draft = pair
    support = int((draft > 0).sum())
    if scheme in (IID(), WithoutReplacement(), ConditionalPoisson()):
        assert found(scheme, draft, draft, k) == pytest.approx(1, abs=1e-12), "equal rows"
    if support <= k and scheme not in (IID(), TopThenIID(1)):
        covered = float(target[draft > 0].sum())
        assert found(scheme, draft, target, k) == pytest.approx(covered, abs=1e-12), "the whole support is drafted"
    apart = torch.cat([draft, torch.zeros_like(draft)]), torch.cat([torch.zeros_like(target), target])
    assert found(scheme, *apart, k) == 0, "disjoint supports"
    hot = torch.nn.functional.one_hot(draft.argmax(), len(draft)).double()
    assert found(scheme, hot, target, k) == pytest.approx(float(target[draft.argmax()]), abs=1e-12)
    assert found(scheme, hot, hot, k) == 1


def test_more_drafts_are_never_worse():
    stream = torch.Generator().manual_seed(5)
    for scheme in (IID(), WithoutReplacement(), ConditionalPoisson(), TopK()):
        draft, target = random_pair(stream, 9)
        rates = [float(optimal_acceptance(draft, target, scheme, k)) for k in range(1, 12)]
        assert rates == pytest.approx(sorted(rates), abs=1e-12)
        assert scheme == IID() or rates[8:] == pytest.approx([1, 1, 1], abs=1e-12)


@pytest.mark.parametrize("k", [0, -3])
def test_k_must_be_a_positive_integer(k: int):
    with pytest.raises(InvalidParameter, match=f"k must be .* {k}"):
        optimal_acceptance(row(0.5, 0.5), row(0.5, 0.5), IID(), k)


BAD_ROWS = [
    (row(0.5, 0.4), "draft_probs has a row whose sum differs from 1 by 0.1"),
    (row(1.5, -0.5), "draft_probs has a negative or NaN entry: its smallest is -0.5"),
    (row(0.5, float("nan")), "draft_probs has a negative or NaN entry"),
    (row(0.5, float("inf")), "draft_probs has a row whose sum differs from 1 by inf"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_ROWS)
def test_rows_that_are_no_distributions_are_named(bad: Tensor, message: str):
    with pytest.raises(InvalidProbabilities, match=message):
        optimal_acceptance(bad, row(0.5, 0.5), IID(), 2)
    with pytest.raises(InvalidProbabilities, match=message.replace("draft", "target")):
        optimal_acceptance(row(0.5, 0.5), bad, IID(), 2)


def test_rows_over_different_vocabularies_are_named():
    with pytest.raises(VocabularyMismatch, match="have 2 tokens and the target rows 3"):
        optimal_acceptance(row(0.5, 0.5), row(0.5, 0.25, 0.25), IID(), 2)


def test_float32_rows_that_sum_to_one_within_rounding_are_fine():
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    draft, target = (2 * logits).softmax(dim=-1), (2 * logits + logits.flip(-1)).softmax(dim=-1)
    rates = optimal_acceptance(draft, target, WithoutReplacement(), 4)
    assert rates.dtype == torch.float64
    torch.testing.assert_close(
        rates, optimal_acceptance(draft.double(), target.double(), WithoutReplacement(), 4), rtol=0, atol=1e-5
    )
