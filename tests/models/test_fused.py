"""Fused passes against a model's own: the same function for every family, and the own one wherever there is doubt."""

import copy
from collections.abc import Iterator

import pytest
import torch
from doubles import fused, scored, tiny_model
from transformers import PreTrainedModel

import polydraft
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel, draft_model
from polydraft.models.tiny import tiny_of_type
from polydraft.trees import Widths

pytestmark = pytest.mark.fuses
LONG = {"max_position_embeddings": 512}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
MODELS = {
    "grouped heads": ("llama", {}),
    "a key head each": ("llama", {"num_key_value_heads": 4}),
    "tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "heads of another width": ("llama", {"head_dim": 6}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "stretched rotation": ("llama", {"rope_parameters": STRETCHED}),
    "scaled rotation": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    "qwen2": ("qwen2", {}),
    "mistral": ("mistral", {"sliding_window": None}),
}


def both_ways(model: PreTrainedModel, lengths: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return what trees score by the model's own modules, and in the fused pass."""
    return zip(scored(HuggingFaceModel(model, fused=False), lengths), scored(fused(model), lengths), strict=True)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [[5], [5, 9, 1]])
def test_trees_score_like_in_the_models_own_pass(name: str, lengths: list[int]) -> None:
    kind, changes = MODELS[name]
    model = tiny_model(kind, seed=1, **{**LONG, **changes})
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1)  # biases and gains that are not zero and one
    for plain, found in zip(
        scored(HuggingFaceModel(model, fused=False), lengths), scored(fused(model), lengths), strict=True
    ):
        # the models' own norms compute in single precision
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-5 * float(plain.abs().max()))


def test_large_matrices_are_packed() -> None:
    model = tiny_model(seed=1, dtype=torch.float32, hidden_size=512, intermediate_size=640, **LONG)
    for plain, found in both_ways(model, [5]):
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-4 * float(plain.abs().max()))


def test_only_the_last_logits_if_asked() -> None:
    made = fused(tiny_model(seed=1))
    tokens, mask = torch.arange(8).view(2, 4), torch.ones(2, 4, 4, dtype=torch.bool).tril()
    places, starts = torch.arange(4).expand(2, 4), torch.zeros(2, dtype=torch.long)
    everything = made.forward(tokens, places, mask, made.new_cache(2, 4), starts).logits
    last = made.forward(tokens, places, mask, made.new_cache(2, 4), starts, logits_to_keep=2).logits
    torch.testing.assert_close(last, everything[:, -2:])


@pytest.mark.parametrize("keep", [0, 1])
def test_hidden_states_leave_the_fused_pass(keep: int) -> None:
    model, layers = tiny_model(seed=1), (0, 1, 2, "final")
    tokens, mask = torch.arange(8).view(2, 4), torch.ones(2, 4, 4, dtype=torch.bool).tril()
    places, starts = torch.arange(4).expand(2, 4), torch.zeros(2, dtype=torch.long)
    plain, found = (
        one.forward(tokens, places, mask, one.new_cache(2, 4), starts, hidden_layers=layers, logits_to_keep=keep)
        for one in (HuggingFaceModel(model, fused=False), fused(model))
    )
    torch.testing.assert_close(found.logits, plain.logits, rtol=0, atol=1e-5)  # rotations are of single precision
    for layer in layers:
        torch.testing.assert_close(found.hidden[layer], plain.hidden[layer], rtol=0, atol=1e-5)


def test_hidden_states_of_layers_that_are_not_there_are_refused() -> None:
    made = fused(tiny_model(seed=1))
    tokens, mask = torch.arange(4).view(1, 4), torch.ones(1, 4, 4, dtype=torch.bool).tril()
    with pytest.raises(InvalidParameter, match="0 to 2 layers"):
        made.forward(tokens, tokens, mask, made.new_cache(1, 4), torch.zeros(1, dtype=torch.long), hidden_layers=(3,))


def test_weights_are_joined_once_and_anew_after_a_change() -> None:
    model = tiny_model(seed=1)
    first = fused(model).fused
    assert fused(model).fused is first
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    assert fused(model).fused is not first
    assert fused(copy.deepcopy(model)).fused is not first


FAMILIES = """
    arcee falcon gemma gemma2 gemma3_text glm4_moe gpt2 gpt_bigcode gpt_neox granite llama mistral mixtral olmo2 olmo3
    olmoe opt phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2
    """.split()


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("lengths", [[5], [5, 9, 1]])
def test_every_anatomy_scores_trees_like_its_own_modules(kind: str, lengths: list[int]) -> None:
    """Windows, chunks and caps of tiny models are small enough to be met; weights are far from those of a start."""
    model = tiny_of_type(kind)
    stream = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=stream).to(weight))
    for plain, found in zip(
        scored(HuggingFaceModel(model, fused=False), lengths), scored(fused(model), lengths), strict=True
    ):
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-5 * float(plain.abs().max()))


@pytest.mark.parametrize("kind", ["bloom", "gpt_oss", "deepseek_v3"])
def test_other_anatomies_keep_their_own_pass(kind: str) -> None:
    made = draft_model(tiny_of_type(kind))
    assert made.fused is None and "keeps its own passes" in made.why_not_fused


def test_a_model_with_a_hook_keeps_its_own_pass() -> None:
    model = tiny_model(seed=1)
    model.model.layers[0].mlp.register_forward_hook(lambda layer, given, found: found * 1.5)
    assert draft_model(model).fused is None and "has a hook" in draft_model(model).why_not_fused


def test_a_model_with_an_adapter_keeps_its_own_pass() -> None:
    model = tiny_model(seed=1)
    attention = model.model.layers[0].self_attn
    attention.q_proj = torch.nn.Sequential(attention.q_proj, torch.nn.Linear(16, 16, dtype=torch.float64))
    assert isinstance(draft_model(model), HuggingFaceModel)


def test_a_fused_draft_model_drafts_what_its_own_pass_does() -> None:
    target, draft = tiny_model(seed=1, **LONG), tiny_model(seed=2, **LONG)
    settings = {"policy": Widths((3, 2)), "temperature": 0.9, "seed": 3, "max_new_tokens": 24}
    runs = [
        polydraft.stream(target, torch.arange(6).unsqueeze(0), drafter=polydraft.ModelDrafter(one), **settings)
        for one in (HuggingFaceModel(draft, fused=False), fused(draft))
    ]
    texts = [run.exhaust().new_tokens for run in runs]
    assert texts[0] == texts[1]
    assert runs[0].statistics.accepted == runs[1].statistics.accepted
