"""Sliding windows, chunks, and keys of several shapes: the text is Hugging Face's, far beyond the window."""

import copy
from typing import Any

import pytest
import torch
from doubles import fused, tiny_model
from families import GREEDY, NEW, PROMPT, built, theirs
from transformers import PreTrainedModel

import polydraft
from polydraft import Fixed, ModelDrafter, NgramDrafter, Widths
from polydraft.errors import ContextOverflow, UnsupportedModel
from polydraft.models import CompiledModel, HuggingFaceModel
from polydraft.models.checks.layout import KeyWindow, cache_name, windows_of
from polydraft.models.checks.room import cache_bytes
from polydraft.models.tiny import tiny_of_type
from polydraft.trees import EAGLE_25

WINDOW = 16
SLIDES = {"sliding_window": WINDOW}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "mistral": (SLIDES, {"sliding_attention"}),
    "qwen2": ({**SLIDES, "use_sliding_window": True, "max_window_layers": 2}, {"full_attention", "sliding_attention"}),
    "phi3": (SLIDES, {"sliding_attention"}),
    "gemma2": (SLIDES, {"full_attention", "sliding_attention"}),
    "gemma3_text": ({**SLIDES, "sliding_window_pattern": 2}, {"full_attention", "sliding_attention"}),
    "gemma4_text": (
        {
            **SLIDES,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
        },
        {"full_attention", "sliding_attention"},
    ),
    "gpt_oss": ({**SLIDES, "num_local_experts": 4, "num_experts_per_tok": 2}, {"full_attention", "sliding_attention"}),
    "cohere2": (SLIDES, {"full_attention", "sliding_attention"}),
    "llama4_text": (
        {
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "moe_layers": [1, 3],
            "no_rope_layers": [1, 1, 1, 0],
        },
        {"full_attention", "chunked_attention"},
    ),
    "deepseek_v3": (
        {**LATENT, **EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        {"full_attention"},
    ),
    "minicpm3": (LATENT, {"full_attention"}),
    "mimo_v2_flash": (SLIDES, {"full_attention", "sliding_attention"}),
}
MIXED = {"gemma4_text", "deepseek_v3", "minicpm3", "mimo_v2_flash"}
"""Those whose keys and values have several shapes."""


LONG = {"mimo_v2_flash"}
"""Those whose small model is not small."""


def tiny(name: str, **changes: object) -> PreTrainedModel:
    """Return a small random model of a family."""
    return built(name, {**FAMILIES[name][0], **changes})


@pytest.mark.long(2)
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one in LONG)) for one in FAMILIES])
def test_greedy_text_is_hugging_faces_far_beyond_the_window(name: str) -> None:
    model = tiny(name)
    door, expected = HuggingFaceModel(model), theirs(model, PROMPT)
    assert {one.kind for one in door.windows} == FAMILIES[name][1] and door.context == 256
    assert (door.shapes is not None) == (name in MIXED)
    drafter = ModelDrafter(door)
    for given in (
        {"drafter": NgramDrafter()},
        {"drafter": drafter, "policy": Widths((3, 2, 1))},
    ):
        found = polydraft.generate(model, torch.tensor([PROMPT]), max_new_tokens=NEW, **GREEDY, **given)
        assert found.sequences[0, len(PROMPT) :].tolist() == expected
        assert found.finish == ("length",)
    prompts, new = [PROMPT, PROMPT[:9]], 30
    many = polydraft.generate_many(
        model, prompts, drafter=drafter, policy=Widths((3, 2, 1)), batch_size=2, max_new_tokens=new, **GREEDY
    )
    assert {one.name: one.tokens for one in many} == {
        place: theirs(model, one, new) for place, one in enumerate(prompts)
    }


@pytest.mark.long(2)
@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "llama4_text", "minicpm3"])
def test_a_seed_gives_a_text_whatever_batch_it_is_in(name: str) -> None:
    model = tiny(name)
    options = {"drafter": ModelDrafter(HuggingFaceModel(tiny(name))), "policy": Widths((2, 1)), "temperature": 1.0}
    options |= {"max_new_tokens": 30, "eos_token_id": None}
    alone = polydraft.generate(model, torch.tensor([PROMPT]), seed=5, **options).sequences[0, len(PROMPT) :].tolist()
    own = {0: {"seed": 5}, 1: {"seed": 6}, 2: {"seed": 5}}
    many = polydraft.generate_many(
        model, [PROMPT, PROMPT[:7], PROMPT], batch_size=2, per_prompt=own, **options
    )  # the third takes a row that another text has left
    found = {one.name: one.tokens for one in many}
    assert found[0] == found[2] == alone


def test_fused_and_compiled_passes_follow_the_window() -> None:
    model = tiny_model("mistral")  # a window of 12 tokens
    prompt, expected = PROMPT_OF_FEW, None
    plain = polydraft.generate(model, torch.tensor([prompt]), drafter="none", max_new_tokens=60, **GREEDY)
    expected = plain.sequences.tolist()
    joined, compiled = fused(model), CompiledModel(copy.deepcopy(model), backend="eager")
    for drafter in (ModelDrafter(joined), ModelDrafter(compiled)):
        found = polydraft.generate(
            model, torch.tensor([prompt]), drafter=drafter, policy=Widths((2, 1, 1)), max_new_tokens=60, **GREEDY
        )
        assert found.sequences.tolist() == expected
        steps = found.statistics
        assert steps.accepted == steps.new_tokens - steps.steps, "a draft by the target itself is always accepted"


PROMPT_OF_FEW = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("name", ["gemma3_text", pytest.param("mimo_v2_flash", marks=pytest.mark.slow)])
def test_compiled_passes_of_several_kinds_and_shapes(name: str) -> None:
    model = tiny(name)
    drafter = ModelDrafter(CompiledModel(model, backend="eager"))
    found = polydraft.generate(
        model, torch.tensor([PROMPT]), drafter=drafter, policy=Widths((2, 1)), max_new_tokens=30, **GREEDY
    )
    assert found.sequences[0, len(PROMPT) :].tolist() == theirs(model, PROMPT, 30)
    assert found.statistics.accepted == found.statistics.new_tokens - found.statistics.steps


def test_a_trial_leaves_the_configuration_as_it_was() -> None:
    model = tiny("gemma3_text")
    before = model.config.to_dict()
    HuggingFaceModel(model)
    assert model.config.to_dict() == before and windows_of(model.config) == (
        KeyWindow("sliding_attention", WINDOW),
        KeyWindow("full_attention"),
    )


def test_another_window_is_another_trial() -> None:
    model = tiny_model("mistral")
    assert HuggingFaceModel(model).windows == (KeyWindow("sliding_attention", 12),)
    model.config.sliding_window = 7
    assert HuggingFaceModel(model).windows == (KeyWindow("sliding_attention", 7),)


def test_a_model_that_slides_whatever_it_says_of_its_layers_is_found_out() -> None:
    model = tiny_model("mistral")
    model.config.layer_types = ["full_attention", "full_attention"]
    assert HuggingFaceModel(model).windows == (KeyWindow("sliding_attention", 12),)


def test_a_model_that_follows_no_masks_of_windows_ends_at_its_window() -> None:
    model = tiny_model("mistral")
    inner = model.model.forward

    def stubborn(*places: Any, attention_mask: Any = None, **named: Any) -> Any:
        """Reads what its own window shows, once that is narrow: as if the window were a part of its weights."""
        narrow = model.config.sliding_window == 2
        model.config.sliding_window = 12 if narrow else model.config.sliding_window
        try:
            return inner(*places, attention_mask=attention_mask, **named)
        finally:
            model.config.sliding_window = 2 if narrow else model.config.sliding_window

    model.model.forward = stubborn
    prompt = torch.tensor([PROMPT_OF_FEW])
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20)
    options = {"drafter": "ngram", "policy": Fixed(EAGLE_25), "temperature": 0, "max_new_tokens": 20}
    with pytest.warns(UserWarning, match="cut short by the model's context of 12 tokens"):
        found = polydraft.generate(model, prompt, **options)
    assert HuggingFaceModel(model).context == 12 and found.finish == ("context",)
    assert found.sequences.tolist() == expected[:, :12].tolist()
    with pytest.raises(ContextOverflow, match="13 tokens, but at most 12 fit"):
        polydraft.generate(model, torch.ones(1, 13, dtype=torch.int64), max_new_tokens=20)


def test_the_memory_of_a_text_counts_every_layers_keys_and_values() -> None:
    door = HuggingFaceModel(tiny("deepseek_v3"))
    assert (
        cache_bytes(door, 10) == 4 * (16 + 8) * 10 * 8
    )  # layers, widths of a latent and of its rotated part, slots, bytes
    cache = door.new_cache(1, 10)
    ids = torch.tensor([[1, 2]])
    door.forward(ids, ids - 1, torch.ones(1, 2, 2, dtype=torch.bool).tril(), cache, torch.tensor([0]))
    assert sum(store.numel() * store.element_size() for store in cache.stores) == cache_bytes(door, 10)


def test_a_window_of_nothing_is_refused() -> None:
    model = tiny_model("mistral")
    model.config.sliding_window = 0
    with pytest.raises(UnsupportedModel, match="MistralForCausalLM has sliding_window=0, so its tokens see nothing"):
        HuggingFaceModel(model)
    plain = tiny_model("llama")
    plain.config.sliding_window = 0
    plain.config.layer_types = ["full_attention"] * 2
    assert HuggingFaceModel(plain).facts.branches


ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, **SLIDES}
ROUTING = {
    "mixtral": {**ROUTED, "num_local_experts": 4},
    "gpt_oss": {**ROUTED, "num_local_experts": 4},
    "qwen3_moe": {
        **ROUTED,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "use_sliding_window": True,
        "max_window_layers": 0,
    },
    "qwen2_moe": {
        **ROUTED,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "use_sliding_window": True,
        "max_window_layers": 0,
    },
}


@pytest.mark.parametrize("kind", ROUTING)
def test_what_a_router_says_is_not_asked_for(kind: str) -> None:
    """A balancing loss, which the model would compute of it, does not take our masks."""
    model = built(kind, ROUTING[kind])
    found = polydraft.generate(model, torch.tensor([PROMPT]), drafter="ngram", max_new_tokens=NEW, **GREEDY)
    assert found.sequences[0, len(PROMPT) :].tolist() == theirs(model, PROMPT)


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        ("falcon", "return_dict", False),
        ("bert", "return_dict", False),
        ("mistral", "output_attentions", True),
        ("mistral", "output_hidden_states", True),
        ("mistral", "use_cache", False),
        ("gemma2", "use_cache", False),
    ],
)
def test_what_a_pass_is_told_goes_before_what_the_configuration_says(kind: str, setting: str, value: bool) -> None:
    model = built(kind, SLIDES) if kind in FAMILIES else tiny_of_type(kind)
    expected = theirs(model, PROMPT)
    setattr(model.config, setting, value)
    found = polydraft.generate(model, torch.tensor([PROMPT]), drafter="ngram", max_new_tokens=NEW, **GREEDY)
    assert found.sequences[0, len(PROMPT) :].tolist() == expected


@pytest.mark.parametrize("own", [True, False])
def test_an_error_in_a_trial_of_windows_is_no_answer(own: bool) -> None:
    """It is the reason of a refusal; the text would else end at the window."""
    model = tiny_model("mistral")
    original = model.config

    def fail(part: Any, _: Any, named: dict[str, Any]) -> None:
        if part.config is not original and (named.get(cache_name(model)) is None) is own:
            raise RuntimeError("no room in the tank")

    model.model.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match="MistralForCausalLM cannot score a small token tree: no room in the t"):
        HuggingFaceModel(model)


def test_a_pass_that_failed_once_is_made_again() -> None:
    model, failures = built("deepseek_v3", FAMILIES["deepseek_v3"][0]), [RuntimeError("busy")]

    def fail(*_: Any) -> None:
        if failures:
            raise failures.pop()

    model.model.register_forward_pre_hook(fail)
    with pytest.raises(UnsupportedModel, match="cannot read a token into a cache: busy"):
        HuggingFaceModel(model)
    assert HuggingFaceModel(model).facts.branches
