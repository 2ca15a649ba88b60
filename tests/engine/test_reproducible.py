"""The reproducible mode: with `SharedNoise` the text for a seed does not depend on what drafts it."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from doubles import perturbed, tiny_model
from scipy.stats import chi2, kstest
from torch import Tensor
from transformers import PreTrainedModel
from worlds import World, check_by_chi_square, completed

import polydraft
from polydraft import (
    EAGLE_25,
    IID,
    Chain,
    Fixed,
    Given,
    HuggingFaceModel,
    ModelDrafter,
    NgramDrafter,
    NoDraft,
    RecursiveRejectionWithoutReplacement,
    SamplingParams,
    TopDown,
    TopK,
    Widths,
)
from polydraft.drafters import Drafter
from polydraft.probs import Noise
from polydraft.schemes import Coupled, WithoutReplacement, enumerate_drafts
from polydraft.trees import TreePolicy, grow
from polydraft.verifiers import SharedNoise, TreeVerifier

VOCAB, NEW, FALSE_ALARM = 24, 24, 1e-6
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]])


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB)


def model(noise: float, **options) -> ModelDrafter:
    return ModelDrafter(HuggingFaceModel(perturbed(target(), noise)), **options)


WAYS: dict[str, tuple[Callable[[], Drafter], TreePolicy, TreeVerifier]] = {
    "no drafts": (NoDraft, Chain(1), SharedNoise()),
    "a chain": (lambda: model(0.05), Chain(3), SharedNoise()),
    "a tree": (lambda: model(0.05), Fixed(EAGLE_25), SharedNoise()),
    "a bad model": (lambda: model(0.5), Widths((3, 2)), SharedNoise()),
    "a cold model": (lambda: model(0.1, params=SamplingParams(temperature=0.3)), Widths((2, 2, 1)), SharedNoise()),
    "a short list": (lambda: model(0.1, shortlist_size=3), Widths((3, 1)), SharedNoise()),
    "n-grams": (NgramDrafter, Chain(4), SharedNoise(Given())),
    "likeliest tokens": (lambda: model(0.05), Widths((2, 1)), SharedNoise(TopK())),
    "independent drafts": (lambda: model(0.05), Widths((2, 2)), SharedNoise(IID())),
}


def generated(way: tuple, seed: int, ids: Tensor = PROMPT, **options) -> polydraft.GenerationOutput:
    drafter, policy, verifier = way
    settings = {"temperature": 0.8, "top_k": 0, "max_new_tokens": NEW, **options}
    return polydraft.generate(target(), ids, drafter=drafter(), policy=policy, verifier=verifier, seed=seed, **settings)


@cache
def plain(seed: int) -> list[int]:
    return generated(WAYS["no drafts"], seed).sequences[0].tolist()


@pytest.mark.long(4)
@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_the_text_for_a_seed_is_the_same_whatever_drafts_it(way: str) -> None:
    accepted = 0
    for seed in range(3):
        output = generated(WAYS[way], seed)
        assert output.sequences[0].tolist() == plain(seed)
        accepted += output.statistics.accepted
    assert accepted > 0


def test_other_seeds_give_other_texts() -> None:
    assert len({tuple(plain(seed)) for seed in range(3)}) == 3


def test_the_usual_rules_give_texts_that_depend_on_the_tree() -> None:
    usual = TopDown(RecursiveRejectionWithoutReplacement())
    texts = {
        tuple(generated((lambda: model(0.05), policy, usual), 0).sequences[0].tolist())
        for policy in (Chain(1), Chain(3), Widths((3, 2)))
    }
    assert len(texts) > 1


def test_a_row_of_a_batch_is_the_text_of_its_own_seed() -> None:
    ids = torch.tensor([[0, 0, 7, 2, 9], [3, 1, 4, 1, 5]])
    together = generated(WAYS["a tree"], 4, ids, attention_mask=(ids > 0).long())
    for row, prompt in enumerate((ids[:1, 2:], ids[1:])):
        alone = generated(WAYS["a chain"], 4 + 1_000_003 * row, prompt)
        assert together.sequences[row, ids.shape[1] :].tolist() == alone.sequences[0, prompt.shape[1] :].tolist()


def test_coupled_drafts_are_accepted_more_often_than_independent_ones() -> None:
    shared = generated(WAYS["a chain"], 0, max_new_tokens=60).statistics
    assert (
        shared.acceptance_rate > generated(WAYS["independent drafts"], 0, max_new_tokens=60).statistics.acceptance_rate
    )


def many(rows: int) -> Noise:
    """Return tied numbers for many rows at once; it has no streams."""
    return Noise((), seeds=tuple(range(rows)))


def test_three_tokens_of_many_seeds_follow_the_target() -> None:
    """From drafting to the bonus token, by chi-square with false-alarm rate 1e-6."""
    world, noise = World.random(5), many(2**13)
    draft = grow(torch.zeros(2**13, dtype=torch.int64), Widths((2, 1)), Coupled(), world.propose, noise)
    verdict = SharedNoise().verify(draft, world.target_rows(draft.tree), noise)
    assert set(verdict.length.tolist()) == {0, 1, 2}
    check_by_chi_square(completed(world, verdict.tokens(draft.tree)), world.joint)


def test_coupled_drafts_have_the_law_of_sampling_without_replacement() -> None:
    row = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
    tokens = torch.tensor([7, 3, 100_000, 8]).expand(4096, 1, 4)
    rows = row.expand(4096, 1, 4)
    uniforms = many(4096).tied(2, tokens)
    drawn = Coupled().sample(rows, torch.full((4096, 1), 2), uniforms, 2).squeeze(1)
    outcomes, chance = enumerate_drafts(WithoutReplacement(), row, 2)
    torch.testing.assert_close(Coupled().probability(row.expand(len(outcomes), 4), outcomes), chance)
    found = (drawn.unsqueeze(1) == outcomes).all(dim=-1).sum(dim=0)
    assert int(found.sum()) == 4096
    statistic = float(((found - 4096 * chance) ** 2 / (4096 * chance)).sum())
    assert statistic < chi2.isf(FALSE_ALARM, len(chance) - 1)


class TestTiedNumbers:
    def test_depend_on_seed_place_and_token_and_on_nothing_else(self) -> None:
        tokens = torch.tensor([[4, 0, 9], [4, 0, 9]])
        noise = Noise.from_seed(1, 2)
        first = noise.at(0, torch.tensor([10, 20])).tied(3, tokens)
        later = noise.at(5, torch.tensor([12, 22]))
        later.uniform(7)
        assert torch.equal(first, later.tied(1, tokens))
        assert torch.equal(first[:, 1:], later.tied(1, tokens[:, 1:]))
        assert (
            len({*first.flatten().tolist(), *noise.at(0, torch.tensor([11, 21])).tied(3, tokens).flatten().tolist()})
            == 12
        )
        assert not torch.equal(first, Noise.from_seed(2, 2).at(0, torch.tensor([10, 20])).tied(3, tokens))

    def test_are_splitmix64(self) -> None:
        """The first outputs of the published generator started at zero."""
        published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
        numbers = Noise((), seeds=(0,)).tied(0, torch.tensor([[0, 1, 2]]))[0]
        assert numbers.tolist() == [(word >> 11) * 2.0**-53 for word in published]

    def test_are_uniform_and_independent(self) -> None:
        numbers = many(40).tied(0, torch.arange(500).expand(40, 500))
        assert float(numbers.min()) >= 0
        assert float(numbers.max()) < 1
        assert kstest(numbers.flatten().numpy(), "uniform").pvalue > FALSE_ALARM
        for other in (numbers.roll(1, 0), numbers.roll(1, 1), many(40).tied(1, torch.arange(500).expand(40, 500))):
            pair = torch.stack([numbers.flatten(), other.flatten()])
            assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / 20_000**0.5

    @pytest.mark.parametrize("seed", [0, -1, 2**62, 2**63 + 5, 2**64 - 1])
    def test_any_seed_will_do(self, seed: int) -> None:
        numbers = Noise.from_seed(seed, 1).tied(0, torch.arange(5).unsqueeze(0))
        assert bool(((numbers >= 0) & (numbers < 1)).all())


def race(rates: Tensor, uniforms: Tensor) -> Tensor:
    return -torch.log1p(-uniforms) / rates


class TestCoupling:
    """How often the target's token is among k coupled drafts, in 20000 races of 50 tokens."""

    @pytest.fixture
    def rows(self) -> tuple[Tensor, Tensor]:
        logits = 2 * torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        noise = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return (logits + noise).softmax(dim=-1), logits.softmax(dim=-1)

    def hits(self, rows: tuple[Tensor, Tensor], k: int) -> float:
        target, draft = rows
        uniforms = many(20_000).tied(0, torch.arange(50).expand(20_000, 50))
        drafted = race(draft, uniforms).topk(k, largest=False).indices
        return float((drafted == race(target, uniforms).argmin(dim=-1, keepdim=True)).any(dim=-1).double().mean())

    def test_one_draft_is_accepted_as_often_as_published(self, rows: tuple[Tensor, Tensor]) -> None:
        target, draft = rows
        ratios = torch.maximum(target.unsqueeze(-1) / target, draft.unsqueeze(-1) / draft)
        exact = float((1 / ratios.sum(dim=0)).sum())
        distance = float((target - draft).abs().sum()) / 2
        assert (1 - distance) / (1 + distance) <= exact <= 1 - distance
        assert abs(self.hits(rows, 1) - exact) < 5 * (exact * (1 - exact) / 20_000) ** 0.5

    def test_one_noise_for_all_drafts_accepts_more_than_one_for_each(self, rows: tuple[Tensor, Tensor]) -> None:
        target, draft = rows
        for k in (2, 4):
            uniforms = torch.stack([many(20_000).tied(j, torch.arange(50).expand(20_000, 50)) for j in range(k)])
            drafted = race(draft, uniforms).argmin(dim=-1)
            emitted = race(target, uniforms).amin(dim=0).argmin(dim=-1)
            separate = float((drafted == emitted).any(dim=0).double().mean())
            assert self.hits(rows, k) > separate + 0.01
