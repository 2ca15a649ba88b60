"""The test of any generation function: ours and Hugging Face's pass, wrong ones are caught, bad ones are refused."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import IID, RecursiveRejection, SamplingParams, TopDown, Widths
from polydraft.conformance import LawReport, check, joint_law, tiny_draft, tiny_target
from polydraft.errors import InvalidParameter, InvalidProbabilities
from polydraft.verifiers import OutcomeLaw

PROMPTS = [[1, 2, 3], [5, 0, 5, 0, 5]]
Many = Callable[[list[list[int]], list[int]], Tensor]


@cache
def models() -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """A target, a draft model, and one that is further from the target."""
    target = tiny_target(seed=0, vocabulary=8)
    return target, tiny_draft(target), tiny_draft(target, distance=0.1)


def ours(far: bool = False, **options: object) -> Many:
    target, draft = models()[0], models()[2 if far else 1]

    def generate(prompts: list[list[int]], seeds: list[int]) -> Tensor:
        ids = torch.tensor(prompts)
        settings = {"temperature": 1.0, "top_k": 0, "max_new_tokens": 3, "drafter": draft, **options}
        output = polydraft.generate(target, ids, attention_mask=torch.ones_like(ids), seed=seeds[0], **settings)
        return output.sequences[:, ids.shape[1] :]

    return generate


def hugging_face(**options: object) -> Many:
    def generate(prompts: list[list[int]], seeds: list[int]) -> Tensor:
        ids = torch.tensor(prompts)
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": 3, **options}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds[0])
            texts = models()[0].generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return texts[:, ids.shape[1] :]

    return generate


def checked(generate: Many, samples: int = 1000, **options: object) -> LawReport:
    return check(generate, models()[0], PROMPTS, batch_size=500, most_samples=samples, **options)


@pytest.mark.long(3)
@pytest.mark.parametrize(
    ("maker", "options"),
    [
        (ours, {}),
        (ours, {"temperature": 0.7, "top_p": 0.9}),
        (hugging_face, {}),
        (hugging_face, {"temperature": 0.7, "top_p": 0.9}),
        (hugging_face, {"top_k": 3}),
        (hugging_face, {"min_p": 0.2}),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, dict) else one.__name__,
)
def test_correct_generation_passes(maker: Callable[..., Many], options: dict[str, float]) -> None:
    report = checked(maker(**options), params=SamplingParams(**options))
    assert report.passed and report.verdict == "passed"
    assert report.samples == 2000
    assert report.e_value < 100
    for one in report.prompts:
        assert 0 < one.total_variation < 2 * one.by_chance
        assert one.by_chance < one.detectable < 0.25


def test_plain_sampling_and_exact_token_by_token_sampling_pass_one_at_a_time() -> None:
    target = models()[0]

    def generate(prompt: list[int], seed: int) -> list[int]:
        stream, text = torch.Generator().manual_seed(seed), list(prompt)
        for _ in range(2):
            with torch.no_grad():
                logits = target(input_ids=torch.tensor([text])).logits[0, -1]
            text.append(int(logits.softmax(-1).multinomial(1, generator=stream)))
        return text[len(prompt) :]

    seen: list[tuple[int, int]] = []
    report = check(
        generate, target, [[4]], new_tokens=2, most_samples=150, on_progress=lambda *counts: seen.append(counts)
    )
    assert report.passed and report.samples == 150
    assert seen == [(32, 150), (64, 150), (96, 150), (128, 150), (150, 150)]


@dataclass(frozen=True)
class SkipsDuplicates(RecursiveRejection):
    """A wrong rule found in public code: a repeated draft is passed over without updating the residual."""

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        repeats = torch.tril(drafts.unsqueeze(-1) == drafts.unsqueeze(-2), diagonal=-1).any(dim=-1)
        order = repeats.int().argsort(dim=-1, stable=True)
        kept = drafts.masked_fill(repeats, -1).gather(-1, order)
        honest = super().law(kept, draft_probs, target_probs)
        return OutcomeLaw(torch.zeros_like(honest.child).scatter(-1, order, honest.child), honest.rest)


WRONG: dict[str, Many] = {
    "temperature 1.1, ours": ours(temperature=1.1),
    "temperature 1.1, Hugging Face's": hugging_face(temperature=1.1),
    "top_p": hugging_face(top_p=0.95),
    "duplicates skipped": ours(verifier=TopDown(SkipsDuplicates()), policy=Widths((4,)), far=True, max_new_tokens=2),
    "one seed for all": lambda prompts, seeds: ours()(prompts, [7]),
    "the draft model's text": lambda prompts, seeds: models()[1].generate(
        torch.tensor(prompts), do_sample=True, top_k=0, max_new_tokens=3
    )[:, len(prompts[0]) :],
}


NEEDED = {"duplicates skipped": 1}


@pytest.mark.long(1)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_generation_is_caught(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        report = checked(WRONG[name], samples=10_000, new_tokens=NEEDED.get(name, 3))
    assert report.verdict == "deviates" and not report.passed
    assert report.e_value >= 1e6
    assert report.samples < 20_000


def test_the_honest_twin_of_the_wrong_rule_passes() -> None:
    assert RecursiveRejection().scheme == IID()
    honest = ours(verifier=TopDown(RecursiveRejection()), policy=Widths((4,)), far=True, max_new_tokens=2)
    assert checked(honest, samples=2000, new_tokens=1).passed


def test_a_strong_bias_is_caught_early_and_named() -> None:
    honest = hugging_face()

    def generate(prompts: list[list[int]], seeds: list[int]) -> Tensor:
        texts = honest(prompts, seeds)
        texts[:, 1] = torch.where(texts[:, 0] == 6, 6, texts[:, 1])
        return texts

    report = checked(generate, samples=10_000)
    assert report.samples == 1000, "the first look is enough"
    worst = report.worst.worst
    assert worst.tokens[:2] == (6, 6) and worst.observed > worst.expected + 0.1
    assert "deviates after 1000 samples" in str(report) and "[6, 6" in str(report)


def test_an_impossible_token_ends_it_at_once() -> None:
    report = checked(hugging_face(), params=SamplingParams(top_k=3))
    assert report.e_value == inf and report.samples == 1000
    assert report.worst.worst.expected == 0


def test_temperature_zero_is_token_identity() -> None:
    cold = SamplingParams(temperature=0)
    for correct in (ours(temperature=0), hugging_face(do_sample=False, temperature=None)):
        report = checked(correct, params=cold)
        assert report.passed and report.samples == 1000 and report.prompts[0].total_variation == 0
        assert report.prompts[0].by_chance == 0 and report.prompts[0].detectable < 0.01
    wanted = joint_law(models()[0], PROMPTS[0], 3, cold).probs.flatten().argmax()

    def nearly(prompts: list[list[int]], seeds: list[int]) -> Tensor:
        texts = ours(temperature=0)(prompts, seeds)
        if prompts[0] == PROMPTS[0]:
            texts[-1, 2] = (texts[-1, 2] + 1) % 8
        return texts

    report = checked(nearly, params=cold)
    assert not report.passed and report.e_value == inf
    tokens = report.prompts[0].worst.tokens
    assert len(tokens) == 3 and tokens[0] * 64 + tokens[1] * 8 + (tokens[2] - 1) % 8 == int(wanted)
    assert report.prompts[0].worst.observed == pytest.approx(1 / 500)


def uniform(context: list[int]) -> Tensor:
    return torch.full((4,), 0.25, dtype=torch.float64)


def test_a_target_may_be_a_function_of_the_context() -> None:
    def alternating(context: list[int]) -> Tensor:
        mass = torch.ones(4, dtype=torch.float64)
        mass[context[-1]] = 3
        return mass / mass.sum()

    law = joint_law(alternating, [2], 2, SamplingParams()).probs
    assert law.shape == (4, 4)
    assert float(law[2, 2]) == pytest.approx(0.25) and float(law[0, 1]) == pytest.approx(1 / 36)

    def generate(prompts: list[list[int]], seeds: list[int]) -> Tensor:
        stream = torch.Generator().manual_seed(seeds[0])
        return (
            law.flatten().multinomial(len(prompts), replacement=True, generator=stream).unsqueeze(-1)
            // torch.tensor([4, 1])
            % 4
        )

    options = {"new_tokens": 2, "batch_size": 200, "most_samples": 2000}
    assert check(generate, alternating, [[2]], **options).passed
    assert not check(generate, uniform, [[2]], **options).passed


def test_the_law_of_a_model_is_that_of_its_softmax() -> None:
    target = models()[0]
    law = joint_law(target, [1, 2], 2, SamplingParams(temperature=0.5)).probs
    with torch.no_grad():
        first = (target(input_ids=torch.tensor([[1, 2]])).logits[0, -1] / 0.5).softmax(-1)
        second = (target(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1] / 0.5).softmax(-1)
    torch.testing.assert_close(law[3], first[3] * second)
    assert float(law.sum()) == pytest.approx(1, abs=1e-12)


def test_a_low_false_alarm_rate_needs_more_samples() -> None:
    needed = [
        check(
            ours(temperature=1.2), models()[0], PROMPTS, batch_size=100, most_samples=10_000, false_alarm=rate
        ).samples
        for rate in (0.05, 1e-6)
    ]
    assert needed[0] < needed[1] < 10_000


def too_few(prompt: list[int], seed: int) -> list[int]:
    return [1, 2]


def good(prompt: list[int], seed: int) -> list[int]:
    return [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"false_alarm": 0.0}, "false_alarm must lie between 0 and 1, but is 0.0"),
        ({"false_alarm": 1.5}, "but is 1.5"),
        ({"most_samples": 0}, "most_samples must be at least 1, but is 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, but is 0"),
        ({"prompts": []}, "prompts must be at least 1, but is 0"),
        ({"prompts": [[]]}, "at least one and none negative, but is []"),
        ({"prompts": [[1, -2]]}, "but is [1, -2]"),
        ({"prompts": [[1, 9]]}, "The prompt has token 9, but the target's vocabulary has 4 tokens"),
        ({"new_tokens": 0}, "new_tokens must be at least 1, but is 0"),
        ({"new_tokens": 9}, "A vocabulary of 4 tokens has 262144 continuations of 9 tokens; at most 100000"),
        ({"params": SamplingParams(temperature=0.5)}, "the target is a function that gives probabilities"),
        ({"generate": too_few}, "must return at least 3 new tokens, but returned [1, 2] after prompt [0]"),
        ({"generate": lambda prompt, seed: [0, 4, 1]}, "returned token 4, but the target's vocabulary has 4 tokens"),
        ({"generate": lambda prompt, seed: [0, -1, 1]}, "returned token -1"),
        ({"generate": lambda prompts, seeds: [[1, 2, 3]], "batch_size": 3}, "given 3 prompts, but returned 1 rows"),
    ],
)
def test_bad_input_is_named(changes: dict[str, object], words: str) -> None:
    arguments = {"generate": good, "target": uniform, "prompts": [[0]], "most_samples": 9, **changes}
    with pytest.raises(InvalidParameter) as error:
        check(**arguments)
    assert words in str(error.value)


def test_a_large_vocabulary_is_refused_before_it_is_enumerated() -> None:
    with pytest.raises(InvalidParameter, match="A vocabulary of 60 tokens has 216000 continuations of 3 tokens"):
        check(good, tiny_target(vocabulary=60), [[0]])


def test_rows_that_are_no_law_are_named() -> None:
    with pytest.raises(InvalidProbabilities, match="The target's law has a row whose sum differs from 1 by 1"):
        check(good, lambda context: torch.full((4,), 0.5), [[0]])


def test_tiny_models_are_fixed_by_their_seed_and_leave_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = tiny_target(3), tiny_target(3), tiny_target(4)
    draft = tiny_draft(one, distance=0.1)
    assert torch.equal(before, torch.random.get_rng_state())
    ids = torch.tensor([[1, 2, 3], [7, 0, 5], [4, 4, 6]])
    with torch.no_grad():
        laws = [model(input_ids=ids).logits.softmax(-1) for model in (one, same, other, draft)]
    assert torch.equal(laws[0], laws[1]) and not torch.allclose(laws[0], laws[2])
    overlap = torch.minimum(laws[0], laws[3]).sum(dim=-1).mean()
    assert 0.4 < float(overlap) < 0.95 and one.dtype == torch.float64
    assert tiny_target(dtype=torch.float32).dtype == torch.float32
    with pytest.raises(InvalidParameter, match="vocabulary must be at least 2, but is 1"):
        tiny_target(vocabulary=1)
