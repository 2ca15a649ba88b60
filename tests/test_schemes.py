from collections import Counter
from fractions import Fraction
from itertools import combinations, permutations, product
from math import factorial, prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor
from torch.quasirandom import SobolEngine
from zoo import ZOO, row, rows

from polydraft.errors import InvalidParameter, UnpairedScheme
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
    require_scheme,
)

Law = dict[tuple[int, ...], float]

ANY_NUMBER: list[Scheme] = [
    IID(),
    WithoutReplacement(),
    TopK(),
    TopThenSample(),
    TopThenIID(0),
    TopThenIID(1),
    TopThenIID(2),
    ConditionalPoisson(),
    Given(),
]
"""The schemes that draw any number of drafts from one row; `Product` has tests of its own."""
SCHEMES: list[Scheme] = [*ANY_NUMBER, SpecHub()]
REPEATING = {IID(), TopThenIID(0), TopThenIID(1), TopThenIID(2)}
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
each_draft_row = pytest.mark.parametrize("draft", [draft for _, draft in ZOO.values()], ids=list(ZOO))


def each_number(*numbers: int) -> pytest.MarkDecorator:
    """Run a test for all schemes with each number of drafts that they can draw."""
    pairs = [(scheme, k) for scheme in SCHEMES for k in numbers if k <= most(scheme)]
    return pytest.mark.parametrize(("scheme", "k"), pairs, ids=lambda one: getattr(one, "name", str(one)))


def most(scheme: Scheme, k: int = 99) -> int:
    return min(k, 2) if scheme == SpecHub() else k


def by_hand(scheme: Scheme, draft: list[float], k: int) -> Law:
    """Write the law of k drafts down from its definition, in exact arithmetic where sums are involved."""
    support = [atom for atom, mass in enumerate(draft) if mass > 0]
    likeliest = sorted(support, key=lambda atom: (-draft[atom], atom))
    few = min(k, len(support))
    if scheme == IID():
        return _independent(support, draft, k)
    if scheme == WithoutReplacement() or (scheme == SpecHub() and k == 1):
        return {_padded(drafts, k): _successive(drafts, draft) for drafts in permutations(support, few)}
    if scheme == ConditionalPoisson():
        weights = {
            _padded(drafts, k): prod(Fraction(draft[x]) for x in drafts) for drafts in permutations(support, few)
        }
        return {drafts: float(weight / sum(weights.values())) for drafts, weight in weights.items()}
    if scheme == SpecHub():
        pairs = {(x, likeliest[0]): draft[x] for x in likeliest[1:]}
        after = _independent(likeliest[1:], draft, 1) or {(-1,): 1.0}
        return pairs | {(likeliest[0], *second): draft[likeliest[0]] * chance for second, chance in after.items()}
    if isinstance(scheme, TopThenIID | TopThenSample):
        fixed = min(k, scheme.top if isinstance(scheme, TopThenIID) else k - 1)
        drawn = _independent(likeliest[fixed:], draft, k - fixed) or {(): 1.0}
        return {_padded((*likeliest[:fixed], *drafts), k): chance for drafts, chance in drawn.items()}
    return {_padded((likeliest if scheme == TopK() else support)[:k], k): 1.0}


def _independent(atoms: list[int], draft: list[float], k: int) -> Law:
    """Return the law of k independent draws from the draft row on these atoms; empty where there are none."""
    total = sum(Fraction(draft[atom]) for atom in atoms)
    return {
        drafts: float(prod(Fraction(draft[atom]) / total for atom in drafts)) for drafts in product(atoms, repeat=k)
    }


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
    uniforms = SobolEngine(max(k, draft.shape[-1]), scramble=True, seed=0).draw(many, dtype=torch.float64)
    uniforms = uniforms.clamp(0, 1 - 1e-15)
    drafts = scheme.sample(draft.expand(many, *draft.shape), torch.full((many,), count), uniforms, k)
    return {kind: times / many for kind, times in Counter(map(tuple, drafts.tolist())).items()}


def distance(one: Law, two: Law) -> float:
    return max(abs(one.get(drafts, 0) - two.get(drafts, 0)) for drafts in {*one, *two})


@each_draft_row
@each_number(1, 2, 3, 4)
def test_the_law_is_that_of_the_definition(scheme: Scheme, draft: Tensor, k: int):
    law = listed(scheme, draft, k)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert distance(law, by_hand(scheme, draft.tolist(), k)) < 1e-12


@pytest.mark.long(5)
@each_scheme
@given(draft=rows(4), k=st.integers(1, 3))
def test_the_law_is_that_of_the_definition_for_any_row(scheme: Scheme, draft: Tensor, k: int):
    law = listed(scheme, draft, most(scheme, k))
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert distance(law, by_hand(scheme, draft.tolist(), most(scheme, k))) < 1e-12


@pytest.mark.long(5)
@each_scheme
@given(draft=rows(4))
def test_the_number_of_drafts_present_is_known_and_tells_the_law(scheme: Scheme, draft: Tensor):
    """A verifier sees how many drafts are there, not how many were asked for: both must have one law."""
    law = listed(scheme, draft, most(scheme, 4))
    numbers = {sum(atom >= 0 for atom in drafts) for drafts in law}
    assert len(numbers) == 1
    there = numbers.pop()
    fewer = {_padded(drafts, most(scheme, 4)): chance for drafts, chance in listed(scheme, draft, there).items()}
    assert distance(law, fewer) < 1e-12


def test_without_replacement_is_not_the_product_law_conditioned_on_distinct_tokens():
    law = listed(WithoutReplacement(), row(0.8, 0.1, 0.1), 2)
    both_in_the_tail = law[1, 2] + law[2, 1]
    assert both_in_the_tail == pytest.approx(2 * 0.1 * 0.1 / 0.9, abs=1e-12)


@each_scheme
def test_probability_is_zero_for_impossible_drafts(scheme: Scheme):
    draft = row(0.5, 0.3, 0.2, 0)
    impossible = torch.tensor([[3, 0], [0, 3], [-1, 0], [0, -1], [-1, -1]])
    assert scheme.probability(draft.expand(5, -1), impossible).tolist() == [0] * 5
    if scheme not in REPEATING:
        assert scheme.probability(draft, torch.tensor([0, 0])) == 0


@each_draft_row
@each_number(2, 3)
def test_samples_follow_the_law(scheme: Scheme, draft: Tensor, k: int):
    """Exact up to the grid: Sobol points miss the area of such regions by less than 0.004."""
    assert distance(sampled(scheme, draft, k, k), by_hand(scheme, draft.tolist(), k)) < 0.004


@each_scheme
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_smaller_count_gives_the_law_of_fewer_drafts(scheme: Scheme, count: int):
    draft = row(0.1, 0.5, 0.3, 0.1)
    k = most(scheme, 3)
    shares = sampled(scheme, draft, k, count)
    expected = {_padded(drafts, k): p for drafts, p in by_hand(scheme, draft.tolist(), count).items()} if count else {}
    assert distance(shares, expected or {(-1,) * k: 1.0}) < 0.004


@pytest.mark.parametrize(
    "scheme", [IID(), WithoutReplacement(), TopK(), TopThenIID(2), Given()], ids=lambda scheme: scheme.name
)
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
    k = most(scheme, 3)
    counts = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]]).clamp_max(k)
    drafts = scheme.sample(law, counts, uniforms, k)
    assert torch.equal((drafts >= 0).sum(dim=-1), counts)
    for i, j in product(range(2), range(4)):
        alone = scheme.sample(law[i, j], counts[i, j], uniforms[i, j], k)
        assert torch.equal(drafts[i, j], alone)
        assert min(alone[: counts[i, j]].tolist(), default=0) >= 0, "absent drafts come last"


@pytest.mark.parametrize("scheme", ANY_NUMBER, ids=lambda scheme: scheme.name)
def test_absent_drafts_where_the_support_is_smaller_than_k(scheme: Scheme):
    draft = row(0, 0.25, 0, 0.75)
    drafts = scheme.sample(draft, torch.tensor(3), torch.full((4,), 0.5).double(), 3).tolist()
    if scheme in REPEATING - {TopThenIID(2)}:
        assert set(drafts) <= {1, 3}, "independent drafts repeat tokens instead"
    else:
        assert sorted(drafts) == [-1, 1, 3]
        assert drafts[-1] == -1


@each_scheme
def test_a_row_without_mass_gives_no_drafts(scheme: Scheme):
    draft = torch.stack([row(0, 0, 0), row(0.5, 0.5, 0)])
    drafts = scheme.sample(draft, torch.tensor([2, 2]), torch.full((2, 3), 0.25).double(), 2)
    assert drafts[0].tolist() == [-1, -1]
    assert bool((drafts[1] >= 0).all())
    assert scheme.probability(draft, torch.full((2, 2), -1)).tolist() == [1, 0]


@pytest.mark.parametrize("scheme", ANY_NUMBER, ids=lambda scheme: scheme.name)
def test_more_drafts_than_atoms(scheme: Scheme):
    drafts = scheme.sample(row(0.5, 0.5), torch.tensor(4), torch.full((4,), 0.25).double(), 4).tolist()
    repeated = {TopThenIID(1): [0, 1, 1, 1]}.get(scheme, [0, 0, 0, 0])
    assert sorted(drafts) == (repeated if scheme in REPEATING - {TopThenIID(2)} else [-1, -1, 0, 1])


@each_scheme
@pytest.mark.parametrize("uniform", [0.0, 5e-324, 1 - 2**-53])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_atoms_without_mass_are_never_drawn(scheme: Scheme, uniform: float, dtype: torch.dtype):
    draft = row(0, 0.1, 0, 0.2, 0.7, 0).to(dtype)
    k = most(scheme, 3)
    drafts = scheme.sample(draft, torch.tensor(k), torch.full((6,), uniform, dtype=torch.float64), k).tolist()
    assert set(drafts) <= {1, 3, 4}
    assert scheme in REPEATING or len(set(drafts)) == k


@each_scheme
def test_deterministic_schemes_are_those_that_ignore_the_uniforms(scheme: Scheme):
    draft, k = row(0.4, 0.2, 0.2, 0.2).expand(64, -1), most(scheme, 3)
    uniforms = SobolEngine(4).draw(64, dtype=torch.float64)
    drafts = scheme.sample(draft, torch.full((64,), k), uniforms, k)
    assert scheme.deterministic == (len(drafts.unique(dim=0)) == 1)


def test_top_k_keeps_the_order_of_equals_and_given_that_of_the_shortlist():
    draft, counts, uniforms = row(0.2, 0.3, 0.2, 0.3), torch.tensor(3), torch.zeros(4).double()
    assert TopK().sample(draft, counts, uniforms, 3).tolist() == [1, 3, 0]
    assert Given().sample(draft, counts, uniforms, 3).tolist() == [0, 1, 2]


def chi_square(scheme: Scheme, draft: Tensor, k: int, truth: Scheme) -> float:
    """Return the chi-square tail probability of many samples of one scheme under the law of another."""
    many = 60_000
    uniforms = torch.rand(many, draft.shape[-1], generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    drafts = scheme.sample(draft.expand(many, *draft.shape), torch.full((many,), k), uniforms, k)
    seen = Counter(map(tuple, drafts.tolist()))
    law = listed(truth, draft, k)
    assert set(seen) <= set(law)
    return float(chi2.sf(sum((seen[x] - many * p) ** 2 / (many * p) for x, p in law.items()), len(law) - 1))


WIDE = row(0.3, 0.05, 0.2, 0.15, 0.2, 0.1)


@each_number(2, 3)
def test_many_samples_follow_the_law(scheme: Scheme, k: int):
    """A false alarm for one choice of the seed in a million."""
    if len(by_hand(scheme, WIDE.tolist(), k)) > 1:
        assert chi_square(scheme, WIDE, k, truth=scheme) > 1e-6


def test_many_samples_would_show_another_law():
    assert chi_square(WithoutReplacement(), WIDE, 3, truth=ConditionalPoisson()) < 1e-6
    assert chi_square(ConditionalPoisson(), WIDE, 3, truth=WithoutReplacement()) < 1e-6


def unordered(law: Law) -> Law:
    result: Law = {}
    for drafts, chance in law.items():
        result[tuple(sorted(drafts))] = result.get(tuple(sorted(drafts)), 0) + chance
    return result


@given(draft=rows(4))
def test_spechub_draws_the_pairs_of_top_then_sample(draft: Tensor):
    pairs, expected = listed(SpecHub(), draft, 2), listed(TopThenSample(), draft, 2)
    assert distance(unordered(pairs), unordered(expected)) < 1e-12


def test_spechub_orders_the_pairs_in_its_own_way():
    assert distance(listed(SpecHub(), row(0.5, 0.3, 0.2), 2), listed(TopThenSample(), row(0.5, 0.3, 0.2), 2)) > 0.1


def test_spechub_draws_no_more_than_two():
    draft = row(0.5, 0.3, 0.2)
    with pytest.raises(InvalidParameter, match="at most 2 drafts per node, not 3"):
        SpecHub().sample(draft, torch.tensor(3), torch.zeros(3).double(), 3)
    with pytest.raises(InvalidParameter, match="at most 2 drafts per node, not 4"):
        enumerate_drafts(SpecHub(), draft, 4)


@given(draft=rows(4), k=st.integers(1, 3))
def test_top_then_iid_is_a_family(draft: Tensor, k: int):
    for top, same in ((0, IID()), (k - 1, TopThenSample()), (k, TopK()), (k + 1, TopK())):
        assert distance(listed(TopThenIID(top), draft, k), listed(same, draft, k)) < 1e-12


def test_top_then_iid_without_top_draws_what_iid_draws():
    stream = torch.Generator().manual_seed(2)
    law, uniforms = (torch.rand(50, 5, generator=stream, dtype=torch.float64) for _ in range(2))
    counts = torch.arange(50) % 4
    assert torch.equal(TopThenIID(0).sample(law, counts, uniforms, 3), IID().sample(law, counts, uniforms, 3))


def test_a_negative_number_of_top_tokens_is_refused():
    with pytest.raises(InvalidParameter, match="top must be an integer >= 0, but is -1"):
        TopThenIID(-1)


@given(draft=rows(4), k=st.integers(1, 3))
def test_conditional_poisson_is_the_independent_law_given_distinct_tokens(draft: Tensor, k: int):
    law = {drafts: chance for drafts, chance in by_hand(IID(), draft.tolist(), k).items() if len(set(drafts)) == k}
    total = sum(law.values())
    if total > 1e-12:
        expected = {drafts: chance / total for drafts, chance in law.items()}
        assert distance(listed(ConditionalPoisson(), draft, k), expected) < 1e-12


def test_containment_of_conditional_poisson_is_a_ratio_of_elementary_symmetric_polynomials():
    draft, members = row(0.4, 0.3, 0.2, 0.1), {0, 2, 3}
    for k in (1, 2, 3):
        inside, everywhere = (
            sum(prod(float(draft[atom]) for atom in drafts) for drafts in combinations(atoms, k))
            for atoms in (sorted(members), range(4))
        )
        law = listed(ConditionalPoisson(), draft, k)
        contained = sum(chance for drafts, chance in law.items() if set(drafts) <= members)
        assert contained == pytest.approx(inside / everywhere, abs=1e-12)


def test_a_small_support_is_drafted_in_uniformly_random_order():
    law = listed(ConditionalPoisson(), row(0.9, 0, 0.09, 0.01), 4)
    assert len(law) == factorial(3)
    assert [*law.values()] == [pytest.approx(1 / 6, abs=1e-15)] * 6


def test_conditional_poisson_of_a_whole_vocabulary():
    """Sums of products of probabilities far below the smallest float are taken in logarithms."""
    draft = torch.full((2, 5000), 1e-60, dtype=torch.float64)
    draft[0, :4990] = 0
    uniforms = torch.rand(2, 5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drafts = ConditionalPoisson().sample(draft, torch.tensor([8, 8]), uniforms, 8)
    assert [len(set(one)) for one in drafts.tolist()] == [8, 8]
    assert int(drafts[0].min()) >= 4990


PAIR = torch.stack([row(0.6, 0.3, 0.1, 0), row(0, 0.2, 0.3, 0.5)])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_product_draws_draft_j_from_row_j(k: int):
    law = listed(Product(), PAIR, k)
    expected = {x: prod(float(PAIR[j % 2, atom]) for j, atom in enumerate(x)) for x in product(range(4), repeat=k)}
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert distance(law, expected) < 1e-12
    assert distance(sampled(Product(), PAIR, k, k), expected) < 0.004
    assert chi_square(Product(), PAIR, k, truth=Product()) > 1e-6


def test_product_of_equal_rows_is_iid():
    stream = torch.Generator().manual_seed(2)
    law, uniforms = (torch.rand(50, 5, generator=stream, dtype=torch.float64) for _ in range(2))
    law = law / law.sum(dim=-1, keepdim=True)
    counts = torch.arange(50) % 5
    for members in (1, 2, 4, 5):
        same = law.unsqueeze(-2).expand(50, members, 5)
        drafts = Product().sample(same, counts, uniforms, 4)
        assert torch.equal(drafts, IID().sample(law, counts, uniforms, 4))
        assert torch.equal(Product().probability(same, drafts[:, :1]), IID().probability(law, drafts[:, :1]))


def test_product_ends_at_a_row_without_mass():
    rows_of_three = torch.stack([PAIR[0], torch.zeros(4).double(), PAIR[1]])
    uniforms = torch.full((4,), 0.5).double()
    assert Product().sample(rows_of_three, torch.tensor(3), uniforms, 3).tolist() == [0, -1, -1]
    assert listed(Product(), rows_of_three, 3) == {(0, -1, -1): 0.6, (1, -1, -1): 0.3, (2, -1, -1): 0.1}
    assert listed(Product(), torch.zeros(2, 3).double(), 2) == {(-1, -1): 1.0}


@pytest.mark.parametrize("uniform", [0.0, 5e-324, 1 - 2**-53])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_product_never_draws_an_atom_without_mass(uniform: float, dtype: torch.dtype):
    drafts = Product().sample(PAIR.to(dtype), torch.tensor(4), torch.full((4,), uniform).double(), 4).tolist()
    assert set(drafts[0::2]) <= {0, 1, 2}
    assert set(drafts[1::2]) <= {1, 2, 3}


def test_long_lists_are_refused():
    with pytest.raises(InvalidParameter, match="200000"):
        enumerate_drafts(IID(), torch.full((600,), 1 / 600), 2)


def test_unpaired_schemes_are_refused_by_name():
    require_scheme(IID(), (IID, WithoutReplacement), "the rule")
    with pytest.raises(UnpairedScheme, match="the rule works with drafts that are iid or given, not top-k"):
        require_scheme(TopK(), (IID, Given), "the rule")
    with pytest.raises(UnpairedScheme, match="iid or TopThenIID, not top-k"):
        require_scheme(TopK(), (IID, TopThenIID), "the rule")
    with pytest.raises(UnpairedScheme, match="that are iid, not top 2 then iid"):
        require_scheme(TopThenIID(2), (IID,), "the rule")


SAYS = {
    # deterministic, independent, a lone draft is drawn, several rows, numbers
    IID(): (False, True, True, False, Uniforms.OF_DRAFTS),
    WithoutReplacement(): (False, True, True, False, Uniforms.OF_TOKENS),
    TopK(): (True, True, False, False, Uniforms.NONE),
    TopThenSample(): (False, True, True, False, Uniforms.OF_DRAFTS),
    TopThenIID(0): (False, True, True, False, Uniforms.OF_DRAFTS),
    TopThenIID(1): (False, True, False, False, Uniforms.OF_DRAFTS),
    ConditionalPoisson(): (False, True, True, False, Uniforms.OF_DRAFTS),
    SpecHub(): (False, True, True, False, Uniforms.OF_TOKENS),
    Product(): (False, True, True, True, Uniforms.OF_TOKENS),
    Coupled(): (False, False, False, False, Uniforms.SHARED),
    Given(): (True, True, False, False, Uniforms.NONE),
}


@pytest.mark.parametrize("scheme", SAYS, ids=lambda scheme: scheme.name)
def test_what_a_scheme_says_of_itself(scheme: Scheme) -> None:
    said = scheme.deterministic, scheme.independent, scheme.lone_draft_is_drawn, scheme.several_rows, scheme.uniforms
    assert said == SAYS[scheme]
