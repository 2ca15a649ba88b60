"""Compiled passes against plain ones. Dynamo alone checks slots and masks in a second; inductor, slow, the rest."""

import copy

import pytest
import torch
from doubles import scored, tiny_model

import polydraft
from polydraft.drafters import ModelDrafter
from polydraft.models import CompiledModel, HuggingFaceModel
from polydraft.models.compiled import LEVELS
from polydraft.trees import Widths


@pytest.mark.parametrize("widths", [(), LEVELS])
@pytest.mark.parametrize("lengths", [[5], [5, 9, 1]])
def test_compiled_passes_score_trees_like_plain_ones(widths: tuple[int, ...], lengths: list[int]) -> None:
    model = tiny_model(seed=1, max_position_embeddings=512)
    compiled = CompiledModel(model, widths, backend="eager")
    for plain, fast in zip(scored(HuggingFaceModel(model), lengths), scored(compiled, lengths), strict=True):
        torch.testing.assert_close(fast, plain, rtol=0, atol=1e-12)
    assert len(compiled.passes.seconds) == 1, "both trees are of one shape, compiled once"


def test_a_model_is_compiled_once_whoever_asks() -> None:
    model = tiny_model(seed=1, max_position_embeddings=512)
    first = CompiledModel(model, backend="eager")
    assert CompiledModel(model, backend="eager").passes is first.passes
    assert CompiledModel(tiny_model(seed=1, max_position_embeddings=512), backend="eager").passes is not first.passes


def test_a_copy_of_a_model_is_compiled_anew() -> None:
    model = tiny_model(seed=1, max_position_embeddings=512)
    first = CompiledModel(model, backend="eager")
    assert CompiledModel(copy.deepcopy(model), backend="eager").passes.model is not first.passes.model


def test_prompts_take_the_plain_way() -> None:
    compiled = CompiledModel(tiny_model(seed=1, max_position_embeddings=512), backend="eager")
    scored(compiled, [200])
    assert {shape[1] for shape in compiled.passes.seconds} == {Widths((2, 2)).shape.size}


def test_a_compiled_draft_model_drafts_what_the_plain_one_does() -> None:
    target, draft = tiny_model(seed=1, max_position_embeddings=512), tiny_model(seed=2, max_position_embeddings=512)
    prompt = torch.arange(6).unsqueeze(0)
    settings = {"policy": Widths((3, 2)), "temperature": 0.9, "seed": 3, "max_new_tokens": 24}
    plain = polydraft.stream(target, prompt, drafter=ModelDrafter(HuggingFaceModel(draft)), **settings).exhaust()
    compiled = CompiledModel(draft, LEVELS, backend="eager")
    fast = polydraft.stream(target, prompt, drafter=ModelDrafter(compiled), **settings).exhaust()
    assert fast.new_tokens == plain.new_tokens
    assert len(compiled.passes.seconds) == 1, "all levels share one shape"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_inductor_writes_the_greedy_text() -> None:
    pair = polydraft.load_pair()
    prompt = torch.tensor([pair.tokenizer("def add(a, b):\n")["input_ids"]])
    settings = {"temperature": 0.0, "max_new_tokens": 32}
    plain = polydraft.stream(pair.target, prompt, drafter=pair.draft, **settings).exhaust()
    fast = polydraft.stream(pair.target, prompt, drafter=pair.draft, compile=True, **settings).exhaust()
    assert fast.new_tokens == plain.new_tokens
