from collections import Counter
from itertools import permutations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.quasirandom import SobolEngine
from zoo import ZOO, row, rows

from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.schemes import (
    IID,
    Given,
    Scheme,
    TopK,
    TopThenSample,
    WithoutReplacement,
    enumerate_drafts,
    require_scheme,
)

Law = dict[tuple[int, ...], float]

SCHEMES: list[Scheme] = [IID(), WithoutReplacement(), TopK(), TopThenSample(), Given()]
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
each_draft_row = pytest.mark.parametrize("draft", [draft for _, draft in ZOO.values()], ids=list(ZOO))


def by_hand(scheme: Scheme, draft: list[float], k: int) -> Law:
    """Write the law of k drafts down from its definition, without tensors."""
    support = [atom for atom, mass in enumerate(draft) if mass > 0]
    likeliest = sorted(support, key=lambda atom: (-draft[atom], atom))
    if scheme == IID():
        law: Law = {}
        for drafts in product(support, repeat=k):
            law[drafts] = 1.0
            for atom in drafts:
                law[drafts] *= draft[atom]
        return law
    if scheme == WithoutReplacement():
        return {
            _padded(drafts, k): _successive(drafts, draft) for drafts in permutations(support, min(k, len(support)))
        }
    if scheme == TopThenSample():
        top, others = likeliest[: k - 1], likeliest[k - 1 :]
        total = sum(draft[atom] for atom in others)
        drawn = {_padded((*top, atom), k): draft[atom] / total for atom in others}
        return drawn or {_padded(top, k): 1.0}
    return {_padded((likeliest if scheme == TopK() else support)[:k], k): 1.0}


def _padded(drafts, k: int) -> tuple[int, ...]:
    return (*drafts, *[-1] * (k - len(drafts)))


def _successive(drafts: tuple[int, ...], draft: list[float]) -> float:
    probability, left = 1.0, dict(enumerate(draft))
    for atom in drafts:
        probability *= left[atom] / sum(left.values())
        del left[atom]
    return probability


def listed(scheme: Scheme, draft: Tensor, k: int) -> Law:
    drafts, probability = enumerate_drafts(scheme, draft, k)
    return dict(zip(map(tuple, drafts.tolist()), probability.tolist(), strict=True))


def sampled(scheme: Scheme, draft: Tensor, k: int, count: int) -> Law:
    """Return the shares of all outcomes over 2^14 scrambled Sobol points, a uniform grid in max(k, K) dimensions."""
    many = 2**14
    uniforms = SobolEngine(max(k, len(draft)), scramble=True, seed=0).draw(many, dtype=torch.float64)
    uniforms = uniforms.clamp(0, 1 - 1e-15)
    drafts = scheme.sample(draft.expand(many, -1), torch.full((many,), count), uniforms, k)
    return {kind: times / many for kind, times in Counter(map(tuple, drafts.tolist())).items()}


def distance(one: Law, two: Law) -> float:
    return max(abs(one.get(drafts, 0) - two.get(drafts, 0)) for drafts in {*one, *two})


@each_scheme
@each_draft_row
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_law_is_that_of_the_definition(scheme: Scheme, draft: Tensor, k: int):
    law = listed(scheme, draft, k)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert distance(law, by_hand(scheme, draft.tolist(), k)) < 1e-12


@each_scheme
@given(draft=rows(4), k=st.integers(1, 3))
def test_the_law_is_that_of_the_definition_for_any_row(scheme: Scheme, draft: Tensor, k: int):
    law = listed(scheme, draft, k)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert distance(law, by_hand(scheme, draft.tolist(), k)) < 1e-12


def test_without_replacement_is_not_the_product_law_conditioned_on_distinct_tokens():
    law = listed(WithoutReplacement(), row(0.8, 0.1, 0.1), 2)
    both_in_the_tail = law[1, 2] + law[2, 1]
    assert both_in_the_tail == pytest.approx(2 * 0.1 * 0.1 / 0.9, abs=1e-12)


@each_scheme
def test_probability_is_zero_for_impossible_drafts(scheme: Scheme):
    draft = row(0.5, 0.3, 0.2, 0)
    impossible = torch.tensor([[3, 0], [0, 3], [-1, 0], [0, -1], [-1, -1]])
    assert scheme.probability(draft.expand(5, -1), impossible).tolist() == [0] * 5


@each_scheme
@each_draft_row
@pytest.mark.parametrize("k", [2, 3])
def test_samples_follow_the_law(scheme: Scheme, draft: Tensor, k: int):
    """Exact up to the grid: Sobol points miss the area of such regions by less than 0.004."""
    assert distance(sampled(scheme, draft, k, k), by_hand(scheme, draft.tolist(), k)) < 0.004


@each_scheme
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_smaller_count_gives_the_law_of_fewer_drafts(scheme: Scheme, count: int):
    draft = row(0.1, 0.5, 0.3, 0.1)
    shares = sampled(scheme, draft, 3, count)
    expected = {_padded(drafts, 3): p for drafts, p in by_hand(scheme, draft.tolist(), count).items()} if count else {}
    assert distance(shares, expected or {(-1, -1, -1): 1.0}) < 0.004


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement(), TopK(), Given()], ids=lambda scheme: scheme.name)
def test_fewer_drafts_are_the_first_of_more(scheme: Scheme):
    stream = torch.Generator().manual_seed(0)
    law = torch.rand(50, 5, generator=stream, dtype=torch.float64)
    law = law / law.sum(dim=-1, keepdim=True)
    uniforms = torch.rand(50, 5, generator=stream, dtype=torch.float64)
    most = scheme.sample(law, torch.full((50,), 4), uniforms, 4)
    for k in (1, 2, 3):
        assert torch.equal(scheme.sample(law, torch.full((50,), k), uniforms, k), most[:, :k])


@each_scheme
def test_rows_of_one_batch_may_have_different_counts(scheme: Scheme):
    stream = torch.Generator().manual_seed(1)
    law = torch.rand(2, 4, 5, generator=stream, dtype=torch.float64)
    uniforms = torch.rand(2, 4, 5, generator=stream, dtype=torch.float64)
    counts = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
    drafts = scheme.sample(law, counts, uniforms, 3)
    assert torch.equal((drafts >= 0).sum(dim=-1), counts)
    for i, j in product(range(2), range(4)):
        alone = scheme.sample(law[i, j], counts[i, j], uniforms[i, j], 3)
        assert torch.equal(drafts[i, j], alone)
        assert min(alone[: counts[i, j]].tolist(), default=0) >= 0, "absent drafts come last"


@each_scheme
def test_absent_drafts_where_the_support_is_smaller_than_k(scheme: Scheme):
    draft = row(0, 0.25, 0, 0.75)
    drafts = scheme.sample(draft, torch.tensor(3), torch.full((4,), 0.5).double(), 3).tolist()
    if scheme == IID():
        assert set(drafts) <= {1, 3}, "independent drafts repeat tokens instead"
    else:
        assert sorted(drafts) == [-1, 1, 3]
        assert drafts[-1] == -1


@each_scheme
def test_more_drafts_than_atoms(scheme: Scheme):
    drafts = scheme.sample(row(0.5, 0.5), torch.tensor(4), torch.full((4,), 0.25).double(), 4).tolist()
    assert sorted(drafts) == ([0, 0, 0, 0] if scheme == IID() else [-1, -1, 0, 1])


@each_scheme
@pytest.mark.parametrize("uniform", [0.0, 5e-324, 1 - 2**-53])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_atoms_without_mass_are_never_drawn(scheme: Scheme, uniform: float, dtype: torch.dtype):
    draft = row(0, 0.1, 0, 0.2, 0.7, 0).to(dtype)
    drafts = scheme.sample(draft, torch.tensor(3), torch.full((6,), uniform, dtype=torch.float64), 3)
    assert set(drafts.tolist()) <= {1, 3, 4}


@each_scheme
def test_deterministic_schemes_are_those_that_ignore_the_uniforms(scheme: Scheme):
    draft = row(0.4, 0.3, 0.3).expand(64, -1)
    uniforms = SobolEngine(3).draw(64, dtype=torch.float64)
    drafts = scheme.sample(draft, torch.full((64,), 2), uniforms, 2)
    assert scheme.deterministic == (len(drafts.unique(dim=0)) == 1)


def test_top_k_keeps_the_order_of_equals_and_given_that_of_the_shortlist():
    draft, counts, uniforms = row(0.2, 0.3, 0.2, 0.3), torch.tensor(3), torch.zeros(4).double()
    assert TopK().sample(draft, counts, uniforms, 3).tolist() == [1, 3, 0]
    assert Given().sample(draft, counts, uniforms, 3).tolist() == [0, 1, 2]


def test_long_lists_are_refused():
    with pytest.raises(InvalidParameter, match="200000"):
        enumerate_drafts(IID(), torch.full((600,), 1 / 600), 2)


def test_unpaired_schemes_are_refused_by_name():
    require_scheme(IID(), (IID, WithoutReplacement), "the rule")
    with pytest.raises(UnpairedScheme, match="the rule works with drafts that are iid or given, not top-k"):
        require_scheme(TopK(), (IID, Given), "the rule")
