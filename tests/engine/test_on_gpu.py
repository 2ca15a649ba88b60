"""The decode loop on a GPU: run with `python -m pytest -m gpu` where there is one."""

import pytest
import torch
from doubles import tiny_model
from torch import nn

import polydraft
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
