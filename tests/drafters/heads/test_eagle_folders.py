"""Folders of EAGLE's heads: every form is read, written again, and refused where something is wrong."""

import copy
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from safetensors.torch import load_file, save_file
from test_medusa import CONFIG, heads, layout_a
from torch import Tensor
from transformers import PreTrainedModel

from polydraft.drafters import load_head
from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds
from polydraft.drafters.heads.eagle_head import Eagle1Head, Eagle3Head, Eagle3Norms
from polydraft.drafters.heads.formats.eagle_folders import is_eagle, read_eagle, write_eagle
from polydraft.drafters.heads.sublayers import Anatomy, Rotation
from polydraft.errors import CheckpointError, InvalidParameter
from polydraft.models import HuggingFaceModel, read_plain, write_plain

VOCAB = 24
TOKENS = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9, 11, 12, 15, 17, 20, 23])


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, num_hidden_layers=3)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}
LAYER = {
    "self_attn.q_proj.weight": (16, 16),
    "self_attn.k_proj.weight": (8, 16),
    "self_attn.v_proj.weight": (8, 16),
    "self_attn.o_proj.weight": (16, 16),
    "mlp.gate_proj.weight": (24, 16),
    "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24),
    "post_attention_layernorm.weight": (16,),
}
PAIRS = {
    **{name: (rows[0], 32) if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else rows
       for name, rows in LAYER.items()},
    "hidden_norm.weight": (16,),
    "input_layernorm.weight": (16,),
}  # fmt: skip


def tensors_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    stream = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=stream) * 0.1 for name, shape in shapes.items()}


def under(prefix: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {prefix + name: shape for name, shape in shapes.items()}


def vocabulary(tokens: Tensor = TOKENS) -> dict[str, Tensor]:
    there = torch.zeros(VOCAB, dtype=torch.bool)
    there[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": there}


def without_fc(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if name != "fc.weight"}


IDS = "eagle_aux_hidden_state_layer_ids"
FIRST = {"embed_tokens.weight": (VOCAB, 16), "fc.weight": (16, 32), **under("layers.0.", LAYER)}
THIRD = {"fc.weight": (16, 48), "norm.weight": (16,), "lm_head.weight": (14, 16)}
SOURCES = {f"fc_norm.{one}.weight": (16,) for one in range(3)}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "transformer_layer_config": LLAMA,
    "draft_vocab_size": 14,
    "eagle_aux_hidden_state_layer_ids": [2, 1, 3],
}
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "eagle": ({**LLAMA, "architectures": ["LlamaForCausalLM"], "bias": False}, tensors_of(FIRST)),
    "eagle, bias untold": ({**LLAMA, "architectures": ["Eagle"]}, tensors_of({**FIRST, "fc.bias": (16,)})),
    "vllm": (
        {"model_type": "eagle", "model": LLAMA, "eagle_fc_bias": True},
        tensors_of(under("model.", {**FIRST, "fc.bias": (16,)})),
    ),
    "eagle 3": (
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 14},
        {**tensors_of({**THIRD, **under("midlayer.", PAIRS)}), **vocabulary()},
    ),
    "specforge": (
        {**LLAMA, "draft_vocab_size": 14, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 2]}},
        {**tensors_of({**THIRD, **under("midlayer.", PAIRS)}), **vocabulary()},
    ),
    "speculators": (
        {**SPECULATORS, "norm_before_residual": True},
        {**tensors_of({**THIRD, **under("layers.0.", PAIRS), "embed_tokens.weight": (VOCAB, 16)}), **vocabulary()},
    ),
    "eagle 3.1": (
        {**SPECULATORS, "norm_output": True, "fc_norm": True},
        {
            **tensors_of(
                {**THIRD, **under("layers.0.", PAIRS), **{f"fc_norm.{one}.weight": (16,) for one in range(3)}}
            ),
            **vocabulary(),
        },
    ),
    "gpt-oss": (
        {**SPECULATORS, "norm_before_fc": True},
        {**tensors_of({**THIRD, **under("layers.0.", PAIRS), "input_norm.weight": (48,)}), **vocabulary()},
    ),
    "vllm, final": (
        {**LLAMA, "draft_vocab_size": 14, "eagle_config": {"use_aux_hidden_state": False}, "logit_scale": 0.5},
        {**tensors_of({**without_fc(THIRD), **under("layers.0.", PAIRS)}), **vocabulary()},
    ),
    "specforge, raw": (
        {**LLAMA, "draft_vocab_size": 14, IDS: [2, 1, 3], "norm_output": False, "recycle": "bare", "qkv_bias": False},
        {**tensors_of({**THIRD, **under("midlayer.", PAIRS)}), **vocabulary()},
    ),
    "speculators, eagle": (
        {"speculators_model_type": "eagle", "transformer_layer_config": LLAMA, "fusion_bias": True},
        tensors_of({"fusion_fc.weight": (16, 32), "fusion_fc.bias": (16,), **under("transformer.", LAYER)}),
    ),
    "speculators, norms": (
        {"speculators_model_type": "eagle", "transformer_layer_config": LLAMA, "layernorms": True},
        tensors_of(
            {
                "fusion_fc.weight": (16, 32),
                "embedding_layernorm.weight": (16,),
                "pre_lm_head_layernorm.weight": (16,),
                **under("transformer.", {**LAYER, "input_layernorm.weight": (16,)}),
            }
        ),
    ),
}


def put(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], pickled: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, str(folder / "model.safetensors"))
    return folder


def loaded(folder: Path, layers: int | None = 6) -> HeadDrafter[Any]:
    return read_eagle(read_plain(folder), layers)


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickle"])
@pytest.mark.parametrize("name", FOLDERS)
def test_folders_are_read(name: str, pickled: bool, tmp_path: Path) -> None:
    config, tensors = FOLDERS[name]
    assert is_eagle(config)
    drafter = loaded(put(tmp_path / "head", config, tensors, pickled))
    third = "d2t" in tensors
    final = not third or name == "vllm, final"
    expected: tuple[Any, ...] = ("final",) if final else (2, 3, 3) if name == "eagle 3" else (2, 1, 3)
    assert drafter.needs.layers == expected
    assert drafter.network.anatomy.rotation == Rotation(10_000.0) and drafter.network.anatomy.eps == 1e-5
    count = sum(value.numel() for value in [*drafter.network.parameters(), *drafter.ends.parameters()])
    assert count == sum(value.numel() for key, value in tensors.items() if key not in ("d2t", "t2d"))
    if third:
        assert torch.equal(drafter.ends.get_buffer("tokens"), TOKENS)
        assert isinstance(drafter.network, Eagle3Head)
        assert drafter.network.norms.residual == (name == "speculators")
        assert drafter.network.norms.output == drafter.network.norms.sources == (name == "eagle 3.1")
        assert drafter.network.norms.joined == (name == "gpt-oss")
        assert drafter.network.norms.rows == (name != "specforge, raw")
        assert drafter.ends.multiplier == (0.5 if name == "vllm, final" else 1)


@pytest.mark.parametrize("speculators", [False, True])
@pytest.mark.parametrize("name", FOLDERS)
def test_folders_are_written_as_they_are_read(
    name: str, speculators: bool, tmp_path: Path, target: PreTrainedModel
) -> None:
    config, tensors = FOLDERS[name]
    drafter, model = loaded(put(tmp_path / "head", config, tensors)), HuggingFaceModel(target)
    if isinstance(drafter.network, Eagle1Head) and (drafter.ends.embed_tokens is not None) == speculators:
        if speculators or drafter.network.normed:
            with pytest.raises(InvalidParameter, match="speculators"):
                write_eagle(drafter, tmp_path / "new", model, speculators=speculators)
            return
    if speculators and name in ("vllm, final", "specforge, raw"):
        with pytest.raises(InvalidParameter, match="speculators has no form for EAGLE-3's heads"):
            write_eagle(drafter, tmp_path / "new", model, speculators=True)
        return
    write_eagle(drafter, tmp_path / "new", model, speculators=speculators, dtype=torch.float32)
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert is_eagle(written)
    again = loaded(tmp_path / "new", None)
    assert again.needs == drafter.needs and again.network.anatomy == drafter.network.anatomy
    assert again.ends.multiplier == drafter.ends.multiplier
    if isinstance(drafter.network, Eagle3Head):
        assert again.network.norms == drafter.network.norms
    for key, value in drafter.network.state_dict().items():
        assert torch.equal(again.network.state_dict()[key], value)
    for key, value in drafter.ends.state_dict().items():
        assert torch.equal(again.ends.state_dict()[key], value)
    if name == ("speculators" if speculators else "eagle"):
        assert load_file(tmp_path / "new" / "model.safetensors").keys() == tensors.keys()


def without(name: str) -> Callable[[dict[str, Any], dict[str, Tensor]], Any]:
    return lambda config, tensors: tensors.pop(name)


DAMAGED: list[tuple[str, Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = [
    ("eagle 3", without("norm.weight"), "norm.weight is missing"),
    ("eagle 3", without("lm_head.weight"), "lm_head.weight is missing"),
    ("eagle 3", lambda c, t: t.pop("d2t"), "d2t is missing"),
    ("eagle 3", lambda c, t: t.update(extra=torch.ones(1)), "holds extra"),
    ("eagle 3", lambda c, t: t["fc.weight"].fill_(math.nan), "fc.weight holds values that are no numbers"),
    ("eagle 3", lambda c, t: t.update({"fc.weight": torch.ones(16, 32)}), r"fc.weight has shape \[16, 32\]"),
    ("eagle 3", lambda c, t: t["t2d"].logical_not_(), "d2t and t2d name different tokens"),
    ("eagle 3", lambda c, t: c.update(draft_vocab_size="many"), "draft_vocab_size is"),
    ("eagle 3", lambda c, t: c.update(hidden_act="gelu"), "activation"),
    ("eagle 3", lambda c, t: c.update(eagle_config={"use_aux_hidden_state": False}), "holds fc.weight"),
    (
        "gpt-oss",
        lambda c, t: c.update(eagle_config={"use_aux_hidden_state": False}),
        "norm_before_fc is True; a head that reads no layers of its target projects nothing",
    ),
    (
        "vllm, final",
        lambda c, t: c.update(target_hidden_size=32),
        "target_hidden_size is 32; the head projects no states and is 16 wide",
    ),
    ("vllm, final", lambda c, t: c.update(logit_scale=0), "logit_scale is 0; it must be a number above 0"),
    ("eagle 3.1", lambda c, t: c.pop("fc_norm"), "fc_norm is False; its tensors hold fc_norm.0.weight"),
    ("speculators", lambda c, t: c.update(fc_norm=True), "fc_norm is True; its tensors hold no fc_norm.0.weight"),
    ("eagle 3.1", without("fc_norm.2.weight"), "fc_norm.2.weight is missing"),
    ("gpt-oss", lambda c, t: c.pop("norm_before_fc"), "norm_before_fc is False; its tensors hold input_norm.weight"),
    ("gpt-oss", without("input_norm.weight"), "norm_before_fc is True; its tensors hold no input_norm.weight"),
    (
        "gpt-oss",
        lambda c, t: (c.update(fc_norm=True), t.update(tensors_of(SOURCES))),
        "fc_norm is True; norm_before_fc is true as well, and a head has one of the two",
    ),
    ("eagle 3", lambda c, t: c.update(recycle="both"), "recycle is 'both'; it must be raw, normed or bare"),
    ("eagle", lambda c, t: c.update(recycle="raw"), "recycle is 'raw'; EAGLE-1's heads recycle"),
    ("eagle 3", lambda c, t: c.update(norm_output="false"), "norm_output is 'false'; it must be true or false"),
    ("eagle 3", lambda c, t: c.update(norm_before_residual=1), "norm_before_residual is 1; it must be true or false"),
    ("eagle", lambda c, t: c.update(bias="no"), "bias is 'no'; it must be true or false"),
    ("eagle", lambda c, t: c.update(logit_scale=0), "logit_scale is 0; it must be a number above 0"),
    ("eagle 3", lambda c, t: c.update(qkv_bias=True), "qkv_bias is True; its tensors hold no biases of queries"),
    (
        "eagle",
        lambda c, t: (c.update(qkv_bias=False), t.update({"layers.0.self_attn.q_proj.bias": torch.ones(16)})),
        "qkv_bias is False; its tensors hold biases",
    ),
    (
        "specforge",
        lambda c, t: c["eagle_config"].update(parallel_draft_step=3),
        "parallel_draft_step is 3; drafts with parallel draft heads are not read",
    ),
    (
        "specforge",
        lambda c, t: t.update({"parallel_draft_heads.lm_head.weight": torch.ones(14, 16)}),
        "holds parallel_draft_heads.lm_head.weight: drafts with parallel draft heads are not read",
    ),
    (
        "eagle 3",
        lambda c, t: c.update(architectures=["Eagle3DeepseekV2ForCausalLM"]),
        "architectures is 'Eagle3DeepseekV2ForCausalLM'; drafts with latent attention are not read",
    ),
    (
        "eagle 3",
        lambda c, t: t.update({"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(4, 32)}),
        "holds midlayer.self_attn.kv_a_proj_with_mqa.weight: drafts with latent attention are not read",
    ),
    ("eagle 3", lambda c, t: c.update(rope_theta=0), "rope_theta is 0; it must be a number above 0"),
    ("eagle 3", lambda c, t: c.update(vocab_size="many"), "vocab_size is 'many'"),
    ("eagle 3", lambda c, t: t.update(d2t=torch.tensor(0)), r"d2t has shape \[\], no list of tokens"),
    ("eagle 3", lambda c, t: t.update({"embed_tokens.weight": torch.tensor(1.0)}), "is no matrix"),
    ("eagle", lambda c, t: c.pop("bias"), "fc.bias is missing"),
    ("eagle", lambda c, t: t.update({"layers.0.input_layernorm.weight": torch.ones(16)}), "input_layernorm"),
    ("eagle", lambda c, t: c.pop("hidden_size"), "hidden_size is"),
    ("speculators, eagle", lambda c, t: c.update(speculators_model_type="mlp"), "none of EAGLE's"),
    ("specforge", lambda c, t: c["eagle_config"].update(use_last_layernorm=False), "use_last_layernorm is False"),
    (
        "specforge",
        lambda c, t: c["eagle_config"].update(use_input_layernorm_in_first_layer=False),
        "use_input_layernorm_in_first_layer is False; EAGLE-3's heads are read with True",
    ),
    ("specforge", lambda c, t: c["eagle_config"].update(use_mtp_layernorm=True), "use_mtp_layernorm is True"),
    ("eagle", lambda c, t: c.update(use_last_layernorm=True), "is True; EAGLE-1's heads are read with False"),
]
MODEL_OPTIMIZER = {
    "use_aux_hidden_state": True,
    "use_last_layernorm": True,
    "use_input_layernorm_in_first_layer": True,
    "use_mtp_layernorm": False,
    "eagle_aux_hidden_state_layer_ids": [1, 0, 2],
}


def test_the_norms_that_model_optimizer_names_are_those_of_its_heads(tmp_path: Path) -> None:
    config, tensors = FOLDERS["specforge"]
    found = loaded(put(tmp_path / "head", {**config, "eagle_config": MODEL_OPTIMIZER}, tensors))
    assert isinstance(found.network, Eagle3Head) and found.needs.layers == (2, 1, 3)
    first = {**FOLDERS["eagle"][0], "use_last_layernorm": False, "use_input_layernorm_in_first_layer": False}
    assert isinstance(loaded(put(tmp_path / "first", first, FOLDERS["eagle"][1])).network, Eagle1Head)


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGED, ids=[one[2] for one in DAMAGED])
def test_what_is_wrong_with_a_folder_is_said(name: str, damage: Any, message: str, tmp_path: Path) -> None:
    config, tensors = copy.deepcopy(FOLDERS[name][0]), {key: value.clone() for key, value in FOLDERS[name][1].items()}
    damage(config, tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        loaded(put(tmp_path / "head", config, tensors))
    assert str(caught.value).count(". ") == 0


def norms_read(folder: Path, recycle: str | None) -> tuple[bool, bool]:
    norms = load_head(folder, 6, recycle=recycle).network.norms
    return norms.output, norms.rows


@pytest.mark.parametrize(
    ("told", "recycle", "wanted"),
    [
        (None, None, (False, True)),
        (True, None, (True, True)),
        (False, None, (False, True)),
        (None, "raw", (False, True)),
        (True, "raw", (False, True)),
        (False, "raw", (False, True)),
        (True, "bare", (False, False)),
        (False, "bare", (False, False)),
        (None, "normed", (True, True)),
        (True, "normed", (True, True)),
    ],
)
def test_norm_output_has_two_meanings_and_a_reader_may_choose(
    told: bool | None, recycle: str | None, wanted: tuple[bool, bool], tmp_path: Path
) -> None:
    """SpecForge's was, before September 2026, whether rows have the last norm; everyone's, whether states do."""
    config, tensors = FOLDERS["specforge"]
    given = put(tmp_path / "head", config if told is None else {**config, "norm_output": told}, tensors)
    assert norms_read(given, recycle) == wanted
    if recycle is not None:  # a folder may say it as well
        said = json.loads((given / "config.json").read_text())
        (given / "config.json").write_text(json.dumps({**said, "recycle": recycle}))
        assert norms_read(given, None) == wanted


def test_only_heads_that_recycle_states_are_told_which(tmp_path: Path) -> None:
    write_plain(tmp_path, CONFIG, layout_a(heads(2, dtype=torch.float32)))
    load_head(tmp_path)
    with pytest.raises(CheckpointError, match="holds a Medusa head, and only EAGLE-3's and MTP's recycle states"):
        load_head(tmp_path, recycle="raw")
    with pytest.raises(InvalidParameter, match="recycle must be one of raw, normed, bare, but is 'both'"):
        load_head(tmp_path, recycle="both")


def test_layers_that_nobody_names_need_the_targets_depth(tmp_path: Path) -> None:
    folder = put(tmp_path / "head", *FOLDERS["eagle 3"])
    with pytest.raises(CheckpointError, match="does not say which of the target's layers"):
        loaded(folder, None)
    with pytest.raises(CheckpointError, match="its target has 2"):
        loaded(folder, 2)


def test_offsets_of_32_bits_and_in_another_order(tmp_path: Path) -> None:
    config, tensors = FOLDERS["eagle 3"]
    plain = loaded(put(tmp_path / "plain", config, tensors))
    order = torch.arange(13, -1, -1)
    turned = {**tensors, "lm_head.weight": tensors["lm_head.weight"][order].contiguous()}
    turned["d2t"] = (TOKENS[order] - torch.arange(14)).int()
    found = loaded(put(tmp_path / "turned", config, turned))
    for key, value in plain.ends.state_dict().items():
        assert torch.equal(found.ends.state_dict()[key], value)


def test_no_code_in_a_folder_is_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FOLDERS["eagle"][0]))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match="damaged"):
        loaded(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "architectures": ["LlamaForCausalLM"]},
        {**LLAMA, "block_size": 8, "draft_vocab_size": 14, "target_layer_ids": [1]},
        {"speculators_model_type": "dflash", "draft_vocab_size": 14},
        {},
    ],
)
def test_configurations_that_do_not_tell_a_head_of_eagles(config: dict[str, Any]) -> None:
    """The first is what EAGLE-1's authors write: there the tensors tell (test_telling_heads.py)."""
    assert not is_eagle(config)


def test_folders_of_the_first_kind_hold_no_heads_of_fewer_tokens(target: PreTrainedModel, tmp_path: Path) -> None:
    drafter = HeadDrafter(
        Eagle1Head(Anatomy(width=16, inner=24, heads=4, groups=2, channels=4)), HeadEnds(tokens=TOKENS)
    )
    with pytest.raises(InvalidParameter, match="hold heads of all tokens of a target, and this drafts 14"):
        write_eagle(drafter, tmp_path / "head", HuggingFaceModel(target))
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("name", ["eagle", "vllm, final"])
def test_scaled_rows_are_read_and_written(name: str, target: PreTrainedModel, tmp_path: Path) -> None:
    config, tensors = FOLDERS[name]
    head = loaded(put(tmp_path / "given", {**config, "logit_scale": 3.5}, tensors))
    assert head.ends.multiplier == 3.5
    write_eagle(head, tmp_path / "own", HuggingFaceModel(target), dtype=torch.float32)
    assert loaded(tmp_path / "own").ends.multiplier == 3.5


def test_ends_that_a_form_cannot_say_are_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    head = loaded(put(tmp_path / "given", *FOLDERS["eagle"]))
    capped = replace(head, ends=HeadEnds(head.ends.embed_tokens, softcap=2.0))
    with pytest.raises(InvalidParameter, match=r"whose ends have a softcap of 2\.0 has no such form"):
        write_eagle(capped, tmp_path / "own", HuggingFaceModel(target))
    assert not (tmp_path / "own").exists()


def test_no_head_recycles_normed_states_and_drafts_from_others() -> None:
    with pytest.raises(InvalidParameter, match="output goes with rows"):
        Eagle3Norms(output=True, rows=False)
