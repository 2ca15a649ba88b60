"""The decode loop on a GPU: run with `python -m pytest -m gpu` where there is one."""

import pytest
import torch
from doubles import scored, tiny_model
from torch import nn

import polydraft
from polydraft.models import HuggingFaceModel
from polydraft.models.fused.graphs import SEEN
from polydraft.models.tiny import tiny_of_type
from polydraft.trees import Widths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
PROMPTS = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])


def text(*, compiled: bool = False, rows: slice = slice(None), drafting: bool = True, temperature: float = 0.0) -> list:
    target, draft = (nn.Module.to(tiny_model(seed=seed), "cuda") for seed in (0, 1))
    prompt = PROMPTS[rows].to("cuda")
    run = polydraft.stream(
        target,
        prompt,
        attention_mask=torch.ones_like(prompt),
        drafter=draft if drafting else polydraft.NoDraft(),
        policy=Widths((3, 2)),
        temperature=temperature,
        seed=0,
        max_new_tokens=20,
        compile=compiled,
    )
    return run.exhaust().new_tokens


def test_greedy_text_is_that_of_plain_decoding() -> None:
    assert text() == text(drafting=False)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_batch_is_its_first_row_alone(temperature: float) -> None:
    assert text(temperature=temperature)[0] == text(rows=slice(1), temperature=temperature)[0]


@pytest.mark.filterwarnings("ignore")
def test_compiled_passes_write_the_same_greedy_text() -> None:
    assert text(compiled=True) == text()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "qwen3", "stablelm"])
@pytest.mark.parametrize("lengths", [[5], [5, 9, 1]])
def test_recorded_passes_score_trees_like_the_models_own(kind: str, lengths: list[int]) -> None:
    model = nn.Module.to(tiny_of_type(kind), "cuda")
    wanted, made = scored(HuggingFaceModel(model, fused=False), lengths), HuggingFaceModel(model)
    assert made.fused is not None and made.fused.graphs is not None
    for _ in range(SEEN + 3):
        for plain, fast in zip(wanted, scored(made, lengths), strict=True):
            torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5 * float(plain.abs().max()))
    assert any(memory.passes for memory in (*made.fused.graphs.free, *made.fused.graphs.left))


def test_texts_of_one_model_and_of_later_calls_are_the_same() -> None:
    assert text() == text() == text(drafting=False)
    target = nn.Module.to(tiny_model(seed=0), "cuda")
    calls = [
        polydraft.stream(target, PROMPTS[:1].to("cuda"), drafter="ngram", temperature=0.0, max_new_tokens=60).exhaust()
        for _ in range(3)
    ]
    assert len({tuple(one.new_tokens[0]) for one in calls}) == 1
