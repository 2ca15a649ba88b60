"""Block heads with Gemma 4's layers, as DeepSpec writes them: their formula, written a second time, and refusals."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import VOCAB, WIDTH
from test_block_folders import folder_of
from test_block_heads import ROWS, begun, text_of
from torch import Tensor
from transformers import Gemma4TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import polydraft
from polydraft.drafters import DraftRequest, HeadDrafter, is_head, load_head, write_block
from polydraft.drafters.heads.block_head import BlockHead
from polydraft.drafters.heads.sublayers import Rotation
from polydraft.errors import CheckpointError, InvalidParameter
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise
from polydraft.schemes import IID
from polydraft.trees import Widths

HEADS, CHANNELS, INNER, RANK, CAP = 4, 8, 24, 6, 5.0
PART, THETA = 0.5, 50.0
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 2,
    "global_head_dim": CHANNELS,
    "attention_k_eq_v": True,
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "sliding_window": 512,
    "layer_types": ["full_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": PART, "rope_theta": THETA},
    },
    "final_logit_softcapping": CAP,
    "block_size": 4,
    "mask_token_id": 1,
    "target_layer_ids": [0, 1],
    "num_target_layers": 3,
    "num_anchors": 512,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
TARGET = HuggingFaceModel(tiny_model(vocab=VOCAB, num_hidden_layers=3))


def tensors_of(shared: bool) -> dict[str, Tensor]:
    """Return random tensors under DeepSpec's names; `shared` is what it calls `attention_k_eq_v`."""
    groups = 1 if shared else 2
    layer = {
        "self_attn.q_proj.weight": (HEADS * CHANNELS, WIDTH),
        "self_attn.k_proj.weight": (groups * CHANNELS, WIDTH),
        **({} if shared else {"self_attn.v_proj.weight": (groups * CHANNELS, WIDTH)}),
        "self_attn.o_proj.weight": (WIDTH, HEADS * CHANNELS),
        "self_attn.q_norm.weight": (CHANNELS,),
        "self_attn.k_norm.weight": (CHANNELS,),
        "mlp.gate_proj.weight": (INNER, WIDTH),
        "mlp.up_proj.weight": (INNER, WIDTH),
        "mlp.down_proj.weight": (WIDTH, INNER),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
        "pre_feedforward_layernorm.weight": (WIDTH,),
        "post_feedforward_layernorm.weight": (WIDTH,),
        "layer_scalar": (1,),
    }
    shapes = {
        "fc.weight": (WIDTH, 2 * WIDTH),
        "hidden_norm.weight": (WIDTH,),
        "norm.weight": (WIDTH,),
        "embed_tokens.weight": (VOCAB, WIDTH),
        "lm_head.weight": (VOCAB, WIDTH),
        "markov_head.markov_w1.weight": (VOCAB, RANK),
        "markov_head.markov_w2.weight": (VOCAB, RANK),
        "confidence_head.proj.weight": (1, WIDTH + RANK),
        "confidence_head.proj.bias": (1,),
        **{f"layers.{number}.{name}": shape for number in range(2) for name, shape in layer.items()},
    }
    stream = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=stream, dtype=torch.float64) * 0.5 for name, shape in shapes.items()}


def evened(states: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return weight * states / (states.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rotated(heads: Tensor, places: Sequence[int]) -> Tensor:
    """Turn the first part of the pairs (i, i + h/2) of channels, and leave the others."""
    found, half = heads.clone(), CHANNELS // 2
    for row, place in enumerate(places):
        for pair in range(int(PART * half)):
            angle = place * THETA ** (-2 * pair / CHANNELS)
            a, b = heads[row, pair], heads[row, pair + half]
            found[row, pair] = a * math.cos(angle) - b * math.sin(angle)
            found[row, pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return found


def by_hand(named: dict[str, Tensor], features: Tensor, tokens: Sequence[int], shared: bool) -> Tensor:
    """Return the slots behind the last norm, by DeepSpec's formulas, a head at a time."""
    context = evened(features @ named["fc.weight"].T, named["hidden_norm.weight"])
    states = named["embed_tokens.weight"][list(tokens)] * WIDTH**0.5
    known, places = len(context), [*range(len(context) + len(tokens))]
    for layer in range(2):
        at = {name.removeprefix(f"layers.{layer}."): one for name, one in named.items() if f"layers.{layer}." in name}
        inside = evened(states, at["input_layernorm.weight"])
        both, parts = torch.cat([context, inside]), []
        for number in range(HEADS):
            group = 0 if shared else number // 2
            own = slice(number * CHANNELS, (number + 1) * CHANNELS)
            theirs = slice(group * CHANNELS, (group + 1) * CHANNELS)
            projected = both @ at["self_attn.k_proj.weight"][theirs].T
            values = projected if shared else both @ at["self_attn.v_proj.weight"][theirs].T
            queries = evened(inside @ at["self_attn.q_proj.weight"][own].T, at["self_attn.q_norm.weight"])
            keys = rotated(evened(projected, at["self_attn.k_norm.weight"]), places)
            scores = rotated(queries, places[known:]) @ keys.T
            parts.append(scores.softmax(-1) @ evened(values))
        found = torch.cat(parts, -1) @ at["self_attn.o_proj.weight"].T
        states = states + evened(found, at["post_attention_layernorm.weight"])
        inside = evened(states, at["pre_feedforward_layernorm.weight"])
        gate = inside @ at["mlp.gate_proj.weight"].T
        gate = gate / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        found = (gate * (inside @ at["mlp.up_proj.weight"].T)) @ at["mlp.down_proj.weight"].T
        states = (states + evened(found, at["post_feedforward_layernorm.weight"])) * at["layer_scalar"]
    return evened(states, named["norm.weight"])


def loaded(folder: Path, shared: bool, **changes: Any) -> HeadDrafter[Any]:
    config = {**CONFIG, "attention_k_eq_v": shared, **changes}
    found = load_head(folder_of(folder, config, tensors_of(shared)), dtype=torch.float64)
    assert isinstance(found.network, BlockHead)
    return found


@pytest.mark.parametrize("shared", [True, False], ids=["keys are values", "values of their own"])
def test_slots_and_rows_are_those_of_the_formula(shared: bool, tmp_path: Path) -> None:
    drafter, named = loaded(tmp_path, shared), tensors_of(shared)
    # Heads are read into single precision first, which the formula has to know of as well.
    named = {name: one.float().double() for name, one in named.items()}
    text = text_of(ROWS)
    state, features = begun(TARGET, drafter, text)
    assert features is not None
    slots = drafter.network.filled(state.memory, text, state.ends)
    draft, _ = drafter.draft(state, DraftRequest(text, IID(), Widths((1, 1, 1)), Noise.from_seed(5, len(ROWS))))
    for row, tokens in enumerate(ROWS):
        kept = features.places[row] >= 0
        joined = torch.cat([features.states[layer][row, kept] for layer in (1, 2)], -1)
        wanted = by_hand(named, joined, [tokens[-1], 1, 1, 1], shared)
        torch.testing.assert_close(slots[row], wanted, rtol=1e-5, atol=1e-6)
        for depth in range(3):
            last = int(draft.tree.tokens[row, depth])
            logits = CAP * torch.tanh(named["lm_head.weight"] @ wanted[depth] / CAP)
            logits = logits + named["markov_head.markov_w2.weight"] @ named["markov_head.markov_w1.weight"][last]
            listed = draft.shortlist[row, depth]
            chances = logits.softmax(-1)[listed[listed >= 0]]
            found = draft.probs[row, depth][listed >= 0]
            torch.testing.assert_close(found, chances / chances.sum(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.0, "policy": Widths((3, 2, 1))}])
def test_greedy_text_is_plain_text(options: dict[str, Any], tmp_path: Path) -> None:
    drafter, prompt = loaded(tmp_path, shared=True), torch.tensor([ROWS[0]])
    wanted = polydraft.generate(TARGET.model, prompt, drafter="none", max_new_tokens=16, temperature=0.0)
    found = polydraft.generate(TARGET.model, prompt, drafter=drafter, max_new_tokens=16, **options)
    assert found.statistics.drafted and torch.equal(found.sequences, wanted.sequences)


@pytest.mark.parametrize(("channels", "part"), [(512, 0.25), (8, 0.5), (8, 1.0), (6, 0.5), (8, 0.1)])
def test_positions_are_hugging_faces(channels: int, part: float) -> None:
    told = {"rope_type": "proportional", "partial_rotary_factor": part, "rope_theta": 1e6}
    config = Gemma4TextConfig(
        num_hidden_layers=1,
        layer_types=["full_attention"],
        global_head_dim=channels,
        rope_parameters={"full_attention": told},
    )
    wanted, factor = ROPE_INIT_FUNCTIONS["proportional"](config, layer_type="full_attention")  # pyright: ignore
    found = Rotation(1e6, "proportional", part=part).frequencies(channels, torch.device("cpu"))
    torch.testing.assert_close(found, wanted)
    assert factor == 1


def test_without_a_list_positions_are_those_of_global_layers(tmp_path: Path) -> None:
    found = loaded(tmp_path / "a", shared=True, rope_parameters=None)
    assert found.network.shape.anatomy.rotation == Rotation(1e6, "proportional", part=0.25)
    plain = {"full_attention": {"rope_type": "default", "rope_theta": 3.0}}
    assert loaded(tmp_path / "b", shared=True, rope_parameters=plain).network.shape.anatomy.rotation == Rotation(3.0)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"enable_moe_block": True}, "says that enable_moe_block is True; such layers are not read"),
    ({"hidden_size_per_layer_input": 256}, "says that hidden_size_per_layer_input is 256; such layers are not read"),
    ({"use_double_wide_mlp": True}, "says that use_double_wide_mlp is True; such layers are not read"),
    ({"hidden_activation": "silu"}, "asks for the activation 'silu', not gelu_pytorch_tanh"),
    ({"global_head_dim": None}, "says that global_head_dim is None; it must be a number"),
    ({"num_global_key_value_heads": None}, "says that num_global_key_value_heads is None; it must be a number"),
    ({"num_global_key_value_heads": 3}, "has 4 query heads of 8 channels on 3 key heads"),
    ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "asks for rotary positions of kind 'yarn'"),
    ({"rope_parameters": {"full_attention": 5}}, "says that full_attention is 5; it must be a table"),
    ({"attention_k_eq_v": False}, "v_proj.weight is missing|k_proj.weight has shape"),
]


@pytest.mark.parametrize(("changes", "said"), BAD, ids=[said for _, said in BAD])
def test_what_is_not_read_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {**CONFIG, **changes}, tensors_of(shared=True))
    assert is_head(folder)
    with pytest.raises(CheckpointError, match=said) as found:
        load_head(folder)
    assert "\n" not in str(found.value)


def test_such_heads_are_not_written(tmp_path: Path) -> None:
    drafter = loaded(tmp_path / "head", shared=True)
    for form in ({}, {"speculators": True}, {"deepspec": True}):
        with pytest.raises(InvalidParameter, match="with Gemma's layers are read, and not written"):
            write_block(drafter, tmp_path / "new", TARGET, **form)
    assert not (tmp_path / "new").exists()
