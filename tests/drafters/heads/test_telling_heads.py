"""Which folders hold a head, told by their configuration or by their tensors, and what is said of those that do not."""

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import mtp_drafter
from safetensors.torch import load_file, save_file
from test_block_folders import FLAT, SIZES, folder_of, named
from test_eagle_folders import FIRST, FOLDERS, LLAMA, THIRD, put, tensors_of
from test_medusa import CONFIG, heads, layout_a, layout_c
from torch import Tensor

import polydraft
from polydraft.drafters import drafter_of, is_head, load_head, write_mtp
from polydraft.drafters.heads.block_head import BlockHead
from polydraft.drafters.heads.eagle_head import Eagle1Head, Eagle3Head, EagleHead
from polydraft.drafters.heads.falcon import FalconHead
from polydraft.drafters.heads.formats.eagle_folders import is_eagle
from polydraft.drafters.heads.formats.head_kinds import KINDS
from polydraft.drafters.heads.last_state_heads import MedusaHeads
from polydraft.drafters.heads.mtp_head import MtpHead
from polydraft.drafters.heads.parallel_eagle import ParallelEagle
from polydraft.errors import CheckpointError
from polydraft.models import HuggingFaceModel, read_plain, write_plain
from polydraft.training import MAKERS, HeadSize
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.new_heads import OWN, usual_reads

OFFICIAL = {**LLAMA, "architectures": ["LlamaForCausalLM"]}
"""What EAGLE-1's authors write: the configuration of a model of one layer; a missing `bias` means that there is one."""
BIASED = tensors_of({**FIRST, "fc.bias": (16,)})


def sharded(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Write two files and the index that names them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OFFICIAL))
    names = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(tensors)}
    for file in {*names.values()}:
        save_file({name: tensors[name] for name in tensors if names[name] == file}, str(folder / file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def old_pickle(folder: Path, tensors: dict[str, Tensor]) -> Path:
    put(folder, OFFICIAL, tensors, pickled=True)
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return folder


WRITERS = {
    "safetensors": lambda folder: put(folder, OFFICIAL, BIASED),
    "an index": lambda folder: sharded(folder, BIASED),
    "a pickle": lambda folder: put(folder, OFFICIAL, BIASED, pickled=True),
    "an old pickle": lambda folder: old_pickle(folder, BIASED),
    "a prefix": lambda folder: put(folder, OFFICIAL, {f"model.{name}": value for name, value in BIASED.items()}),
}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "bloom", "falcon"])
def test_models_of_one_layer_are_no_heads(kind: str, tmp_path: Path) -> None:
    """Falcon's own configurations have `bias`, as EAGLE-1's do."""
    tiny_model(kind, **{"n_layer" if kind in ("gpt2", "bloom") else "num_hidden_layers": 1}).save_pretrained(tmp_path)
    assert not is_head(tmp_path)


@pytest.mark.parametrize("kind", WRITERS)
def test_eagles_own_folders_are_told_by_their_tensors(kind: str, tmp_path: Path) -> None:
    folder = WRITERS[kind](tmp_path / "head")
    assert not is_eagle(OFFICIAL) and is_head(folder)
    drafter = load_head(folder)
    assert isinstance(drafter.network, EagleHead) and isinstance(drafter.network, Eagle1Head)
    assert torch.equal(drafter.network.fc.bias, BIASED["fc.bias"])


def test_such_a_head_drafts_for_its_target(tmp_path: Path) -> None:
    folder, target = put(tmp_path / "head", OFFICIAL, BIASED), tiny_model(num_hidden_layers=3, dtype=torch.float32)
    prompt = torch.tensor([[1, 2, 3]])
    drafted = polydraft.generate(target, prompt, drafter=str(folder), max_new_tokens=8)
    assert drafted.statistics.drafted and not drafted.statistics.fallback
    assert torch.equal(
        drafted.sequences, polydraft.generate(target, prompt, drafter="none", max_new_tokens=8).sequences
    )


def test_a_bias_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = put(tmp_path / "head", OFFICIAL, tensors_of(FIRST))
    with pytest.raises(CheckpointError, match=r"is not complete: fc\.bias is missing"):
        load_head(folder)


@pytest.mark.parametrize("name", ["specforge", "speculators"])
def test_eagle_3_is_told_by_its_tensors(name: str, tmp_path: Path) -> None:
    folder = put(tmp_path / "head", OFFICIAL, {**FOLDERS[name][1]})
    assert is_head(folder)
    drafter = load_head(folder, 6)
    assert isinstance(drafter.network, EagleHead) and isinstance(drafter.network, Eagle3Head)
    assert drafter.network.fc.weight.shape == THIRD["fc.weight"]


@pytest.mark.parametrize("name", ["specforge", "speculators"])
def test_p_eagle_is_told_from_eagle_3_by_its_feature_of_slots(name: str, tmp_path: Path) -> None:
    config, tensors = FOLDERS[name]
    held = {**tensors, "mask_hidden": torch.zeros(1, 48)}
    for told in (config, {**OFFICIAL}):
        folder = put(tmp_path / str(len(told)), {**told, "ptd_token_id": 3}, held)
        assert is_head(folder) and type(load_head(folder, 6).network) is ParallelEagle
        without = put(tmp_path / f"{len(told)} without", told, {**tensors})
        assert type(load_head(without, 6).network) is Eagle3Head


@pytest.mark.parametrize("config", [{"k_mask": 2, "bias": True}, {"k_mask": 2}, {"bias": True}, {}], ids=str)
def test_falcon_is_told_from_eagle_1_by_its_block_or_its_lstm(config: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"weight_ih_l0": (64, 32), "weight_hh_l0": (64, 16), "weight_ih_l1": (64, 16), "weight_hh_l1": (64, 16)}
    sizes |= {f"bias_{side}_l{layer}": (64,) for side in ("ih", "hh") for layer in range(2)}
    layers = {name: shape for name, shape in FIRST.items() if name != "fc.weight"}
    tensors = tensors_of({**layers, **{f"lstm.{name}": shape for name, shape in sizes.items()}})
    folder = put(tmp_path / "head", {**OFFICIAL, **config}, tensors)
    if "k_mask" in config:
        assert is_head(folder) and type(load_head(folder).network) is FalconHead
    else:
        with pytest.raises(CheckpointError, match=r"k_mask is None|fc\.weight is missing"):
            load_head(folder)


def test_other_heads_are_told_by_their_tensors(tmp_path: Path) -> None:
    own = heads(2, dtype=torch.float32)
    for place, tensors in enumerate((layout_a(own), layout_c(own, "medusa_heads."), layout_c(own))):
        write_plain(tmp_path / str(place), {"vocab_size": 24}, tensors)
        assert is_head(tmp_path / str(place))
    assert isinstance(load_head(tmp_path / "0").network, MedusaHeads)
    write_plain(tmp_path / "riders", {"num_lookahead": 2}, {"lookahead.weight": torch.ones(2, 16)})
    assert is_head(tmp_path / "riders") and load_head(tmp_path / "riders").name == "riders"
    tensors = named("markov")[1]
    block = folder_of(tmp_path / "block", {**SIZES, "architectures": ["Qwen3DSparkModel"]}, tensors)
    assert is_head(block)
    with pytest.raises(CheckpointError, match="names no target_layer_ids and no num_target_layers"):
        load_head(block)
    (block / "config.json").write_text(json.dumps({**SIZES, **FLAT}))
    assert isinstance(load_head(block).network, BlockHead)


@pytest.mark.parametrize("speculators", [False, True])
def test_modules_alone_are_told_and_a_target_that_has_some_is_no_head(speculators: bool, tmp_path: Path) -> None:
    target = tiny_model(num_hidden_layers=2)
    write_mtp(mtp_drafter(), tmp_path / "head", HuggingFaceModel(target), speculators=speculators)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert [one.name for one in KINDS if one.told(config)] == ["MTP"] * speculators
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    assert [one.name for one in KINDS if one.holds(shapes)] == ["MTP"] * (not speculators)
    assert isinstance(load_head(tmp_path / "head").network, MtpHead)
    target.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)
    assert not is_head(tmp_path / "model")


CALLED: dict[str, str | None] = {
    **dict.fromkeys(("mlp", "arctic-rnn", "arctic-lstm"), "MLP speculator"),
    **dict.fromkeys(("eagle", "hass", "eagle-3"), "EAGLE"),
    **dict.fromkeys(("dspark", "xpress", "lilicorr", "mixing"), "block"),
    **dict.fromkeys(("hydra", "hydra++"), "Hydra"),
    **dict.fromkeys(("medusa", "medusa-2"), "Medusa"),
    **dict.fromkeys(("pard", "pard-path", "space")),
    "redrafter": "ReDrafter",
    "joined-walk": "walk",
    "pass": "PaSS",
    "p-eagle": "P-EAGLE",
    "falcon": "Falcon",
    "mtp": "MTP",
    "spire": "SPIRe",
    "adapter": "adapter",
}
"""The kind of head in the folder of each that can be trained; None for models that draft without a head."""
FORMATS = [(kind, form) for kind, one in MAKERS.items() for form in one.forms if not one.encodes]


@pytest.mark.parametrize(("kind", "form"), FORMATS, ids=[" ".join(one) for one in FORMATS])
def test_each_format_is_told_among_all_others(kind: str, form: str, tmp_path: Path) -> None:
    """By its configuration if that tells, and its tensors alone tell the same or nothing."""
    target: Any = tiny_model(num_hidden_layers=3, dtype=torch.float32)
    size = HeadSize(drafts=3, rank=4 if MAKERS[kind].ranked else None)
    made = MAKERS[kind].make(target, TargetEnds.of(target), usual_reads(3), size, None)
    made.write(tmp_path / "head", HuggingFaceModel(target), form, "")
    folder, called = read_plain(tmp_path / "head"), "walk" if form == OWN else CALLED[kind]
    told = [one for one in KINDS if one.told(folder.config)]
    held = [one for one in KINDS if one.holds({name: tuple(one.shape) for name, one in folder.tensors.items()})]
    assert is_head(tmp_path / "head") == (called is not None)
    readers = [one.read for one in KINDS if one.name == called]  # that of EAGLE's folders tells P-EAGLE's itself
    assert [one.read for one in (told or held)[:1]] == readers
    assert [one.name for one in held[:1]] in ([], [called])


@pytest.mark.parametrize(
    ("kind", "other", "both"),
    [
        ("redrafter", "arctic-lstm", "ReDrafter and MLP speculator .such as speculator.cell_ln"),
        ("medusa", "pass", "Medusa and PaSS .such as lookahead.weight"),
        ("mlp", "hydra", "MLP speculator and Hydra .such as hydra_lm_head"),
    ],
)
def test_keys_of_two_kinds_are_said_with_both(kind: str, other: str, both: str, tmp_path: Path) -> None:
    target: Any = tiny_model(dtype=torch.float32)
    tensors = dict[str, Tensor]()
    for one in (other, kind):  # the configuration that stays is the second's
        made = MAKERS[one].make(target, TargetEnds.of(target), (), HeadSize(drafts=2), None)
        made.write(tmp_path / one, HuggingFaceModel(target), "official", "")
        tensors |= read_plain(tmp_path / one).tensors
    write_plain(tmp_path / "both", read_plain(tmp_path / kind).config, tensors)
    with pytest.raises(CheckpointError, match=f"both' holds keys of two kinds of heads, {both}.*: a folder is for one"):
        load_head(tmp_path / "both")


@pytest.mark.parametrize("layers", [1, 2])
def test_models_and_what_cannot_be_read_are_no_heads(layers: int, tmp_path: Path) -> None:
    tiny_model(num_hidden_layers=layers).save_pretrained(tmp_path / "model")
    assert not is_head(tmp_path / "model") and not is_head(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no draft head of a kind that is known"):
        load_head(tmp_path / "model")
    rows = {**BIASED, "lm_head.weight": torch.zeros(24, 16)}
    wide = {**BIASED, "fc.weight": torch.zeros(16, 16)}
    for name, tensors in (("rows", rows), ("wide", wide), ("fc alone", {"fc.weight": torch.zeros(16, 32)})):
        assert not is_head(put(tmp_path / name, OFFICIAL, tensors))
    half = put(tmp_path / "half", OFFICIAL, BIASED) / "model.safetensors"
    half.write_bytes(half.read_bytes()[:40])
    assert not is_head(tmp_path / "half")


@pytest.mark.parametrize("told", [{"pard_token": 3}, {"spd_type": "pard", "mask_token_id": 3}])
def test_draft_models_that_fill_masks_are_no_heads(told: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=1, **told)
    model.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text()).items() >= told.items()
    assert not is_head(tmp_path / "model") and drafter_of(model).name == "pard"


class Trap:
    def __reduce__(self) -> Any:
        return print, ("code was run",)


def test_no_code_is_run_to_tell_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = put(tmp_path / "head", OFFICIAL, BIASED, pickled=True)
    torch.save({**BIASED, "trap": Trap()}, folder / "pytorch_model.bin")
    assert not is_head(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Trap()}))
    assert not is_head(folder) and "code was run" not in capsys.readouterr().out


def test_a_raw_pickle_is_refused_without_a_warning_before_it(tmp_path: Path) -> None:
    folder = put(tmp_path / "head", {**OFFICIAL, "bias": True}, BIASED, pickled=True)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": [1.0]}, protocol=4))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged"):
            load_head(folder)
    assert not said


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    own = layout_a(heads(2, dtype=torch.float32))
    half = {name: value for name, value in own.items() if name not in ("1.0.linear.weight", "1.1.weight")}
    write_plain(tmp_path / "half", CONFIG, half)
    with pytest.raises(CheckpointError, match=r"is not complete: 1\.1\.weight is missing"):
        load_head(tmp_path / "half")
    only = {name: value for name, value in own.items() if name.startswith("0.") or name == "1.1.weight"}
    write_plain(tmp_path / "rows", CONFIG, only)
    with pytest.raises(CheckpointError, match=r"is not complete: 1\.0\.linear\.weight is missing"):
        load_head(tmp_path / "rows")
    write_plain(tmp_path / "empty", CONFIG, {})
    (tmp_path / "empty" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"medusa_lm_head\.safetensors, pytorch_model\.bin or medusa_lm_head\.pt"):
        load_head(tmp_path / "empty")
    config = {**SIZES, **FLAT, "mask_token_id": None}
    with pytest.raises(CheckpointError, match=r"mask_embed is missing, and its .* names no mask_token_id"):
        load_head(folder_of(tmp_path / "block", config, named("markov")[1]))
