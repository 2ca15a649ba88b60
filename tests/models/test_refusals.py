"""Models that cannot score a token tree are refused with the reason."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from doubles import perturbed, tiny_model, tiny_tokenizer
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaForCausalLM,
)

import polydraft
from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models import Cache, HuggingFaceModel, Pair, draft_model, prepare_by_hugging_face


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("mamba", {}, "MambaForCausalLM goes on from its states otherwise with several tokens than with one"),
        ("llama", {"attention": "flex_attention"}, "LlamaForCausalLM runs flex_attention attention.*sdpa"),
    ],
)
def test_refused_with_the_reason(kind: str, changes: dict[str, object], reason: str) -> None:
    model = tiny_model(kind, **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        HuggingFaceModel(model)
    with pytest.raises(UnsupportedModel, match=reason):
        polydraft.generate(model, torch.tensor([[1, 2]]), max_new_tokens=2)


def test_rotary_falcon_is_supported() -> None:
    assert HuggingFaceModel(tiny_model("falcon", alibi=False)).vocab_size == 24


def test_foreign_cache_is_refused() -> None:
    class Foreign(Cache):
        def keep(self, base: torch.Tensor, path: torch.Tensor) -> None: ...

        def put(self, row: int, other: object, length: int) -> Cache: ...

    place = torch.tensor([[0]])
    with pytest.raises(InvalidParameter, match="must come from new_cache, but is a Foreign"):
        HuggingFaceModel(tiny_model()).forward(place, place, place.unsqueeze(0) == 0, Foreign(), torch.tensor([0]))


def bert(kind: type[PreTrainedModel], config: type[PreTrainedConfig], **changes: object) -> PreTrainedModel:
    """Return a small random model of the BERT family, with weights as small as transformers makes them."""
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config(vocab_size=24, **size, **changes))


@pytest.mark.parametrize(("kind", "config"), [(BertLMHeadModel, BertConfig), (RobertaForCausalLM, RobertaConfig)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_models_that_see_later_tokens_are_refused(
    kind: type[PreTrainedModel], config: type[PreTrainedConfig], dtype: torch.dtype
) -> None:
    model = bert(kind, config).to(dtype)
    with pytest.raises(UnsupportedModel, match=f"{kind.__name__} lets tokens see later ones.*is_decoder=True"):
        HuggingFaceModel(model)


def test_a_model_that_returns_its_last_logits_only_is_refused_for_that() -> None:
    class LastOnly(LlamaForCausalLM):
        def forward(self, *args: object, **options: object) -> object:
            found = super().forward(*args, **{**options, "logits_to_keep": 0})  # type: ignore[arg-type]
            found.logits = found.logits[:, -1:]
            return found

    with pytest.raises(UnsupportedModel, match="LastOnly was given 4 tokens and returned logits of 1, but"):
        HuggingFaceModel(LastOnly(tiny_model().config))


def test_bidirectional_attention_is_refused() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    size = {**sizes, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 24, "max_position_embeddings": 64}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**size, use_bidirectional_attention=True))
    with pytest.raises(UnsupportedModel, match="Gemma3ForCausalLM attends in both directions"):
        HuggingFaceModel(model)
    assert HuggingFaceModel(Gemma3ForCausalLM(Gemma3TextConfig(**size))).vocab_size == 24


def test_positions_are_those_that_hugging_faces_generate_gives() -> None:
    """RoBERTa was trained with positions from two; Hugging Face's `generate` counts from zero, and so do we."""
    model, prompt = bert(RobertaForCausalLM, RobertaConfig, is_decoder=True).eval(), torch.tensor([[3, 9, 4, 7]])
    theirs = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    found = polydraft.generate(model, prompt, max_new_tokens=12, temperature=0.0, eos_token_id=None)
    assert found.sequences.tolist() == theirs.tolist()


def test_a_bert_that_decodes_is_supported() -> None:
    model = bert(BertLMHeadModel, BertConfig, is_decoder=True, initializer_range=0.6).eval()
    prompt = torch.tensor([[3, 1, 4]])
    plain = model.generate(prompt, do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0)
    drafted = polydraft.generate(
        model,
        prompt,
        drafter=perturbed(model, 0.03),
        temperature=0,
        max_new_tokens=8,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert torch.equal(drafted.sequences, plain)


def test_a_model_that_fails_at_a_tree_is_refused_with_its_own_reason() -> None:
    model = tiny_model()
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM cannot read a token into a cache: division by zero"):
        HuggingFaceModel(model)


def test_a_model_is_tried_once() -> None:
    model, passes = tiny_model(), []
    model.register_forward_hook(lambda *_: passes.append(1))
    HuggingFaceModel(model)
    assert 1 <= len(passes) <= 8
    tried = len(passes)
    HuggingFaceModel(model)
    assert len(passes) == tried
    model.config.is_decoder = False
    HuggingFaceModel(model)
    assert tried < len(passes) <= 2 * tried, "another setting, another trial"


@pytest.mark.parametrize("kind", [LlamaModel, LlamaForSequenceClassification, BertModel])
def test_models_without_a_head_are_refused(kind: type[PreTrainedModel]) -> None:
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = kind(kind.config_class(vocab_size=24, pad_token_id=0, **small))
    with pytest.raises(UnsupportedModel, match=f"{kind.__name__} has no head that predicts the next token; load"):
        prepare_by_hugging_face(model, torch.tensor([[1, 2]]), lambda *_, **__: None, {"max_new_tokens": 2})


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM is on the meta device"):
        HuggingFaceModel(tiny_model().to("meta"))


def things() -> dict[str, tuple[object, type[Exception], str]]:
    model = tiny_model()
    return {
        "nothing": (None, InvalidParameter, "None was given"),
        "a pair": (Pair(model, model, tiny_tokenizer()), InvalidParameter, "a Pair .*its target .*drafter=pair.draft"),
        "a name": ("some/model", InvalidParameter, "a name was given, 'some/model'; load it first"),
        "a folder": (Path("models") / "llama", InvalidParameter, "a name was given, 'models/llama'; load it first"),
        "a tokenizer": (tiny_tokenizer(), InvalidParameter, "a tokenizer was given"),
        "a pipeline": (SimpleNamespace(model=model), InvalidParameter, "pass the model that it holds, .*`model`"),
        "one of ours": (HuggingFaceModel(model), InvalidParameter, "a HuggingFaceModel was given; .*`model`"),
        "a number": (7, InvalidParameter, "what was given is 7;"),
        "a layer": (torch.nn.Linear(2, 2), UnsupportedModel, "Linear is no Hugging Face model"),
        "a wrapper": (torch.nn.Sequential(model), UnsupportedModel, "Sequential is a wrapper around LlamaForCausalLM"),
    }


@pytest.mark.parametrize("name", things())
def test_what_is_no_model(name: str) -> None:
    thing, kind, said = things()[name]
    prompt = torch.tensor([[1, 2]])
    calls = [lambda: HuggingFaceModel(thing), lambda: draft_model(thing)]
    calls.append(lambda: prepare_by_hugging_face(thing, prompt, lambda *_, **__: None, {"max_new_tokens": 2}))
    for call in calls:
        with pytest.raises(kind, match=said) as caught:
            call()
        assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
