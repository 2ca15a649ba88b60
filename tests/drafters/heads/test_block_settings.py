"""What block heads' folders set: each is read, and does what its formula says, written a second time."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import VOCAB, WIDTH, block_drafter
from heads import slots_of as drafted_from
from test_block_folders import INNER, SIZES, folder_of, named, same
from test_block_heads import ROWS, begun, normed, rotated, text_of
from torch import Tensor

from polydraft.drafters import DraftRequest, HeadDrafter, load_head, write_block
from polydraft.drafters.heads.block_head import BlockHead
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise
from polydraft.reading import Features, Text
from polydraft.schemes import IID
from polydraft.trees import Widths

TARGET = HuggingFaceModel(tiny_model(vocab=VOCAB, num_hidden_layers=3))
CONFIG = {**SIZES, "architectures": ["DFlashDraftModel"], "num_target_layers": 3}
LAST_ROW = ROWS[0]


def read_again(folder: Path, tensors: dict[str, Tensor], inner: dict[str, Any], **outer: Any) -> HeadDrafter[Any]:
    """Return the head of a folder with these settings, in double precision."""
    config = {**CONFIG, "dflash_config": {**INNER, "shift_label": True, **inner}, **outer}
    found = load_head(folder_of(folder, config, tensors))
    assert isinstance(found.network, BlockHead)
    found.network.double()
    found.ends.double()
    return found


def state_of(drafter: HeadDrafter[Any], row: Sequence[int] = LAST_ROW) -> tuple[Any, Text, Tensor]:
    """Return what a head has read of a text, the text, and the target's states of all tokens but the last."""
    text = text_of([row])
    state, features = begun(TARGET, drafter, text)
    assert isinstance(features, Features)
    kept = features.places[0] >= 0
    return state, text, torch.cat([features.states[layer][0, kept] for layer in drafter.network.shape.reads], -1)


def convolved(states: Tensor, base: Tensor, dynamic: Tensor, group: int) -> Tensor:
    """Return sum_t (base[t, c] + dynamic[i, t, group of c]) x[i - t, c], zeros before slot 0."""
    found = torch.zeros_like(states)
    for slot in range(len(states)):
        for channel in range(states.shape[1]):
            for tap in range(min(slot + 1, len(base))):
                weight = base[tap, channel] + dynamic[slot, tap, channel // group]
                found[slot, channel] += weight * states[slot - tap, channel]
    return found


def around(states: Tensor, at: dict[str, Tensor], conv: str, sublayer: Any, group: int) -> Tensor:
    """Return a sublayer's output between its convolutions, whose kernels both follow from what came in."""
    base = at[f"{conv}.base_kernel"]
    taps = base.shape[1]
    dynamic = (states @ at[f"{conv}.kernel_projection.weight"].T).view(len(states), 2, taps, -1)
    inside = sublayer(convolved(states, base[0], dynamic[:, 0], group))
    return convolved(inside, base[1], dynamic[:, 1], group)


def looked_up(at: dict[str, Tensor], inside: Tensor, context: Tensor, places: Sequence[int]) -> Tensor:
    """Return attention over the context and the whole block, a head at a time."""
    both, known, parts = torch.cat([context, inside]), len(context), []
    for number in range(4):
        own, shared = slice(number * 4, number * 4 + 4), slice(number // 2 * 4, number // 2 * 4 + 4)
        queries = normed(inside @ at["self_attn.q_proj.weight"][own].T, at["self_attn.q_norm.weight"])
        keys = normed(both @ at["self_attn.k_proj.weight"][shared].T, at["self_attn.k_norm.weight"])
        scores = rotated(queries, places[known:]) @ rotated(keys, places).T / 2
        parts.append(scores.softmax(-1) @ (both @ at["self_attn.v_proj.weight"][shared].T))
    return torch.cat(parts, -1) @ at["self_attn.o_proj.weight"].T


def gated(at: dict[str, Tensor], inside: Tensor) -> Tensor:
    gate = torch.nn.functional.silu(inside @ at["mlp.gate_proj.weight"].T)
    return (gate * (inside @ at["mlp.up_proj.weight"].T)) @ at["mlp.down_proj.weight"].T


def convolved_slots(head: BlockHead, features: Tensor, query: Tensor) -> Tensor:
    """Return DFlash2's slots: x + conv(attn(conv(norm x)); norm x), then the same around the gated layer."""
    named_all, group = dict(head.state_dict()), head.shape.group
    context = normed(features @ named_all["fc.weight"].T, named_all["hidden_norm.weight"])
    places = [*range(len(context) + len(query))]
    for layer in range(head.shape.layers):
        prefix = f"layers.{layer}."
        at = {name.removeprefix(prefix): one for name, one in named_all.items() if name.startswith(prefix)}
        plain = normed(query, at["input_layernorm.weight"])
        query = query + around(
            plain, at, "attention_conv", lambda one, at=at: looked_up(at, one, context, places), group
        )
        plain = normed(query, at["post_attention_layernorm.weight"])
        query = query + around(plain, at, "mlp_conv", lambda one, at=at: gated(at, one), group)
    return normed(query, named_all["norm.weight"])


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_dflash_2s_whole_layer_is_its_formula(taps: int, tmp_path: Path) -> None:
    """Kernels are random, so that the order of norms, convolutions and sublayers shows."""
    written = block_drafter("selector", taps=taps, group=4)
    write_block(written, tmp_path, TARGET, dtype=torch.float64)
    drafter = load_head(tmp_path, dtype=torch.float64)
    assert isinstance(drafter.network, BlockHead) and float(drafter.network.layers[0].mlp_conv.base_kernel.std()) > 0.1
    state, text, features = state_of(drafter)
    query = TARGET.embedded(torch.tensor([[LAST_ROW[-1], 1, 1, 1]]))[0]
    wanted = convolved_slots(drafter.network, features, query)
    torch.testing.assert_close(drafted_from(drafter, state, text)[0], wanted, rtol=1e-5, atol=1e-6)


def test_model_optimizers_windows_are_two_sided_and_in_every_layer(tmp_path: Path) -> None:
    drafter, tensors = named("none", reads=(1, 2))
    swa = {"use_swa": True, "swa_window_size": 3, "causal": False}
    outer = {"layer_types": ["full_attention"] * 2, "sliding_window": 3}
    found = read_again(tmp_path / "a", tensors, swa, **outer)
    same(found, drafter, windows=(3, 3))
    other = read_again(tmp_path / "b", tensors, {**swa, "use_swa": False}, **outer)
    same(other, drafter)
    places = torch.arange(4, 8).unsqueeze(0)
    seen = found.network.sees(0, places, torch.arange(8).unsqueeze(0), torch.tensor([[4]]))[0]
    assert seen.tolist() == [[abs(slot - key) < 3 for key in range(8)] for slot in range(4, 8)]


@pytest.mark.parametrize("plain", [0, 1, 2, 3])
@pytest.mark.parametrize("shifted", [True, False])
def test_domino_corrects_from_its_prefix_on(plain: int, shifted: bool, tmp_path: Path) -> None:
    _, tensors = named("domino", reads=(1, 2), confidence=False)
    inner = {"projector_type": "domino", "gru_hidden_dim": 10, "emb_dim": 6, "pure_draft_prefix_len": plain}
    drafter = read_again(tmp_path, tensors, {**inner, "shift_label": shifted})
    state, text, _ = state_of(drafter)
    slots = drafted_from(drafter, state, text)[0]
    draft, _ = drafter.draft(state, DraftRequest(text, IID(), Widths((1, 1, 1, 1)), Noise.from_seed(5, 1)))
    assert len(slots) == 3 + shifted
    output = TARGET.model.get_output_embeddings()
    for depth in range(len(slots)):
        path = draft.tree.tokens[0, : depth + 1].tolist()
        assert path[0] == LAST_ROW[-1]
        base = output(slots[depth])
        joined = torch.cat([slots[depth], gru_state(drafter.network, path)])
        named_path = dict(drafter.network.path.state_dict())
        inside = torch.nn.functional.silu(named_path["embed_proj.0.weight"] @ joined)
        wanted = base + (named_path["embed_proj.2.weight"] @ inside if depth >= plain else 0)
        listed = draft.shortlist[0, depth]
        there = listed >= 0
        chances = wanted.softmax(-1)[listed[there]]
        torch.testing.assert_close(draft.probs[0, depth][there], chances / chances.sum(), rtol=1e-6, atol=1e-9)


def gru_state(head: BlockHead, path: Sequence[int]) -> Tensor:
    """Return the recurrent state after a path, by torch's own unit."""
    weights = {name: one for name, one in head.path.state_dict().items() if name.startswith("prefix_gru.")}
    cell = torch.nn.GRU(WIDTH, 10, bias=False, batch_first=True).double()
    cell.load_state_dict({name.removeprefix("prefix_gru."): one for name, one in weights.items()})
    embedding = TARGET.model.get_input_embeddings()
    return cell(embedding(torch.tensor([list(path)])))[0][0, -1]


def test_embeddings_are_scaled_and_logits_multiplied_and_capped(tmp_path: Path) -> None:
    _, tensors = named("none", reads=(1, 2))
    plain = read_again(tmp_path / "a", tensors, {})
    shaped = {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0}
    drafter = read_again(tmp_path / "b", tensors, shaped)
    state, text, features = state_of(drafter)
    places = torch.arange(len(LAST_ROW) - 1, len(LAST_ROW) + 3).unsqueeze(0)
    query = 3 * TARGET.embedded(torch.tensor([[LAST_ROW[-1], 1, 1, 1]]))
    wanted = slots_of(plain.network, features, query, places)
    found = drafted_from(drafter, state, text)
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(found, drafted_from(plain, state_of(plain)[0], text))
    draft, _ = drafter.draft(state, DraftRequest(text, IID(), Widths((2,)), Noise.from_seed(5, 1)))
    logits = 2 * torch.tanh(TARGET.model.get_output_embeddings()(found[0, 0]) * 0.5 / 2)
    torch.testing.assert_close(draft.probs[0, 0], logits.softmax(-1)[draft.shortlist[0, 0]], rtol=1e-6, atol=1e-9)


def slots_of(head: BlockHead, features: Tensor, query: Tensor, places: Tensor) -> Tensor:
    """Return a head's slots for a query, its context being all tokens before the anchor."""
    known = torch.arange(len(features)).unsqueeze(0)
    context = head.keys(head.context(features.unsqueeze(0)), known)

    def seen(layer: int) -> Any:
        return lambda keys, values: (
            torch.cat([context[layer][0], keys], dim=2),
            torch.cat([context[layer][1], values], dim=2),
        )

    masks = [torch.ones(1, query.shape[1], len(features) + query.shape[1], dtype=torch.bool)] * head.shape.layers
    return head.slots(query, places, [seen(layer) for layer in range(head.shape.layers)], masks)


def test_a_confidence_head_may_read_the_slot_alone(tmp_path: Path) -> None:
    _, tensors = named("markov", reads=(1, 2))
    tensors["confidence_head.proj.weight"] = torch.randn(1, WIDTH, dtype=torch.float64)
    drafter = read_again(tmp_path, tensors, {"projector_type": "dspark"})
    assert drafter.network.confidence is not None and drafter.network.confidence.in_features == WIDTH
    state, text, _ = state_of(drafter)
    slots = drafted_from(drafter, state, text)[0]
    for node in (torch.zeros(1, 4, 6), torch.randn(1, 4, 6)):
        sure = drafter.network.sure(slots.unsqueeze(0), node.double())[0]
        logit = slots @ tensors["confidence_head.proj.weight"][0] + tensors["confidence_head.proj.bias"]
        torch.testing.assert_close(sure, 1 / (1 + torch.exp(-logit)), rtol=1e-5, atol=1e-6)


def stretched(pair: int, scaling: dict[str, Any]) -> float:
    """Return the angle per position of a pair of four channels, by Hugging Face's formulas."""
    plain = 100.0 ** (-2 * pair / 4)
    if scaling["rope_type"] == "linear":
        return plain / scaling["factor"]
    length = 2 * math.pi / plain
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    if length < original / high:
        return plain
    if length > original / low:
        return plain / scaling["factor"]
    kept = (original / length - low) / (high - low)
    return (1 - kept) * plain / scaling["factor"] + kept * plain


LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROTATIONS = [LINEAR, *({**LLAMA, "original_max_position_embeddings": one} for one in (8, 120, 512))]


@pytest.mark.parametrize("table", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", ROTATIONS, ids=["linear", "all slow", "one between", "all fast"])
def test_stretched_rotations_are_their_formulas(scaling: dict[str, Any], table: str, tmp_path: Path) -> None:
    drafter, tensors = named("none", reads=(1, 2))
    found = read_again(tmp_path / "a", tensors, {}, **{table: scaling})
    rotation = found.network.shape.anatomy.rotation
    wanted = torch.tensor([stretched(pair, scaling) for pair in range(2)])
    torch.testing.assert_close(rotation.frequencies(4, torch.device("cpu")), wanted)
    cosine, sine = rotation.turn(torch.tensor([[7]]), 4, torch.float32)
    torch.testing.assert_close(cosine[0, 0, 0], torch.cat([wanted, wanted]).mul(7).cos())
    torch.testing.assert_close(sine[0, 0, 0], torch.cat([wanted, wanted]).mul(7).sin())
    write_block(found, tmp_path / "b", TARGET, dtype=torch.float64)
    again = load_head(tmp_path / "b")
    assert isinstance(again.network, BlockHead) and again.network.shape.anatomy.rotation == rotation
    assert drafter.network.shape.anatomy.rotation != rotation


@pytest.mark.parametrize(
    ("told", "causal"), [({}, (True, False)), ({"sliding_window_non_causal": True}, (False, False))]
)
def test_speculators_windows_are_causal_unless_told_otherwise(
    told: dict[str, Any], causal: tuple[bool, bool], tmp_path: Path
) -> None:
    drafter, tensors = named("markov", reads=(1, 2))
    layers = {**SIZES, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    config = {
        "speculators_model_type": "dspark",
        "transformer_layer_config": layers,
        "block_size": 4,
        "mask_token_id": 1,
        "aux_hidden_state_layer_ids": [1, 2],
        **told,
    }
    found = load_head(folder_of(tmp_path, config, tensors))
    same(found, drafter, windows=(5, None), causal=causal)
