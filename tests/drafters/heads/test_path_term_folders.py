"""Folders of XPress and LiLiCorr: their authors' layouts, what tells them, and what is wrong with one in a sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import IN_PLACE, LATTICE, VOCAB, WIDTH, block_drafter, block_head
from safetensors.torch import load_file
from test_block_folders import SIZES, folder_of, named, same
from test_block_heads import ROWS
from torch import Tensor

import polydraft
from polydraft.drafters import HeadDrafter, is_head, load_head, write_block
from polydraft.drafters.heads.block_head import BlockHead
from polydraft.drafters.heads.drafter import HeadEnds
from polydraft.drafters.heads.formats.head_kinds import KINDS
from polydraft.drafters.heads.lilicorr import LiLiCorr
from polydraft.drafters.heads.xpress import XPress
from polydraft.errors import CheckpointError, InvalidParameter, VocabularyMismatch
from polydraft.models import HuggingFaceModel

TARGET = HuggingFaceModel(tiny_model(vocab=VOCAB, num_hidden_layers=3))
INNER = {"mask_token_id": 1, "target_layer_ids": [0, 1], "block_size": 4}
LILICORR: dict[str, Any] = {
    "lilicorr_candidate_topk": 5,
    "lilicorr_hidden_size": 8,
    "lilicorr_num_layers": 2,
    "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 2.0,
    "lilicorr_factor_dim": 6,
    "lilicorr_vector_eps": 1e-4,
    "lilicorr_logit_scale": 3.0,
}
RELEASE: dict[str, Any] = {
    "xpress_rank": 6,
    "xpress_mlp_hidden": 12,
    "xpress_block_size": 4,
    "xpress_num_passes": 6,
    "sample_from_anchor": False,
}
REFINER: dict[str, Any] = {
    "speculators_model_type": "xpress",
    "transformer_layer_config": SIZES,
    "draft_vocab_size": VOCAB,
    "block_size": 4,
    "mask_token_id": 1,
    "aux_hidden_state_layer_ids": [1, 2],
    "sample_from_anchor": False,
    "xpress_rank": 6,
    "xpress_mlp_ratio": 2,
    "num_jacobi_passes": 6,
}
REFINER_SHAPES = {
    "token_embed.weight": (VOCAB, 6),
    "down_h.weight": (6, WIDTH),
    "down_g.weight": (6, WIDTH),
    "in_proj.weight": (6, 18),
    "mix_l": (6, 4, 4),
    "mlp_gate.weight": (12, 6),
    "mlp_up.weight": (12, 6),
    "mlp_down.weight": (6, 12),
    "readout.weight": (VOCAB, 6),
}
RELEASE_SHAPES = {
    "w1.weight": (VOCAB, 6),
    "down_h.weight": (6, WIDTH),
    "down_g.weight": (6, WIDTH),
    "in_proj.weight": (6, 18),
    "mix.L": (6, 4, 4),
    "mlp.gate_proj.weight": (12, 6),
    "mlp.up_proj.weight": (12, 6),
    "mlp.down_proj.weight": (6, 12),
    "w2.weight": (VOCAB, 6),
}
LATTICE_LAYER = {
    "attn_norm.weight": (8,),
    "attn.in_proj_weight": (24, 8),
    "attn.in_proj_bias": (24,),
    "attn.out_proj.weight": (8, 8),
    "attn.out_proj.bias": (8,),
    "mlp_norm.weight": (8,),
    "mlp.0.weight": (16, 8),
    "mlp.0.bias": (16,),
    "mlp.2.weight": (8, 16),
    "mlp.2.bias": (8,),
}
LATTICE_SHAPES: dict[str, tuple[int, ...]] = {
    "token_proj.weight": (8, WIDTH),
    "token_proj.bias": (8,),
    "pass_hidden_proj.weight": (8, WIDTH),
    "pass_hidden_proj.bias": (8,),
    "feature_mlp.0.weight": (5,),
    "feature_mlp.0.bias": (5,),
    "feature_mlp.1.weight": (8, 5),
    "feature_mlp.1.bias": (8,),
    "feature_mlp.3.weight": (8, 8),
    "feature_mlp.3.bias": (8,),
    "slot_embedding": (1, 1, 3, 1, 8),
    "rank_embedding": (1, 1, 1, 5, 8),
    "relative_slot_bias": (2, 7),
    "same_slot_bias": (2,),
    "context_proj.weight": (8, WIDTH),
    "context_proj.bias": (8,),
    **{f"layers.{layer}.{name}": shape for layer in range(2) for name, shape in LATTICE_LAYER.items()},
    "output_norm.weight": (8,),
    "anchor_norm.weight": (8,),
    "factor_input_proj.weight": (8, 24),
    "factor_input_proj.bias": (8,),
    "out_head.weight": (6, 8),
    "out_head.bias": (6,),
    "in_head.weight": (6, 8),
    "in_head.bias": (6,),
    "anchor_out_head.weight": (6, 8),
    "anchor_out_head.bias": (6,),
}
NEWER = {
    "feature_mlp.0.": "feature_norm.",
    "feature_mlp.1.": "feature_mlp.up_proj.",
    "feature_mlp.3.": "feature_mlp.down_proj.",
    ".mlp.0.": ".mlp.up_proj.",
    ".mlp.2.": ".mlp.down_proj.",
}
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def released(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return speculators' tensors under the names of XPress's authors."""
    names = dict(zip(REFINER_SHAPES, RELEASE_SHAPES, strict=True))
    return {
        f"xpress_head.{names[name.removeprefix('refiner_head.')]}" if name.startswith("refiner_head.") else name: one
        for name, one in tensors.items()
    }


def lilicorr(folder: Path, change: Change = dict, **inner: Any) -> Path:
    """Write Model-Optimizer's folder; None takes a setting out."""
    told = {name: one for name, one in {**INNER, **LILICORR, **inner}.items() if one is not None}
    config = {**SIZES, "architectures": ["LiLiCorrDraftModel"], "num_target_layers": 3, "dflash_config": told}
    taps = {"taps": 2, "group": 4} if inner.get("conv_kernel_size") else {}
    return folder_of(folder, config, change(named("lilicorr", reads=(1, 2), **taps)[1]))


def xpress(folder: Path, change: Change = dict, **settings: Any) -> Path:
    """Write the folder of XPress's authors."""
    config = {**SIZES, "architectures": ["Qwen3XPressModel"], "num_target_layers": 3, "dflash_config": INNER}
    return folder_of(folder, {**config, **RELEASE, **settings}, change(released(named("xpress", reads=(1, 2))[1])))


def refiner(folder: Path, change: Change = dict, taps: int = 0, **settings: Any) -> Path:
    """Write the folder of speculators."""
    given = {"taps": taps, "group": 4} if taps else {}
    config = {name: one for name, one in {**REFINER, **settings}.items() if one is not None}
    return folder_of(folder, config, change(named("xpress", reads=(1, 2), **given)[1]))


def test_all_layouts_are_told_and_read(tmp_path: Path) -> None:
    wanted = block_drafter("xpress", reads=(1, 2))
    for name, folder in (("a", xpress(tmp_path / "a")), ("b", refiner(tmp_path / "b"))):
        assert is_head(folder), name
        same(load_head(folder), wanted)
    convolved = block_drafter("xpress", reads=(1, 2), taps=2, group=4)
    more = {"xpress_backbone": "dflash2", "conv_kernel_size": 2, "conv_group_size": 4}
    same(load_head(refiner(tmp_path / "c", taps=2, **more)), convolved)
    shifted = HeadDrafter(block_head("xpress", reads=(1, 2), shifted=True), HeadEnds())
    same(load_head(refiner(tmp_path / "d", sample_from_anchor=True)), shifted)
    wanted = block_drafter("lilicorr", reads=(1, 2))
    assert is_head(lilicorr(tmp_path / "e"))
    same(load_head(tmp_path / "e"), wanted)
    found = load_head(lilicorr(tmp_path / "f", newer))
    same(found, wanted)
    assert isinstance(found.network, BlockHead) and isinstance(found.network.path, LiLiCorr)
    assert found.network.path.shape == LATTICE
    more = {"conv_kernel_size": 2, "conv_group_size": 4}
    same(load_head(lilicorr(tmp_path / "g", **more)), block_drafter("lilicorr", reads=(1, 2), taps=2, group=4))


def newer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return LiLiCorr's tensors under their newer names."""
    parts = [(name, next((old for old in NEWER if old in name), "")) for name in tensors]
    assert sum(bool(old) for _, old in parts) == 6 + 8
    return {name.replace(old, NEWER[old]) if old else name: tensors[name] for name, old in parts}


def test_one_kind_tells_each_of_them(tmp_path: Path) -> None:
    for folder in (xpress(tmp_path / "a"), refiner(tmp_path / "b"), lilicorr(tmp_path / "c")):
        config = json.loads((folder / "config.json").read_text())
        shapes = {name: tuple(one.shape) for name, one in load_file(folder / "model.safetensors").items()}
        assert [one.name for one in KINDS if one.told(config)] == ["block"]
        assert [one.name for one in KINDS if one.holds(shapes)] == ["block"]


def test_a_head_without_a_projection_is_as_wide_as_its_slots(tmp_path: Path) -> None:
    """A width of 0 says so."""
    lattice = LiLiCorr(WIDTH, 3, type(LATTICE)(5, WIDTH, 1, 2, 1.5, 6, 1e-4, 3.0)).double()
    drafter = HeadDrafter(BlockHead(block_head("lilicorr", reads=(1, 2)).shape, lattice).double(), HeadEnds())
    write_block(drafter, tmp_path, TARGET, dtype=torch.float32)
    assert not any("token_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    config = json.loads((tmp_path / "config.json").read_text())
    same(load_head(tmp_path), drafter)
    config["dflash_config"]["lilicorr_hidden_size"] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    same(load_head(tmp_path), drafter)


def test_the_seed_of_rounds_is_left_out(tmp_path: Path) -> None:
    """A selector chooses where Jacobi rounds begin, and a walk runs none."""

    def seeded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tables = {"predecessor_codebook": (VOCAB, 6), "successor_codebook": (VOCAB, 6)}
        tables |= {"hidden_projection.weight": (6, WIDTH)}
        return tensors | {f"candidate_selector.{name}": torch.randn(shape) for name, shape in tables.items()}

    same(load_head(refiner(tmp_path / "a", seeded, xpress_selector=True)), block_drafter("xpress", reads=(1, 2)))
    with pytest.raises(CheckpointError, match=r"holds candidate_selector\.hidden_projection\.weight and 2 more"):
        load_head(refiner(tmp_path / "b", seeded))


@pytest.mark.parametrize(
    ("term", "speculators", "prefix", "shapes"),
    [
        ("xpress", False, "xpress_head.", RELEASE_SHAPES),
        ("xpress", True, "refiner_head.", REFINER_SHAPES),
        ("lilicorr", False, "lilicorr.", LATTICE_SHAPES),
    ],
)
def test_forms_have_the_documented_names_shapes_and_settings(
    term: str, speculators: bool, prefix: str, shapes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    drafter = block_drafter(term, reads=(1, 2))
    write_block(drafter, tmp_path, TARGET, speculators=speculators, dtype=torch.float64)
    found = load_file(tmp_path / "model.safetensors")
    own = {name.removeprefix(prefix): tuple(one.shape) for name, one in found.items() if name.startswith(prefix)}
    assert own == shapes
    config = json.loads((tmp_path / "config.json").read_text())
    if term == "lilicorr":
        assert config["architectures"] == ["LiLiCorrDraftModel"] and LILICORR.items() <= config["dflash_config"].items()
    elif speculators:
        told = {name: one for name, one in REFINER.items() if name != "transformer_layer_config"}
        assert config["architectures"] == ["XPressSpeculator"] and told.items() <= config.items()
    else:
        assert config["architectures"] == ["Qwen3XPressModel"] and RELEASE.items() <= config.items()
    read = load_head(tmp_path, dtype=torch.float64).network
    for name, value in drafter.network.state_dict().items():
        assert torch.equal(read.state_dict()[name], value.float().double()), name


@pytest.mark.parametrize("term", IN_PLACE)
@pytest.mark.parametrize("form", ["official", "speculators"])
def test_heads_of_fewer_tokens_are_read_as_they_were_written(term: str, form: str, tmp_path: Path) -> None:
    tokens = torch.tensor([1, 4, 5, 9, 20, 22])
    drafter = HeadDrafter(block_head(term, rows=6, reads=(1, 2)), HeadEnds(tokens=tokens))
    if (term, form) == ("lilicorr", "speculators"):
        with pytest.raises(InvalidParameter, match="no form for heads with the path term LiLiCorr;"):
            write_block(drafter, tmp_path / "head", TARGET, speculators=True)
        return
    write_block(drafter, tmp_path / "head", TARGET, speculators=form == "speculators", dtype=torch.float32)
    found = load_head(tmp_path / "head")
    same(found, drafter)
    given: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0.0}
    text: Any = polydraft.generate(TARGET.model, torch.tensor([ROWS[0]]), drafter=str(tmp_path / "head"), **given)
    plain: Any = polydraft.generate(TARGET.model, torch.tensor([ROWS[0]]), drafter="none", **given)
    assert torch.equal(text.sequences, plain.sequences) and text.statistics.drafted > 0


def test_forms_that_cannot_say_what_a_head_is_are_refused(tmp_path: Path) -> None:
    for term, said in (("xpress", "the path term XPress"), ("lilicorr", "the path term LiLiCorr")):
        with pytest.raises(InvalidParameter, match=f"DeepSpec has no form for heads with {said};"):
            write_block(block_drafter(term), tmp_path / "head", TARGET, deepspec=True)
    shifted = HeadDrafter(block_head("lilicorr", shifted=True), HeadEnds())
    with pytest.raises(InvalidParameter, match="LiLiCorr's folders hold heads whose slots draft their own places"):
        write_block(shifted, tmp_path / "head", TARGET)
    head = block_head("xpress")
    odd = BlockHead(head.shape, XPress(VOCAB, VOCAB, 6, WIDTH, 4, 10)).double()
    with pytest.raises(InvalidParameter, match="no form for heads with a gated layer that is no multiple of its rank;"):
        write_block(HeadDrafter(odd, HeadEnds()), tmp_path / "head", TARGET, speculators=True)
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("name", LILICORR)
def test_none_of_lilicorrs_settings_is_guessed(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"config.json in .* names no {name}, and .* never guessed") as found:
        load_head(lilicorr(tmp_path, **{name: None}))
    assert "\n" not in str(found.value)


WRONG = (10**12, 10**40, -1, "16", True, [16])


@pytest.mark.parametrize("name", LILICORR)
def test_a_setting_of_lilicorr_that_cannot_be_is_named(name: str, tmp_path: Path) -> None:
    for number, value in enumerate(WRONG):
        if name in ("lilicorr_vector_eps", "lilicorr_logit_scale") and value in (10**12, 10**40) and value is not True:
            continue  # no tensor shows them
        with pytest.raises(CheckpointError, match=f"says that {name} is "):
            load_head(lilicorr(tmp_path / str(number), **{name: value}))


def without(part: str) -> Change:
    return lambda tensors: {name: one for name, one in tensors.items() if part not in name}


def instead(name: str, *shape: int) -> Change:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        assert name in tensors or "token_proj" in name
        return {**tensors, name: torch.zeros(shape)}

    return change


CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 4}
BAD_LILICORR: list[tuple[Change, dict[str, Any], str]] = [
    (dict, {"conv_kernel_size": 2}, "names conv_kernel_size and no conv_group_size; it must name both"),
    (dict, {"conv_group_size": 4}, "names conv_group_size and no conv_kernel_size; it must name both"),
    (without("_conv."), CONVOLVED, "attention_conv.base_kernel is missing, and its config.json names conv_kernel"),
    (dict, {"shift_label": True}, "says that shift_label is True; LiLiCorr's slots draft their own places"),
    (dict, {"lilicorr_num_heads": 3}, "is damaged: 3 heads cannot share a width of 8"),
    (dict, {"lilicorr_candidate_topk": 6}, r"rank_embedding has shape \[1, 1, 1, 5, 8\], and .* asks for .* 6, 8\]"),
    (dict, {"lilicorr_factor_dim": 4}, r"out_head.weight has shape \[6, 8\], and .* asks for \[4, 8\]"),
    (dict, {"lilicorr_num_layers": 1}, "holds lilicorr.layers.1.attn.in_proj_bias and 9 more, which"),
    (dict, {"lilicorr_num_layers": 3}, "lilicorr.layers.2.attn_norm.weight is missing"),
    (dict, {"block_size": 5}, r"slot_embedding has shape \[1, 1, 3, 1, 8\], and .* asks for \[1, 1, 4, 1, 8\]"),
    (without("lilicorr."), {}, "slot_embedding is missing"),
    (without("same_slot_bias"), {}, "lilicorr.same_slot_bias is missing"),
    (
        dict,
        {"lilicorr_hidden_size": 0},
        r"slot_embedding has shape .* asks for \[1, 1, 3, 1, 16\]",
    ),
]


@pytest.mark.parametrize(("change", "changed", "said"), BAD_LILICORR, ids=[said for *_, said in BAD_LILICORR])
def test_what_is_wrong_with_lilicorr_is_said_in_a_sentence(
    change: Change, changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said) as found:
        load_head(lilicorr(tmp_path, change, **changed))
    assert "\n" not in str(found.value)


def test_convolutions_that_no_setting_names_are_refused(tmp_path: Path) -> None:
    folder = lilicorr(tmp_path, **CONVOLVED)
    config = json.loads((folder / "config.json").read_text())
    for name in CONVOLVED:
        del config["dflash_config"][name]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"names no conv_kernel_size, and its tensors hold layers\.0\.att"):
        load_head(folder)


BAD_XPRESS: list[tuple[Callable[..., Path], Change, dict[str, Any], str]] = [
    (refiner, instead("refiner_head.mix_l", 6, 5, 5), {}, r"refiner_head.mix_l has shape \[6, 5, 5\], .* \[6, 4, 4\]"),
    (xpress, instead("xpress_head.mix.L", 6, 5, 5), {}, r"xpress_head.mix.L has shape \[6, 5, 5\], .* \[6, 4, 4\]"),
    (
        refiner,
        dict,
        {"xpress_mlp_ratio": 4},
        "xpress_mlp_ratio is 4; refiner_head.mlp_gate.weight has 12 rows for",
    ),
    (refiner, dict, {"xpress_rank": 8}, "xpress_rank is 8; .* ask for 6"),
    (xpress, dict, {"xpress_mlp_hidden": 24}, "xpress_mlp_hidden is 24; .* ask for 12"),
    (xpress, dict, {"xpress_block_size": 8}, "xpress_block_size is 8; .* ask for 4"),
    (xpress, dict, {"xpress_candidate_topc": 256}, "xpress_candidate_topc is 256; .* must be 0"),
    (xpress, dict, {"xpress_topc": 512}, "xpress_topc is 512; .* must be 0"),
    (xpress, dict, {"xpress_num_passes": 0}, "xpress_num_passes is 0; it must be a number"),
    (refiner, dict, {"num_jacobi_passes": "six"}, "num_jacobi_passes is 'six'; it must be a number"),
    (refiner, dict, {"xpress_num_passes": 4}, "xpress_num_passes is 4; num_jacobi_passes is 6"),
    (refiner, dict, {"xpress_backbone": "eagle"}, "xpress_backbone is 'eagle'; it must be dflash or dflash2"),
    (
        refiner,
        dict,
        {"xpress_backbone": "dflash2"},
        "xpress_backbone is 'dflash2'; .*base_kernel is missing",
    ),
    (refiner, without("refiner_head."), {}, "refiner_head.token_embed.weight is missing"),
    (refiner, without("down_g"), {}, "refiner_head.down_g.weight is missing"),
    (xpress, without("mlp.up_proj.weight"), {}, "mlp.up_proj.weight is missing"),
]


@pytest.mark.parametrize(("write", "change", "changed", "said"), BAD_XPRESS, ids=[said for *_, said in BAD_XPRESS])
def test_what_is_wrong_with_xpress_is_said_in_a_sentence(
    write: Callable[..., Path], change: Change, changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said) as found:
        load_head(write(tmp_path, change, **changed))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("names", [("num_jacobi_passes",), ("xpress_num_passes",), (), (*REFINER, "xpress_num_passes")])
def test_rounds_may_be_counted_under_either_name_or_not_at_all(names: tuple[str, ...], tmp_path: Path) -> None:
    told = {"num_jacobi_passes": None} | {name: 6 for name in names if "passes" in name}
    same(load_head(refiner(tmp_path, **told)), block_drafter("xpress", reads=(1, 2)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (instead("refiner_head.token_embed.weight", 10, 6), "knows 10 tokens and the target has 24"),
        (instead("refiner_head.readout.weight", 20, 6), "has 20 rows for 24 tokens to draft"),
    ],
)
def test_xpresss_tables_for_another_target_are_refused_before_generation(
    change: Change, said: str, tmp_path: Path
) -> None:
    folder = refiner(tmp_path, change)
    with pytest.raises(VocabularyMismatch, match=said):
        polydraft.generate(TARGET.model, torch.tensor([[1, 2]]), drafter=str(folder), max_new_tokens=4)
