"""What is written of block heads: the documented names and shapes, and nothing that reads back as another head."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import VOCAB, WIDTH, block_drafter
from safetensors.torch import load_file
from test_block_folders import same
from transformers import Qwen3Config

from polydraft.drafters import HeadDrafter, load_head, write_block
from polydraft.drafters.heads.block_head import BlockHead
from polydraft.drafters.heads.drafter import HeadEnds
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel

TARGET = HuggingFaceModel(tiny_model(vocab=VOCAB, num_hidden_layers=4))
LAYER = {
    "input_layernorm.weight": (WIDTH,),
    "post_attention_layernorm.weight": (WIDTH,),
    "self_attn.q_proj.weight": (16, WIDTH),
    "self_attn.k_proj.weight": (8, WIDTH),
    "self_attn.v_proj.weight": (8, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, 16),
    "self_attn.q_norm.weight": (4,),
    "self_attn.k_norm.weight": (4,),
    "mlp.gate_proj.weight": (24, WIDTH),
    "mlp.up_proj.weight": (24, WIDTH),
    "mlp.down_proj.weight": (WIDTH, 24),
}
BACKBONE = {
    "fc.weight": (WIDTH, 3 * WIDTH),
    "hidden_norm.weight": (WIDTH,),
    "norm.weight": (WIDTH,),
    **{f"layers.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER.items()},
}
MARKOV = {"markov_w1.weight": (VOCAB, 6), "markov_w2.weight": (VOCAB, 6)}
SURE = {"confidence_proj.weight": (1, WIDTH + 6), "confidence_proj.bias": (1,)}
EXTRA: dict[str, dict[str, tuple[int, ...]]] = {
    "none": {},
    "markov": {**MARKOV, **SURE},
    "gated": {**MARKOV, **SURE, "gate_proj.weight": (6, WIDTH + 6), "gate_proj.bias": (6,)},
    "recurrent": {**MARKOV, "joint_proj.weight": (18, 12 + WIDTH), "joint_proj.bias": (18,)},
    "domino": {
        "prefix_gru.weight_ih_l0": (30, WIDTH),
        "prefix_gru.weight_hh_l0": (30, 10),
        "embed_proj.0.weight": (6, WIDTH + 10),
        "embed_proj.2.weight": (VOCAB, 6),
    },
    "selector": {
        "candidate_selector.predecessor_codebook": (VOCAB, 6),
        "candidate_selector.successor_codebook": (VOCAB, 6),
        "candidate_selector.hidden_projection.weight": (6, WIDTH),
        **{
            f"layers.{layer}.{name}": shape
            for layer in range(2)
            for side in ("attention_conv", "mlp_conv")
            for name, shape in {
                f"{side}.base_kernel": (2, 2, WIDTH),
                f"{side}.kernel_projection.weight": (16, WIDTH),
            }.items()
        },
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"projector_type": "dflash"},
    "markov": {"projector_type": "dspark", "markov_head_type": "vanilla", "markov_rank": 6},
    "gated": {"projector_type": "dspark", "markov_head_type": "gated", "markov_rank": 6},
    "recurrent": {"projector_type": "dspark", "markov_head_type": "rnn", "markov_rank": 6},
    "domino": {"projector_type": "domino", "gru_hidden_dim": 10, "emb_dim": 6, "pure_draft_prefix_len": 1},
    "selector": {"selector_rank": 6, "selector_top_k": 5, "conv_kernel_size": 2, "conv_group_size": 4},
}
NO_CONFIDENCE = ("none", "recurrent", "domino", "selector")


def of_term(term: str, **changes: Any) -> HeadDrafter[Any]:
    convolved = {"taps": 2, "group": 4, "shifted": False} if term == "selector" else {}
    given = {"reads": (1, 2, 3), **convolved, **changes}
    return block_drafter(term, confidence=term not in NO_CONFIDENCE, **given)


def config_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("term", EXTRA)
def test_the_official_form_has_the_documented_names_and_shapes(term: str, tmp_path: Path) -> None:
    """DSpark's terms are named as Model-Optimizer names them, whose class and settings stand in the configuration."""
    drafter = of_term(term)
    write_block(drafter, tmp_path, TARGET, dtype=torch.float32)
    found = {name: tuple(one.shape) for name, one in load_file(tmp_path / "model.safetensors").items()}
    assert found == {**BACKBONE, **EXTRA[term]}
    config = config_in(tmp_path)
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert (config["block_size"], config["num_target_layers"], config["vocab_size"]) == (4, 4, VOCAB)
    inner = {"mask_token_id": 1, "target_layer_ids": [0, 1, 2], "shift_label": term != "selector", **SETTINGS[term]}
    assert inner.items() <= config["dflash_config"].items()
    assert config["dflash_config"]["use_confidence_head"] == (term not in NO_CONFIDENCE)
    assert config.get("emb_dim") == inner.get("emb_dim")
    same(load_head(tmp_path), drafter)


CAUSAL: list[dict[str, Any]] = [
    {},
    {"windows": (9, 9), "causal": (True, True)},
    {"windows": (9, 9), "causal": (False, False)},
    {"windows": (9, 9)},
    {"windows": (5, None), "causal": (True, False)},
    {"windows": (5, None), "causal": (False, False)},
]


@pytest.mark.parametrize("speculators", [False, True], ids=["official", "speculators"])
@pytest.mark.parametrize("changes", CAUSAL, ids=repr)
def test_causality_and_windows_read_back_as_they_were_written(
    changes: dict[str, Any], speculators: bool, tmp_path: Path
) -> None:
    drafter = of_term("markov", **changes)
    write_block(drafter, tmp_path, TARGET, speculators=speculators, dtype=torch.float32)
    same(load_head(tmp_path), drafter)


BEYOND: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"causal": (True, True)}, {}, "causal layers that have no window"),
    ({"causal": (True, True), "windows": (5, None)}, {}, "causal layers that have no window"),
    ({"causal": (True, False), "windows": (5, 5)}, {}, "causal and other layers among those with windows"),
    ({"mask_id": None}, {}, "a mask embedding of their own"),
    ({"taps": 2, "group": 4}, {}, "convolutions over slots"),
    ({"reads": (1, 2, "final")}, {}, "the target's last hidden states to read"),
    ({}, {"multiplier": 2.0}, "a factor or a cap of their logits"),
    ({}, {"softcap": 30.0}, "a factor or a cap of their logits"),
]


@pytest.mark.parametrize(("changes", "ends", "said"), BEYOND, ids=lambda one: repr(one))
def test_speculators_refuses_by_name_what_its_form_cannot_say(
    changes: dict[str, Any], ends: dict[str, Any], said: str, tmp_path: Path
) -> None:
    drafter = HeadDrafter(of_term("markov", **changes).network, HeadEnds(**ends))
    with pytest.raises(InvalidParameter, match=f"speculators has no form for heads with {said}; leave out"):
        write_block(drafter, tmp_path / "head", TARGET, speculators=True)
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("term", ["domino", "mixing", "selector"])
def test_speculators_refuses_other_path_terms_by_name(term: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"no form for heads with the path term (Domino|Mixing|Selector);"):
        write_block(block_drafter(term), tmp_path / "head", TARGET, speculators=True)


def test_layers_that_are_causal_without_their_windows_are_refused(tmp_path: Path) -> None:
    drafter = of_term("markov", causal=(True, False), windows=(None, 5))
    with pytest.raises(InvalidParameter, match="can be written only if those with windows are"):
        write_block(drafter, tmp_path / "head", TARGET)


DEEPSPEC = {
    "markov": {"markov_rank": 6, "markov_head_type": "vanilla"},
    "gated": {"markov_rank": 6, "markov_head_type": "gated"},
    "recurrent": {"markov_rank": 6, "markov_head_type": "rnn"},
    "none": {"markov_rank": 0},
}


@pytest.mark.parametrize("term", DEEPSPEC)
def test_deepspecs_form_has_its_names_shapes_and_one_flat_table(term: str, tmp_path: Path) -> None:
    """What `Qwen3DSparkModel` asks of its configuration, and the parameters that it has."""
    drafter = of_term(term, reads=(0, 1, 3))
    write_block(drafter, tmp_path, TARGET, deepspec=True, dtype=torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    parts = {"confidence_proj": "confidence_head.proj", "markov_w": "markov_head.markov_w"}
    parts |= {"gate_proj.": "markov_head.gate_proj.", "joint_proj.": "markov_head.joint_proj."}
    extra = {replaced(name, parts): shape for name, shape in EXTRA[term].items()}
    ends = {"embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH)}
    assert {name: tuple(one.shape) for name, one in tensors.items()} == {**BACKBONE, **extra, **ends}
    model = TARGET.model
    torch.testing.assert_close(tensors["embed_tokens.weight"], model.get_input_embeddings().weight.detach().float())
    torch.testing.assert_close(tensors["lm_head.weight"], model.get_output_embeddings().weight.detach().float())
    config, sure = config_in(tmp_path), term not in NO_CONFIDENCE
    flat = {"block_size": 4, "mask_token_id": 1, "target_layer_ids": [-1, 0, 2], "num_target_layers": 4}
    flat |= {"architectures": ["Qwen3DSparkModel"], "vocab_size": VOCAB, "tie_word_embeddings": False}
    flat |= {"enable_confidence_head": sure, **({"confidence_head_with_markov": True} if sure else {})}
    assert {**flat, **DEEPSPEC[term]}.items() <= config.items()
    assert config["num_anchors"] > 0 and not any(isinstance(one, dict) for one in config.values())
    assert Qwen3Config(**config).layer_types == ["full_attention"] * 2
    found = load_head(tmp_path)
    same(found, drafter)
    assert (
        isinstance(found.network, BlockHead) and found.ends.lm_head is not None and found.ends.embed_tokens is not None
    )


def replaced(name: str, parts: dict[str, str]) -> str:
    """Return a name whose beginning has another name."""
    return next((new + name.removeprefix(old) for old, new in parts.items() if name.startswith(old)), name)


FEW = torch.arange(0, VOCAB, 2)
NOT_DEEPSPECS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("domino", {}, {}, "the path term Domino"),
    ("mixing", {}, {}, "the path term Mixing"),
    ("markov", {"taps": 2, "group": 4}, {}, "convolutions over slots"),
    ("markov", {"mask_id": None}, {}, "a mask embedding of their own"),
    ("markov", {"rows": len(FEW)}, {"tokens": FEW}, "fewer tokens than their target"),
    ("markov", {"vocab": VOCAB + 2}, {}, "tables of different numbers of tokens"),
    ("markov", {"shifted": False}, {}, "slots that draft their own place"),
    ("markov", {"causal": (True, True)}, {}, "causal layers"),
    ("markov", {"windows": (5, None)}, {}, "windows"),
    ("markov", {"reads": (1, 2, "final")}, {}, "the target's last hidden states to read"),
    ("markov", {"reads": (2, 1, 3)}, {}, "layers to read that do not rise"),
    ("markov", {"target_width": 2 * WIDTH}, {}, "another width than their target's"),
    ("markov", {}, {"multiplier": 2.0}, "a factor or a cap of their logits"),
    ("markov", {"anatomy": {"normed": False}}, {}, "queries and keys without norms"),
    ("markov", {"anatomy": {"bias": True}}, {}, "biases in some projections of attention"),
]


@pytest.mark.parametrize(("term", "changes", "ends", "said"), NOT_DEEPSPECS, ids=[one[-1] for one in NOT_DEEPSPECS])
def test_deepspec_refuses_by_name_what_its_form_cannot_say(
    term: str, changes: dict[str, Any], ends: dict[str, Any], said: str, tmp_path: Path
) -> None:
    drafter = HeadDrafter(of_term(term, **changes).network, HeadEnds(**ends))
    with pytest.raises(InvalidParameter, match=f"DeepSpec has no form for heads with {said}; leave out"):
        write_block(drafter, tmp_path / "head", TARGET, deepspec=True)
    assert not (tmp_path / "head").exists()


def test_one_form_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="is written in one form"):
        write_block(of_term("markov"), tmp_path / "head", TARGET, deepspec=True, speculators=True)
    drafter = of_term("markov")
    drafter.network.confidence = torch.nn.Linear(WIDTH + 3, 1).requires_grad_(False)
    with pytest.raises(InvalidParameter, match="told a part of a token's row"):
        write_block(drafter, tmp_path / "head", TARGET, deepspec=True)


@pytest.mark.parametrize("beside", [None, 0, 6])
def test_speculators_says_what_a_confidence_head_reads(beside: int | None, tmp_path: Path) -> None:
    """Its own default takes the last token's row beside the slot, so that a head of the slot alone must say so."""
    head = of_term("markov").network
    head.confidence = None if beside is None else torch.nn.Linear(WIDTH + beside, 1).requires_grad_(False)
    drafter = HeadDrafter(head, HeadEnds())
    write_block(drafter, tmp_path, TARGET, speculators=True, dtype=torch.float32)
    told = {name: one for name, one in config_in(tmp_path).items() if "confidence" in name}
    wanted = {} if beside is None else {"confidence_head_with_markov": beside > 0}
    assert told == {"enable_confidence_head": beside is not None, **wanted}
    same(load_head(tmp_path), drafter)


@pytest.mark.parametrize("speculators", [False, True], ids=["official", "speculators"])
@pytest.mark.parametrize("windows", [(9, None), (None, None)])
def test_hugging_face_reads_the_windows_that_are_written(
    windows: tuple[int | None, int | None], speculators: bool, tmp_path: Path
) -> None:
    """Its configuration of Qwen3 takes a window only where `use_sliding_window` is set."""
    write_block(of_term("markov", windows=windows), tmp_path, TARGET, speculators=speculators)
    config = config_in(tmp_path)
    found = Qwen3Config(**config["transformer_layer_config"] if speculators else config)
    assert found.sliding_window == windows[0]
    assert found.layer_types == ["full_attention" if one is None else "sliding_attention" for one in windows]


def test_speculators_holds_embeddings_with_what_they_are_multiplied_by(tmp_path: Path) -> None:
    table = torch.nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
    drafter = HeadDrafter(of_term("markov").network, HeadEnds(table, scale=3.0))
    write_block(drafter, tmp_path, TARGET, speculators=True, dtype=torch.float32)
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors")["embed_tokens.weight"], 3 * table.weight)
