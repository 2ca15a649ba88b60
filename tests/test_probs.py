import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from zoo import ZOO, pairs, row, rows

from polydraft.errors import InvalidParameter, InvalidProbabilities
from polydraft.probs import (
    Noise,
    SamplingParams,
    check_probs,
    normalised,
    overlap,
    residual,
    sample,
    shortlist,
    to_atoms,
    to_probs,
    whole_row,
    without,
)

BELOW_ONE = math.nextafter(1, 0)

SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_k=1000),
    SamplingParams(top_p=0.8),
    SamplingParams(top_p=1e-9),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(typical_p=0.4),
    SamplingParams(typical_p=0.95),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.5, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.2, top_k=30, top_p=0.95, min_p=0.02, typical_p=0.8),
]


def nasty_logits() -> torch.Tensor:
    noise = torch.randn(6, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    noise[1, ::3] = -math.inf
    noise[2] = noise[2].round()
    noise[3] = 0.0
    noise[4, 5] = 60.0
    noise[5, 1:] = -math.inf
    return noise


def hugging_face(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Apply the warpers in the order of `GenerationMixin._get_logits_processor`."""
    warpers = LogitsProcessorList()
    if params.temperature != 1:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        warpers.append(TypicalLogitsWarper(params.typical_p))
    no_tokens = torch.zeros(len(logits), 0, dtype=torch.int64)
    return warpers(no_tokens, logits).softmax(dim=-1)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_to_probs_agrees_with_hugging_face(params: SamplingParams):
    logits = nasty_logits()
    expected = hugging_face(logits, params)
    found = to_probs(logits, params)
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_to_probs_works_on_any_leading_axes():
    logits, params = nasty_logits(), SETTINGS[-1]
    stacked = to_probs(logits.reshape(2, 3, 40), params)
    for place, line in enumerate(logits):
        torch.testing.assert_close(stacked[place // 3, place % 3], to_probs(line, params), rtol=1e-12, atol=0)


def test_temperature_zero_is_the_one_hot_row_of_the_first_largest_logit():
    logits = torch.tensor([[1.0, 3.0, 2.0], [-math.inf, -5.0, -5.0]])
    probs = to_probs(logits, SamplingParams(temperature=0.0, top_p=0.5))
    assert probs.tolist() == [[0, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-37, 1e-45, 1e-300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tiny_temperature_tends_to_one_hot(temperature: float, dtype: torch.dtype):
    logits = torch.tensor([-math.inf, 10.0, 30.0, 29.0], dtype=dtype)
    assert to_probs(logits, SamplingParams(temperature=temperature)).tolist() == [0, 0, 1, 0]


def test_logits_of_minus_infinity_never_occur():
    logits = torch.tensor([0.0, -math.inf, 1.0], dtype=torch.float64)
    for params in SETTINGS:
        probs = to_probs(logits, params)
        assert probs[1] == 0
        assert float(probs.sum()) == pytest.approx(1, abs=1e-14)


def test_the_precision_of_the_input_is_kept_but_at_least_float32():
    logits = torch.tensor([1.0, 2.0])
    kept = {dtype: to_probs(logits.to(dtype), SamplingParams()).dtype for dtype in (torch.bfloat16, torch.float64)}
    assert kept == {torch.bfloat16: torch.float32, torch.float64: torch.float64}


@pytest.mark.parametrize("bad", [[0, math.nan], [0, math.inf], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_refused(bad: list[float], temperature: float):
    logits = torch.tensor([[1.0, 2.0], bad])
    with pytest.raises(InvalidProbabilities):
        to_probs(logits, SamplingParams(temperature=temperature))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("typical_p", 0.0),
        ("typical_p", 1.5),
    ],
)
def test_settings_outside_their_range_are_refused_by_name(name: str, value: float):
    with pytest.raises(InvalidParameter, match=name):
        SamplingParams(**{name: value})


def test_the_ends_of_the_ranges_are_allowed():
    SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=1.0, typical_p=1.0)


@pytest.mark.parametrize("bad", [(0.5, math.nan), (1.5, -0.5), (math.inf, 0.0), (0.5, 0.4), (0.0, 0.0)])
def test_check_probs_refuses_rows_that_are_no_distribution(bad: tuple[float, float]):
    with pytest.raises(InvalidProbabilities, match="the target"):
        check_probs(torch.stack([row(0.5, 0.5), row(*bad)]), "the target")


def test_check_probs_accepts_distributions():
    check_probs(torch.stack([row(0.5, 0.5), row(0, 1)]), "the target")
    check_probs(row(0.5, 0.4), "the target", tolerance=0.2)
    check_probs(torch.zeros(0, 3), "no rows")


def test_shortlist_takes_the_likeliest_first_and_renormalises():
    logits = row(0.1, 0.4, 0.2, 0.3).log()
    tokens, probs = shortlist(logits, SamplingParams(), 2)
    assert tokens.tolist() == [1, 3]
    torch.testing.assert_close(probs, row(4 / 7, 3 / 7))


def test_shortlist_filters_what_it_lists():
    logits = row(0.1, 0.4, 0.2, 0.3).log()
    tokens, probs = shortlist(logits, SamplingParams(temperature=0.5, min_p=0.3), 3)
    assert tokens.tolist() == [1, 3, 2]
    torch.testing.assert_close(probs, row(16 / 25, 9 / 25, 0))


def test_shortlist_at_temperature_zero_keeps_the_order_of_several_tokens():
    tokens, probs = shortlist(row(0.2, 0.5, 0.3).log(), SamplingParams(temperature=0.0), 3)
    assert tokens.tolist() == [1, 2, 0]
    torch.testing.assert_close(probs, row(0.5, 0.3, 0.2))


def test_shortlist_is_no_longer_than_the_vocabulary():
    tokens, probs = shortlist(torch.zeros(2, 3, 4), SamplingParams(), 9)
    assert tokens.shape == probs.shape == (2, 3, 4)


def test_whole_row_lists_every_token_by_its_id():
    logits = row(0.1, 0.4, 0.2, 0.3).log()
    tokens, probs = whole_row(logits.expand(2, 3, 4), SamplingParams(temperature=0.5, min_p=0.3))
    assert torch.equal(tokens, torch.arange(4).expand(2, 3, 4))
    torch.testing.assert_close(probs, row(0, 16 / 25, 0, 9 / 25).expand(2, 3, 4))
    _, plain = whole_row(logits, SamplingParams(temperature=0))
    torch.testing.assert_close(plain, row(0.1, 0.4, 0.2, 0.3))
    with pytest.raises(InvalidProbabilities):
        whole_row(torch.full((2, 4), float("nan")), SamplingParams())


def test_to_atoms_puts_the_mass_off_the_list_last():
    target = torch.stack([row(0.1, 0.2, 0.3, 0.4), row(0, 0, 0, 1)])
    atoms = to_atoms(target, torch.tensor([[3, 1], [2, -1]]))
    torch.testing.assert_close(atoms, torch.stack([row(0.4, 0.2, 0.4), row(0, 0, 1)]))


@given(rows(5))
def test_to_atoms_is_a_distribution(target: torch.Tensor):
    atoms = to_atoms(target, torch.tensor([4, 2, 0, 1, 3]))
    assert bool((atoms >= 0).all())
    assert float(atoms.sum()) == pytest.approx(1, abs=1e-14)
    assert float(atoms[-1]) <= 1e-15


def test_without_removes_the_named_tokens_and_nothing_else():
    probs = torch.stack([row(0.1, 0.2, 0.3, 0.4)] * 3)
    left = without(probs, torch.tensor([[3, 0, 3], [-1, -1, 3], [-1, -1, -1]]))
    assert left.tolist() == [[0, 0.2, 0.3, 0], [0.1, 0.2, 0.3, 0], [0.1, 0.2, 0.3, 0.4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-36, 1e-43, 1e-310])
def test_normalised_rows_sum_to_one_however_small_they_were(dtype: torch.dtype, scale: float):
    mass = torch.tensor([0.0, 3.0, 1.0], dtype=torch.float64).mul(scale).to(dtype)
    result = normalised(mass, torch.tensor([1.0, 0.0, 0.0], dtype=dtype))
    if mass.any():
        assert float(result.sum()) == pytest.approx(1, abs=1e-6)
        assert float(result[1]) == pytest.approx(0.75, abs=0.02)
    else:
        assert result.tolist() == [1, 0, 0]


def test_normalised_falls_back_row_by_row():
    mass = torch.stack([row(0, 0), row(1, 3)])
    assert normalised(mass, torch.stack([row(1, 0)] * 2)).tolist() == [[1, 0], [0.25, 0.75]]


@given(pairs())
def test_overlap_and_residual_are_those_of_the_definition(pair: tuple[torch.Tensor, torch.Tensor]):
    target, draft = pair
    shared = sum(min(a, b) for a, b in zip(target.tolist(), draft.tolist(), strict=True))
    assert float(overlap(target, draft)) == pytest.approx(shared, abs=1e-15)
    rest = [max(a - b, 0) for a, b in zip(target.tolist(), draft.tolist(), strict=True)]
    expected = [mass / sum(rest) for mass in rest] if sum(rest) else target.tolist()
    assert residual(target, draft).tolist() == pytest.approx(expected, abs=1e-12)


def test_the_residual_of_equal_rows_is_the_target():
    target, draft = ZOO["equal"]
    assert torch.equal(residual(target, draft), target)


@given(rows(5), st.sampled_from([1.0, 1e-30, 4.0]))
def test_sample_hits_each_index_as_often_as_its_weight_says(weights: torch.Tensor, scale: float):
    """Of n evenly spaced uniforms, at most one more or less than n * p falls on an index of probability p."""
    many = 1000
    uniforms = (torch.arange(many, dtype=torch.float64) + 0.5) / many
    drawn = sample((weights * scale).expand(many, -1), uniforms)
    counts = torch.bincount(drawn, minlength=5)
    assert float((counts - many * weights).abs().max()) <= 1 + 1e-9


@given(
    rows(4),
    st.sampled_from([0.0, 5e-324, 1e-30, 0.5, 1 - 1e-16, BELOW_ONE]) | st.floats(0, BELOW_ONE),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_sample_never_draws_an_index_without_weight(weights: torch.Tensor, uniform: float, dtype: torch.dtype):
    weights = weights.to(dtype)
    drawn = sample(weights, torch.tensor(uniform, dtype=torch.float64))
    assert 0 <= drawn < 4
    assert weights[drawn] > 0


def test_sample_at_the_ends_of_the_unit_interval():
    weights = row(0, 0.2, 0, 0.8, 0)
    assert sample(weights.expand(2, -1), torch.tensor([0.0, BELOW_ONE]).double()).tolist() == [1, 3]
    assert sample(weights, torch.tensor(BELOW_ONE).double()) == 3


def test_noise_repeats_with_its_seed_and_moves_on():
    one, two = Noise.from_seed(3, 2), Noise.from_seed(3, 2)
    first = one.uniform(4, 5)
    assert torch.equal(first, two.uniform(4, 5))
    assert not torch.equal(first, one.uniform(4, 5))
    assert not torch.equal(first, Noise.from_seed(4, 2).uniform(4, 5))
    assert first.dtype == torch.float64
    assert first.shape == (2, 4, 5)
    assert bool(((first >= 0) & (first < 1)).all())


def test_streams_differ_by_the_last_bits_of_a_seed_and_steps_by_all_of_them():
    """What the docstring says of torch's generator; should torch read more bits one day, the text may promise more."""
    one, two = Noise.from_seed(5, 1), Noise.from_seed(5 + 2**32, 1)
    assert torch.equal(one.uniform(8), two.uniform(8))
    assert not torch.equal(one.at(0).uniform(8), two.at(0).uniform(8))
    tokens = torch.arange(8).unsqueeze(0)
    assert not torch.equal(one.tied(0, tokens), two.tied(0, tokens))
    assert not torch.equal(Noise.from_seed(5, 2).uniform(8)[0], Noise.from_seed(5, 2).uniform(8)[1])


def test_a_row_of_noise_does_not_depend_on_the_rows_beside_it():
    alone, together = Noise.from_seed(3, 1), Noise.from_seed(3, 3)
    for shape in ((2,), (3, 1), ()):
        noise = together.uniform(*shape)
        assert torch.equal(alone.uniform(*shape)[0], noise[0])
        assert not torch.equal(noise[0], noise[1])
        assert not torch.equal(noise[1], noise[2])
