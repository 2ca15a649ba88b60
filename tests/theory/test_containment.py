"""Containment against the enumeration of all drafts, for every scheme, and what it promises besides."""

from itertools import product
from math import comb

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from two_weights import MANY_DRAFTS, TwoWeights
from zoo import ZOO, row, rows

from polydraft.errors import UnpairedScheme
from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Coupled,
    Given,
    Product,
    Scheme,
    SpecHub,
    TopK,
    TopThenIID,
    TopThenSample,
    Uniforms,
    WithoutReplacement,
    enumerate_drafts,
)
from polydraft.theory import SuccessiveLaw, containment, containment_chain, inclusion

SCHEMES: list[Scheme] = [
    IID(),
    WithoutReplacement(),
    Coupled(),
    TopK(),
    TopThenSample(),
    TopThenIID(0),
    TopThenIID(1),
    TopThenIID(2),
    ConditionalPoisson(),
    SpecHub(),
    Given(),
]
CASES = [(scheme, k) for scheme in SCHEMES for k in (1, 2, 3, 4) if k < 3 or not isinstance(scheme, SpecHub)]
each_case = pytest.mark.parametrize(("scheme", "k"), CASES, ids=lambda value: str(getattr(value, "name", value)))
DRAFTS = [
    *(draft for _, draft in ZOO.values()),
    *(target for target, _ in ZOO.values()),
    row(0.5, 0.5, 0, 0, 0),
    row(1, 1e-30, 3e-30, 2e-30, 0),
    row(1 - 1e-10, 1e-10, 1e-20, 1e-30, 3e-30),
    row(1, 1e-310, 2e-310, 3e-310, 4e-310),
    row(0.25, 0.25, 0.25, 0.25 - 1e-9, 1e-9),
]


def by_enumeration(scheme: Scheme, draft: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return every subset as a row of booleans, and Q of each."""
    drafts, probability = enumerate_drafts(scheme, draft, k)
    subsets = torch.tensor([*product([False, True], repeat=draft.shape[-1])])
    held = (subsets[:, drafts.clamp_min(0)] | (drafts < 0)).all(dim=-1)
    return subsets, held.double() @ probability


def check(scheme: Scheme, draft: Tensor, k: int) -> None:
    subsets, expected = by_enumeration(scheme, draft, k)
    counts = torch.full((len(subsets),), k)
    found = containment(scheme, draft.expand(len(subsets), *draft.shape), subsets, counts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    others = ~torch.eye(draft.shape[-1], dtype=torch.bool)
    alone = containment(scheme, draft.expand(len(others), *draft.shape), others, counts[: len(others)])
    torch.testing.assert_close(inclusion(scheme, draft, torch.tensor(k)), 1 - alone, rtol=0, atol=1e-12)


@pytest.mark.long(21)
@each_case
def test_containment_and_inclusion_agree_with_the_enumeration_of_all_drafts(scheme: Scheme, k: int):
    for draft in DRAFTS:
        check(scheme, draft, k)


@pytest.mark.long(21)
@each_case
@settings(max_examples=15)
@given(draft=st.integers(2, 5).flatmap(rows))
def test_containment_and_inclusion_agree_with_the_enumeration_for_any_rows(scheme: Scheme, k: int, draft: Tensor):
    check(scheme, draft, k)


@settings(max_examples=40)
@given(drafts=st.integers(2, 4).flatmap(lambda size: st.lists(rows(size), min_size=1, max_size=3)), k=st.integers(1, 4))
def test_product_containment_agrees_with_the_enumeration(drafts: list[Tensor], k: int):
    check(Product(), torch.stack(drafts), k)


def test_a_product_row_without_mass_ends_the_drafts():
    draft = torch.stack([row(0.5, 0.3, 0.2), row(0, 0, 0), row(0, 1, 0)])
    for k in (1, 2, 3, 4):
        check(Product(), draft, k)
        assert containment(Product(), draft, torch.tensor([True, False, False]), torch.tensor(k)) == pytest.approx(0.5)


def permuted(size: int, seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, size, generator=torch.Generator().manual_seed(seed)).argsort(dim=-1)


@each_case
def test_the_chain_begins_at_zero_rises_and_ends_at_one(scheme: Scheme, k: int):
    for draft in DRAFTS:
        chain = containment_chain(scheme, draft, permuted(len(draft), k), torch.tensor(k))
        assert (float(chain[0]), float(chain[-1])) == (0, 1)
        assert float(chain.diff().min()) >= -1e-13


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_no_drafts_lie_in_every_set(scheme: Scheme):
    draft = row(0.5, 0.3, 0.2, 0)
    for rowless in (draft, torch.zeros_like(draft)):
        chain = containment_chain(scheme, rowless, torch.arange(4), torch.tensor(0))
        assert torch.equal(chain, torch.ones(5).double())
        assert not bool(inclusion(scheme, rowless, torch.tensor(0)).any())
    chain = containment_chain(scheme, torch.zeros_like(draft), torch.arange(4), torch.tensor(2))
    assert torch.equal(chain, torch.ones(5).double()), "a row without mass gives no drafts"


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_a_batch_gives_what_its_rows_give_whatever_their_counts(scheme: Scheme):
    stream = torch.Generator().manual_seed(3)
    draft = torch.rand(2, 3, 4, 6, generator=stream, dtype=torch.float64) ** 6
    order = permuted(6, 4, 2, 3, 4)
    counts = torch.randint(0, 3 if isinstance(scheme, SpecHub) else 5, (2, 3, 4), generator=stream)
    chain, drawn = containment_chain(scheme, draft, order, counts), inclusion(scheme, draft, counts)
    assert (chain.shape, drawn.shape) == ((2, 3, 4, 7), (2, 3, 4, 6))
    for place in product(range(2), range(3), range(4)):
        alone = containment_chain(scheme, draft[place], order[place], counts[place])
        torch.testing.assert_close(chain[place], alone, rtol=0, atol=1e-13)
        torch.testing.assert_close(drawn[place], inclusion(scheme, draft[place], counts[place]), rtol=0, atol=1e-13)


def test_a_batch_of_no_rows_is_an_empty_answer():
    for scheme in SCHEMES:
        empty = torch.zeros(0, 3).double()
        none = torch.zeros(0, dtype=torch.int64)
        assert containment_chain(scheme, empty, empty.long(), none).shape == (0, 4)
        assert inclusion(scheme, empty, none).shape == (0, 3)


def test_float32_rows_are_worked_on_in_float64():
    draft = torch.tensor([0.8, 0.1, 0.1])
    for scheme in SCHEMES:
        chain = containment_chain(scheme, draft, torch.tensor([1, 2, 0]), torch.tensor(2))
        assert chain.dtype == torch.float64
        exact = containment_chain(scheme, draft.double(), torch.tensor([1, 2, 0]), torch.tensor(2))
        assert torch.equal(chain, exact)


class Unknown:
    """A scheme that theory has not heard of."""

    name = "unknown"
    deterministic = False
    independent = True
    lone_draft_is_drawn = True
    several_rows = False
    uniforms = Uniforms.OF_TOKENS
    sample = IID.sample
    probability = IID.probability


def test_an_unknown_scheme_is_refused():
    assert isinstance(Unknown(), Scheme)
    with pytest.raises(UnpairedScheme, match="unknown"):
        containment(Unknown(), row(0.5, 0.5), torch.tensor([True, False]), torch.tensor(1))
    with pytest.raises(UnpairedScheme, match="unknown"):
        inclusion(Unknown(), row(0.5, 0.5), torch.tensor(1))


# The successive law, and the formula that is published for it.


def published(draft: Tensor, members: Tensor, k: int) -> float:
    """Return e_k(q; H) / e_k(q), which arXiv 2502.18779 gives for drafts without replacement."""
    return float(containment(ConditionalPoisson(), draft, members, torch.tensor(k)))


def test_the_counter_example_to_the_published_formula_for_drafts_without_replacement():
    draft, members = row(0.8, 0.1, 0.1), torch.tensor([False, True, True])
    true = float(containment(WithoutReplacement(), draft, members, torch.tensor(2)))
    assert true == pytest.approx(2 * 0.1 * 0.1 / 0.9, abs=1e-15)
    assert round(true, 4) == 0.0222
    assert round(published(draft, members, 2), 4) == 0.0588


def test_two_drafts_have_the_closed_form():
    draft = torch.softmax(3 * torch.randn(40, generator=torch.Generator().manual_seed(1)).double(), dim=-1)
    chain = containment_chain(WithoutReplacement(), draft, torch.arange(40), torch.tensor(2))
    held, odds = draft.cumsum(dim=-1), (draft / (1 - draft)).cumsum(dim=-1)
    steps = draft[1:] * (odds[:-1] + held[:-1] / (1 - draft[1:]))
    torch.testing.assert_close(chain.diff()[1:], steps, rtol=0, atol=1e-14)


@pytest.mark.long(3)
@pytest.mark.parametrize("k", [3, 4, 8, 16, 17, 24])
def test_equal_weights_have_the_hypergeometric_law(k: int):
    for size in (k, k + 1, 40, 200):
        draft = torch.full((size,), 1 / size, dtype=torch.float64)
        chain = containment_chain(WithoutReplacement(), draft, torch.arange(size), torch.tensor(k))
        expected = torch.tensor([comb(held, k) / comb(size, k) for held in range(size + 1)], dtype=torch.float64)
        torch.testing.assert_close(chain, expected, rtol=0, atol=1e-12)
        drawn = inclusion(WithoutReplacement(), draft, torch.tensor(k))
        torch.testing.assert_close(drawn, torch.full_like(draft, k / size), rtol=0, atol=1e-12)


def successive_by_subsets(draft: list[float], k: int) -> Tensor:
    """Return Q of the first j tokens for all j by a recursion over the sets drawn so far."""
    reached = {0: 1.0}
    for _ in range(k):
        after: dict[int, float] = {}
        for drawn, chance in reached.items():
            left = sum(mass for atom, mass in enumerate(draft) if not drawn >> atom & 1)
            for atom, mass in enumerate(draft):
                if not drawn >> atom & 1 and mass > 0:
                    after[drawn | 1 << atom] = after.get(drawn | 1 << atom, 0.0) + chance * mass / left
        reached = after
    inside = [sum(chance for drawn, chance in reached.items() if not drawn >> held) for held in range(len(draft) + 1)]
    return torch.tensor(inside, dtype=torch.float64)


@pytest.mark.long(7)
@pytest.mark.parametrize("heavy_first", [True, False])
@pytest.mark.parametrize("case", MANY_DRAFTS, ids=str)
def test_many_drafts_of_two_weights_agree_with_fractions(case: TwoWeights, heavy_first: bool):
    """From 17 drafts on, products of odds and silences leave the range of float64."""
    draft = case.row() if heavy_first else case.row().flip(0)
    members = [range(j) if heavy_first else range(case.size - j, case.size) for j in range(case.size + 1)]
    expected = torch.tensor([float(case.containment(some)) for some in members], dtype=torch.float64)
    law = SuccessiveLaw.of(draft.unsqueeze(0), torch.tensor([case.drafts]))
    order = torch.arange(case.size).unsqueeze(0)
    for chain in (law.chain(), law.chain(order)):
        torch.testing.assert_close(chain[0], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 5.0, 12.0])
@pytest.mark.parametrize("k", [3, 4, 6, 8])
def test_successive_drafts_agree_with_a_recursion_over_sets(spread: float, k: int):
    stream = torch.Generator().manual_seed(k)
    for _ in range(4):
        draft = torch.softmax(spread * torch.randn(11, generator=stream).double(), dim=-1)
        draft = draft[permuted(11, k)]
        chain = containment_chain(WithoutReplacement(), draft, torch.arange(11), torch.tensor(k))
        torch.testing.assert_close(chain, successive_by_subsets(draft.tolist(), k), rtol=0, atol=1e-12)


def test_widely_spread_masses_take_few_nodes_more():
    flat = SuccessiveLaw.of(torch.full((64,), 1 / 64, dtype=torch.float64), torch.tensor(4))
    steep = SuccessiveLaw.of(10.0 ** -torch.arange(64).double(), torch.tensor(4))
    assert flat.nodes.time.shape[-1] <= 40
    assert steep.nodes.time.shape[-1] <= 160


def test_one_law_serves_many_orders():
    draft = torch.softmax(2 * torch.randn(5, 9, generator=torch.Generator().manual_seed(2)).double(), dim=-1)
    counts = torch.tensor([1, 2, 3, 4, 5])
    law = SuccessiveLaw.of(draft, counts)
    for seed in range(3):
        order = permuted(9, seed, 5)
        fresh = containment_chain(WithoutReplacement(), draft, order, counts)
        torch.testing.assert_close(law.chain(order), fresh, rtol=0, atol=1e-15)


def test_large_rows_are_cut_into_chunks_of_nodes(monkeypatch: pytest.MonkeyPatch):
    draft = torch.softmax(2 * torch.randn(3, 50, generator=torch.Generator().manual_seed(2)).double(), dim=-1)
    counts, order = torch.tensor([3, 4, 8]), permuted(50, 1, 3)
    whole, drawn = SuccessiveLaw.of(draft, counts).chain(order), inclusion(WithoutReplacement(), draft, counts)
    monkeypatch.setattr("polydraft.theory.successive_law.CHUNK", 1000)
    torch.testing.assert_close(SuccessiveLaw.of(draft, counts).chain(order), whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(inclusion(WithoutReplacement(), draft, counts), drawn, rtol=0, atol=1e-14)
