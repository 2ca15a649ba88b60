"""Log-probabilities are the model's own, at every emitted token, whatever was drafted and however it was sampled."""

from typing import Any

import pytest
import torch
from doubles import perturbed, tiny_model
from transformers import PreTrainedModel

import polydraft
from polydraft.errors import InvalidParameter

PROMPTS = {"one": [3, 1, 4, 1, 5], "two": [2, 7]}


@pytest.fixture
def target() -> PreTrainedModel:
    return tiny_model()


@pytest.mark.parametrize("options", [{"do_sample": False}, {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.3}])
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_they_are_those_of_a_pass_over_the_text(drafter: str, options: dict[str, Any], target: PreTrainedModel) -> None:
    drafts: Any = perturbed(target, 0.1) if drafter == "model" else drafter
    ids = torch.tensor([PROMPTS["one"], [2, 7, 1, 8, 2]])
    found = polydraft.generate(target, ids, drafter=drafts, output_logprobs=4, max_new_tokens=9, seed=1, **options)
    assert found.logprobs is not None and len(found.logprobs) == 2
    expected = target(found.sequences).logits.detach().log_softmax(dim=-1)
    for row, told in enumerate(found.logprobs):
        assert [one.token for one in told] == found.sequences[row, 5:].tolist()
        for place, one in enumerate(told):
            law = expected[row, 4 + place]
            assert one.logprob == pytest.approx(float(law[one.token]), abs=1e-9)
            values, tokens = law.topk(4)
            assert [token for token, _ in one.top] == tokens.tolist()
            assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-9)


def test_a_stream_and_many_texts_have_them(target: PreTrainedModel) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "output_logprobs": 0}
    run = polydraft.stream(target, torch.tensor([PROMPTS["one"]]), **options)
    streamed = [one for block in run for one in block.rows[0].logprobs]
    texts = {one.name: one for one in polydraft.generate_many(target, PROMPTS, **options)}
    assert [one.token for one in streamed] == texts["one"].tokens and not streamed[0].top
    for ours, theirs in zip(streamed, texts["one"].logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)
    assert len(texts["two"].logprobs) == 6


def test_they_are_not_there_unless_asked_for(target: PreTrainedModel) -> None:
    found = polydraft.generate(target, torch.tensor([PROMPTS["one"]]), max_new_tokens=3)
    assert found.logprobs is None and "logprobs" not in found
    for wrong in (-1, True, 10**9):
        with pytest.raises(InvalidParameter, match="output_logprobs must be a number of tokens"):
            polydraft.generate(target, torch.tensor([PROMPTS["one"]]), output_logprobs=wrong)  # pyright: ignore
    with pytest.raises(InvalidParameter, match="output_logprobs needs return_dict_in_generate=True"):
        target.generate(
            torch.tensor([PROMPTS["one"]]), custom_generate=polydraft.generate, output_logprobs=1, max_new_tokens=2
        )
