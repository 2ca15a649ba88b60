"""Riders in folders: PaSS's embeddings, and the masks that a whole model names in its configuration."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from test_medusa import heads, layout_a
from torch import Tensor, nn

import polydraft
from polydraft.bench.environment import described
from polydraft.drafters import RiderDrafter, is_head, load_head, own_riders, write_pass
from polydraft.drafters.heads.formats.head_kinds import KINDS
from polydraft.drafters.heads.formats.rider_folders import masks_inside
from polydraft.errors import CheckpointError, InvalidParameter, TargetMismatch
from polydraft.models import HuggingFaceModel

VOCAB, WIDTH, PROMPT = 24, 16, [3, 1, 4, 1, 5]


def written(folder: Path, count: int = 3, width: int = WIDTH) -> RiderDrafter:
    torch.manual_seed(4)
    drafter = RiderDrafter(lookahead=nn.Embedding(count, width).requires_grad_(False))
    write_pass(drafter, folder, HuggingFaceModel(tiny_model(vocab=VOCAB)), made_for="a target", card="# A card\n")
    return drafter


def test_embeddings_are_told_read_again_bit_for_bit_and_draft(tmp_path: Path) -> None:
    drafter = written(tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {"config.json", "lookahead.safetensors", "README.md"}
    said = json.loads((tmp_path / "config.json").read_text())
    assert said == {"model_type": "pass", "num_lookahead": 3, "base_model_name_or_path": "a target"}
    assert is_head(tmp_path)
    read: Any = load_head(str(tmp_path))
    assert read.lookahead.weight.equal(drafter.lookahead.weight.bfloat16().float())  # pyright: ignore
    write_pass(read, tmp_path / "again", HuggingFaceModel(tiny_model(vocab=VOCAB)), made_for="a target")
    both = [load_file(one / "lookahead.safetensors") for one in (tmp_path, tmp_path / "again")]
    assert all(one.keys() == {"lookahead.weight"} for one in both)
    assert both[0]["lookahead.weight"].equal(both[1]["lookahead.weight"])
    model = tiny_model(vocab=VOCAB)
    given: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12}
    plain: Any = polydraft.generate(model, PROMPT, drafter="none", **given)
    text: Any = polydraft.generate(model, PROMPT, drafter=str(tmp_path), policy=3, **given)
    assert torch.equal(text.sequences, plain.sequences) and text.statistics.drafted > 0


def test_they_are_told_by_their_tensors_and_by_no_other_kind(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"num_lookahead": 3}))
    assert is_head(tmp_path) and isinstance(load_head(str(tmp_path)), RiderDrafter)
    config, shapes = {"model_type": "pass", "num_lookahead": 3}, {"lookahead.weight": (3, WIDTH)}
    assert [one.name for one in KINDS if one.told(config)] == ["PaSS"]
    assert [one.name for one in KINDS if one.holds(shapes)] == ["PaSS"]
    other = {name: tuple(value.shape) for name, value in layout_a(heads(2, dtype=torch.float32)).items()}
    assert [one.name for one in KINDS if one.holds(other)] == ["Medusa"]


def changed(folder: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> None:
    said = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({name: one for name, one in said.items() if one != "-"}))
    if tensors is not None:
        save_file(tensors, folder / "lookahead.safetensors")


ROWS = torch.ones(3, WIDTH)
DAMAGED: dict[str, tuple[dict[str, Tensor] | None, dict[str, Any], str]] = {
    "no number": (None, {"num_lookahead": "-"}, "says that num_lookahead is None; it must be a number"),
    "another number": (None, {"num_lookahead": 4}, "num_lookahead is 4; lookahead.weight holds 3 embeddings"),
    "a half": (None, {"num_lookahead": 2.5}, "num_lookahead is 2.5; it must be a number"),
    "no table": ({"look.weight": ROWS}, {}, "is not complete: lookahead.weight is missing"),
    "a vector": ({"lookahead.weight": torch.ones(3)}, {}, r"lookahead.weight has shape \[3\], and is no matrix"),
    "nothing": ({"lookahead.weight": torch.ones(0, WIDTH)}, {}, "which holds no embedding"),
    "no numbers": ({"lookahead.weight": ROWS * torch.nan}, {}, "lookahead.weight holds values that are no numbers"),
    "more": (
        {"lookahead.weight": ROWS, "fc.weight": ROWS + 1},
        {},
        "holds fc.weight, which this kind",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_one_sentence(case: str, tmp_path: Path) -> None:
    tensors, config, said = DAMAGED[case]
    written(tmp_path)
    changed(tmp_path, tensors, **config)
    with pytest.raises(CheckpointError, match=said) as raised:
        load_head(str(tmp_path))
    assert str(tmp_path) in str(raised.value)


def test_embeddings_of_another_width_are_for_another_target(tmp_path: Path) -> None:
    written(tmp_path, width=8)
    with pytest.raises(TargetMismatch, match="embeddings are 8 wide and the target's 16"):
        polydraft.generate(tiny_model(vocab=VOCAB), PROMPT, drafter=str(tmp_path), max_new_tokens=4)


def test_masks_are_written_with_their_target_alone(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="have no folder; its own config"):
        write_pass(RiderDrafter((1,)), tmp_path, HuggingFaceModel(tiny_model(vocab=VOCAB)))


def tuned(folder: Path, **config: Any) -> Any:
    """Write a whole model whose configuration names its masks."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(vocab=len(tokenizer) + 3, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    changed(folder, **{"spd_type": "space", "mask_token_id": len(tokenizer), **config})
    return model


def test_a_tuned_target_finds_its_own_masks(tmp_path: Path) -> None:
    model = tuned(tmp_path)
    pair = polydraft.load(tmp_path, dtype="float32")
    first = model.config.vocab_size - 3
    assert isinstance(pair.draft, RiderDrafter) and pair.draft.masks == (first,) * 5
    given: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12}
    plain: Any = polydraft.generate(pair.target, PROMPT, drafter="none", **given)
    text: Any = polydraft.generate(pair.target, PROMPT, drafter=pair.draft, policy=3, **given)
    assert torch.equal(text.sequences, plain.sequences) and text.statistics.drafted > 0
    changed(tmp_path, mask_num=3, mask_diff=True)
    own = polydraft.load(tmp_path).draft
    assert isinstance(own, RiderDrafter) and own.masks == (first, first + 1, first + 2)
    assert polydraft.load(tmp_path, "self:int8").draft is not None, "who names a draft has it"
    changed(tmp_path, spd_type="-")
    assert polydraft.load(tmp_path).draft is None


def test_a_tuned_target_without_room_for_its_riders_is_loaded_without_them(tmp_path: Path) -> None:
    tuned(tmp_path, mask_num=11)  # 132 riders, and a context of 128
    with pytest.warns(UserWarning, match="they need 132 tokens beside each text, and the context has 128"):
        assert polydraft.load(tmp_path, dtype="float32").draft is None


def test_runs_that_draft_from_masks_are_described(tmp_path: Path) -> None:
    tuned(tmp_path)
    told = described(polydraft.load(tmp_path, dtype="float32").draft)  # type: ignore[arg-type]
    assert told == {"parameters": 0, "dtype": "none", "device": "none", "weights": "none"}


NAMED: dict[str, Any] = {"spd_type": "space", "mask_token_id": 20, "eos_token_id": [2, 22]}
ROWS_THERE = "the model's embedding has 24 rows, so it must be below 24"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"mask_token_id": None}, "mask_token_id is None; it must be a number"),
    "negative": ({"mask_token_id": -1}, "mask_token_id is -1; it must be a number"),
    "beyond": ({"mask_token_id": 24}, f"mask_token_id is 24; {ROWS_THERE}"),
    "the last beyond": (
        {"mask_diff": True, "eos_token_id": 2},
        f"mask_token_id is 20; of its masks, 24: {ROWS_THERE}",
    ),
    "an end": ({"mask_token_id": 22}, "mask_token_id is 22; that token ends a text, so it cannot be a mask"),
    "an end among": ({"mask_diff": True, "mask_num": 3}, "is 20; of its masks, 22: that token ends a text"),
    "an end of texts that are generated": ({"ends": [2, 20]}, "mask_token_id is 20; that token ends a text"),
    "no masks": ({"mask_num": 0}, "mask_num is 0; it must be a number"),
    "too many": ({"mask_num": 17}, "mask_num is 17; it must be at most 16"),
    "no yes or no": ({"mask_diff": "false"}, "mask_diff is 'false'; it must be true or false"),
}


def named(**config: Any) -> HuggingFaceModel:
    """Return a target whose configurations say this; `ends` are those of its generation configuration."""
    model: Any = copy.deepcopy(tiny_model(vocab=VOCAB))
    model.generation_config.eos_token_id = config.pop("ends", None)
    for name, value in config.items():
        setattr(model.config, name, value)
    return HuggingFaceModel(model)


@pytest.mark.parametrize("case", REFUSED)
def test_masks_that_cannot_be_are_one_sentence(case: str) -> None:
    config, said = REFUSED[case]
    with pytest.raises(CheckpointError, match=said):
        own_riders(named(**{**NAMED, **config}), "'a model'")


def test_other_models_name_no_masks() -> None:
    assert own_riders(named(), "") is None and own_riders(named(spd_type="pard", mask_token_id=3), "") is None


@pytest.mark.parametrize("masks", [(20, 20, 20), (20, 21), (20,)])
def test_what_is_written_of_masks_is_what_is_read(masks: tuple[int, ...]) -> None:
    found = own_riders(named(**NAMED | masks_inside(RiderDrafter(masks))), "")
    assert found is not None and found.masks == masks


@pytest.mark.parametrize("masks", [(20, 22), (20, 20, 21), (21, 20)])
def test_masks_that_no_configuration_can_name_are_refused(masks: tuple[int, ...]) -> None:
    with pytest.raises(InvalidParameter, match="names one mask, or masks in a row, but these are"):
        masks_inside(RiderDrafter(masks))
    with pytest.raises(InvalidParameter, match="names one mask"):
        masks_inside(RiderDrafter(lookahead=nn.Embedding(2, 4)))
