"""Model folders: what is missing, damaged or does not match is one clear sentence."""

import json
import re
from pathlib import Path

import pytest
import torch
from doubles import tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from transformers.utils import logging

import polydraft
from polydraft.errors import CheckpointError, UnsupportedModel, VocabularyMismatch
from polydraft.models import check_same_size
from polydraft.models.checkpoints.placing import device_named, precision_named

VOCAB = len(tiny_tokenizer())


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.disable_progress_bar()


def saved(folder: Path, *, seed: int = 0, swap: tuple[str, str] | None = None) -> Path:
    """Save a small model with its tokenizer and return its folder."""
    tiny_model("llama", VOCAB, seed=seed, dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer(swap).save_pretrained(folder)
    return folder


def refusal(*arguments: object, kind: type[Exception] = CheckpointError, **options: str) -> str:
    """Return the text of the error that loading raises, having checked that it is one line."""
    with pytest.raises(kind) as caught:
        polydraft.load(*arguments, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith((".", "!")) or ": " in text
    return text


def test_a_saved_model_comes_back(tmp_path: Path) -> None:
    folder = saved(tmp_path / "target")
    pair = polydraft.load(folder)
    original = tiny_model("llama", VOCAB, dtype=torch.float32)
    assert pair.draft is None
    assert not pair.target.training
    assert pair.tokenizer.decode(pair.tokenizer("the inner\n a").input_ids) == "the inner\n a"
    for name, weights in original.state_dict().items():
        assert torch.equal(pair.target.state_dict()[name], weights)


def test_a_pair_comes_back_in_the_wanted_precision(tmp_path: Path) -> None:
    pair = polydraft.load(str(saved(tmp_path / "a")), saved(tmp_path / "b", seed=1), dtype="bfloat16", device="cpu")
    assert pair.draft is not None
    assert {pair.target.dtype, pair.draft.dtype} == {torch.bfloat16}
    heads = [one.get_output_embeddings().weight for one in (pair.target, pair.draft)]
    assert not torch.equal(*heads)


def test_missing_folder(tmp_path: Path) -> None:
    assert "There is no model folder" in refusal(tmp_path / "nowhere")
    assert "nowhere" in refusal(str(tmp_path / "nowhere"))
    assert "There is no model folder" in refusal(saved(tmp_path / "target"), tmp_path / "nowhere")


def test_corrupt_weights(tmp_path: Path) -> None:
    folder = saved(tmp_path / "target")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damage in (b"garbage" * 10, whole[: len(whole) // 2]):
        weights.write_bytes(damage)
        assert f"No model can be loaded from {str(folder)!r}: " in refusal(folder)
    weights.unlink()
    assert "model.safetensors" in refusal(folder)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_incomplete_weights_are_not_filled_with_random_numbers(tmp_path: Path, damage: str) -> None:
    folder = saved(tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    if damage == "missing":
        del weights[name]
    else:
        weights[name] = weights[name][:5].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"damaged: {name} is missing or has another shape." in refusal(folder)


def test_corrupt_configuration(tmp_path: Path) -> None:
    folder = saved(tmp_path / "target")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text("{not json")
    assert str(folder) in refusal(folder)
    (folder / "config.json").unlink()
    assert "No model can be loaded" in refusal(folder)
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "nonsense"}))
    assert "of the kind 'nonsense'" in refusal(folder, kind=UnsupportedModel)


def test_corrupt_tokenizer(tmp_path: Path) -> None:
    folder = saved(tmp_path / "target")
    (folder / "tokenizer.json").write_text("{")
    assert f"No tokenizer can be loaded from {str(folder)!r}" in refusal(folder)


def test_different_tokenizers(tmp_path: Path) -> None:
    target, draft = saved(tmp_path / "target"), saved(tmp_path / "draft", swap=("A", "B"))
    first = tiny_tokenizer().convert_tokens_to_ids("A")
    text = refusal(target, draft, kind=VocabularyMismatch)
    assert f"id {first} is 'A' in the one and 'B' in the other" in text
    assert str(target) in text
    assert str(draft) in text


def test_sizes_may_differ_by_padding_only() -> None:
    check_same_size(50257, 50304)
    with pytest.raises(VocabularyMismatch, match="32000 tokens and the draft model 50257"):
        check_same_size(32000, 50257)


@pytest.mark.parametrize(
    "dtype", ["float99", "int8", "nn", "", "complex64", "float8_e4m3fn", None, 5, ["float32"], torch.int8]
)
def test_unknown_dtype(dtype: object) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"There is no dtype {dtype!r}; use auto, float32")):
        precision_named(dtype, torch.device("cpu"))


def test_a_dtype_may_be_torchs_own(tmp_path: Path) -> None:
    assert polydraft.load(saved(tmp_path / "target"), dtype=torch.bfloat16, device="cpu").target.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "device", ["quantum", "cuda:99", "", "meta", "cpu:3", "CPU", 3, None, 1.5, torch.device("meta"), ["cpu"]]
)
def test_unknown_device(device: object) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"There is no device {device!r} here; use cpu")):
        device_named(device)
