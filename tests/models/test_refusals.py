"""Models that cannot score a token tree are refused with the reason; a sliding window limits the context."""

import pytest
import torch
from doubles import perturbed, tiny_model
from transformers import GPTNeoConfig, GPTNeoForCausalLM

import polydraft
from polydraft.errors import ContextOverflow, InvalidParameter, UnsupportedModel
from polydraft.models import HuggingFaceModel
from polydraft.trees import EAGLE_25, Fixed


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("mamba", {}, "MambaForCausalLM keeps a recurrent state"),
        ("bloom", {}, "BloomForCausalLM takes no position ids"),
        ("falcon", {"alibi": True}, "FalconForCausalLM takes no position ids"),
        ("t5", {"decoder_start_token_id": 0}, "T5ForConditionalGeneration is an encoder-decoder model"),
        ("llama", {"attention": "flex_attention"}, "LlamaForCausalLM runs flex_attention attention.*sdpa"),
    ],
)
def test_refused_with_the_reason(kind: str, changes: dict[str, object], reason: str) -> None:
    model = tiny_model(kind, **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        HuggingFaceModel(model)
    with pytest.raises(UnsupportedModel, match=reason):
        polydraft.generate(model, torch.tensor([[1, 2]]), max_new_tokens=2)


def test_layers_with_another_state_are_refused() -> None:
    model = tiny_model("llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModel, match="has linear_attention layers"):
        HuggingFaceModel(model)


def test_attention_that_counts_slots_is_refused() -> None:
    config = GPTNeoConfig(
        vocab_size=24,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        bos_token_id=None,
        eos_token_id=None,
    )
    with pytest.raises(UnsupportedModel, match="GPTNeoForCausalLM has local attention"):
        HuggingFaceModel(GPTNeoForCausalLM(config))


def test_rotary_falcon_is_supported() -> None:
    assert HuggingFaceModel(tiny_model("falcon", alibi=False)).vocab_size == 24


def test_foreign_cache_is_refused() -> None:
    class Foreign:
        def keep(self, base: torch.Tensor, path: torch.Tensor) -> None: ...

        def join(self, row: int, other: object) -> None:
            """Do nothing."""

    place = torch.tensor([[0]])
    with pytest.raises(InvalidParameter, match="must come from new_cache, but is a Foreign"):
        HuggingFaceModel(tiny_model()).forward(place, place, place.unsqueeze(0) == 0, Foreign(), torch.tensor([0]))


def test_sliding_window_limits_the_context_and_is_exact_within() -> None:
    model = tiny_model("mistral")  # a window of 12 tokens
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    everything = torch.ones_like(prompt)
    plain = model.generate(prompt, attention_mask=everything, do_sample=False, max_new_tokens=20)
    output = polydraft.generate(
        model, prompt, drafter=perturbed(model, 0.03), policy=Fixed(EAGLE_25), temperature=0, max_new_tokens=20
    )
    assert HuggingFaceModel(model).context == 12
    assert output.finish == ("context",)
    assert output.sequences.tolist() == plain[:, :12].tolist()
    with pytest.raises(ContextOverflow, match="13 tokens, but at most 12 fit"):
        polydraft.generate(model, torch.ones(1, 13, dtype=torch.int64), max_new_tokens=20)


def test_the_window_of_a_model_without_sliding_layers_is_ignored() -> None:
    model = tiny_model("mistral")
    model.config.layer_types = ["full_attention", "full_attention"]
    assert HuggingFaceModel(model).context == 128
