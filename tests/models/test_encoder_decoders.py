"""Encoder-decoders: the text is Hugging Face's, alone, in batches and in running batches, whoever drafts."""

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model, tiny_tokenizer
from sources import encoder_decoder, near
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import Chain, ModelDrafter, NgramDrafter
from polydraft.conformance import check
from polydraft.drafters import Drafter
from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models import CompiledModel, HuggingFaceModel
from polydraft.models.sources import Encoded

NEW = 18
KINDS = ("t5", "bart", "marian", "mt5", "pegasus", "m2m_100", "led")
QUICK = ("t5",)
GREEDY: dict[str, Any] = {"temperature": 0.0}


def read(*lengths: int) -> tuple[Tensor, Tensor]:
    """Return inputs of encoders, right-padded, and their mask."""
    own = torch.Generator().manual_seed(3)
    ids, mask = torch.zeros(len(lengths), max(lengths), dtype=torch.int64), torch.zeros(len(lengths), max(lengths))
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(4, 60, (length,), generator=own)
        mask[row, :length] = 1
    return ids, mask.long()


def drafters(kind: str) -> dict[str, Drafter]:
    """Return drafters of every sort: lookups, itself, one near it, a shallower one, and one without an encoder."""
    model = encoder_decoder(kind)
    shallow = encoder_decoder(kind, 2, decoder_layers=1, num_decoder_layers=1)
    return {
        "lookup": NgramDrafter(),
        "itself": ModelDrafter(HuggingFaceModel(model)),
        "near": near(model, 0.3),
        "shallow": ModelDrafter(HuggingFaceModel(shallow)),
        "decoder alone": ModelDrafter(HuggingFaceModel(tiny_model("llama", 64).double())),
    }


@pytest.mark.parametrize("kind", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in KINDS])
def test_greedy_text_is_hugging_faces(kind: str) -> None:
    model = encoder_decoder(kind)
    door = HuggingFaceModel(model)
    assert door.encodes and not door.facts.branches and not door.facts.remembers
    assert door.layers == 2
    ids, mask = read(12, 7, 1)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    options: dict[str, Any] = {"policy": Chain(4), "max_new_tokens": NEW}
    for name, drafter in drafters(kind).items():
        found = polydraft.generate(model, ids, attention_mask=mask, drafter=drafter, **options, **GREEDY)
        assert torch.equal(found.sequences, expected), name
        if name == "itself":
            assert found.statistics.steps == math.ceil(NEW / 5), "drafts by the target itself are accepted"
    options["drafter"] = near(model, 0.3)
    inside = model.generate(ids, attention_mask=mask, do_sample=False, custom_generate=polydraft.generate, **options)
    assert torch.equal(inside, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", pytest.param("bart", marks=pytest.mark.slow)])
def test_a_running_batch_is_its_texts(kind: str) -> None:
    model = encoder_decoder(kind)
    ids, mask = read(12, 5, 20, 9)
    prompts = [row[own.bool()] for row, own in zip(ids, mask, strict=True)]
    expected = [model.generate(one[None], max_new_tokens=12, do_sample=False)[0, 1:].tolist() for one in prompts]
    for name, drafter in drafters(kind).items():
        options: dict[str, Any] = {"drafter": drafter, "policy": Chain(3), "batch_size": 2, "max_new_tokens": 12}
        many = polydraft.generate_many(model, prompts, **options, **GREEDY)
        assert {one.name: one.tokens for one in many} == dict(enumerate(expected)), name
    own = {place: {"seed": place + 5} for place in range(4)}
    options = {"drafter": near(model, 0.3), "policy": Chain(3), "max_new_tokens": 12, "temperature": 1.0}
    texts = {
        one.name: one.tokens for one in polydraft.generate_many(model, prompts, batch_size=3, per_prompt=own, **options)
    }
    for place, prompt in enumerate(prompts):
        alone = polydraft.generate(model, prompt[None], seed=place + 5, **options)
        assert alone.sequences[0, 1:].tolist() == texts[place]


@pytest.mark.parametrize("kind", [pytest.param(one, marks=[pytest.mark.slow] * (one != "t5")) for one in KINDS])
def test_sampled_text_has_the_models_law(kind: str) -> None:
    """Sampled texts are consistent with the enumerated law; a right engine fails with probability 1e-6."""
    sizes: dict[str, Any] = {"vocab_size": 5, "decoder_start_token_id": 1, "bos_token_id": 1, "pad_token_id": 0}
    model = encoder_decoder(kind, **sizes)
    drafter = ModelDrafter(HuggingFaceModel(encoder_decoder(kind, 2, **sizes)))
    ids = torch.tensor([[2, 3, 4, 2, 4]])

    def law(context: Sequence[int]) -> Sequence[float]:
        with torch.no_grad():
            logits = model(input_ids=ids, decoder_input_ids=torch.tensor([list(context)])).logits[0, -1]
        return logits.softmax(-1).tolist()

    def generate(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        found = polydraft.generate(
            model,
            ids.expand(len(prompts), -1),
            drafter=drafter,
            policy=Chain(2),
            max_new_tokens=3,
            temperature=1.0,
            seed=seeds[0],
        )
        return found.sequences[:, 1:].tolist()

    report = check(generate, law, [[1]], batch_size=32, most_samples=128)
    assert report.passed, str(report)


def test_each_row_reads_its_own_source() -> None:
    """The same beginning goes on differently behind different inputs, and alike behind the same."""
    model, (ids, mask) = encoder_decoder("t5"), read(9, 9, 4)
    ids, mask = torch.cat([ids, ids[:1]]), torch.cat([mask, mask[:1]])
    found = polydraft.generate(model, ids, attention_mask=mask, drafter=near(model), max_new_tokens=12, **GREEDY)
    texts = found.sequences.tolist()
    assert texts[0] == texts[3] and len({tuple(one) for one in texts}) == 3


def test_several_returned_sequences_and_processors_are_hugging_faces() -> None:
    model, (ids, mask) = encoder_decoder("bart"), read(9, 6)
    options: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 15,
        "encoder_no_repeat_ngram_size": 2,
        "repetition_penalty": 1.3,
        "forced_bos_token_id": 7,
        "decoder_input_ids": torch.tensor([[3, 9, 4], [3, 5, 6]]),
    }
    expected = model.generate(ids, do_sample=False, **options)
    found = polydraft.generate(model, ids, drafter=near(model), **GREEDY, **options)
    assert torch.equal(found.sequences, expected)
    options = {"attention_mask": mask, "max_new_tokens": 6, "num_return_sequences": 3, "temperature": 1.0, "seed": 2}
    plain = polydraft.generate(model, ids, drafter="none", **options)
    assert plain.sequences.shape[0] == 6
    started = polydraft.generate(model, ids[:1], decoder_start_token_id=8, max_new_tokens=4, **GREEDY)
    assert torch.equal(
        started.sequences, model.generate(ids[:1], decoder_start_token_id=8, max_new_tokens=4, do_sample=False)
    )


def test_decoder_prompts_may_be_padded() -> None:
    model, (ids, mask) = encoder_decoder("t5"), read(9, 6)
    begun = torch.tensor([[3, 9, 4], [0, 0, 3]])
    seen = torch.tensor([[1, 1, 1], [0, 0, 1]])
    found = polydraft.generate(
        model,
        ids,
        attention_mask=mask,
        decoder_input_ids=begun,
        decoder_attention_mask=seen,
        drafter=near(model),
        max_new_tokens=12,
        **GREEDY,
    )
    for row, text in enumerate(([3, 9, 4], [3])):
        own = ids[row : row + 1, : int(mask[row].sum())]
        expected = model.generate(own, decoder_input_ids=torch.tensor([text]), max_new_tokens=12, do_sample=False)
        assert found.sequences[row, 3:].tolist() == expected[0, len(text) :].tolist()


def test_a_running_batch_knows_how_texts_begin() -> None:
    """Also one whose prompt the encoder cannot read, which is refused while the others are written."""
    model, (ids, _) = encoder_decoder("bart"), read(9)
    begun, seen = torch.tensor([[3, 0, 4]]), torch.tensor([[1, 0, 1]])
    own: dict[int, dict[str, Any]] = {
        0: {"decoder_input_ids": begun, "decoder_attention_mask": seen},
        1: {"decoder_input_ids": begun[:, ::2]},
    }
    prompts = [ids[0], ids[0], torch.full((200,), 5), ids[0, :4]]
    many = polydraft.generate_many(
        model, prompts, batch_size=2, per_prompt=own, drafter=near(model), max_new_tokens=12, **GREEDY
    )
    texts = {one.name: one for one in many}
    assert texts[2].finish == "refused" and texts[2].error
    assert texts[3].tokens == model.generate(ids[:, :4], max_new_tokens=12, do_sample=False)[0, 1:].tolist()
    expected = model.generate(ids, decoder_input_ids=begun[:, ::2], max_new_tokens=12, do_sample=False)[0, 2:].tolist()
    assert texts[0].tokens == texts[1].tokens == expected


def test_the_encoder_runs_in_evaluation_mode() -> None:
    model, (ids, _) = encoder_decoder("t5", 3, dropout_rate=0.3), read(9)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    model.train()
    try:
        found = polydraft.generate(model, ids, drafter="none", max_new_tokens=12, **GREEDY)
        assert torch.equal(found.sequences, expected) and model.training and model.encoder.training
    finally:
        model.eval()


MOE = [pytest.param(one, marks=pytest.mark.slow) for one in ("nllb-moe", "switch_transformers")]


@pytest.mark.parametrize("kind", ["m2m_100", *MOE])
def test_padding_and_experts(kind: str) -> None:
    """M2M100 does not count its padding where it reads several tokens, but does where it reads one."""
    model, (ids, _) = encoder_decoder(kind), read(9)
    door = HuggingFaceModel(model)
    assert door.uncounted == (None if kind == "switch_transformers" else 0)
    found = polydraft.generate(model, ids, drafter=near(model, 0.3), max_new_tokens=24, **GREEDY)
    assert torch.equal(found.sequences, model.generate(ids, max_new_tokens=24, do_sample=False))
    if door.uncounted is not None:
        with pytest.raises(InvalidParameter, match=r"has the padding token 0 inside, which .* does not count"):
            polydraft.generate(model, ids, decoder_input_ids=torch.tensor([[3, 0, 9]]), max_new_tokens=3)


def test_a_text_fills_the_context() -> None:
    model = encoder_decoder("bart", max_position_embeddings=24)
    ids, _ = read(9)
    with pytest.warns(UserWarning, match="cut short by the model's context of 24 tokens"):
        found = polydraft.generate(model, ids, drafter=near(model), policy=Chain(7), max_new_tokens=60, **GREEDY)
    expected = model.generate(ids, max_new_tokens=23, do_sample=False)
    assert torch.equal(found.sequences, expected) and found.finish == ("context",)


def check_whisper(*ways: dict[str, Any]) -> PreTrainedModel:
    """Compare Whisper's own generate over us with itself."""
    model = copy.deepcopy(encoder_decoder("whisper"))
    settings: Any = model.generation_config
    settings.no_timestamps_token_id, settings.is_multilingual = 53, True
    settings.lang_to_id, settings.task_to_id = {"<|en|>": 50}, {"transcribe": 51, "translate": 52}
    settings.eos_token_id = 2
    sounds = torch.randn(1, 8, 100, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    drafter = near(model, 0.3)
    for options in ways:
        given: dict[str, Any] = {"attention_mask": torch.ones(2, 100), "max_new_tokens": 12, **options}
        expected = model.generate(sounds, **given)
        found = model.generate(sounds, custom_generate=polydraft.generate, drafter=drafter, **given)
        if "return_dict_in_generate" in options:
            expected, found = expected["sequences"], found["sequences"]
        assert torch.equal(found, expected)
    return model


@pytest.mark.slow
def test_whisper_decodes_every_piece_with_times() -> None:
    check_whisper({"return_timestamps": True}, {"language": "en", "return_dict_in_generate": True})


@pytest.mark.slow
def test_whisper_decodes_every_piece_of_its_own_generate() -> None:
    model = check_whisper({"language": "en"})
    with pytest.raises(InvalidParameter, match="WhisperForConditionalGeneration has a generate of its own"):
        polydraft.generate(model, input_features=torch.zeros(1, 8, 100), max_new_tokens=5)


def test_it_is_loaded_from_a_folder_by_its_name(tmp_path: Path) -> None:
    model = encoder_decoder("t5", vocab_size=24)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pair = polydraft.load(tmp_path, tmp_path, dtype="float64")
    ids, _ = read(9)
    ids = ids % 24
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    found = polydraft.generate(pair.target, ids, drafter=pair.draft, max_new_tokens=12, eos_token_id=None, **GREEDY)
    assert torch.equal(found.sequences, expected)


def test_what_cannot_be_is_refused_by_name() -> None:
    model, (ids, _) = encoder_decoder("t5"), read(9, 6)
    llama = tiny_model("llama", 64).double()
    with pytest.raises(InvalidParameter, match="The draft model has an encoder, but the target has none"):
        polydraft.generate(llama, ids[:1], drafter=model, max_new_tokens=3)
    with pytest.raises(InvalidParameter, match=r"decoder_input_ids=.* is refused: the model has no encoder"):
        polydraft.generate(llama, ids[:1], decoder_input_ids=ids[:1], max_new_tokens=3)
    with pytest.raises(InvalidParameter, match="keep_past is for prompts of plain text"):
        polydraft.generate(model, ids[:1], keep_past=True, max_new_tokens=3)
    with pytest.raises(InvalidParameter, match="decoder_input_ids has the token 70, but the model"):
        polydraft.generate(model, ids[:1], decoder_input_ids=torch.tensor([[3, 70]]), max_new_tokens=3)
    with pytest.raises(InvalidParameter, match="There are no prompts: pass input_ids, rows of token ids"):
        polydraft.generate(model, max_new_tokens=3)
    with pytest.raises(InvalidParameter, match="T5ForConditionalGeneration scores chains only; leave compile out"):
        CompiledModel(model)
    with pytest.raises(InvalidParameter, match="pixel_values is more than text, but T5ForConditionalGeneration reads"):
        polydraft.generate(model, ids[:1], pixel_values=torch.zeros(1, 3, 4, 4), max_new_tokens=3)
    with pytest.raises(InvalidParameter, match=r"inputs_tensor is what model\.generate hands to decoding methods"):
        polydraft.generate(model, ids[:1], inputs_tensor=ids, max_new_tokens=3)
    for wrong, said in (
        (
            {"decoder_input_ids": torch.tensor([[3], [3]])},
            "decoder_input_ids must have a row for each input, 1, but has 2",
        ),
        ({"decoder_attention_mask": ids[:1]}, "decoder_attention_mask needs decoder_input_ids"),
        (
            {"decoder_start_token_id": 64},
            "decoder_start_token_id must be one of the model's tokens, 0 to 63, but is 64",
        ),
        (
            {"decoder_input_ids": torch.tensor([[3, 4]]), "decoder_attention_mask": torch.ones(1, 3)},
            "decoder_attention_mask must have the shape of decoder_input_ids",
        ),
    ):
        with pytest.raises(InvalidParameter, match=said):
            polydraft.generate(model, ids[:1], max_new_tokens=3, **wrong)
    door, other = HuggingFaceModel(model), HuggingFaceModel(encoder_decoder("whisper"))
    source = Encoded(torch.zeros(1, 3, 32), None, model.get_encoder(), {"input_ids": ids[:1]})
    with pytest.raises(UnsupportedModel, match="encoder of its own, which reads no such input; there is input_ids"):
        other.new_cache(1, 4, [source])
    with pytest.raises(UnsupportedModel, match="reads what its encoder made, but the source is a int"):
        door.new_cache(1, 4, [5])
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM reads text alone; leave the sources out"):
        HuggingFaceModel(llama).new_cache(1, 4, [source])
