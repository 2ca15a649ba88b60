"""Walks in this package's own form of folders, which may have few tokens: read again, told, damaged, refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import WALKS, walk
from safetensors.torch import load_file, save_file
from torch import Tensor

import polydraft
from polydraft.drafters import load_head, write_hydra, write_mlp, write_redrafter, write_walk
from polydraft.drafters.heads.formats.head_kinds import KINDS
from polydraft.errors import CheckpointError, InvalidParameter, shown
from polydraft.models import HuggingFaceModel
from polydraft.trees import BestFirst

VOCAB, FEW, PROMPTS = 24, torch.tensor([1, 2, 5, 9, 11, 20]), [[3, 1, 4, 1, 5], [9, 2, 6], [5]]


def written(kind: str, folder: Path, tokens: Tensor | None = FEW) -> Any:
    drafter = walk(kind, tokens=tokens)
    write_walk(drafter, folder, HuggingFaceModel(tiny_model(vocab=VOCAB)), card="A head.")
    return drafter


@pytest.mark.parametrize("tokens", [None, FEW], ids=["all tokens", "few"])
@pytest.mark.parametrize("kind", WALKS)
def test_folders_are_told_and_read_again_bit_for_bit(kind: str, tokens: Tensor | None, tmp_path: Path) -> None:
    drafter = written(kind, tmp_path / "one", tokens)
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    shapes = {name: tuple(one.shape) for name, one in load_file(tmp_path / "one" / "model.safetensors").items()}
    assert [one.name for one in KINDS if one.told(config)] == ["walk"]
    assert [one.name for one in KINDS if one.holds(shapes)] == ["walk"]
    found: Any = load_head(tmp_path / "one")
    assert found.name == drafter.name and type(found.network) is type(drafter.network)
    for module, other in ((drafter.network, found.network), (drafter.ends, found.ends)):
        own = {name: one.to(torch.bfloat16).float() for name, one in module.state_dict().items()}
        assert own.keys() == other.state_dict().keys()
        assert all(torch.equal(other.state_dict()[name].float(), one) for name, one in own.items())
    write_walk(found, tmp_path / "two", HuggingFaceModel(tiny_model(vocab=VOCAB)), card="A head.")
    for file in ("config.json", "model.safetensors", "README.md"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.parametrize("kind", WALKS)
def test_heads_of_few_tokens_draft_these_alone_and_write_plain_text(kind: str, tmp_path: Path) -> None:
    written(kind, tmp_path / "head")
    model = tiny_model(vocab=VOCAB)
    padded, mask = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64)
    for row, tokens in enumerate(PROMPTS):
        padded[row, 5 - len(tokens) :], mask[row, 5 - len(tokens) :] = torch.tensor(tokens), 1
    given: dict[str, Any] = {"max_new_tokens": 24, "attention_mask": mask, "temperature": 0.0}
    plain = polydraft.generate(model, padded, drafter="none", **given)
    found = polydraft.generate(model, padded, drafter=str(tmp_path / "head"), policy=BestFirst(9), **given)
    assert torch.equal(found.sequences, plain.sequences) and found.statistics.drafted > 20
    named = load_head(tmp_path / "head").ends.tokens
    assert named is not None and named.tolist() == FEW.tolist()


WRITERS: dict[str, Any] = {"mlp": write_mlp, "lstm": write_mlp, "redrafter": write_redrafter, "hydra++": write_hydra}


@pytest.mark.parametrize("kind", WRITERS)
def test_the_authors_forms_have_all_tokens(kind: str, tmp_path: Path) -> None:
    target = HuggingFaceModel(tiny_model(vocab=VOCAB))
    with pytest.raises(InvalidParameter, match=r"form has all of a target's tokens, and the head 6; take polydraft's"):
        WRITERS[kind](walk(kind, tokens=FEW), tmp_path / "head", target)
    assert not (tmp_path / "head").exists()


def changed(folder: Path, tensors: dict[str, Tensor | None], config: dict[str, Any]) -> None:
    said = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({name: one for name, one in said.items() if one != "-"}))
    held = load_file(folder / "model.safetensors") | tensors
    save_file({name: one for name, one in held.items() if one is not None}, folder / "model.safetensors")


DAMAGED: dict[str, tuple[str, dict[str, Tensor | None], dict[str, Any], str]] = {
    "another walk": ("mlp", {}, {"walk": "gru"}, "walk is 'gru'; it must be one of mlp, lstm,"),
    "no walk": ("mlp", {}, {"walk": "-"}, "walk is None; it must be one of"),
    "no tokens": ("hydra", {"d2t": None, "t2d": None}, {}, "d2t is missing, and it has 6 of 24 tokens"),
    "a token too few": ("lstm", {"d2t": torch.zeros(5), "t2d": None}, {}, "d2t names 5 tokens, and it has 6 output"),
    "tokens that fall": (
        "redrafter",
        {"d2t": FEW.flip(0) - torch.arange(6), "t2d": None},
        {},
        "d2t names tokens that do not rise",
    ),
    "other rows": ("mlp", {}, {"rows": 7}, "d2t names 6 tokens, and it has 7 output rows"),
    "rows of its own": ("hydra", {}, {"own_rows": True}, "walk.heads.0.lm_head.weight|heads.0.lm_head.weight is miss"),
    "rows of the target's": ("redrafter", {}, {"own_rows": False}, "own_rows is False; a walk of this kind has rows"),
    "rows of a joined one": ("joined", {}, {"own_rows": True}, "own_rows is True; a walk of this kind has no rows"),
    "layers too few": (
        "joined",
        {},
        {"reads": [1, 0]},
        r"fc.weight has shape \[16, 48\], and its config.json asks for",
    ),
    "another width": ("mlp", {}, {"width": 8}, r"stages.0.proj.weight has shape \[12, 16\], and its config.json asks"),
    "no state": ("mlp", {}, {"reads": []}, r"reads is \[\]; it must be a list"),
    "no such state": ("mlp", {}, {"reads": ["last"]}, r"reads is \['last'\]; it must be a list"),
    "two states": ("mlp", {}, {"reads": [1, 2]}, r"reads is \[1, 2\]; a walk of this kind reads one"),
    "a stage too many": ("mlp", {}, {"depths": 4}, "stages.3.emb.weight is missing"),
    "no table": ("lstm", {"walk.stages.1.emb.forget.weight": None}, {}, "stages.1.emb.forget.weight is missing"),
    "a table too many": ("lstm", {"walk.stages.1.emb.cell.weight": torch.zeros(2)}, {}, "which this kind of head does"),
    "no flag": ("lstm", {}, {"shared": 1}, "shared is 1; it must be true or false"),
    "no sizes of the layer": ("hydra++", {}, {"prefix": "-"}, "norm.weight, which|holds norm.weight and"),
    "no numbers": ("redrafter", {"walk.rnn_u.bias": torch.full((16,), torch.nan)}, {}, "holds values that are no"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_one_sentence(case: str, tmp_path: Path) -> None:
    kind, tensors, config, said = DAMAGED[case]
    written(kind, tmp_path)
    changed(tmp_path, tensors, config)
    with pytest.raises(CheckpointError, match=said) as found:
        load_head(str(tmp_path))
    assert str(found.value).count(". ") == 0 and "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["width", "inner", "vocab_size", "rows", "depths"])
def test_a_size_that_is_none_is_named(name: str, tmp_path: Path) -> None:
    written("mlp", tmp_path)
    for value in (10**12, 10**40, -1, 16.0, "16", True, [16]):
        changed(tmp_path, {}, {name: value})
        with pytest.raises(CheckpointError, match=f"says that {name} is ") as found:
            load_head(tmp_path)
        assert shown(value) in str(found.value)
