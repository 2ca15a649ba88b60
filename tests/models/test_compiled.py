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


@pytest.mark.long(2)
@pytest.mark.parametrize("widths", [(), LEVELS])
@pytest.mark.parametrize("lengths", [[5], [5, 9, 1]])
def test_compiled_passes_score_trees_like_plain_ones(widths: tuple[int, ...], lengths: list[int]) -> None:
    model = tiny_model(seed=1, max_position_embeddings=512)
    compiled = CompiledModel(model, widths, backend="eager")
    for plain, fast in zip(scored(HuggingFaceModel(model), lengths), scored(compiled, lengths), strict=True):
        torch.testing.assert_close(fast, plain, rtol=0, atol=1e-12)
    assert len(compiled.passes.seconds) == 1, "both trees are of one shape, compiled once"


@pytest.mark.long(1)
@pytest.mark.parametrize("widths", [(), LEVELS])
def test_hidden_states_leave_compiled_passes_and_the_model_keeps_no_hook(widths: tuple[int, ...]) -> None:
    model, layers = tiny_model(seed=1, max_position_embeddings=512), (0, 1, 2, "final")
    compiled = CompiledModel(model, widths, backend="eager")
    mask, starts = torch.ones(2, 8, 8, dtype=torch.bool).tril(), torch.zeros(2, dtype=torch.long)
    for first in (0, 3, 5):
        tokens, places = torch.arange(first, first + 16).view(2, 8), torch.arange(8).expand(2, 8)
        found = []
        for one in (compiled, HuggingFaceModel(model)):
            cache = one.new_cache(2, 8)
            one.forward(tokens[:, :4], places[:, :4], mask[:, :4, :4], cache, starts)
            rest = tokens[:, 4:], places[:, 4:], mask[:, 4:]
            found.append(one.forward(*rest, cache, starts + 4, hidden_layers=layers))
        fast, plain = found
        torch.testing.assert_close(fast.logits, plain.logits, rtol=0, atol=1e-12)
        for layer in layers:
            torch.testing.assert_close(fast.hidden[layer], plain.hidden[layer], rtol=0, atol=1e-12)
    assert len(compiled.passes.seconds) == 1
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


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
