"""What Hugging Face prepares for a decoding method, taken apart for the decode loop."""

from types import SimpleNamespace

import pytest
import torch
from doubles import tiny_model, tiny_tokenizer
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

import polydraft
from polydraft.errors import InvalidParameter
from polydraft.models import is_prepared, prepare_by_hugging_face, take_apart
from polydraft.models.generation.prepare import split_processors
from polydraft.probs import SamplingParams, to_probs


class Unknown(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - input_ids[:, -1:]


WARPERS = (
    TemperatureLogitsWarper(0.7),
    TopKLogitsWarper(5),
    TopPLogitsWarper(0.9),
    MinPLogitsWarper(0.05),
    TypicalLogitsWarper(0.95),
)
ALL = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, typical_p=0.95)


def test_the_warpers_at_the_end_become_parameters() -> None:
    before = RepetitionPenaltyLogitsProcessor(1.3)
    assert split_processors([before, *WARPERS]) == (ALL, [before])
    assert split_processors([*WARPERS]) == (ALL, [])
    assert split_processors([]) == (SamplingParams(), [])


def test_parameters_do_to_logits_what_the_warpers_do() -> None:
    logits = 3 * torch.randn(50, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    history = torch.zeros(50, 1, dtype=torch.int64)
    warped = LogitsProcessorList(WARPERS)(history, logits).softmax(dim=-1)
    params, rest = split_processors([*WARPERS])
    assert not rest
    assert torch.allclose(to_probs(logits, params), warped, atol=1e-12)


def test_something_unknown_stays_where_it_is() -> None:
    unknown = Unknown()
    assert split_processors([*WARPERS, unknown]) == (SamplingParams(), [*WARPERS, unknown])
    assert split_processors([WARPERS[1], unknown, WARPERS[2]]) == (
        SamplingParams(top_p=0.9),
        [WARPERS[1], unknown],
    )


def test_another_order_is_not_rearranged() -> None:
    top_k, temperature = TopKLogitsWarper(5), TemperatureLogitsWarper(0.5)
    assert split_processors([top_k, temperature]) == (SamplingParams(temperature=0.5), [top_k])
    again = TemperatureLogitsWarper(2.0)
    assert split_processors([temperature, again]) == (SamplingParams(temperature=2.0), [temperature])


def test_padding_on_either_side_is_taken_off() -> None:
    prompts = torch.tensor([[9, 9, 1, 2], [3, 4, 5, 9], [6, 7, 8, 2]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]])
    criteria = StoppingCriteriaList([MaxLengthCriteria(10), MaxLengthCriteria(7), EosTokenCriteria(torch.tensor([5]))])
    prepared = take_apart(prompts, LogitsProcessorList(), criteria, mask, GenerationConfig(), 12)
    assert prepared.lengths.tolist() == [2, 3, 4]
    rows = [row[:length].tolist() for row, length in zip(prepared.tokens, prepared.lengths, strict=True)]
    assert rows == [[1, 2], [3, 4, 5], [6, 7, 8, 2]]
    assert [row.tolist() for row in prepared.padding] == [[9, 9], [], []]
    assert prepared.eos == {5}
    assert prepared.pad == 5
    assert prepared.max_length == 7
    assert prepared.criteria == ((), (), ())


def test_without_a_mask_every_token_counts() -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(10)])
    prepared = take_apart(torch.tensor([[0, 0, 1]]), LogitsProcessorList(), criteria, None, GenerationConfig(), 12)
    assert prepared.lengths.tolist() == [3]
    assert prepared.padding == ()
    assert prepared.eos == frozenset()


def test_a_penalty_that_ignores_prompts_is_split_by_row() -> None:
    ignored = torch.tensor([1, 3])
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=ignored)])
    criteria = StoppingCriteriaList([MaxLengthCriteria(10)])
    prepared = take_apart(torch.tensor([[0, 1, 2], [0, 1, 2]]), processors, criteria, None, GenerationConfig(), 4)
    changed = [rows[0](torch.tensor([[0, 1, 2]]), torch.ones(1, 4)).tolist() for rows in prepared.processors]
    assert changed == [[[1.0, 0.5, 0.5, 1.0]], [[1.0, 1.0, 1.0, 1.0]]]


def test_calls_from_inside_generate_are_told_from_calls_from_outside() -> None:
    inside = {
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(10)]),
        "logits_processor": LogitsProcessorList(),
        "generation_config": tiny_model().generation_config,
    }
    assert is_prepared(inside)
    assert not is_prepared({**inside, "stopping_criteria": StoppingCriteriaList()})
    for name in inside:
        assert not is_prepared({key: value for key, value in inside.items() if key != name})


@pytest.mark.parametrize(
    ("options", "samples", "params"),
    [
        ({}, False, SamplingParams()),
        ({"temperature": 0}, False, SamplingParams()),
        ({"temperature": 0, "top_p": 0.5}, False, SamplingParams()),
        ({"temperature": 0.5, "top_k": 3}, True, SamplingParams(temperature=0.5, top_k=3)),
        ({"do_sample": True, "top_k": 0, "top_p": 0.5}, True, SamplingParams(top_p=0.5)),
        ({"do_sample": True}, True, SamplingParams(top_k=50)),
        ({"do_sample": False, "temperature": 0.5}, False, SamplingParams()),
    ],
)
def test_a_temperature_decides_whether_to_sample(
    options: dict[str, float], samples: bool, params: SamplingParams
) -> None:
    seen = prepare_by_hugging_face(
        tiny_model(vocab=60), torch.tensor([[1, 2]]), lambda *_, **given: given, {**options, "max_new_tokens": 3}
    )
    assert seen["generation_config"].do_sample is samples
    assert split_processors(list(seen["logits_processor"])) == (params, [])


def test_stop_strings_need_a_tokenizer_and_become_a_criterion() -> None:
    model, prompt = tiny_model(vocab=101), torch.tensor([[1, 2]])
    with pytest.raises(InvalidParameter, match="stop_strings need the tokenizer"):
        polydraft.generate(model, prompt, stop_strings="ab", max_new_tokens=3)
    seen = prepare_by_hugging_face(
        model,
        prompt,
        lambda *_, **given: SimpleNamespace(**given),
        {"stop_strings": ["ab"], "tokenizer": tiny_tokenizer(), "max_new_tokens": 3},
    )
    prepared = take_apart(prompt, seen.logits_processor, seen.stopping_criteria, None, GenerationConfig(), 101)
    assert [type(one) for one in prepared.criteria[0]] == [StopStringCriteria]
    assert prepared.max_length == 5
