"""Prompts with images: the text is Hugging Face's, alone, in batches and in running batches, whoever drafts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model, tiny_tokenizer
from key_views import few
from sources import SEEING, SIDE, near, prompts_with_images, seeing
from torch import Tensor

import polydraft
from polydraft import Chain, ModelDrafter, NgramDrafter, Recent, Snap, Widths
from polydraft.conformance import check
from polydraft.drafters import Drafter
from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models import CompiledModel, HuggingFaceModel
from polydraft.models.sources import ReadPrompt

NEW = 16
PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids")
GREEDY: dict[str, Any] = {"temperature": 0.0}
STATES = ("lfm2_vl",)
QUICK = ("qwen3_vl", "paligemma", "lfm2_vl")


def drafters(kind: str) -> dict[str, Drafter]:
    """Return drafters: lookups, one near the model, the model itself, which sees no images, and one of text alone."""
    model = seeing(kind)
    return {
        "lookup": NgramDrafter(),
        "near": near(model),
        "itself": ModelDrafter(HuggingFaceModel(model)),
        "text alone": ModelDrafter(HuggingFaceModel(tiny_model("llama", 64).double())),
    }


@pytest.mark.long(1)
@pytest.mark.parametrize("kind", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in SEEING])
def test_greedy_text_is_hugging_faces(kind: str) -> None:
    model = seeing(kind)
    assert HuggingFaceModel(model).facts.remembers == (kind in STATES)
    policy = Chain(4) if kind in STATES else Widths((3, 2, 1))
    alone, padded = prompts_with_images(kind, [(5, 6)]), prompts_with_images(kind, [(5, 6), (2, 3)])
    for given in (alone,) if kind in STATES else (alone, padded):
        expected = model.generate(**given, max_new_tokens=NEW, do_sample=False)
        for name, drafter in drafters(kind).items():
            options: dict[str, Any] = {"drafter": drafter, "policy": policy, "max_new_tokens": NEW}
            found = polydraft.generate(model, given, **options, **GREEDY)
            assert torch.equal(found.sequences, expected), name
        options = {"drafter": near(model), "policy": policy, "max_new_tokens": NEW}
        inside = model.generate(**given, do_sample=False, custom_generate=polydraft.generate, **options)
        assert torch.equal(inside, expected)
    blank = {**alone, "pixel_values": alone["pixel_values"].flip(-1) * 0.3 + 0.1}
    seen = [polydraft.generate(model, one, max_new_tokens=1, output_logits=True, **GREEDY) for one in (alone, blank)]
    assert seen[0].logits is not None and seen[1].logits is not None
    assert not torch.allclose(seen[0].logits[0], seen[1].logits[0]), "the image is seen"


LONG = [pytest.param(one, marks=pytest.mark.slow) for one in ("llava", "qwen3_vl", "gemma3")]


@pytest.mark.parametrize("kind", ["lfm2_vl", *LONG])
def test_a_running_batch_is_its_texts(kind: str) -> None:
    """Prompts with images of several sizes beside prompts of text alone, more than there are slots."""
    model = seeing(kind)
    given = [prompts_with_images(kind, [pair], place) for place, pair in enumerate([(5, 6), (2, 3), (9, 1), (1, 4)])]
    prompts: list[Any] = [*given[:2], torch.arange(4, 13), *given[2:]]
    texts: list[dict[str, Tensor]] = [one if isinstance(one, dict) else {"input_ids": one[None]} for one in prompts]
    expected = {
        place: model.generate(**one, max_new_tokens=12, do_sample=False)[0, one["input_ids"].shape[1] :].tolist()
        for place, one in enumerate(texts)
    }
    policy = Chain(3) if kind in STATES else Widths((2, 1, 1))
    for name, drafter in drafters(kind).items():
        options: dict[str, Any] = {"drafter": drafter, "policy": policy, "batch_size": 2, "max_new_tokens": 12}
        many = polydraft.generate_many(model, prompts, **options, **GREEDY)
        assert {one.name: one.tokens for one in many} == expected, name
    own = {place: {"seed": place + 5} for place in range(5)}
    options = {"drafter": near(model), "policy": policy, "max_new_tokens": 12, "temperature": 1.0}
    sampled = {
        one.name: one.tokens for one in polydraft.generate_many(model, prompts, batch_size=3, per_prompt=own, **options)
    }
    for place, one in enumerate(texts):
        alone = polydraft.generate(model, one, seed=place + 5, **options)
        assert alone.sequences[0, one["input_ids"].shape[1] :].tolist() == sampled[place]


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=[pytest.mark.slow] * (one != "paligemma")) for one in SEEING if one not in STATES]
)
def test_sampled_text_has_the_models_law(kind: str) -> None:
    """Sampled texts are consistent with the enumerated law; a right engine fails with probability 1e-6."""
    model, given = seeing(kind), prompts_with_images(kind, [(3, 2)])
    width, allowed = given["input_ids"].shape[1], [5, 6, 7, 8]
    only: dict[str, Any] = {"prefix_allowed_tokens_fn": lambda *_: allowed}

    def law(context: Sequence[int]) -> Sequence[float]:
        """Return the law by Hugging Face's own steps, each of them forced, of the tokens that are allowed."""
        forced = [*context[1:]]

        def choose(_: int, text: Tensor) -> list[int]:
            done = len(text) - width
            return [forced[done]] if done < len(forced) else allowed

        found = model.generate(
            **given,
            max_new_tokens=len(forced) + 1,
            do_sample=False,
            prefix_allowed_tokens_fn=choose,
            return_dict_in_generate=True,
            output_scores=True,
        )
        return found.scores[-1][0].softmax(-1)[allowed].tolist()

    def generate(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        found = polydraft.generate(
            model,
            given,
            num_return_sequences=len(prompts),
            drafter=near(model),
            policy=Widths((2, 1)),
            max_new_tokens=2,
            temperature=1.0,
            top_k=0,
            seed=seeds[0],
            **only,
        )
        return [[allowed.index(token) for token in row] for row in found.sequences[:, width:].tolist()]

    def of_places(context: Sequence[int]) -> Sequence[float]:
        return law([context[0], *(allowed[place] for place in context[1:])])

    report = check(generate, of_places, [[0]], new_tokens=2, batch_size=64, most_samples=320)
    assert report.passed, str(report)


def test_few_keys_of_an_image_are_chosen() -> None:
    """Its tokens lie before the root's slot in the target's cache, and most of them are not copied."""
    model, options = seeing("qwen3_vl"), {"policy": Chain(2), "max_new_tokens": NEW, **GREEDY}
    given = prompts_with_images("qwen3_vl", [(5, 6), (2, 3)])
    expected = polydraft.generate(model, given, drafter="none", max_new_tokens=NEW, **GREEDY).sequences
    for keys in (Recent(1, 3, room=5), Snap(4, 5)):
        found = polydraft.generate(model, given, drafter=few(keys), **options)
        assert torch.equal(found.sequences, expected) and not found.statistics.fallback and found.statistics.drafted


def test_text_alone_is_text_as_before() -> None:
    """A model that sees writes trees behind prompts of text, and a chat goes on from its past."""
    model = seeing("llava")
    ids = torch.arange(4, 16)[None]
    expected = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    found = polydraft.generate(
        model, ids, drafter=near(model), policy=Widths((3, 2, 1)), max_new_tokens=NEW, keep_past=True, **GREEDY
    )
    assert torch.equal(found.sequences, expected) and found.past is not None
    after = torch.cat([expected, ids], dim=1)
    again = polydraft.generate(model, after, past=found.past, drafter=near(model), max_new_tokens=5, **GREEDY)
    assert torch.equal(again.sequences, model.generate(after, max_new_tokens=5, do_sample=False))
    assert again.statistics.prompt_known >= expected.shape[1] - 2


def test_kinds_of_tokens_that_are_all_text_say_nothing() -> None:
    model, ids = seeing("qwen3_vl"), torch.arange(4, 16)[None]
    kinds = {"input_ids": ids, "mm_token_type_ids": ids * 0}
    found = polydraft.generate(model, kinds, drafter=near(model), keep_past=True, max_new_tokens=NEW, **GREEDY)
    assert torch.equal(found.sequences, model.generate(ids, max_new_tokens=NEW, do_sample=False)) and found.past


def test_a_running_batch_takes_what_processors_pad_and_refuses_what_the_model_does() -> None:
    model, given = seeing("gemma3"), prompts_with_images("gemma3", [(5, 6)])
    padded = {**given, **{name: torch.nn.functional.pad(given[name], (3, 0)) for name in PER_TOKEN}}
    wrong = {**given, "pixel_values": torch.zeros(2, 3, SIDE, SIDE, dtype=torch.float64)}
    prompts = [given, wrong, padded, torch.arange(4, 9)]
    many = polydraft.generate_many(model, prompts, batch_size=1, drafter=near(model), max_new_tokens=12, **GREEDY)
    texts = {one.name: one for one in many}
    expected = model.generate(**given, max_new_tokens=12, do_sample=False)[0, given["input_ids"].shape[1] :].tolist()
    assert texts[0].tokens == texts[2].tokens == expected
    assert texts[1].finish == "refused" and texts[1].error and texts[3].finish == "length"
    both = prompts_with_images("gemma3", [(5, 6), (2, 3)])
    for wrong, said in (
        (both, "There is pixel_values for all prompts together, which generate_many does not take apart"),
        ([both], "Prompt 0 must be one row of token ids, but is a mapping of 2 rows; give one for each"),
    ):
        with pytest.raises(InvalidParameter, match=said):
            polydraft.generate_many(model, wrong, max_new_tokens=3)
    with pytest.raises(InvalidParameter, match="pixel_values belongs to one prompt; give it with that prompt"):
        polydraft.generate_many(model, [given], pixel_values=given["pixel_values"], max_new_tokens=3)


def test_a_prompt_in_both_directions_needs_no_image() -> None:
    model = seeing("paligemma")
    ids = torch.arange(4, 16)[None]
    found = polydraft.generate(model, ids, drafter=near(model), policy=Widths((3, 2)), max_new_tokens=NEW, **GREEDY)
    assert torch.equal(found.sequences, model.generate(ids, max_new_tokens=NEW, do_sample=False))


def test_the_models_own_notes_do_not_matter() -> None:
    """Qwen's model notes how far positions of the last image moved; another prompt in between changes nothing."""
    model = seeing("qwen3_vl")
    given, other = prompts_with_images("qwen3_vl", [(5, 6)]), prompts_with_images("qwen3_vl", [(3, 2)], 4)
    other["image_grid_thw"] = torch.tensor([[1, 8, 4]])
    expected = model.generate(**given, max_new_tokens=NEW, do_sample=False)[0].tolist()
    run = polydraft.stream(model, given, drafter=near(model), max_new_tokens=NEW, **GREEDY)
    next(run)
    model.generate(**other, max_new_tokens=3)
    run.exhaust()
    assert [*given["input_ids"][0].tolist(), *run.new_tokens[0]] == expected


@pytest.mark.parametrize("kind", ["qwen3_vl", pytest.param("llava", marks=pytest.mark.slow)])
def test_compiled_passes_move_positions_too(kind: str) -> None:
    model, given = seeing(kind), prompts_with_images(kind, [(5, 6), (2, 3)])
    target = CompiledModel(model, backend="eager")
    plain = HuggingFaceModel(model)
    sources = polydraft.models.sources_of(
        plain, given["input_ids"], {**_beside(given), "position_ids": _positions(model, given)}, None
    )
    assert sources is not None
    tokens, places = torch.tensor([[5, 7], [5, 7]]), torch.tensor([[one.length - 1, one.length] for one in sources])
    mask = torch.arange(int(places.max()) + 1) <= places.unsqueeze(-1)
    results = []
    for door in (plain, target):
        cache = door.new_cache(2, 60, sources)
        results.append(door.forward(tokens, places, mask, cache, places[:, 0]).logits)
    assert torch.allclose(*results, atol=1e-9)


def _beside(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in given.items() if name != "input_ids"}


def _positions(model: Any, given: dict[str, Tensor]) -> Tensor:
    return model._prepare_position_ids_for_generation(given["input_ids"], _beside(given))


def test_what_cannot_be_is_refused_by_name() -> None:
    model, given = seeing("llava"), prompts_with_images("llava", [(5, 6)])
    llama = tiny_model("llama", 64).double()
    with pytest.raises(InvalidParameter, match="pixel_values is more than text, but LlamaForCausalLM reads text alone"):
        polydraft.generate(llama, given, max_new_tokens=3)
    with pytest.raises(InvalidParameter, match="keep_past is for prompts of plain text"):
        polydraft.generate(model, given, keep_past=True, max_new_tokens=3)
    with pytest.raises(InvalidParameter, match="Image features and image tokens do not match"):
        polydraft.generate(model, {**given, "input_ids": given["input_ids"] % 50}, max_new_tokens=3)
    hybrid = prompts_with_images("lfm2_vl", [(5, 6), (2, 3)])
    with pytest.raises(UnsupportedModel, match="remembers in states, so prompts with images are read one by one"):
        polydraft.generate(seeing("lfm2_vl"), hybrid, max_new_tokens=3)
    door = HuggingFaceModel(model)
    read = ReadPrompt(door.new_cache(1, 9), 9, 0)
    cache = door.new_cache(1, 20, [read])
    place = torch.tensor([[4]])
    with pytest.raises(InvalidParameter, match="A prompt with images is read once"):
        door.forward(place, place, torch.ones(1, 1, 5, dtype=torch.bool), cache, torch.tensor([4]))


def test_it_is_loaded_from_a_folder_by_its_name(tmp_path: Path) -> None:
    model, given = seeing("llava"), prompts_with_images("llava", [(5, 6)])
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pair = polydraft.load(tmp_path, dtype="float64")
    expected = model.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None)
    found = polydraft.generate(pair.target, given, max_new_tokens=8, eos_token_id=None, **GREEDY)
    assert torch.equal(found.sequences, expected)
