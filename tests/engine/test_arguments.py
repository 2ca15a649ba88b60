"""Every argument of Hugging Face's `generate` is honoured exactly or refused by name: a walk over all of them."""

import copy
import inspect
from functools import cache
from typing import Any

import pytest
import torch
from doubles import perturbed, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, GenerationMixin, PreTrainedModel

import polydraft
from polydraft import EAGLE_25, Chain, Fixed, GenerationOutput, NaiveMatch, NoDraft, TopDown, Widths
from polydraft.drafters import ModelDrafter, NgramDrafter, RoutedDrafter
from polydraft.engine import Method
from polydraft.engine.choices import chosen_policy
from polydraft.errors import InvalidParameter
from polydraft.models import OF_A_CALL_THAT_ENDS, OF_ONE_CALL
from polydraft.models.generation.arguments import DRAFTING, HONOURED, REFUSED
from polydraft.trees import Confident
from polydraft.verifiers import ByShape, Optimal

VOCAB, NEW = 30, 12
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
INTERNAL = {"transformers_version"}
"""Fields of a configuration that ask for nothing."""
NOT_OURS = {"self", "kwargs"}


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB)


@cache
def draft() -> PreTrainedModel:
    return perturbed(target(), 0.05)


def generate(ids: Any = PROMPT, **options: Any) -> GenerationOutput:
    settings = {"drafter": draft(), "max_new_tokens": NEW, "temperature": 0, **options}
    output = polydraft.generate(target(), ids, **settings)
    assert isinstance(output, GenerationOutput)
    return output


def plain(**options: Any) -> Tensor:
    settings = {"attention_mask": torch.ones_like(PROMPT), "do_sample": False, "max_new_tokens": NEW, **options}
    return target().generate(PROMPT, **settings)


# --- The walk --------------------------------------------------------------------------------------------------------


def fields() -> list[str]:
    return sorted(name for name in vars(GenerationConfig()) if not name.startswith("_") and name not in INTERNAL)


def parameters() -> list[str]:
    return sorted(inspect.signature(GenerationMixin.generate).parameters.keys() - NOT_OURS)


def test_every_argument_and_field_is_honoured_or_refused_and_none_both() -> None:
    known = HONOURED | REFUSED.keys()
    assert not {*fields(), *parameters()} - known
    assert not HONOURED & REFUSED.keys()
    assert {*OF_A_CALL_THAT_ENDS, *OF_ONE_CALL} - known == {"past", "keep_past"}  # our own
    assert not DRAFTING.keys() - HONOURED


HONOURED_VALUES: dict[str, Any] = {
    "max_length": 12,
    "max_new_tokens": 7,
    "min_length": 15,
    "min_new_tokens": 9,
    "eos_token_id": [7, 22],
    "pad_token_id": 3,
    "bos_token_id": 2,
    "repetition_penalty": 1.9,
    "encoder_repetition_penalty": 1.9,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[7], [22, 4]],
    "renormalize_logits": True,
    "forced_bos_token_id": 4,
    "forced_eos_token_id": 9,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (3, 1.4),
    "suppress_tokens": [7, 22],
    "begin_suppress_tokens": [7, 22],
    "sequence_bias": [[[7], -4.0], [[22, 4], 3.0]],
    "guidance_scale": 1.6,
    "max_time": 1000.0,
    "num_return_sequences": 1,
}
"""Values under which the greedy text must be Hugging Face's; those of sampling are in other tests."""


@pytest.mark.parametrize("name", sorted(HONOURED_VALUES))
def test_the_greedy_text_is_hugging_faces_however_it_is_said(name: str) -> None:
    usual: dict[str, Any] = {"eos_token_id": 11, "pad_token_id": 0, "max_new_tokens": NEW}
    options = {**usual, name: HONOURED_VALUES[name]}
    if name == "max_length":
        options.pop("max_new_tokens")
    expected = target().generate(PROMPT, attention_mask=torch.ones_like(PROMPT), do_sample=False, **options)
    ours = {"drafter": draft(), "policy": Fixed(EAGLE_25), "temperature": 0, "attention_mask": torch.ones_like(PROMPT)}
    said = polydraft.generate(target(), PROMPT, **ours, **options)
    assert torch.equal(said.sequences, expected)
    config = GenerationConfig(**options)
    assert torch.equal(polydraft.generate(target(), PROMPT, **ours, generation_config=config).sequences, expected)
    inside = target().generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), custom_generate=polydraft.generate, do_sample=False,
        drafter=draft(), **options,
    )  # fmt: skip
    assert torch.equal(inside, expected)


def asking(name: str) -> Any:
    """Return a value that asks for something."""
    special = {
        "length_penalty": 0.7,
        "num_beams": 3,
        "num_beam_groups": 2,
        "diversity_penalty": 0.5,
        "use_cache": False,
    }
    special |= {"disable_compile": "yes", "num_assistant_tokens_schedule": "heuristic", "penalty_alpha": 0.6}
    special |= {"position_ids": torch.arange(5)[None], "inputs_embeds": torch.zeros(1, 5, 4), "dola_layers": "low"}
    special |= {"assistant_ensemble_weight": 0.5, "compile_config": CompileConfig()}
    return special.get(name, 4 if name.endswith("lookbehind") else True)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_is_refused_by_name_and_not_where_it_asks_for_nothing(name: str) -> None:
    with pytest.raises(InvalidParameter, match=rf"^{name}=.* is refused: \w.*\.$"):
        generate(**{name: asking(name)})
    for off in REFUSED[name].off:
        assert torch.equal(generate(**{name: off}).sequences, plain())


@pytest.mark.parametrize("name", sorted(REFUSED.keys() & {*fields()}))
def test_a_configuration_cannot_ask_for_what_is_refused(name: str) -> None:
    config = GenerationConfig(max_new_tokens=NEW)
    setattr(config, name, asking(name))
    with pytest.raises(InvalidParameter, match=rf"^{name}=.* of generation_config is refused"):
        polydraft.generate(target(), PROMPT, drafter=draft(), generation_config=config)
    twin = copy.deepcopy(target())
    setattr(twin.generation_config, name, asking(name))
    if REFUSED[name].shapes_text:
        with pytest.raises(InvalidParameter, match=rf"^{name}=.* of the model's generation_config is refused"):
            polydraft.generate(twin, PROMPT, drafter=draft(), max_new_tokens=NEW)
    elif name not in ("cache_implementation", "continuous_batching_config", "is_assistant"):
        again = polydraft.generate(twin, PROMPT, drafter=draft(), max_new_tokens=NEW, temperature=0)
        assert torch.equal(again.sequences, plain())


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"inputs_embeds": torch.zeros(1, 5, 16, dtype=torch.float64)},
        {"position_ids": torch.arange(5)[None] + 3},
        {"output_attentions": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_inside_hugging_faces_generate_they_are_refused_too(options: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=next(iter(options))):
        target().generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            custom_generate=polydraft.generate,
            max_new_tokens=3,
            **options,
        )


def test_images_and_other_inputs_are_refused_by_name_and_slips_of_the_pen_too() -> None:
    gpt = tiny_model("gpt2", VOCAB)
    with pytest.raises(InvalidParameter, match="token_type_ids is an input of the model beside its tokens"):
        polydraft.generate(gpt, PROMPT, token_type_ids=torch.zeros_like(PROMPT), max_new_tokens=2)
    with pytest.raises(InvalidParameter, match="pixel_values is more than text, but LlamaForCausalLM reads text alone"):
        generate(pixel_values=torch.zeros(1, 3, 4, 4))
    with pytest.raises(InvalidParameter, match="There is no argument 'max_new_token'; did you mean max_new_tokens"):
        generate(max_new_token=3)
    with pytest.raises(InvalidParameter, match="There is no argument 'polcy'; did you mean policy"):
        generate(polcy=3)


@pytest.mark.parametrize("name", sorted(OF_ONE_CALL))
def test_many_prompts_refuse_what_belongs_to_one_call(name: str) -> None:
    value = 2 if name == "num_return_sequences" else draft() if name == "assistant_model" else torch.ones(1, 3)
    value = True if name.startswith(("output", "return")) else value
    with pytest.raises(InvalidParameter, match=f"^{name}=.* is refused"):
        polydraft.generate_many(target(), [[1, 2]], max_new_tokens=2, **{name: value})
    with pytest.raises(InvalidParameter, match=f"^{name}=.* is refused"):
        list(polydraft.generate_many(target(), {"a": [1, 2]}, max_new_tokens=2, per_prompt={"a": {name: value}}))


@pytest.mark.parametrize("name", sorted(OF_A_CALL_THAT_ENDS))
def test_a_stream_refuses_what_belongs_to_a_call_that_ends(name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{name}=.* is refused"):
        polydraft.stream(target(), PROMPT, max_new_tokens=2, **{name: True})


# --- Prompts and masks -----------------------------------------------------------------------------------------------


def test_what_tokenizers_and_chat_templates_return_is_a_prompt() -> None:
    expected = plain()
    encoded = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    for prompt in (encoded, {"input_ids": PROMPT[0].tolist()}, {"input_ids": PROMPT.tolist()}):
        assert torch.equal(generate(prompt).sequences, expected)
    for name in ("inputs", "input_ids"):
        output = polydraft.generate(target(), drafter=draft(), max_new_tokens=NEW, **{name: PROMPT})
        assert torch.equal(output.sequences, expected)
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", len(tokenizer))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], return_tensors="pt")
    output = polydraft.generate(model, chat, drafter="none", max_new_tokens=2)
    assert output.sequences.shape == (1, chat["input_ids"].shape[1] + 2)


TALKS = [[{"role": "user", "content": "a b"}], [{"role": "user", "content": "then the other in there"}]]
TENSORS: dict[str, Any] = {"return_tensors": "pt"}


def chat_model() -> tuple[Any, Any]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    )
    tokenizer.pad_token = tokenizer.eos_token = "<end>"
    return tiny_model("llama", len(tokenizer)), tokenizer


def templated(tokenizer: Any, talk: Any, **options: Any) -> Any:
    return tokenizer.apply_chat_template(talk, add_generation_prompt=True, **options)


def test_every_form_of_a_conversation_is_the_same_prompt() -> None:
    model, tokenizer = chat_model()
    ids = templated(tokenizer, TALKS[0], **TENSORS, return_dict=False)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
    assert tokenizer.decode(ids[0]) == "a b!"
    forms = [ids, templated(tokenizer, TALKS[0], **TENSORS), templated(tokenizer, TALKS[0])]
    forms += [templated(tokenizer, TALKS[0], return_dict=False), templated(tokenizer, TALKS[0], return_tensors="np")]
    for form in forms:
        written = polydraft.generate(model, form, drafter="none", max_new_tokens=NEW).sequences
        assert torch.equal(written, expected)
        tokens = expected[0, ids.shape[1] :].tolist()
        for prompts in (form, [form], {"a": form}):
            (one,) = polydraft.generate_many(model, prompts, drafter="none", max_new_tokens=NEW)
            assert one.tokens == tokens and one.name == ("a" if prompts is not form and "a" in prompts else 0)
    whole = polydraft.generate(model, **templated(tokenizer, TALKS[0]), drafter="none", max_new_tokens=NEW)
    assert torch.equal(whole.sequences, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_of_conversations(side: str) -> None:
    model, tokenizer = chat_model()
    tokenizer.padding_side = side

    def written(prompt: Any) -> list[list[int]]:
        return polydraft.stream(model, prompt, drafter="none", max_new_tokens=NEW).exhaust().new_tokens

    alone = [written(templated(tokenizer, talk))[0] for talk in TALKS]
    for options in (TENSORS, {}):
        batch = templated(tokenizer, TALKS, padding=True, **options)
        assert not bool(torch.tensor(batch["attention_mask"]).all() if not options else batch["attention_mask"].all())
        many = {
            one.name: one.tokens for one in polydraft.generate_many(model, batch, drafter="none", max_new_tokens=NEW)
        }
        assert written(batch) == alone == [many[0], many[1]]
    ragged = templated(tokenizer, TALKS)
    many = {one.name: one.tokens for one in polydraft.generate_many(model, ragged, drafter="none", max_new_tokens=NEW)}
    assert [many[0], many[1]] == alone
    with pytest.raises(InvalidParameter, match="return_tensors='pt' and padding=True"):
        polydraft.generate(model, ragged, max_new_tokens=NEW)


def test_many_prompts_of_a_tokenizer_that_tells_too_much_or_too_little() -> None:
    model, _ = chat_model()
    with pytest.raises(InvalidParameter, match="The tokenizer returned token_type_ids too"):
        polydraft.generate_many(model, {"input_ids": [[1, 2]], "token_type_ids": [[0, 0]]})
    with pytest.raises(InvalidParameter, match="attention_mask must have the shape of input_ids"):
        polydraft.generate_many(model, {"input_ids": [[1, 2]], "attention_mask": [[1]]})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"ids": None}, "There are no prompts"),
        ({"inputs": PROMPT}, "Give prompts once"),
        ({"ids": {"attention_mask": PROMPT}}, "The prompts have no input_ids"),
        ({"ids": {"input_ids": PROMPT, "attention_mask": PROMPT}, "attention_mask": PROMPT}, "attention_mask is given"),
        ({"ids": {"input_ids": [[1, 2], [3]]}}, "cannot be put into one tensor"),
        ({"attention_mask": torch.ones(5)}, r"attention_mask must have the shape of input_ids, \(1, 5\)"),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, "attention_mask must have the shape"),
        ({"attention_mask": torch.ones(1, 4)}, r"but has the shape \(1, 4\)"),
        ({"attention_mask": [[1, 1, 1, 1, 1]]}, "but is of type list"),
        ({"attention_mask": torch.tensor([[1, 1, 2, 1, 1]])}, "1 for a token and 0 for padding, but has 2"),
        ({"attention_mask": torch.tensor([[1, 1, 0.5, 1, 1]])}, "but has 0.5"),
        ({"negative_prompt_ids": PROMPT}, "negative_prompt_ids needs guidance_scale"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, but is 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer"),
        ({"num_return_sequences": 0}, "num_return_sequences must be an integer"),
        ({"seed": -1}, "seed must be an integer"),
        ({"seed": 1, "generator": torch.Generator()}, "seed and generator both fix the text"),
        ({"stop_strings": [""], "tokenizer": tiny_tokenizer()}, "texts of at least one character"),
        ({"max_matching_ngram_size": 2}, "max_matching_ngram_size needs prompt_lookup_num_tokens"),
        ({"num_assistant_tokens": 2}, "num_assistant_tokens needs assistant_model"),
        ({"assistant_model": draft()}, "assistant_model and drafter both say who drafts"),
        ({"drafter": None, "prompt_lookup_num_tokens": 3, "policy": Chain(2)}, "policy says how long chains are"),
        ({"drafter": None, "prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens must be an integer"),
        ({"no_repeat_ngram_size": "two"}, "Hugging Face's generate refuses the arguments"),
        ({"bad_words_ids": 3}, "Hugging Face's generate refuses the arguments"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_slips_are_answered_in_a_sentence(call: dict[str, Any], said: str) -> None:
    call = dict(call)
    ids = call.pop("ids", PROMPT)
    with pytest.raises(InvalidParameter, match=said) as caught:
        generate(ids, **call)
    assert "\n" not in str(caught.value)


# --- Drafters, verifiers and trees by other names --------------------------------------------------------------------


def method_of(**options: Any) -> Method:
    settings = {"max_new_tokens": 2, "temperature": 0, **options}
    return polydraft.stream(target(), PROMPT, **settings).setup.method


def test_what_is_meant_is_taken() -> None:
    assert method_of(drafter=draft(), verifier=NaiveMatch()).verifier == TopDown(NaiveMatch())
    assert method_of(drafter=draft(), verifier="optimal").verifier == TopDown(Optimal())
    assert method_of(drafter="ngram", verifier="naive").verifier.scheme.name == "given"
    for policy, meant in (
        (EAGLE_25, Fixed(EAGLE_25)),
        ("4,2,1", Widths((4, 2, 1))),
        ((2, 1), Widths((2, 1))),
        (3, Chain(3)),
    ):
        assert method_of(drafter=draft(), policy=policy).policy == meant
    assert isinstance(method_of(drafter="none").drafter, NoDraft)
    assert isinstance(method_of(drafter="ngram").drafter, NgramDrafter)
    assert isinstance(method_of(drafter=draft()).drafter, RoutedDrafter)


def test_hugging_faces_words_for_drafts() -> None:
    method = method_of(prompt_lookup_num_tokens=5, max_matching_ngram_size=4)
    assert (method.drafter, method.policy) == (NgramDrafter(4), Chain(5))
    assert isinstance(method_of(assistant_model=draft()).drafter, RoutedDrafter)
    method = method_of(assistant_model=draft(), num_assistant_tokens=4, temperature=1.0)
    assert isinstance(method.drafter, ModelDrafter)
    assert (method.policy, method.verifier) == (Chain(4), ByShape())
    method = method_of(assistant_model=draft(), num_assistant_tokens=4, assistant_confidence_threshold=0.3)
    assert method.policy == Confident((1, 1, 1, 1), 0.3)
    config = GenerationConfig(prompt_lookup_num_tokens=6)
    assert method_of(generation_config=config).policy == Chain(6)
    inside = target().generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), custom_generate=polydraft.generate, do_sample=False,
        prompt_lookup_num_tokens=6, max_new_tokens=NEW,
    )  # fmt: skip
    assert torch.equal(inside, plain())
    run = polydraft.generate_many(target(), [[1, 2]], prompt_lookup_num_tokens=6, max_new_tokens=2)
    assert (run.setup.method.drafter, run.setup.method.policy) == (NgramDrafter(2), Chain(6))


def test_a_folder_is_a_drafter(tmp_path: Any) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", len(tokenizer))
    for name, one in (("target", model), ("draft", perturbed(model, 0.02))):
        one.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    pair = polydraft.load(tmp_path / "target", dtype="float64")
    output = polydraft.generate(pair.target, PROMPT, drafter=tmp_path / "draft", policy=3, max_new_tokens=NEW)
    assert output.statistics.accepted > 0  # without a tree a draft model as large as its target is not asked


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "length"), ("0", "Widths"), ((), "no drafts"), ((0,), "Widths"), (2.5, "policy must be"), (Chain, r"Chain\(")],
)
def test_a_policy_that_is_none_says_what_to_pass(value: Any, said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        chosen_policy(value)


# --- What is returned ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_scores_and_logits_are_hugging_faces(temperature: float) -> None:
    ids, mask = torch.tensor([[0, 3, 1, 4], [2, 7, 1, 8]]), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    options: dict[str, Any] = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    options |= {"attention_mask": mask, "max_new_tokens": NEW, "repetition_penalty": 1.2, "eos_token_id": 11}
    warm = {"top_k": 7, "top_p": 0.9} if temperature else {}
    output = generate(ids, policy=Fixed(EAGLE_25), temperature=temperature, seed=1, **options, **warm)
    assert output.scores is not None
    assert output.logits is not None
    texts = output.sequences
    assert len(output.scores) == len(output.logits) == texts.shape[1] - 4
    steps = polydraft.models.HuggingFaceModel(target()).model
    from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=torch.tensor([1, 0]))])
    if temperature:
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        processors.extend([TemperatureLogitsWarper(temperature), TopKLogitsWarper(7), TopPLogitsWarper(0.9)])
    for place, (scores, logits) in enumerate(zip(output.scores, output.logits, strict=True)):
        past = texts[:, : 4 + place]
        seen = torch.cat([mask, torch.ones(2, place, dtype=mask.dtype)], dim=-1)
        ended = (past[:, 4:] == 11).any(dim=-1)
        with torch.no_grad():
            positions = (seen.cumsum(dim=-1) - 1).clamp_min(0)
            own = steps(past, attention_mask=seen, position_ids=positions).logits[:, -1].float()
        torch.testing.assert_close(logits[~ended].float(), own[~ended], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(scores[~ended].float(), processors(past, own)[~ended], rtol=1e-4, atol=1e-4)
        assert not bool(scores[ended].any())


@pytest.mark.wrong_types
def test_outputs_are_read_like_hugging_faces() -> None:
    output = generate(output_scores=True, return_dict_in_generate=True)
    assert torch.equal(output["sequences"], output.sequences)
    assert torch.equal(output[0], output.sequences)
    assert "scores" in output
    assert "logits" not in output
    assert [*output.keys()] == ["sequences", "statistics", "finish", "scores", "verifier", "lossless"]
    assert {**output}["finish"] == ("length",)
    assert generate().scores is None
    with pytest.raises(KeyError):
        output["logits"]
    inside = target().generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), custom_generate=polydraft.generate, do_sample=False,
        max_new_tokens=3, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    assert inside.scores is None
    assert [tuple(one.shape) for one in inside.logits] == [(1, VOCAB)] * 3


def test_the_statistics_name_what_is_in_force() -> None:
    output = generate(temperature=0.8, repetition_penalty=1.2, seed=1)
    assert output.statistics.in_force == ("RepetitionPenaltyLogitsProcessor", "temperature=0.8", "top_k=50")
    assert output.statistics.as_dict()["in_force"] == [*output.statistics.in_force]
    assert generate(temperature=0.8, top_k=0, seed=1).statistics.in_force == ("temperature=0.8",)
    run = polydraft.generate_many(target(), [[1, 2]], temperature=0.8, max_new_tokens=2)
    assert run.statistics.in_force == ("temperature=0.8", "top_k=50")
