"""Small random models that read more than text: encoder-decoders, and models with images in their prompts."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import transformers
from families import SIZES
from torch import Tensor
from transformers import PreTrainedModel

from polydraft import ModelDrafter
from polydraft.models import HuggingFaceModel

PARTS = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "forced_eos_token_id": None,
    "tie_word_embeddings": False,
}
"""Sizes of encoder-decoders: an encoder of three layers, a decoder of two."""
WHISPER = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 100}
IMAGE, BEFORE, BEHIND = 60, 58, 59
"""The tokens in place of an image, and around it."""
SIDE = 8
"""Pixels of an image's side."""
EYES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 2,
}
TEXT = {**SIZES, "tie_word_embeddings": False}
THREE_PARTS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
QWEN = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "out_hidden_size": 32,
}
SEEING: dict[str, tuple[dict[str, Any], int]] = {
    "llava": (
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**EYES, "model_type": "clip_vision_model", "projection_dim": 16},
            "image_seq_length": 16,
            "vision_feature_layer": -1,
        },
        16,
    ),
    "qwen2_5_vl": (
        {
            "text_config": {**TEXT, **THREE_PARTS},
            "vision_config": {**QWEN, "window_size": 8, "fullatt_block_indexes": [1]},
        },
        8,
    ),
    "qwen3_vl": (
        {
            "text_config": {**TEXT, **THREE_PARTS},
            "vision_config": {**QWEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        },
        8,
    ),
    "gemma3": (
        {
            "text_config": {
                **TEXT,
                "sliding_window": 12,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "query_pre_attn_scalar": 8,
            },
            "vision_config": EYES,
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
        },
        4,
    ),
    "paligemma": (
        {
            "text_config": {**TEXT, "model_type": "gemma"},
            "vision_config": {**EYES, "projection_dim": 32},
            "image_token_index": IMAGE,
            "projection_dim": 32,
            "hidden_size": 32,
        },
        16,
    ),
    "mistral3": (
        {
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": {**EYES, "model_type": "pixtral", "head_dim": 8},
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        4,
    ),
    "idefics3": ({"text_config": {**TEXT, "model_type": "llama"}, "vision_config": EYES, "scale_factor": 2}, 4),
    "smolvlm": ({"text_config": {**TEXT, "model_type": "llama"}, "vision_config": EYES, "scale_factor": 2}, 4),
    "lfm2_vl": (
        {
            "text_config": {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2},
            "vision_config": {**EYES, "num_patches": 16},
            "downsample_factor": 2,
        },
        4,
    ),
}
"""Settings of models that see, and how many tokens stand for an image."""


@cache
def encoder_decoder(kind: str, seed: int = 1, **changes: Any) -> PreTrainedModel:
    """Return a small random encoder-decoder in float64."""
    settings = {"vocab_size": 64, **PARTS, **(WHISPER if kind == "whisper" else {}), **changes}
    config = transformers.AutoConfig.for_model(kind, **settings)
    speech = kind == "whisper"
    door = transformers.AutoModelForSpeechSeq2Seq if speech else transformers.AutoModelForSeq2SeqLM
    model = _random(door, config, seed, "eager")
    config = model.generation_config
    config.eos_token_id = config.forced_eos_token_id = None
    return model


@cache
def seeing(kind: str, seed: int = 1) -> PreTrainedModel:
    """Return a small random model that sees images, in float64."""
    settings, _ = SEEING[kind]
    tokens: dict[str, Any] = {"image_token_id": IMAGE, "vision_start_token_id": BEFORE, "vision_end_token_id": BEHIND}
    config = transformers.AutoConfig.for_model(
        kind, **{**tokens, "video_token_id": 61, **settings}, tie_word_embeddings=False
    )
    model = _random(transformers.AutoModelForImageTextToText, config, seed, "sdpa")
    model.generation_config.eos_token_id = None
    return model


def prompts_with_images(kind: str, lengths: Sequence[tuple[int, int]], seed: int = 0) -> dict[str, Tensor]:
    """Return what a processor makes of prompts with so many tokens before and behind an image, left-padded."""
    _, count = SEEING[kind]
    own = torch.Generator().manual_seed(seed)
    image = [BEFORE, *[IMAGE] * count, BEHIND]
    texts = [[torch.randint(2, 57, (size,), generator=own).tolist() for size in pair] for pair in lengths]
    rows = [[*first, *image, *last] for first, last in texts]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    pixels = torch.randn(len(rows), 3, SIDE, SIDE, generator=own, dtype=torch.float64)
    return {"input_ids": ids, "attention_mask": mask, **_images(kind, pixels), **_kinds(kind, ids)}


def _images(kind: str, pixels: Tensor) -> dict[str, Tensor]:
    rows = len(pixels)
    if kind.startswith("qwen"):
        return {
            "pixel_values": torch.cat([pixels, pixels.flip(1)], dim=1).reshape(rows * 32, -1),
            "image_grid_thw": torch.tensor([[1, 4, 8]] * rows),
        }
    if kind == "lfm2_vl":
        return {
            "pixel_values": pixels.reshape(rows, 16, 12),
            "pixel_attention_mask": torch.ones(rows, 16, dtype=torch.int64),
            "spatial_shapes": torch.tensor([[4, 4]] * rows),
        }
    if kind in ("idefics3", "smolvlm"):
        return {"pixel_values": pixels.unsqueeze(1)}
    sizes = {"image_sizes": torch.tensor([[SIDE, SIDE]] * rows)} if kind == "mistral3" else {}
    return {"pixel_values": pixels, **sizes}


def _kinds(kind: str, ids: Tensor) -> dict[str, Tensor]:
    """Return what says which tokens are images, or prompt."""
    if kind == "paligemma":
        return {"token_type_ids": torch.zeros_like(ids)}
    names = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids", "qwen3_vl": "mm_token_type_ids"}
    return {names[kind]: (ids == IMAGE).long()} if kind in names else {}


def near(model: PreTrainedModel, noise: float = 0.1) -> ModelDrafter:
    """Return a drafter that is right about half of the time: the same model with noise in its weights."""
    other = copy.deepcopy(model)
    own = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weights in other.parameters():
            weights.add_(noise * weights.abs().mean() * torch.randn(weights.shape, generator=own))
    return ModelDrafter(HuggingFaceModel(other))


def _random(door: Any, config: Any, seed: int, attention: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = door.from_config(config, attn_implementation=attention).double().eval()
        with torch.no_grad():
            for weights in model.parameters():
                weights.mul_(3.0 if weights.dim() > 1 else 1.0)
                if weights.dim() > 1 and not bool(weights.any()):  # else the image would be lost
                    weights.normal_(std=0.3)
    return model
