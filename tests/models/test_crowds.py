"""Models whose logits for a token depend on the other tokens of its pass: drafts are refused, plain text is exact."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import SIZES, built
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    PreTrainedModel,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

import polydraft
from polydraft.errors import UnsupportedModel
from polydraft.models import HuggingFaceModel
from polydraft.models.tiny import tiny_of_type
from polydraft.options.commands.serve_options import Settings
from polydraft.server.worker.served import load_served

NEW = 20
PROMPT = torch.tensor([[3, 9, 4, 27, 5, 8]])


def switch(capacity: int = 3, step: int = 1) -> PreTrainedModel:
    """Return a Switch Transformers model with a small capacity; 1 of `step` layers of its decoder has experts."""
    config = SwitchTransformersConfig(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_experts=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=2,
        expert_capacity=capacity,
        dropout_rate=0.0,
        initializer_factor=12.0,
        tie_word_embeddings=False,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    config.decoder_sparse_step = step
    torch.manual_seed(0)
    return SwitchTransformersForConditionalGeneration(config).eval()


def nllb(share: float) -> PreTrainedModel:
    config = NllbMoeConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_experts=4,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        expert_capacity=3,
        moe_eval_capacity_token_fraction=share,
        dropout=0.0,
        init_std=0.4,
        pad_token_id=1,
        eos_token_id=None,
        decoder_start_token_id=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    return NllbMoeForConditionalGeneration(config).eval()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.4)).eval()


def dynamic() -> PreTrainedModel:
    """Return a model of torch's own dynamic quantisation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to replace it
        return torch.ao.quantization.quantize_dynamic(llama(), {nn.Linear}, dtype=torch.qint8)


class Scaled(nn.Module):
    """A linear layer whose input has steps of a size that follows from the largest number of the whole pass."""

    def __init__(self, plain: nn.Linear, steps: int) -> None:
        super().__init__()
        self.plain, self.weight, self.bias, self.steps = plain, plain.weight, plain.bias, steps
        self.in_features, self.out_features = plain.in_features, plain.out_features

    def forward(self, numbers: Tensor) -> Tensor:
        step = numbers.abs().amax() / self.steps
        return self.plain((numbers / step).round() * step)


class Capped(nn.Module):
    """A layer that takes so many tokens of a pass with the same largest number, and passes the others over."""

    def __init__(self, plain: nn.Linear, most: int) -> None:
        super().__init__()
        self.plain, self.weight, self.bias, self.most = plain, plain.weight, plain.bias, most

    def forward(self, numbers: Tensor) -> Tensor:
        chosen = nn.functional.one_hot(numbers.argmax(-1), numbers.shape[-1])
        taken = ((chosen.cumsum(-2) <= self.most) & (chosen > 0)).any(-1, keepdim=True)
        return self.plain(numbers) * taken


def scaled(kind: str, dtype: torch.dtype, steps: int = 127) -> PreTrainedModel:
    """Return a tiny model whose linear layers, but for the head, scale what comes in by the pass."""
    model = tiny_of_type(kind).to(dtype)
    head = model.get_output_embeddings()
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.Linear) and part is not head:
            model.set_submodule(name, Scaled(part, steps))
    return model


def capped(kind: str, dtype: torch.dtype, most: int) -> PreTrainedModel:
    model = tiny_of_type(kind).to(dtype)
    for layer in model.model.layers:
        layer.mlp.down_proj = Capped(layer.mlp.down_proj, most)
    return model


CROWDS: dict[str, tuple[Callable[[], Any], str]] = {
    "switch": (switch, r"experts that take at most 3 tokens of a pass \(expert_capacity\)"),
    "a share": (lambda: nllb(0.25), "a share of 0.25 of a pass's tokens"),
    "a capacity in evaluation": (lambda: nllb(-1.0), r"at most 3 tokens of a pass \(expert_capacity\)"),
    "dynamic": (dynamic, "layers of dynamic quantisation"),
    "scaled": (lambda: scaled("llama", torch.float32), "otherwise beside other tokens, as layers do that quantise"),
    "capped": (lambda: capped("llama", torch.float32, 4), "passes tokens over where a pass brings many"),
    "chains": (lambda: scaled("bloom", torch.float32), "otherwise beside other tokens, as layers do that quantise"),
}


@pytest.mark.parametrize("name", CROWDS)
def test_drafts_are_refused_and_plain_text_is_hugging_faces(name: str) -> None:
    make, reason = CROWDS[name]
    model = make()
    for choices in ({}, {"drafter": "ngram"}, {"drafter": model, "policy": 8}, {"prediction": [1, 2, 3]}):
        with pytest.raises(UnsupportedModel, match=f'{type(model).__name__} .*{reason}.*; drafter="none"') as caught:
            polydraft.generate(model, PROMPT, max_new_tokens=NEW, do_sample=False, **choices)
        assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **settings)
    plain = polydraft.generate(model, PROMPT, drafter="none", **settings)
    assert plain.sequences.tolist() == wanted.tolist()
    timed = polydraft.generate(model, PROMPT, drafter="none", time=True, **settings)
    assert timed.sequences.tolist() == wanted.tolist()


def test_a_decoders_prompt_that_fills_a_capacity_is_read_as_hugging_face_reads_it() -> None:
    model, own = switch(), torch.tensor([[0, 3, 9, 9, 9, 3, 3, 7, 9, 9]])
    settings: dict[str, Any] = {"decoder_input_ids": own, "max_new_tokens": NEW, "do_sample": False}
    wanted = model.generate(PROMPT, **settings)
    assert polydraft.generate(model, PROMPT, drafter="none", **settings).sequences.tolist() == wanted.tolist()


def test_other_texts_beside_and_texts_in_parts_are_refused() -> None:
    model, plain = dynamic(), {"drafter": "none", "max_new_tokens": 3, "do_sample": False}
    with pytest.raises(UnsupportedModel, match="one prompt at a time"):
        polydraft.generate(model, PROMPT.expand(2, -1), **plain)
    with pytest.raises(UnsupportedModel, match="one prompt at a time"):
        polydraft.generate_many(model, [[1, 2]], **plain)
    past = polydraft.generate(model, PROMPT, keep_past=True, **plain).past
    with pytest.raises(UnsupportedModel, match="leave past out"):
        polydraft.generate(model, PROMPT, past=past, **plain)


def test_rows_of_an_encoder_decoder_do_not_see_each_other() -> None:
    model, both = switch(), torch.cat([PROMPT, PROMPT.flip(-1)])
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    found = polydraft.generate(model, both, drafter="none", **settings).sequences
    assert found.tolist() == model.generate(both, **settings).tolist()


@pytest.mark.wrong_types
def test_the_server_refuses_such_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = SimpleNamespace(target=dynamic(), draft=None, tokenizer=None)
    monkeypatch.setattr("polydraft.server.worker.served.load", lambda *_, **__: pair)
    with pytest.raises(UnsupportedModel, match="texts that are written side by side would change each other"):
        load_served(Settings(target="a", device="cpu"))


def test_as_a_draft_model_it_is_harmless() -> None:
    target, settings = llama(), {"max_new_tokens": NEW, "do_sample": False}
    wanted = target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **settings)
    found = polydraft.generate(target, PROMPT, drafter=dynamic(), policy=4, **settings)
    assert found.sequences.tolist() == wanted.tolist() and found.statistics.acceptance_rate > 0


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_neox", "bloom"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_scaled_by_the_pass_are_noticed_in_every_precision(kind: str, dtype: torch.dtype) -> None:
    assert HuggingFaceModel(scaled(kind, dtype)).crowded


@pytest.mark.parametrize("most", [4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_capacity_is_noticed_that_seven_tokens_fill(dtype: torch.dtype, most: int) -> None:
    assert HuggingFaceModel(capped("llama", dtype, most)).crowded


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen2_moe", "bloom", "lfm2_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_models_are_not_suspected(kind: str, dtype: torch.dtype) -> None:
    assert HuggingFaceModel(tiny_of_type(kind).to(dtype)).crowded is None


@pytest.mark.parametrize("make", [lambda: switch(step=0), lambda: nllb(1.0)])
def test_a_capacity_that_no_draft_can_fill_is_no_reason(make: Callable[[], Any]) -> None:
    model, settings = make(), {"max_new_tokens": NEW, "do_sample": False}
    found = polydraft.generate(model, PROMPT, drafter=model, policy=6, **settings)
    assert found.sequences.tolist() == model.generate(PROMPT, **settings).tolist()
    assert found.statistics.target_calls < NEW


class Linear8bitLt(nn.Linear):
    """A layer that has the name and the state of bitsandbytes'."""

    state = SimpleNamespace(threshold=6.0)


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_llm_int8_is_refused_for_its_outliers(threshold: float) -> None:
    model = llama()
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.Linear) and name.endswith("up_proj"):
            twin = Linear8bitLt(part.in_features, part.out_features, bias=False)
            twin.weight, twin.state = part.weight, SimpleNamespace(threshold=threshold)
            model.set_submodule(name, twin)
    crowd = HuggingFaceModel(model).crowded
    assert crowd is None if threshold == 0 else crowd is not None and "LLM.int8" in crowd


def test_layers_that_are_replaced_after_a_trial_are_tried_anew() -> None:
    model = built("llama", {})
    assert HuggingFaceModel(model).crowded is None
    layer = model.model.layers[0].mlp
    layer.up_proj = Scaled(layer.up_proj, 127)
    assert HuggingFaceModel(model).crowded
