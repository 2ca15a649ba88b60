"""Folders of block heads: every published layout, and what is wrong with a folder, each in one sentence."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import TERMS, VOCAB, WIDTH, block_drafter
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

import polydraft
from polydraft.drafters import HeadDrafter, is_head, load_head, write_block
from polydraft.drafters.heads.block_head import BlockHead, BlockShape
from polydraft.drafters.heads.drafter import HeadEnds
from polydraft.drafters.heads.formats.blocks.block_reading import LAYERS
from polydraft.drafters.heads.formats.blocks.block_writing import block_tensors
from polydraft.drafters.heads.formats.folder_fields import DEFAULTS, Fields
from polydraft.drafters.heads.sublayers import Rotation
from polydraft.errors import CheckpointError, TargetMismatch, VocabularyMismatch
from polydraft.models import HuggingFaceModel

SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "vocab_size": VOCAB,
}
FLAT = {"block_size": 4, "mask_token_id": 1, "target_layer_ids": [-1, 0, 1], "num_target_layers": 3}
INNER = {"mask_token_id": 1, "target_layer_ids": [0, 1], "block_size": 4}


def named(term: str, **changes: Any) -> tuple[HeadDrafter[Any], dict[str, Tensor]]:
    drafter = block_drafter(term, **changes)
    return drafter, block_tensors(drafter.network, drafter.ends)


def folder_of(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps(config))
    return path


def same(drafter: Any, other: HeadDrafter[Any], **changes: Any) -> None:
    """Check that a head that was read is another one, but for the precision of its numbers."""
    assert isinstance(drafter.network, BlockHead)
    ours, theirs = drafter.network.state_dict(), other.network.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value.double(), theirs[name].double(), rtol=1e-6, atol=1e-6)
    assert plain(drafter.network.shape) == {**plain(other.network.shape), **changes}


def plain(shape: BlockShape) -> dict[str, Any]:
    found = {name: getattr(shape, name) for name in shape.__dataclass_fields__}
    found["causal"] = found["causal"] or (False,) * shape.layers
    found["windows"] = found["windows"] or (None,) * shape.layers
    return found


@pytest.mark.long(14)
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"causal": (True, True), "windows": (9, None)}, {"shifted": False, "mask_id": None}, {"taps": 2, "group": 4}],
    ids=["plain", "causal", "in place", "convolved"],
)
def test_our_own_folders_are_read_as_they_were_written(term: str, changes: dict[str, Any], tmp_path: Path) -> None:
    drafter = block_drafter(term, reads=(1, 2, "final"), **changes)
    target = HuggingFaceModel(tiny_model(vocab=VOCAB, num_hidden_layers=4))
    write_block(drafter, tmp_path / "head", target, dtype=torch.float32)
    assert is_head(tmp_path / "head")
    same(load_head(tmp_path / "head"), drafter)


def test_fewer_tokens_are_written_with_their_ids(tmp_path: Path) -> None:
    tokens = torch.tensor([1, 4, 5, 9, 20])
    drafter = block_drafter("markov", rows=5)
    drafter = HeadDrafter(drafter.network, HeadEnds(tokens=tokens))
    target = HuggingFaceModel(tiny_model(vocab=VOCAB))
    write_block(drafter, tmp_path / "head", target, dtype=torch.float32)
    found = load_head(tmp_path / "head")
    assert isinstance(found.network, BlockHead) and torch.equal(found.ends.get_buffer("tokens"), tokens)
    text = polydraft.generate(
        target.model, torch.tensor([[3, 1, 4]]), drafter=str(tmp_path / "head"), max_new_tokens=20
    )
    same_text = polydraft.generate(target.model, torch.tensor([[3, 1, 4]]), drafter="none", max_new_tokens=20)
    assert torch.equal(text.sequences, same_text.sequences)


def without(tensors: dict[str, Tensor], *parts: str) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if not any(part in name for part in parts)}


def test_dflash_of_z_lab_drafts_in_place_and_reads_what_layers_put_out(tmp_path: Path) -> None:
    drafter, tensors = named("none", reads=(1, 2))
    config = {**SIZES, "architectures": ["DFlashDraftModel"], "num_target_layers": 3, "dflash_config": INNER}
    same(load_head(folder_of(tmp_path / "a", config, tensors)), drafter, shifted=False)
    prefixed = {f"model.{name}": value for name, value in tensors.items()}
    same(load_head(folder_of(tmp_path / "b", config, prefixed)), drafter, shifted=False)
    causal = {**config, "dflash_config": {**INNER, "causal_head": True}}
    same(load_head(folder_of(tmp_path / "c", causal, tensors)), drafter, shifted=False, causal=(True, True))
    slides = {**config, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    found = load_head(folder_of(tmp_path / "d", slides, tensors))
    same(found, drafter, shifted=False, causal=(True, False), windows=(8, None))
    two_sided = load_head(folder_of(tmp_path / "e", {**slides, "is_causal": False}, tensors))
    same(two_sided, drafter, shifted=False, windows=(8, None))


@pytest.mark.parametrize("term", ["none", "markov", "gated", "recurrent"])
def test_deepspec_shifts_its_dflash_too_and_holds_copies_of_the_targets_ends(term: str, tmp_path: Path) -> None:
    drafter, tensors = named(term)
    ends = {"embed_tokens.weight": torch.randn(VOCAB, WIDTH), "lm_head.weight": torch.randn(VOCAB, WIDTH)}
    config = {**SIZES, **FLAT, "architectures": ["Qwen3DSparkModel"], "markov_rank": 6}
    found = load_head(folder_of(tmp_path / "a", config, {**tensors, **ends}))
    same(found, drafter)
    assert (
        isinstance(found.network, BlockHead) and found.ends.lm_head is not None and found.ends.embed_tokens is not None
    )
    assert torch.equal(found.ends.lm_head.weight, ends["lm_head.weight"])
    assert torch.equal(found.ends.embed_tokens.weight, ends["embed_tokens.weight"])


def test_specforge_and_model_optimizer_name_the_same_head_otherwise(tmp_path: Path) -> None:
    drafter, tensors = named("gated", reads=(1, 2))
    inner = {**INNER, "projector_type": "dspark", "markov_rank": 6}
    config = {**SIZES, "architectures": ["DSparkDraftModel"], "num_target_layers": 3, "dflash_config": inner}
    heads = {f"logit_head.{name}" if "_head." in name else name: value for name, value in tensors.items()}
    same(load_head(folder_of(tmp_path / "a", config, heads)), drafter)
    flat = {
        name.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj"): value
        for name, value in tensors.items()
    }
    same(load_head(folder_of(tmp_path / "b", {**config, "architectures": ["DFlashDraftModel"]}, flat)), drafter)
    bare = without(flat, "confidence_proj.bias")
    found = load_head(folder_of(tmp_path / "c", config, bare))
    assert isinstance(found.network, BlockHead) and found.network.confidence is not None
    assert float(found.network.confidence.bias.detach()) == 0


def test_domino_and_dflash_2(tmp_path: Path) -> None:
    drafter, tensors = named("domino", reads=(1, 2), confidence=False)
    inner = {**INNER, "projector_type": "domino", "gru_hidden_dim": 10, "emb_dim": 6, "shift_label": True}
    config = {**SIZES, "num_target_layers": 3, "dflash_config": inner}
    same(load_head(folder_of(tmp_path / "a", config, tensors)), drafter)
    drafter, tensors = named("selector", reads=(1, 2), confidence=False, taps=2, group=4)
    inner = {**INNER, "conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
    assert "candidate_selector.predecessor_codebook" in tensors
    found = load_head(folder_of(tmp_path / "b", {**config, "is_causal": False, "dflash_config": inner}, tensors))
    same(found, drafter, shifted=False)


@pytest.mark.parametrize("term", ["none", "markov"])
def test_speculators_count_layers_from_one(term: str, tmp_path: Path) -> None:
    drafter = block_drafter(term, reads=(0, 1, 2))
    target = HuggingFaceModel(tiny_model(vocab=VOCAB))
    write_block(drafter, tmp_path / "head", target, speculators=True, dtype=torch.float32)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [0, 1, 2] and config["speculators_model_type"].startswith("d")
    found = load_head(tmp_path / "head")
    same(found, drafter)
    assert isinstance(found.network, BlockHead) and found.ends.embed_tokens is not None
    del config["sample_from_anchor"], config["aux_hidden_state_layer_ids"]
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    other = load_head(tmp_path / "head", target_layers=5)
    same(other, drafter, shifted=term == "markov", reads=(2, 2, 2))


@pytest.mark.parametrize("told", [None, True, False])
@pytest.mark.parametrize("label", [None, True, False])
def test_speculators_alignment_is_that_of_the_anchor_or_else_of_the_labels(
    told: bool | None, label: bool | None, tmp_path: Path
) -> None:
    """Domino's folders say `shift_label`; a head without a word is in place."""
    drafter, tensors = named("domino", reads=(1, 2), confidence=False)
    words = {"sample_from_anchor": told, "shift_label": label}
    config = {
        "speculators_model_type": "dflash",
        "projector_type": "domino",
        "transformer_layer_config": SIZES,
        "block_size": 4,
        "mask_token_id": 1,
        "aux_hidden_state_layer_ids": [1, 2],
        **{name: word for name, word in words.items() if word is not None},
    }
    shifted = bool(label) if told is None else told
    found = load_head(folder_of(tmp_path, config, tensors))
    same(found, drafter, shifted=shifted)
    assert isinstance(found.network, BlockHead) and found.network.shape.drafts == (4 if shifted else 3)


@pytest.mark.parametrize("kind", [{}, {"model_type": "qwen3"}])
def test_speculators_table_of_layers_may_leave_out_what_hugging_face_has_anyway(
    kind: dict[str, str], tmp_path: Path
) -> None:
    sizes = {"heads": 32, "groups": 32, "channels": 128, "inner": 22016}
    drafter = block_drafter("none", reads=(1,), layers=1, anatomy={**sizes, "rotation": Rotation()})
    config = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": {**kind, "hidden_size": WIDTH, "num_hidden_layers": 1},
        "block_size": 4,
        "mask_token_id": 1,
        "aux_hidden_state_layer_ids": [1],
    }
    tensors = {name: one.float() for name, one in block_tensors(drafter.network, drafter.ends).items()}
    same(load_head(folder_of(tmp_path, config, tensors)), drafter, shifted=False)
    config["transformer_layer_config"]["model_type"] = []
    with pytest.raises(CheckpointError):
        load_head(folder_of(tmp_path, config, tensors))


@pytest.mark.parametrize(("kind", "made"), [("llama", LlamaConfig), ("qwen3", Qwen3Config)])
def test_sizes_that_may_be_left_out_are_hugging_faces(kind: str, made: Any) -> None:
    theirs, alone = made(), Fields("a folder", {}, (DEFAULTS[kind],)).anatomy()
    assert {name: getattr(theirs, name) for name in DEFAULTS[kind]} == DEFAULTS[kind]
    assert (alone.groups, alone.channels) == (theirs.num_key_value_heads, theirs.head_dim)
    assert alone.rotation.theta == theirs.rope_parameters["rope_theta"] and LAYERS == theirs.num_hidden_layers


class Trap:
    def __reduce__(self) -> Any:
        return print, ("code was run",)


def ruined(tensors: dict[str, Tensor], name: str, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {**tensors, name: change(tensors[name])}


BAD: list[tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Any], str]] = [
    (lambda one: without(one, "hidden_norm"), {}, "hidden_norm.weight is missing"),
    (lambda one: without(one, "markov_w2"), {}, "markov_head.markov_w2.weight is missing"),
    (lambda one: {**one, "midlayer.x.weight": torch.zeros(1)}, {}, "keys of two kinds of heads, block and EAGLE"),
    (lambda one: {**one, "a": torch.zeros(1), "b": torch.zeros(1)}, {}, "holds a and 1 more, which"),
    (lambda one: ruined(one, "norm.weight", lambda old: old * torch.nan), {}, "norm.weight holds values that are no"),
    (lambda one: ruined(one, "norm.weight", lambda old: old[:-1]), {}, r"norm.weight has shape \[15\]"),
    (lambda one: one, {"block_size": 0}, "says that block_size is 0"),
    (lambda one: one, {"hidden_size": None}, "says that hidden_size is None"),
    (lambda one: one, {"mask_token_id": None}, "names no mask_token_id"),
    (lambda one: one, {"rope_scaling": {"rope_type": "yarn"}}, "rotary positions of kind 'yarn'"),
    (lambda one: one, {"target_layer_ids": [0, 1, 2, 3, 4]}, "fc.weight is 48 wide, which 5 layers cannot fill"),
    (lambda one: one, {"hidden_act": "gelu"}, "asks for the activation 'gelu'"),
    (lambda one: {**one, "d2t": torch.tensor([0, -1])}, {}, "d2t names a token twice"),
    (lambda one: {**one, "d2t": torch.zeros(8, 2).long()}, {}, r"d2t has shape \[8, 2\], no list"),
    (lambda one: {**one, "d2t": torch.zeros(0).long()}, {}, r"d2t has shape \[0\], no list"),
    (lambda one: {**one, "lm_head.weight": torch.zeros(24)}, {}, r"lm_head.weight has shape \[24\], and is no matrix"),
    (lambda one: {**one, "lm_head.weight": torch.zeros(24, 10)}, {}, r"lm_head.weight has shape \[24, 10\]"),
    (lambda one: {**one, "embed_tokens.weight": torch.zeros(24, 10)}, {}, r"embed_tokens.weight has shape \[24, 10\]"),
    (
        lambda one: {**one, "markov_head.markov_w1.weight": torch.zeros(24)},
        {},
        "markov_w1.weight has shape .* no matrix",
    ),
    (
        lambda one: {**one, "confidence_head.proj.weight": torch.zeros(1, 40)},
        {},
        "is 40 wide, and a slot with its node",
    ),
    (lambda one: {**one, "fc.weight": torch.tensor(1.0)}, {}, r"fc.weight has shape \[\], and is no matrix"),
    (lambda one: one, {"layer_types": ["sliding_attention"]}, "layer_types is .* a list of 2"),
    (lambda one: one, {"layer_types": 5}, "layer_types is 5; it must be a list of 2"),
    (lambda one: one, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2.5}, "sliding_window is 2.5"),
    (lambda one: one, {"rope_theta": 0}, "rope_theta is 0; it must be a number above 0"),
    (lambda one: one, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number above 0"),
]


@pytest.mark.parametrize(("change", "changed", "said"), BAD, ids=[said for *_, said in BAD])
def test_what_is_wrong_is_said_in_a_sentence(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    _, tensors = named("markov")
    config = {**SIZES, **FLAT, "architectures": ["Qwen3DSparkModel"], **changed}
    folder = folder_of(tmp_path / "bad", config, change(tensors))
    with pytest.raises(CheckpointError, match=said) as found:
        load_head(folder)
    assert "\n" not in str(found.value)


def test_half_a_download_and_a_pickle_that_runs_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, tensors = named("markov")
    folder = folder_of(tmp_path / "half", {**SIZES, **FLAT}, tensors)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        load_head(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"holds no model.safetensors"):
        load_head(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Trap()}))
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is damaged"):
        load_head(folder)
    torch.save({**tensors, "trap": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds more than numbers"):
        load_head(folder)
    assert "code was run" not in capsys.readouterr().out
    torch.save(tensors, folder / "pytorch_model.bin")
    assert isinstance(load_head(folder).network, BlockHead)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"reads": (0, 1, 9)}, TargetMismatch, "output of 9 layers and the target has 2"),
        ({"target_width": 32}, TargetMismatch, "32 wide and the target's are 16"),
        ({"mask_id": 99}, VocabularyMismatch, "mask is token 99"),
    ],
)
def test_a_head_for_another_target_is_refused_before_generation(
    changes: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    target = tiny_model(vocab=VOCAB)
    drafter = block_drafter("markov", **changes)
    with pytest.raises(error, match=said):
        polydraft.generate(target, torch.tensor([[1, 2]]), drafter=drafter, max_new_tokens=4)
    write_block(drafter, tmp_path / "head", HuggingFaceModel(target))
    with pytest.raises(error, match=said):
        polydraft.generate(target, torch.tensor([[1, 2]]), drafter=str(tmp_path / "head"), max_new_tokens=4)
    assert load_file(str(tmp_path / "head" / "model.safetensors"))


def wider(name: str, *shape: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: torch.randn(shape)}


OTHERS: list[tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = [
    ("markov", wider("markov_head.markov_w1.weight", 10, 6), "knows 10 tokens and the target has 24"),
    ("markov", wider("markov_head.markov_w2.weight", 20, 6), "has 20 rows for 24 tokens to draft"),
    ("markov", wider("lm_head.weight", 20, WIDTH), "has 24 rows for 20 tokens to draft"),
    ("markov", lambda one: {**one, "d2t": torch.zeros(8).long()}, "has 24 rows for 8 tokens to draft"),
    ("domino", wider("embed_proj.2.weight", 20, 6), "has 20 rows for 24 tokens to draft"),
    ("selector", wider("candidate_selector.predecessor_codebook", 10, 6), "knows 10 tokens and the target has 24"),
    ("selector", wider("candidate_selector.successor_codebook", 10, 6), "has 10 rows for 24 tokens to draft"),
]


@pytest.mark.parametrize(("term", "change", "said"), OTHERS, ids=[f"{term}, {said}" for term, _, said in OTHERS])
def test_tables_for_other_tokens_than_the_targets_are_refused_before_generation(
    term: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], said: str, tmp_path: Path
) -> None:
    """Without ends of its own a head's vocabulary shows in its path term alone: it would fail in mid-text."""
    _, tensors = named(term, confidence=False)
    folder = folder_of(tmp_path / "head", {**SIZES, **FLAT, "selector_top_k": 5}, change(tensors))
    for given in (str(folder), load_head(folder)):
        with pytest.raises(VocabularyMismatch, match=said):
            polydraft.generate(
                tiny_model(vocab=VOCAB, num_hidden_layers=3), torch.tensor([[1, 2]]), drafter=given, max_new_tokens=4
            )


def test_a_head_that_cannot_draft_is_refused_before_generation(tmp_path: Path) -> None:
    _, tensors = named("markov")
    large = {name: value * (1e200 if name == "fc.weight" else 1) for name, value in tensors.items()}
    config = {**SIZES, **FLAT, "output_multiplier": 1e308}
    folder = folder_of(tmp_path / "head", config, large)
    with pytest.raises(CheckpointError, match="cannot draft for this target: its logits are not usable"):
        polydraft.generate(
            tiny_model(vocab=VOCAB, num_hidden_layers=3), torch.tensor([[1, 2]]), drafter=str(folder), max_new_tokens=4
        )


@pytest.mark.parametrize("written", [5, "Qwen3DSparkModel", [None, 3]])
def test_classes_that_are_no_list_of_names_name_no_class(written: Any, tmp_path: Path) -> None:
    drafter, tensors = named("markov")
    same(load_head(folder_of(tmp_path / "head", {**SIZES, **FLAT, "architectures": written}, tensors)), drafter)
