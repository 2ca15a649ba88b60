"""Folders of block heads: DFlash and its kin with all path terms, as authors and trainers write them.

What a head is follows from its tensors first, since one name of a class is written for several kinds. The two
alignments look alike in a folder: DeepSpec's heads, all with a Markov term, and those that say `shift_label` or
`sample_from_anchor` predict the position behind a slot; all others predict a slot's own.

Sources: z-lab/dflash, deepseek-ai/DeepSpec, hao-ai-lab/JetSpec, sgl-project/SpecForge, NVIDIA/Model-Optimizer,
vllm-project/speculators.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from polydraft.drafters.heads.block_head import BlockHead, BlockShape
from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds
from polydraft.drafters.heads.formats.blocks.path_term_folders import (
    holds_lilicorr,
    holds_xpress,
    read_lilicorr,
    read_xpress,
)
from polydraft.drafters.heads.formats.folder_fields import (
    DEFAULTS,
    Fields,
    Shapes,
    Tensors,
    classes_of,
    draft_tokens,
    target_tokens,
)
from polydraft.drafters.heads.paths import Domino, GatedMarkov, Markov, Mixing, PathTerm, RecurrentMarkov, Selector
from polydraft.drafters.heads.sublayers import Anatomy, Rotation
from polydraft.errors import CheckpointError
from polydraft.models import Layer, PlainFolder

LONGEST = 1 << 16
"""Tokens of the longest block: beside those of the text, caches have room for one."""
DEEPSPEC = "DSparkModel"
"""How the names of DeepSpec's classes end, those of its DFlash heads included."""
QWEN, LAYERS = "qwen3", 32
"""Whose layers speculators' block heads have where none are named, and how many layers Hugging Face's models have."""
FOUR_NORMS = "layers.0.pre_feedforward_layernorm.weight"
"""A tensor of Gemma's layers, which differ from Qwen's."""
BACKBONE = {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight"}
"""What all block heads have, and EAGLE's do not: the norm behind `fc` is one of theirs inside the first layer."""
ACTIVATION = "gelu_pytorch_tanh"
KIND = "full_attention"
"""Whose positions Gemma's layers have, of those that `rope_parameters` lists by kinds of layers."""
POSITIONS: Mapping[str, Any] = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
"""Hugging Face's positions of Gemma's global layers, where a configuration lists none."""
NOT_READ = ("enable_moe_block", "hidden_size_per_layer_input", "use_double_wide_mlp")
"""Parts of Gemma's models that DeepSpec's heads do not have either."""


def is_block(config: Mapping[str, Any]) -> bool:
    """Tell by its configuration whether a folder holds a block head."""
    inner = config.get("dflash_config")
    kinds = ("dflash", "dspark", "xpress")
    if config.get("speculators_model_type") in kinds or isinstance(inner, Mapping):
        return True
    return config.get("block_size") is not None and config.get("target_layer_ids") is not None


def holds_block(shapes: Shapes) -> bool:
    """Tell by its tensors whether a folder holds a block head."""
    return {name.removeprefix("model.") for name in shapes} >= BACKBONE


def read_block(folder: PlainFolder, target_layers: int | None = None) -> HeadDrafter[BlockHead]:
    """Build the drafter of a block head; a folder that names no layers needs the target's depth.

    Raises:
        CheckpointError: a key is missing or left over, a shape is another one, or a setting is not known.
    """
    fields, tensors = _fields(folder), Tensors.of(folder, ("model.", "logit_head."))
    tensors.drop("verifier_lm_head.weight", "verifier_norm.weight")
    shape = _shape(fields, tensors, target_layers)
    made_for = fields.made_for(target_tokens(tensors))
    ends = _ends(fields, tensors, shape)
    path = _path(fields, tensors, shape)
    sure = next((one for one in ("confidence_head.proj.", "confidence_proj.") if tensors.has(f"{one}weight")), None)
    read = None if sure is None else _width_beside(tensors, f"{sure}weight", shape.anatomy.width, path.told)
    head = BlockHead(shape, path, read)
    if sure is not None and head.confidence is not None:
        tensors.left.setdefault(f"{sure}bias", torch.zeros(1))
        tensors.fill(head.confidence, sure)
    tensors.fill(backbone_of(head))
    return tensors.drafter(head, ends, made_for)


def _fields(folder: PlainFolder) -> Fields:
    """Return a configuration with the tables inside it, and what speculators' table of layers may leave out."""
    inner = folder.config.get("dflash_config")
    layers = folder.config.get("transformer_layer_config")
    tables = [one for one in (inner, layers) if isinstance(one, Mapping)]
    if folder.config.get("speculators_model_type") is not None:
        kind = layers.get("model_type", QWEN) if isinstance(layers, Mapping) else QWEN
        tables += [DEFAULTS[kind], {"num_hidden_layers": LAYERS}] if isinstance(kind, str) and kind in DEFAULTS else []
    return Fields.of(folder, folder.config, *tables)


def backbone_of(head: BlockHead) -> nn.Module:
    """Return the layers and what stands around them, under the names that they have in folders."""
    backbone = nn.Module()
    for name in ("fc", "hidden_norm", "layers", "norm"):
        backbone.add_module(name, getattr(head, name))
    if head.mask_embed is not None:
        backbone.register_parameter("mask_embed", head.mask_embed)
    return backbone


def _is_deepspec(fields: Fields) -> bool:
    return any(one.endswith(DEEPSPEC) for one in classes_of(fields.config))


def _shifted(fields: Fields, tensors: Tensors) -> bool:
    """Tell whether slot i predicts the position behind it."""
    kind = fields.get("speculators_model_type")
    if kind is not None:
        return bool(fields.get("sample_from_anchor", fields.get("shift_label", kind == "dspark")))
    told = fields.get("shift_label", fields.get("sample_from_anchor"))
    return bool(told) if told is not None else _is_deepspec(fields) or any("markov_w1" in name for name in tensors.left)


def _shape(fields: Fields, tensors: Tensors, target_layers: int | None) -> BlockShape:
    normed, gemma = tensors.has("layers.0.self_attn.q_norm.weight"), tensors.has(FOUR_NORMS)
    anatomy = _gemma_anatomy(fields) if gemma else fields.anatomy(normed=normed)
    if tensors.has("layers.0.self_attn.q_proj.bias") != anatomy.bias:
        anatomy = replace(anatomy, bias=not anatomy.bias)
    layers = fields.count("num_hidden_layers", each=anatomy.width)
    width = tensors.matrix("fc.weight")[1]
    reads = _reads(fields, width, target_layers)
    if not width or width % len(reads):
        raise tensors.damaged(f"fc.weight is {width} wide, which {len(reads)} layers cannot fill")
    taps = 0
    if tensors.has("layers.0.attention_conv.base_kernel"):
        kernel = tensors.left["layers.0.attention_conv.base_kernel"]
        taps = fields.count("conv_kernel_size", kernel.shape[1] if kernel.dim() == 3 else 1, each=1)
    mask = fields.get("mask_token_id")
    if mask is None and not tensors.has("mask_embed"):
        raise tensors.incomplete("mask_embed is missing, and its config.json names no mask_token_id in its place")
    windows = _windows(fields, layers)
    return BlockShape(
        anatomy=anatomy,
        layers=layers,
        reads=reads,
        target_width=width // len(reads),
        block=fields.count("block_size", most=LONGEST),
        mask_id=None if mask is None else fields.count("mask_token_id", least=0),
        shifted=_shifted(fields, tensors),
        causal=_causal(fields, windows),
        windows=windows,
        taps=taps,
        group=fields.count("conv_group_size", 16, each=1),
        gemma=gemma,
        own_values=not gemma or _has_own_values(fields),
    )


def _reads(fields: Fields, width: int, target_layers: int | None) -> tuple[Layer, ...]:
    """Return the hidden states that a head reads; ids in folders count layers from 0, and name what they put out."""
    depth = fields.made_for().layers or target_layers
    if fields.get("aux_hidden_state_layer_ids") is not None:
        return fields.counts("aux_hidden_state_layer_ids")
    if fields.get("speculators_model_type") is not None:
        if depth is None:
            raise CheckpointError(f"config.json in {fields.name} names no layers, and the target's depth is not known.")
        return (2, depth // 2, depth - 3)
    if fields.get("target_layer_ids") is not None:
        deepspec = _is_deepspec(fields)
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
    if not isinstance(kinds, list | tuple) or len(kinds) < layers:
        raise fields.wrong("layer_types", kinds, f"it must be a list of {layers}")
    slides = [kind == "sliding_attention" for kind in kinds[:layers]]
    window = fields.count("sliding_window") if any(slides) and fields.get("sliding_window") is not None else None
    return tuple(window if one else None for one in slides)


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


def _ends(fields: Fields, tensors: Tensors, shape: BlockShape) -> HeadEnds:
    """Return the head's own embedding and output rows, where the folder holds them.

    Gemma multiplies embeddings by the root of their width; a target's own come multiplied already.
    """
    width = shape.anatomy.width
    tokens, embed = draft_tokens(tensors), tensors.embedding(width)
    rows = tensors.output_rows(width) if tensors.has("lm_head.weight") else None
    cap = fields.get("final_logit_softcapping")
    return HeadEnds(
        embed,
        rows,
        tokens,
        scale=fields.number("input_embedding_scale", width**0.5 if shape.gemma and embed is not None else 1.0),
        multiplier=fields.number("output_multiplier", 1.0),
        softcap=None if cap is None else fields.number("final_logit_softcapping", 0.0, above=0),
    )


def _path(fields: Fields, tensors: Tensors, shape: BlockShape) -> PathTerm:
    """Build the path term that the tensors make, and fill it."""
    if holds_xpress(fields, tensors):
        return read_xpress(fields, tensors, shape)
    if holds_lilicorr(fields, tensors):
        return read_lilicorr(fields, tensors, shape)
    width = shape.anatomy.width
    prefix = next((one for one in ("markov_head.", "") if tensors.has(f"{one}markov_w1.weight")), None)
    if tensors.has("candidate_selector.predecessor_codebook"):
        prefix = "candidate_selector."
        vocab, rank = tensors.matrix(f"{prefix}predecessor_codebook")
        rows, _ = tensors.matrix(f"{prefix}successor_codebook")
        term: PathTerm = Selector(vocab, rows, rank, width, fields.count("selector_top_k", 16))
    elif tensors.has("mix.0.weight"):
        prefix, (_, size) = "", tensors.matrix("prefix_gru.weight_hh_l0")
        term = Mixing(width, size, tensors.matrix("mix.0.weight")[0])
    elif tensors.has("prefix_gru.weight_hh_l0"):
        prefix, (_, size) = "", tensors.matrix("prefix_gru.weight_hh_l0")
        plain = fields.count("pure_draft_prefix_len", 1, 0)
        (rows, _), (inner, _) = tensors.matrix("embed_proj.2.weight"), tensors.matrix("embed_proj.0.weight")
        term = Domino(width, rows, size, inner, plain)
    elif prefix is not None:
        term = _markov(tensors, prefix, width)
    else:
        return PathTerm()
    tensors.fill(term, prefix)
    return term


def _markov(tensors: Tensors, prefix: str, width: int) -> Markov:
    vocab, rank = tensors.matrix(f"{prefix}markov_w1.weight")
    rows, _ = tensors.matrix(f"{prefix}markov_w2.weight")
    if tensors.has(f"{prefix}gate_proj.weight"):
        return GatedMarkov(vocab, rows, rank, width)
    if tensors.has(f"{prefix}joint_proj.weight"):
        return RecurrentMarkov(vocab, rows, rank, width)
    return Markov(vocab, rows, rank)


def _width_beside(tensors: Tensors, name: str, width: int, size: int) -> int:
    """Return how many of the numbers that it may be told of a node a confidence head reads beside the slot.

    Raises:
        CheckpointError: it reads less than the slot, or more than there is.
    """
    found = tensors.matrix(name)[1]
    if not width <= found <= width + size:
        sizes = f"{width} to {width + size}"
        raise tensors.damaged(f"{name} is {found} wide, and a slot with its node's state is {sizes}")
    return found - width


def _gemma_anatomy(fields: Fields) -> Anatomy:
    """Return the sizes of Gemma 4's global layers.

    Raises:
        CheckpointError: a size is missing, they do not fit each other, or layers have parts that are not read.
    """
    for name in NOT_READ:
        if fields.get(name):
            raise fields.wrong(name, fields.get(name), "such layers are not read")
    fields.check_activation("hidden_activation", ACTIVATION)
    width = fields.count("hidden_size", each=1)
    heads = fields.count("num_attention_heads", each=width)
    groups = "num_key_value_heads" if _has_own_values(fields) else "num_global_key_value_heads"
    known = fields.count(groups, each=width)
    channels = fields.count("global_head_dim", each=width * heads)
    return fields.layers_of(width, heads, known, channels, partial(_rotation, fields), normed=True)


def _has_own_values(fields: Fields) -> bool:
    """Tell whether values of Gemma's layers have a projection of their own."""
    return not fields.get("attention_k_eq_v", False)


def _rotation(fields: Fields) -> Rotation:
    told = fields.table("rope_parameters").get(KIND) or POSITIONS
    if not isinstance(told, Mapping):
        raise fields.wrong(KIND, told, "it must be a table")
    own = Fields(fields.name, told)
    theta, kind = own.number("rope_theta", 1e6, above=0), own.get("rope_type", "default")
    if kind == "default":
        return Rotation(theta)
    if kind != "proportional":
        raise fields.other_positions(kind)
    factor = own.number("factor", 1.0, above=0)
    part = own.number("partial_rotary_factor", 1.0, above=0)
    return Rotation(theta, "proportional", factor, part=min(part, 1.0))
