"""Folders of block heads: DFlash, DSpark, JetSpec, Domino and DFlash2, as authors and trainers write them.

What a head is follows from its tensors first, since one name of a class is written for several kinds. The two
alignments look alike in a folder: DeepSpec's heads, all with a Markov term, and those that say `shift_label` or
`sample_from_anchor` predict the position behind a slot; all others predict a slot's own.

Sources: z-lab/dflash, deepseek-ai/DeepSpec, hao-ai-lab/JetSpec, sgl-project/SpecForge, NVIDIA/Model-Optimizer,
vllm-project/speculators.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polydraft.drafters.heads.block import BlockHead, BlockShape
from polydraft.drafters.heads.ends import HeadEnds
from polydraft.drafters.heads.formats.fields import Fields, Tensors
from polydraft.drafters.heads.formats.vocabulary import draft_tokens
from polydraft.drafters.heads.lattice import BlockDrafter
from polydraft.drafters.heads.paths import (
    Domino,
    GatedMarkov,
    Markov,
    Mixing,
    PathTerm,
    RecurrentMarkov,
    Selector,
)
from polydraft.errors import CheckpointError
from polydraft.models import Layer, PlainFolder

DEEPSPEC = "DSparkModel"
"""How the names of DeepSpec's classes end, those of its DFlash heads included."""
FOUR_NORMS = "pre_feedforward_layernorm"
"""A tensor of Gemma's layers, which differ from Qwen's."""


def is_block(config: Mapping[str, Any]) -> bool:
    """Tell by its configuration whether a folder holds a block head."""
    inner = config.get("dflash_config")
    kinds = ("dflash", "dspark")
    if config.get("speculators_model_type") in kinds or isinstance(inner, Mapping):
        return True
    return config.get("block_size") is not None and config.get("target_layer_ids") is not None


def read_block(folder: PlainFolder, target_layers: int | None = None) -> BlockDrafter:
    """Build the drafter of a block head.

    Args:
        folder: what was read.
        target_layers: how many layers the target has, for folders that name no layers; None if it is not known.

    Raises:
        CheckpointError: a key is missing or left over, a shape is another one, or a setting is not known.
    """
    fields, tensors = _fields(folder), Tensors.of(folder, ("model.", "logit_head."))
    if any(FOUR_NORMS in name for name in tensors.left):
        raise CheckpointError(f"The head in {folder.name} has Gemma's layers, which are not read yet.")
    tensors.drop("verifier_lm_head.weight", "verifier_norm.weight")
    ends = _ends(fields, tensors)
    shape = _shape(fields, tensors, target_layers)
    path = _path(fields, tensors, shape, ends)
    sure = next((one for one in ("confidence_head.proj.", "confidence_proj.") if tensors.has(f"{one}weight")), None)
    read = None if sure is None else tensors.left[f"{sure}weight"].shape[-1] - shape.anatomy.width
    head = BlockHead(shape, path, read)
    if sure is not None and head.confidence is not None:
        if not tensors.has(f"{sure}bias"):
            tensors.left[f"{sure}bias"] = torch.zeros(1)
        tensors.fill(head.confidence, sure)
    tensors.fill(_without(head))
    tensors.done()
    return BlockDrafter(head.eval().requires_grad_(False), ends)


def _fields(folder: PlainFolder) -> Fields:
    inner = folder.config.get("dflash_config")
    layers = folder.config.get("transformer_layer_config")
    tables = [one for one in (inner, layers) if isinstance(one, Mapping)]
    return Fields(folder.name, folder.config, tuple(tables))


def _without(head: BlockHead) -> nn.Module:
    """Return the backbone alone, under the names that it has in folders."""
    backbone = nn.Module()
    for name in ("fc", "hidden_norm", "layers", "norm"):
        backbone.add_module(name, getattr(head, name))
    if head.mask_embed is not None:
        backbone.register_parameter("mask_embed", head.mask_embed)
    return backbone


def _shifted(fields: Fields, tensors: Tensors) -> bool:
    """Tell whether slot i predicts the position behind it."""
    classes = fields.get("architectures", [])
    kind = fields.get("speculators_model_type")
    if kind is not None:
        return bool(fields.get("sample_from_anchor", kind == "dspark"))
    if any(str(one).endswith(DEEPSPEC) for one in classes) or any("markov_w1" in name for name in tensors.left):
        return True
    return bool(fields.get("shift_label", False))


def _shape(fields: Fields, tensors: Tensors, target_layers: int | None) -> BlockShape:
    normed = tensors.has("layers.0.self_attn.q_norm.weight")
    anatomy = fields.anatomy(normed=normed)
    if tensors.has("layers.0.self_attn.q_proj.bias") != anatomy.bias:
        anatomy = replace(anatomy, bias=not anatomy.bias)
    layers = fields.count("num_hidden_layers")
    width = tensors.left.get("fc.weight", torch.empty(0, 0)).shape[-1]
    reads = _reads(fields, width, target_layers)
    if not width or width % len(reads):
        raise CheckpointError(
            f"The head in {fields.name} is damaged: fc.weight is {width} wide, which {len(reads)} layers cannot fill."
        )
    taps = 0
    if tensors.has("layers.0.attention_conv.base_kernel"):
        taps = fields.count("conv_kernel_size", tensors.left["layers.0.attention_conv.base_kernel"].shape[1])
    mask = fields.get("mask_token_id")
    if mask is None and not tensors.has("mask_embed"):
        raise CheckpointError(f"config.json in {fields.name} names no mask_token_id.")
    windows = _windows(fields, layers)
    return BlockShape(
        anatomy=anatomy,
        layers=layers,
        reads=reads,
        target_width=width // len(reads),
        block=fields.count("block_size"),
        mask_id=None if mask is None else fields.count("mask_token_id", least=0),
        shifted=_shifted(fields, tensors),
        causal=_causal(fields, windows),
        windows=windows,
        taps=taps,
        group=fields.count("conv_group_size", 16),
    )


def _reads(fields: Fields, width: int, target_layers: int | None) -> tuple[Layer, ...]:
    """Return the hidden states that a head reads; ids in folders count layers from 0, and name what they put out."""
    depth = fields.get("num_target_layers", target_layers)
    if fields.get("aux_hidden_state_layer_ids") is not None:
        return fields.counts("aux_hidden_state_layer_ids")
    if fields.get("speculators_model_type") is not None:
        if depth is None:
            raise CheckpointError(f"config.json in {fields.name} names no layers, and the target's depth is not known.")
        return (2, depth // 2, depth - 3)
    if fields.get("target_layer_ids") is not None:
        deepspec = any(str(one).endswith(DEEPSPEC) for one in fields.get("architectures", []))
        listed = tuple(1 + one for one in fields.counts("target_layer_ids", least=-1))
        return tuple("final" if one == depth and not deepspec else one for one in listed)
    if depth is None:
        raise CheckpointError(f"config.json in {fields.name} names no target_layer_ids and no num_target_layers.")
    count = max(width // fields.count("hidden_size"), 1)
    if count == 1:
        return (1 + depth // 2,)
    return tuple(1 + round(1 + place * (depth - 4) / (count - 1)) for place in range(count))


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if fields.get("use_swa"):
        return (fields.count("swa_window_size"),) * layers
    kinds = fields.get("layer_types") or ["full_attention"] * layers
    window = fields.get("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])


def _causal(fields: Fields, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """Return which layers are causal inside the block: as told, else those with a window."""
    if fields.get("speculators_model_type") is not None:
        slides = not fields.get("sliding_window_non_causal", False)
        return tuple(window is not None and slides for window in windows)
    for name in ("causal_head", "is_causal", "causal"):
        told = fields.get(name)
        if told is not None:
            return (bool(told),) * len(windows)
    return tuple(window is not None for window in windows)


def _ends(fields: Fields, tensors: Tensors) -> HeadEnds:
    """Return the head's own embedding and output rows, where the folder holds them."""
    tokens = draft_tokens(tensors)
    embed = rows = None
    if tensors.has("embed_tokens.weight"):
        vocab, width = tensors.left["embed_tokens.weight"].shape
        tensors.fill(embed := nn.Embedding(vocab, width), "embed_tokens.")
    if tensors.has("lm_head.weight"):
        size = tensors.left["lm_head.weight"].shape
        tensors.fill(rows := nn.Linear(size[1], size[0], bias=False), "lm_head.")
    cap = fields.get("final_logit_softcapping")
    return HeadEnds(
        embed,
        rows,
        tokens,
        scale=fields.number("input_embedding_scale", 1.0),
        multiplier=fields.number("output_multiplier", 1.0),
        softcap=None if cap is None else fields.number("final_logit_softcapping", 0.0),
    )


def _path(fields: Fields, tensors: Tensors, shape: BlockShape, ends: HeadEnds) -> PathTerm:
    """Build the path term that the tensors make, and fill it."""
    width = shape.anatomy.width
    if tensors.has("candidate_selector.predecessor_codebook"):
        table = tensors.left["candidate_selector.predecessor_codebook"]
        rows = _rows(tensors, "candidate_selector.successor_codebook")
        term: PathTerm = Selector(table.shape[0], rows, table.shape[1], width, fields.count("selector_top_k", 16))
        tensors.fill(term, "candidate_selector.")
    elif tensors.has("mix.0.weight"):
        size = tensors.left["prefix_gru.weight_hh_l0"].shape[-1]
        term = Mixing(width, size, tensors.left["mix.0.weight"].shape[0])
        tensors.fill(term)
    elif tensors.has("prefix_gru.weight_hh_l0"):
        size, plain = tensors.left["prefix_gru.weight_hh_l0"].shape[-1], fields.count("pure_draft_prefix_len", 1, 0)
        inner = tensors.left["embed_proj.0.weight"].shape[0]
        term = Domino(width, _rows(tensors, "embed_proj.2.weight"), size, inner, plain)
        tensors.fill(term)
    else:
        term = _markov(tensors, width)
    return term


def _markov(tensors: Tensors, width: int) -> PathTerm:
    prefix = next((one for one in ("markov_head.", "") if tensors.has(f"{one}markov_w1.weight")), None)
    if prefix is None:
        return PathTerm()
    vocab, rank = tensors.left[f"{prefix}markov_w1.weight"].shape
    rows = _rows(tensors, f"{prefix}markov_w2.weight")
    if tensors.has(f"{prefix}gate_proj.weight"):
        term: PathTerm = GatedMarkov(vocab, rows, rank, width)
    elif tensors.has(f"{prefix}joint_proj.weight"):
        term = RecurrentMarkov(vocab, rows, rank, width)
    else:
        term = Markov(vocab, rows, rank)
    tensors.fill(term, prefix)
    return term


def _rows(tensors: Tensors, name: str) -> int:
    """Return how many rows a table has.

    Raises:
        CheckpointError: it is missing.
    """
    if not tensors.has(name):
        raise CheckpointError(f"The head in {tensors.folder.name} is not complete: {name} is missing.")
    return tensors.left[name].shape[0]


def block_tensors(head: BlockHead, ends: HeadEnds) -> dict[str, Tensor]:
    """Return a head's tensors under the names of DeepSpec's folders, and Domino's for its term."""
    named = dict(_without(head).state_dict())
    prefix = "markov_head." if isinstance(head.path, Markov) else ""
    prefix = "candidate_selector." if isinstance(head.path, Selector) else prefix
    named |= {f"{prefix}{name}": value for name, value in head.path.state_dict().items()}
    if head.confidence is not None:
        named |= {f"confidence_head.proj.{name}": value for name, value in head.confidence.state_dict().items()}
    own = {name: value for name, value in ends.state_dict().items() if name != "tokens"}
    return {**named, **own}
