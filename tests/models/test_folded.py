"""The fold in models that run their own modules: the same scores, each key read once, and nobody else affected."""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from doubles import fused, perturbed, scored, tiny_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import polydraft
from polydraft.errors import UnsupportedModel
from polydraft.models import CompiledModel, HuggingFaceModel
from polydraft.models.fused import folded
from polydraft.models.fused.folded import attend, folding
from polydraft.models.tiny import tiny_of_type
from polydraft.trees import Widths

WINDOWS = {"max_position_embeddings": 128}
FAMILIES = """
    afmoe bamba beam cohere cohere2 diffllama doge emu3 exaone4 gemma3_text gemma4_text gpt_bigcode granitemoehybrid
    lfm2 llama4_text minimax_m2 mistral moshi nemotron olmo3 phi3 qwen3_next smollm3 stablelm zaya
    """.split()
"""Kinds of transformers' own attention: windows, pieces, one key head, arguments by name, states beside keys."""
UNGROUPED = ("gpt2", "gpt_neox")


def own(model: PreTrainedModel) -> HuggingFaceModel:
    """Return a model that runs its own modules."""
    return HuggingFaceModel(model, fused=False)


def by_sdpa(kind: str) -> PreTrainedModel:
    """Return a tiny model whose attention is transformers' own function."""
    model = tiny_of_type(kind)
    model.set_attn_implementation("sdpa")
    return model


@contextmanager
def registered(function: Callable[..., Any]) -> Iterator[None]:
    """Put a function in the place of transformers' own for a while."""
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", function)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", before)


def as_it_was(*given: Any, **named: Any) -> Any:
    """Attend by transformers' function; anything else in its place keeps passes from folding."""
    return sdpa_attention_forward(*given, **named)


@contextmanager
def kernels() -> Iterator[list[tuple[int, int]]]:
    """Note heads of queries and of keys of every attention with a mask and several queries, as the kernel gets them."""
    seen, usual, lock = list[tuple[int, int]](), functional.scaled_dot_product_attention, threading.Lock()

    def noted(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **named: Any) -> Tensor:
        if attn_mask is not None and query.shape[2] > 1:
            with lock:
                seen.append((query.shape[1], key.shape[1]))
        return usual(query, key, value, attn_mask=attn_mask, **named)

    functional.scaled_dot_product_attention = noted
    try:
        yield seen
    finally:
        functional.scaled_dot_product_attention = usual


def given_to_a_pass(width: int = 4) -> tuple[Tensor, ...]:
    places, mask = torch.arange(width).unsqueeze(0), torch.ones(1, width, width, dtype=torch.bool).tril()
    return places % 24, places, mask


def passed(model: HuggingFaceModel, width: int = 4) -> Tensor:
    """Return the logits of one pass over a few tokens."""
    start = torch.zeros(1, dtype=torch.long)
    return model.forward(*given_to_a_pass(width), model.new_cache(1, width), start).logits


def check_same(model: PreTrainedModel, lengths: list[int]) -> None:
    made = own(model)
    found = scored(made, lengths)
    with registered(as_it_was):
        plain = scored(made, lengths)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * float(other.abs().max()))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gpt2"])
@pytest.mark.parametrize("lengths", [[5], [5, 9, 1]])
def test_trees_score_the_same(kind: str, lengths: list[int]) -> None:
    check_same(tiny_model(kind, seed=1), lengths)


@pytest.mark.long(8)
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("lengths", [[5], [5, 9, 1]])
def test_trees_of_every_kind_of_attention_score_the_same(kind: str, lengths: list[int]) -> None:
    with kernels() as seen:
        check_same(by_sdpa(kind), lengths)
    assert any(heads == keys < 4 for heads, keys in seen), "something folded"


def test_every_layer_folds_with_one_mask() -> None:
    made = own(tiny_model(seed=1, num_hidden_layers=3))
    with kernels() as seen:
        passed(made)
    assert seen == [(2, 2)] * 3
    with kernels() as seen, registered(as_it_was):
        passed(made)
    assert seen == [(4, 4)] * 3


def test_a_mask_is_repeated_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    made, usual, repeated = own(tiny_model(seed=1, num_hidden_layers=3)), Tensor.repeat, list[tuple[int, ...]]()

    def repeat(one: Tensor, *counts: int) -> Tensor:
        repeated.append(counts)
        return usual(one, *counts)

    monkeypatch.setattr(Tensor, "repeat", repeat)
    passed(made)
    assert repeated == [(1, 1, 2, 1)]


@pytest.mark.parametrize("kind", UNGROUPED)
def test_heads_with_keys_of_their_own_are_left_alone(kind: str) -> None:
    made = own(tiny_model(kind, seed=1))
    with kernels() as seen:
        passed(made)
    assert {heads for heads, _ in seen} == {2}


@pytest.mark.parametrize(("width", "heads"), [(64, 2), (65, 4)])
def test_only_few_queries_fold(width: int, heads: int) -> None:
    made = own(tiny_model(seed=1))
    with kernels() as seen:
        passed(made, width)
    assert {found for found, _ in seen} == {heads}


def test_no_call_outside_of_a_pass_folds() -> None:
    model = tiny_model(seed=1)
    made = own(model)
    tokens, places, mask = given_to_a_pass()
    numbers = torch.zeros(mask.shape, dtype=torch.float64).masked_fill_(~mask, -1e9).unsqueeze(1)
    with kernels() as seen, torch.no_grad():
        passed(made)
        seen.clear()
        model(input_ids=tokens, position_ids=places, attention_mask=numbers)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend
    assert seen == [(4, 4)] * 2


def test_no_call_of_another_thread_folds_during_a_pass() -> None:
    model, other = tiny_model(seed=1), tiny_model(seed=2, num_attention_heads=8, num_key_value_heads=2)
    tokens, places, mask = given_to_a_pass()
    numbers = torch.zeros(mask.shape, dtype=torch.float64).masked_fill_(~mask, -1e9).unsqueeze(1)
    found = list[Tensor]()

    def elsewhere() -> None:
        with torch.no_grad():
            found.append(other(input_ids=tokens, position_ids=places, attention_mask=numbers).logits)

    def meanwhile(*_: Any) -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    made = own(model)
    model.model.layers[1].register_forward_pre_hook(meanwhile)
    with kernels() as seen:
        passed(made)
    assert seen == [(2, 2), (8, 8), (8, 8), (2, 2)]
    assert found


def test_passes_of_several_threads_fold_each_its_own() -> None:
    models = [own(tiny_model(seed=seed)) for seed in range(4)]
    usual, found = [passed(one) for one in models], dict[int, Tensor]()

    def run(number: int) -> None:
        for _ in range(20):
            found[number] = passed(models[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[number], one) for number, one in enumerate(usual))


def test_a_model_that_is_told_to_run_otherwise_does() -> None:
    with kernels() as seen:
        passed(own(tiny_model(seed=1, attention="eager")))
    assert not seen


def test_a_function_of_somebody_else_stays_and_gets_every_call() -> None:
    calls = list[int]()

    def theirs(module: nn.Module, query: Tensor, *given: Any, **named: Any) -> Any:
        calls.append(query.shape[1])
        return sdpa_attention_forward(module, query, *given, **named)

    with registered(theirs):
        made = own(tiny_model(seed=1))
        calls.clear()
        with kernels() as seen:
            passed(made)
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
        assert calls == [4, 4]
        assert seen == [(4, 4)] * 2
    with registered(sdpa_attention_forward):
        passed(made)
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend, "transformers' own comes back, and the fold with it"


def test_a_function_that_changes_what_is_read_is_heeded() -> None:
    def twice(*given: Any, **named: Any) -> Any:
        seen, _ = sdpa_attention_forward(*given, **named)
        return 2 * seen, None

    model = tiny_model(seed=1)
    usual = passed(own(model))
    with registered(twice):
        made = HuggingFaceModel(model)
        changed = passed(made)
        with torch.no_grad():
            whole = model(input_ids=torch.arange(4).unsqueeze(0)).logits
    assert made.fused is None
    torch.testing.assert_close(changed, whole)
    assert not torch.allclose(changed, usual)


def test_fused_passes_are_found_beside_the_fold() -> None:
    model = tiny_model(seed=1)
    passed(own(model))
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend
    assert fused(model).fused is not None


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    "named",
    [
        {"softcap": 5.0},
        {"position_bias": torch.zeros(1)},
        {"s_aux": torch.zeros(4)},
        {"dropout": 0.5},
        {"a_later_one": 1},
    ],
)
def test_what_is_not_known_is_handed_on(named: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    handed = list[dict[str, Any]]()
    monkeypatch.setattr(folded, "sdpa_attention_forward", lambda *given, **rest: handed.append(rest))
    module, (query, key) = nn.Module(), (torch.zeros(1, heads, 3, 8) for heads in (4, 2))
    module.num_key_value_groups = 2
    with folding():
        attend(module, query, key, key, torch.zeros(1, 1, 3, 3), **named)
        assert handed == [named]
        attend(module, query, key, key, torch.zeros(1, 1, 3, 3), softcap=None, output_attentions=False, use_cache=True)
    assert handed == [named]


def test_a_fold_that_is_another_function_is_found_by_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial passes fold too, and are compared with the model called without us."""
    usual = folded.functional.scaled_dot_product_attention

    def wrong(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **named: Any) -> Tensor:
        return usual(query, key, value, mask.flip(2), **named)

    own(tiny_model(seed=1))
    monkeypatch.setattr(folded, "functional", type("Wrong", (), {"scaled_dot_product_attention": staticmethod(wrong)}))
    with pytest.raises(UnsupportedModel, match="branches of a token tree differently"):
        own(tiny_model(seed=1))


def test_greedy_text_with_drafts_is_the_models_own() -> None:
    model = tiny_model(seed=1)
    tokens = torch.arange(6).unsqueeze(0)
    plain = model.generate(tokens, max_new_tokens=24, do_sample=False)[0, 6:].tolist()
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)  # so that the target runs its own modules
    drafter = polydraft.ModelDrafter(own(perturbed(model, 0.05)))
    with kernels() as seen:
        run = polydraft.stream(
            model, tokens, drafter=drafter, policy=Widths((3, 2)), temperature=0.0, max_new_tokens=24, seed=0
        ).exhaust()
    assert run.new_tokens[0] == plain
    assert seen and {heads for heads, _ in seen} == {2}


def test_passes_under_autocast_fold() -> None:
    model = tiny_model(seed=1, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        made = own(model)
        with kernels() as seen:
            found = passed(made)
        with registered(as_it_was):
            plain = passed(made)
    assert seen == [(2, 2)] * 2
    torch.testing.assert_close(found, plain, rtol=0, atol=0.05 * float(plain.abs().max()))


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="older versions of torch cannot trace transformers' own forward in one piece",
)
@pytest.mark.parametrize("inside", [False, True])
def test_compiled_code_is_traced_in_one_piece_and_does_not_fold(inside: bool) -> None:
    model = tiny_model(seed=1)
    made = own(model)
    usual = passed(made)
    tokens, places, mask = given_to_a_pass()
    numbers = torch.zeros(mask.shape, dtype=torch.float64).masked_fill_(~mask, -1e9).unsqueeze(1)
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    given = {"input_ids": tokens, "position_ids": places, "attention_mask": numbers, "use_cache": False}
    with torch.no_grad():
        if inside:
            with folding():
                found = compiled(**given).logits
        else:
            found = compiled(**given).logits
    torch.testing.assert_close(found, usual, rtol=0, atol=1e-12 * float(usual.abs().max()))


@pytest.mark.wrong_types
def test_compiled_passes_score_the_same() -> None:
    model = tiny_model(seed=1, max_position_embeddings=512)
    for plain, fast in zip(scored(own(model), [5]), scored(CompiledModel(model, backend="eager"), [5]), strict=True):
        torch.testing.assert_close(fast, plain, rtol=0, atol=1e-12 * float(plain.abs().max()))
