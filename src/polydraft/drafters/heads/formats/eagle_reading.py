"""Folders of EAGLE's heads, as their authors, SpecForge, vLLM and speculators write them.

Layers are named in two ways: speculators and vLLM write how many layers' output is read ("input of layer k"), which is
this package's way; SpecForge and Model-Optimizer write in `eagle_config` which layer's output, counted from 0.

Sources: SafeAILab/EAGLE, sgl-project/SpecForge, vllm-project/speculators, NVIDIA/Model-Optimizer, vllm-project/vllm.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from polydraft.drafters.heads.drafter import HeadDrafter
from polydraft.drafters.heads.eagle_head import Eagle1Head, Eagle3Head, Eagle3Norms, EagleHead
from polydraft.drafters.heads.ends import HeadEnds
from polydraft.drafters.heads.formats.folder_fields import (
    DEFAULTS,
    Fields,
    Shapes,
    Tensors,
    classes_of,
    draft_tokens,
    target_tokens,
)
from polydraft.drafters.heads.sublayers import Anatomy
from polydraft.errors import CheckpointError, shown
from polydraft.models import PlainFolder

IDS = "eagle_aux_hidden_state_layer_ids"
"""What the list of layers is called."""
OLD_NAMES = {
    "fusion_fc.": "fc.",
    "transformer.": "layers.0.",
    "embedding_layernorm.": "embed_layernorm.",
    "pre_lm_head_layernorm.": "lm_head_layernorm.",
}
"""What speculators' first form for EAGLE-1 calls the parts."""
NORMS_OF_THIRD = ("use_last_layernorm", "use_input_layernorm_in_first_layer")
"""What Model-Optimizer calls the last norm and that of the embedding: EAGLE-3's heads have both, EAGLE-1's neither."""
OTHER_NORMS = "use_mtp_layernorm"
"""What it calls the norms of another kind of head."""
OF_BLOCKS = ("dflash_config", "block_size", "target_layer_ids")
"""What only block heads' configurations have."""


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Tell by its configuration whether a folder holds a head of EAGLE-1 or EAGLE-3.

    EAGLE-1's own folders are told from a model of one layer by `bias`, or by the name of their class; where their
    configuration has neither, by their tensors (`holds_eagle`).
    """
    kind = config.get("speculators_model_type")
    if kind is not None:
        return kind in ("eagle", "eagle3")
    if any(config.get(name) is not None for name in OF_BLOCKS):
        return False
    if _wraps(config) or _is_third(config):
        return True
    named = any("eagle" in one.lower() for one in classes_of(config))
    return config.get("num_hidden_layers") == 1 and ("bias" in config or named)


def holds_eagle(shapes: Shapes) -> bool:
    """Tell by its tensors whether a folder holds a head of EAGLE-1 or EAGLE-3.

    A projection of pairs [e; f] to half their width before a first layer, and no output rows, is EAGLE-1.
    """
    named = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    if _holds_third(named):
        return True
    layered = any(name.startswith("layers.0.") for name in named)
    match named.get("fc.weight"):
        case (width, pairs) if pairs == 2 * width:
            return layered and not named.keys() & {"lm_head.weight", "hidden_norm.weight"}
        case _:
            return False


def _holds_third(names: Iterable[str]) -> bool:
    """Tell by the names of tensors, without prefixes, whether a head is of EAGLE-3."""
    return any(name.startswith("midlayer.") or name == "layers.0.hidden_norm.weight" for name in names)


def read_eagle(folder: PlainFolder, target_layers: int | None = None) -> HeadDrafter[EagleHead]:
    """Build the drafter of a head of EAGLE-1 or EAGLE-3.

    Args:
        folder: what was read.
        target_layers: how many layers the target has, for folders that name no layers; None if it is not known.

    Raises:
        CheckpointError: a key is missing or left over, a shape is another one, or a setting is not known.
    """
    kind = folder.config.get("speculators_model_type")
    if kind is not None:
        return _third(folder, target_layers) if kind == "eagle3" else _old_first(folder)
    if _wraps(folder.config):
        return _wrapped(folder)
    third = _is_third(folder.config) or _holds_third(name.removeprefix("model.") for name in folder.tensors)
    return _third(folder, target_layers) if third else _first(folder)


def _wraps(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "eagle" and isinstance(config.get("model"), Mapping)


def _is_third(config: Mapping[str, Any]) -> bool:
    third = any("eagle3" in one.lower() for one in classes_of(config))
    return third or config.get("draft_vocab_size") is not None or config.get("eagle_config") is not None


def _first(folder: PlainFolder) -> HeadDrafter[EagleHead]:
    """Read EAGLE-1's own form, in which a missing `bias` means that there is one."""
    fields = Fields.of(folder, folder.config)
    return _of_first(fields, Tensors.of(folder), bias=bool(fields.get("bias", True)), normed=False)


def _check_norms(fields: Fields, *, third: bool) -> None:
    """Check that a head has the norms of its kind.

    Raises:
        CheckpointError: its configuration asks for others.
    """
    for name, usual in (*((one, third) for one in NORMS_OF_THIRD), (OTHER_NORMS, False)):
        told = fields.get(name, usual)
        if told is not usual:
            raise CheckpointError(
                f"config.json in {fields.name} says that {name} is {shown(told)}; EAGLE-{3 if third else 1}'s heads "
                f"are read with {usual} alone."
            )


def _wrapped(folder: PlainFolder) -> HeadDrafter[EagleHead]:
    """Read vLLM's first form: the head's configuration inside another, and `model.` before its tensors."""
    fields = Fields.of(folder, folder.config["model"], folder.config)
    tensors = Tensors.of(folder, ("model.model.", "model."))
    told = folder.config.get("eagle_fc_bias")
    return _of_first(fields, tensors, bias=tensors.has("fc.bias") if told is None else bool(told), normed=False)


def _old_first(folder: PlainFolder) -> HeadDrafter[EagleHead]:
    """Read speculators' form for EAGLE-1."""
    if folder.config.get("speculators_model_type") != "eagle":
        raise CheckpointError(
            f"config.json in {folder.name} names a speculator of kind {folder.config['speculators_model_type']!r}, "
            "which is none of EAGLE's."
        )
    fields, tensors = _fields(folder), Tensors.of(folder)
    tensors.left = {_renamed(name): value for name, value in tensors.left.items()}
    bias, normed = bool(fields.get("fusion_bias", False)), bool(fields.get("layernorms", False))
    return _of_first(fields, tensors, bias=bias, normed=normed)


def _renamed(name: str) -> str:
    old = next((one for one in OLD_NAMES if name.startswith(one)), "")
    return OLD_NAMES[old] + name.removeprefix(old) if old else name


def _of_first(fields: Fields, tensors: Tensors, *, bias: bool, normed: bool) -> HeadDrafter[EagleHead]:
    tensors.drop("verifier_lm_head.weight", "verifier_norm.weight")
    _check_norms(fields, third=False)
    anatomy = _anatomy(fields, tensors, "layers.0.")
    head = Eagle1Head(anatomy, fields.count("num_hidden_layers", 1, each=anatomy.width), bias=bias, normed=normed)
    tensors.fill(head)
    made_for = fields.made_for(target_tokens(tensors))
    ends = HeadEnds(_embedding(tensors, anatomy), _rows(tensors, anatomy) if tensors.has("lm_head.weight") else None)
    tensors.done()
    return HeadDrafter(head.eval().requires_grad_(False), ends, made_for=made_for)


def _third(folder: PlainFolder, target_layers: int | None) -> HeadDrafter[EagleHead]:
    """Read EAGLE-3's own form, SpecForge's, or speculators'."""
    fields, tensors = _fields(folder), Tensors.of(folder)
    tensors.drop("verifier_lm_head.weight", "verifier_norm.weight")
    first = "midlayer." if any(name.startswith("midlayer.") for name in tensors.left) else "layers.0."
    tensors.left = {_of_layer(name, first): value for name, value in tensors.left.items()}
    if fields.get("use_aux_hidden_state", True) is False:
        raise CheckpointError(f"The head in {folder.name} reads no layers of its target, which EAGLE-3's heads do.")
    _check_norms(fields, third=True)
    anatomy = _anatomy(fields, tensors, "midlayer.")
    reads = _reads(fields, target_layers)
    head = Eagle3Head(
        anatomy,
        reads,
        fields.count("target_hidden_size", anatomy.width, each=anatomy.width),
        Eagle3Norms(
            residual=bool(fields.get("norm_before_residual", False)),
            output=bool(fields.get("norm_output", False)),
            joined=bool(fields.get("norm_before_fc", False)),
            sources=bool(fields.get("fc_norm", False)),
        ),
        fields.count("num_hidden_layers", 1, each=anatomy.width),
    )
    tensors.fill(head)
    made_for = fields.made_for(target_tokens(tensors))
    ends = _own_ends(fields, tensors, anatomy)
    tensors.done()
    return HeadDrafter(head.eval().requires_grad_(False), ends, made_for=made_for)


def _of_layer(name: str, first: str) -> str:
    """Return a tensor's name in `Eagle3Head`, where the layers behind the first are counted by themselves."""
    if name.startswith(first):
        return "midlayer." + name.removeprefix(first)
    parts = name.split(".")
    if parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit() and parts[1] != "0":
        return ".".join(["layers", str(int(parts[1]) - 1), *parts[2:]])
    return name


def _fields(folder: PlainFolder) -> Fields:
    """Return a configuration with the tables inside it, and what speculators leaves out."""
    tables = [folder.config.get(name) for name in ("eagle_config", "transformer_layer_config")]
    inner = [one for one in tables if isinstance(one, Mapping)]
    if folder.config.get("speculators_model_type") is not None:
        kind = next((one["model_type"] for one in inner if isinstance(one.get("model_type"), str)), "llama")
        inner.append(DEFAULTS.get(kind, DEFAULTS["llama"]))
    return Fields.of(folder, folder.config, *inner)


def _anatomy(fields: Fields, tensors: Tensors, layer: str) -> Anatomy:
    """Return the layers' sizes; whether they have biases and norms of queries and keys, the tensors tell."""
    attention = f"{layer}self_attn."
    normed, bias = tensors.has(f"{attention}q_norm.weight"), tensors.has(f"{attention}q_proj.bias")
    return replace(fields.anatomy(normed=normed), bias=bias, output_bias=tensors.has(f"{attention}o_proj.bias"))


def _reads(fields: Fields, target_layers: int | None) -> tuple[int, ...]:
    """Return how many layers' outputs are read."""
    inner = fields.config.get("eagle_config")
    if fields.config.get(IDS) is None and isinstance(inner, Mapping) and inner.get(IDS) is not None:
        return tuple(1 + one for one in fields.counts(IDS))
    if fields.get(IDS) is not None:
        return fields.counts(IDS)
    depth = fields.made_for().layers or target_layers
    if depth is None:
        raise CheckpointError(
            f"config.json in {fields.name} does not say which of the target's layers are read, and how many these are "
            "is not known."
        )
    if depth < 3:
        raise CheckpointError(f"The head in {fields.name} reads three layers, and its target has {depth}.")
    return (2, depth // 2, depth - 3)


def _embedding(tensors: Tensors, anatomy: Anatomy) -> nn.Embedding | None:
    if not tensors.has("embed_tokens.weight"):
        return None
    made = nn.Embedding(tensors.matrix("embed_tokens.weight")[0], anatomy.width)
    tensors.fill(made, "embed_tokens.")
    return made.requires_grad_(False)


def _rows(tensors: Tensors, anatomy: Anatomy, count: int | None = None) -> nn.Linear:
    if count is None:
        count = tensors.matrix("lm_head.weight")[0]
    made = nn.Linear(anatomy.width, count, bias=False)
    tensors.fill(made, "lm_head.")
    return made.requires_grad_(False)


def _own_ends(fields: Fields, tensors: Tensors, anatomy: Anatomy) -> HeadEnds:
    """Return EAGLE-3's ends: output rows of its own, for tokens of its own; they are never the embeddings."""
    tokens = draft_tokens(tensors)
    told = fields.get("draft_vocab_size")
    rows = _rows(tensors, anatomy, None if told is None else fields.count("draft_vocab_size", each=anatomy.width))
    vocab = None if fields.get("vocab_size") is None else fields.count("vocab_size")
    if tokens is None and vocab is not None and rows.out_features < vocab:
        raise CheckpointError(
            f"The head in {fields.name} is not complete: d2t is missing, and it has {rows.out_features} of {vocab} "
            "tokens."
        )
    if tokens is not None and len(tokens) != rows.out_features:
        raise CheckpointError(
            f"The head in {fields.name} is damaged: d2t names {len(tokens)} tokens, and lm_head.weight has "
            f"{rows.out_features} rows."
        )
    if tokens is not None:
        tokens, order = tokens.sort()
        with torch.no_grad():
            rows.weight.copy_(rows.weight[order])
    return HeadEnds(_embedding(tensors, anatomy), rows, tokens)
