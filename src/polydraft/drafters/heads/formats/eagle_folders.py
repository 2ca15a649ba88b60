"""Folders of EAGLE's heads, P-EAGLE's among them, as their authors, SpecForge, vLLM and speculators write them.

Layers are named in two ways: speculators and vLLM write how many layers' output is read ("input of layer k"), which is
this package's way; SpecForge and Model-Optimizer write in `eagle_config` which layer's output, counted from 0.

Sources: SafeAILab/EAGLE, sgl-project/SpecForge, vllm-project/speculators, NVIDIA/Model-Optimizer, vllm-project/vllm.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds
from polydraft.drafters.heads.eagle_head import Eagle1Head, Eagle3Head, EagleHead
from polydraft.drafters.heads.formats.eagle_settings import BARE, check_bias, norms_of, reads_final, refuse_other_drafts
from polydraft.drafters.heads.formats.folder_fields import (
    DEFAULTS,
    Fields,
    Shapes,
    Tensors,
    classes_of,
    embeddings_of,
    output_rows_of,
    sizes_of,
    speculator,
    target_tokens,
    tokens_of_rows,
    write_head,
)
from polydraft.drafters.heads.parallel_eagle import DRAFTS, MOST_DRAFTS, ParallelEagle
from polydraft.drafters.heads.sublayers import Anatomy
from polydraft.errors import CheckpointError, InvalidParameter
from polydraft.models import LanguageModel, PlainFolder

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
PROPOSAL: Mapping[str, Any] = {"speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
"""What speculators writes of what is drafted."""
MASK = "mask_hidden"
"""The tensor that only P-EAGLE's heads have: the feature of slots that have no pair."""
MASK_IDS = ("dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Where a configuration may name the token of these slots, in the order that vLLM looks."""
FALCON = "falcon"
"""The type of draft models whose own configurations have `bias`, which tells EAGLE-1's among the others."""
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
    told = "bias" in config and config.get("model_type") != FALCON
    return config.get("num_hidden_layers") == 1 and (told or named)


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


def is_parallel(config: Mapping[str, Any]) -> bool:
    """Tell by its configuration whether a folder holds a head of P-EAGLE.

    vLLM's own form has EAGLE-3's class and is told by its tensor (`holds_parallel`), unless the token of the slots
    stands where block heads have theirs.
    """
    kind, named = config.get("speculators_model_type"), [one.lower() for one in classes_of(config)]
    if kind is not None:
        return kind == "peagle"
    third = any("eagle3" in one for one in named) and config.get("dflash_config") is not None
    return third or any("peagle" in one for one in named)


def holds_parallel(shapes: Shapes) -> bool:
    """Tell by its tensors whether a folder holds a head of P-EAGLE."""
    names = {name.removeprefix("model.") for name in shapes}
    return MASK in names and _holds_third(names)


def read_eagle(folder: PlainFolder, target_layers: int | None = None) -> HeadDrafter[EagleHead]:
    """Build the drafter of a head of EAGLE-1 or EAGLE-3; a folder that names no layers needs the target's depth.

    Raises:
        CheckpointError: a key is missing or left over, a shape is another one, or a setting is not known.
    """
    kind = folder.config.get("speculators_model_type")
    if kind is not None:
        return _third(folder, target_layers) if kind in ("eagle3", "peagle") else _old_first(folder)
    if _wraps(folder.config):
        return _wrapped(folder)
    third = is_parallel(folder.config) or _is_third(folder.config)
    third = third or _holds_third(name.removeprefix("model.") for name in folder.tensors)
    return _third(folder, target_layers) if third else _first(folder)


def _wraps(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "eagle" and isinstance(config.get("model"), Mapping)


def _is_third(config: Mapping[str, Any]) -> bool:
    third = any("eagle3" in one.lower() for one in classes_of(config))
    return third or config.get("draft_vocab_size") is not None or config.get("eagle_config") is not None


def _first(folder: PlainFolder) -> HeadDrafter[EagleHead]:
    """Read EAGLE-1's own form, in which a missing `bias` means that there is one."""
    fields = Fields.of(folder, folder.config)
    return _of_first(fields, Tensors.of(folder), bias=fields.flag("bias", True), normed=False)


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
    tensors.left = {_begun_anew(name, OLD_NAMES): value for name, value in tensors.left.items()}
    bias, normed = fields.flag("fusion_bias"), fields.flag("layernorms")
    return _of_first(fields, tensors, bias=bias, normed=normed)


def _begun_anew(name: str, beginnings: Mapping[str, str]) -> str:
    """Return a name with another beginning, where its own is among these."""
    own = next((one for one in beginnings if name.startswith(one)), None)
    return name if own is None else beginnings[own] + name.removeprefix(own)


def _of_first(fields: Fields, tensors: Tensors, *, bias: bool, normed: bool) -> HeadDrafter[EagleHead]:
    tensors.drop("verifier_lm_head.weight", "verifier_norm.weight")
    _check_norms(fields, third=False)
    if fields.get("recycle") is not None:
        raise fields.wrong("recycle", fields.get("recycle"), "EAGLE-1's heads recycle the states that they foretell")
    anatomy = anatomy_of(fields, tensors, "layers.0.")
    head = Eagle1Head(anatomy, fields.count("num_hidden_layers", 1, each=anatomy.width), bias=bias, normed=normed)
    tensors.fill(head)
    made_for, embedding = fields.made_for(target_tokens(tensors)), tensors.embedding(anatomy.width)
    rows = tensors.output_rows(anatomy.width) if tensors.has("lm_head.weight") else None
    ends = HeadEnds(embedding, rows, multiplier=fields.number("logit_scale", 1.0, above=0))
    return tensors.drafter(head, ends, made_for)


def _third(folder: PlainFolder, target_layers: int | None) -> HeadDrafter[EagleHead]:
    """Read EAGLE-3's own form, SpecForge's, or speculators'."""
    fields, tensors = _fields(folder), Tensors.of(folder)
    tensors.drop("verifier_lm_head.weight", "verifier_norm.weight")
    first = "midlayer." if any(name.startswith("midlayer.") for name in tensors.left) else "layers.0."
    tensors.left = {_of_layer(name, first): value for name, value in tensors.left.items()}
    refuse_other_drafts(fields, tensors)
    _check_norms(fields, third=True)
    anatomy, norms = anatomy_of(fields, tensors, "midlayer."), norms_of(fields, tensors)
    width = anatomy.width
    reads = ("final",) if reads_final(fields, norms, width) else _reads(fields, target_layers)
    target_width = fields.count("target_hidden_size", width, each=width)
    depth = fields.count("num_hidden_layers", 1, each=width)
    if is_parallel(folder.config) or tensors.has(MASK):
        if fields.get("recycle", BARE) != BARE:
            raise fields.wrong("recycle", fields.get("recycle"), "P-EAGLE's heads read none of their states again")
        _flatten_mask(tensors, len(reads) * target_width)
        head = ParallelEagle(anatomy, reads, target_width, norms, _mask_id(fields, tensors), depth, _drafts(fields))
    else:
        head = Eagle3Head(anatomy, reads, target_width, norms, depth)
    tensors.fill(head)
    made_for = fields.made_for(target_tokens(tensors))
    return tensors.drafter(head, _own_ends(fields, tensors, width), made_for)


def _flatten_mask(tensors: Tensors, width: int) -> None:
    """Let `mask_hidden` be one row: speculators has two axes more, and vLLM one."""
    found = tensors.take(MASK)
    if found.numel() != width or found.shape[-1:] != (width,):
        raise tensors.damaged(
            f"{MASK} has shape {list(found.shape)}, and the joined states that it reads are {width} wide"
        )
    tensors.left[MASK] = found.flatten()


def _mask_id(fields: Fields, tensors: Tensors) -> int:
    """Return the token of the slots.

    Raises:
        CheckpointError: none is named, or one that has no embedding or ends texts.
    """
    inner = {f"dflash_config.{name}": value for name, value in fields.table("dflash_config").items()}
    own = replace(fields, beside=(inner, *fields.beside))
    name = next((one for one in MASK_IDS if own.get(one) is not None), None)
    if name is None:
        raise CheckpointError(
            f"config.json in {fields.name} names no mask token by {', '.join(MASK_IDS[:-1])} or {MASK_IDS[-1]}; write "
            "the one that the head was trained with into it as mask_token_id, or name it by load_head(folder, "
            "mask_token_id=...)."
        )
    found, rows, end = own.count(name, least=0), target_tokens(tensors), fields.get("eos_token_id")
    if rows is not None and found >= rows:
        raise fields.wrong(name, found, f"there are {rows} tokens")
    if found in (end if isinstance(end, list | tuple) else (end,)):
        raise fields.wrong(name, found, "that token ends texts (eos_token_id), and a mask is in none")
    return found


def _drafts(fields: Fields) -> int:
    """Return how many tokens a P-EAGLE head drafts, by speculators' proposal or by `para_depths`."""
    proposals = fields.table("speculators_config").get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals and isinstance(proposals[0], Mapping) else {}
    told = fields.count("para_depths", DRAFTS, most=MOST_DRAFTS)
    return Fields(fields.name, first).count("speculative_tokens", told, most=MOST_DRAFTS)


def _of_layer(name: str, first: str) -> str:
    """Return a tensor's name in `Eagle3Head`, where the layers behind the first are counted by themselves."""
    if name.startswith(first):
        return "midlayer." + name.removeprefix(first)
    parts = name.split(".")
    if parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit() and parts[1] != "0":
        return ".".join(["layers", str(int(parts[1]) - 1), *parts[2:]])
    return name


def _check_norms(fields: Fields, *, third: bool) -> None:
    """Raise `CheckpointError` for a configuration that asks for other norms than a head of its kind has."""
    for name, usual in (*((one, third) for one in NORMS_OF_THIRD), (OTHER_NORMS, False)):
        told = fields.get(name, usual)
        if told is not usual:
            raise fields.wrong(name, told, f"EAGLE-{3 if third else 1}'s heads are read with {usual} alone")


def _fields(folder: PlainFolder) -> Fields:
    """Return a configuration with the tables inside it, and what speculators leaves out."""
    tables = [folder.config.get(name) for name in ("eagle_config", "transformer_layer_config")]
    inner = [one for one in tables if isinstance(one, Mapping)]
    if folder.config.get("speculators_model_type") is not None:
        kind = next((one["model_type"] for one in inner if isinstance(one.get("model_type"), str)), "llama")
        inner.append(DEFAULTS.get(kind, DEFAULTS["llama"]))
    return Fields.of(folder, folder.config, *inner)


def anatomy_of(fields: Fields, tensors: Tensors, layer: str) -> Anatomy:
    """Return the layers' sizes; whether they have biases and norms of queries and keys, the tensors tell."""
    attention = f"{layer}self_attn."
    normed, bias = tensors.has(f"{attention}q_norm.weight"), tensors.has(f"{attention}q_proj.bias")
    own = replace(fields.anatomy(normed=normed), bias=bias, output_bias=tensors.has(f"{attention}o_proj.bias"))
    check_bias(fields, own)
    return own


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


def _own_ends(fields: Fields, tensors: Tensors, width: int) -> HeadEnds:
    """Return EAGLE-3's ends: output rows of its own, for tokens of its own; they are never the embeddings."""
    told = fields.get("draft_vocab_size")
    rows = tensors.output_rows(width, None if told is None else fields.count("draft_vocab_size", each=width))
    vocab = None if fields.get("vocab_size") is None else fields.count("vocab_size")
    tokens = tokens_of_rows(tensors, rows.out_features, vocab)
    if tokens is not None:
        tokens, order = tokens.sort()
        with torch.no_grad():
            rows.weight.copy_(rows.weight[order])
    return HeadEnds(tensors.embedding(width), rows, tokens, multiplier=fields.number("logit_scale", 1.0, above=0))


def write_eagle(
    drafter: HeadDrafter[EagleHead],
    folder: Path,
    target: LanguageModel,
    *,
    speculators: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    card: str = "",
) -> None:
    """Write a head of EAGLE-1, EAGLE-3 or P-EAGLE as a folder; the last as vLLM reads it, or in speculators' form.

    Args:
        speculators: write the form of vllm-project/speculators: `layers.0.` for `midlayer.`, sizes in a table.

    Raises:
        InvalidParameter: the form has no such head; one of EAGLE-1 drafts all tokens of its target.
        CheckpointError: it cannot be written.
    """
    head, ends = drafter.network, drafter.ends
    if isinstance(head, Eagle3Head):
        config, tensors = _written_third(head, ends, target, speculators)
    elif isinstance(head, Eagle1Head):
        if ends.tokens is not None:
            count = len(ends.tokens)
            raise InvalidParameter(f"Folders of EAGLE-1 hold heads of all tokens of a target, and this drafts {count}.")
        config, tensors = _written_first(head, ends, target, speculators)
    else:
        raise InvalidParameter(f"There is no form of folders for {type(head).__name__}.")
    write_head(folder, config, tensors, ends, target, dtype, card)


def _written_third(
    head: Eagle3Head, ends: HeadEnds, target: LanguageModel, speculators: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = dict(head.state_dict())
    if speculators or head.depth > 1:
        tensors = {_numbered(name): value for name, value in tensors.items()}
    tensors["lm_head.weight"] = output_rows_of(ends, target)
    if ends.embed_tokens is not None:
        tensors["embed_tokens.weight"] = ends.embed_tokens.weight
    sizes = layer_sizes(head.anatomy, head.depth, target)
    narrow = head.target_width == head.anatomy.width
    final, raw = head.reads == ("final",), not head.norms.rows
    if speculators and (final or raw):
        what = "read no layers of their target" if final else "have no norm before their output rows"
        raise InvalidParameter(f"speculators has no form for EAGLE-3's heads that {what}.")
    own: dict[str, Any] = {
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "target_hidden_size": None if narrow else head.target_width,
        **({"eagle_config": {"use_aux_hidden_state": False}} if final else {IDS: [*head.reads]}),
        "norm_before_residual": head.norms.residual,
        "norm_before_fc": head.norms.joined,
        "fc_norm": head.norms.sources,
        "norm_output": head.norms.output,
        **({"recycle": BARE} if raw else {}),
        **({} if ends.multiplier == 1 else {"logit_scale": ends.multiplier}),
    }
    named = speculator("eagle3", "Eagle3Speculator", **PROPOSAL)
    if isinstance(head, ParallelEagle):
        named = speculator("peagle", "PEagleSpeculator", **{**PROPOSAL, "speculative_tokens": head.drafts})
        own |= {"mask_token_id" if speculators else "ptd_token_id": head.mask_id, "para_depths": head.drafts}
        tensors[MASK] = head.mask_hidden.view(*((1, 1, -1) if speculators else (1, -1)))
    if speculators:
        return {**named, "transformer_layer_config": sizes, **own}, tensors
    return {"architectures": ["LlamaForCausalLMEagle3"], **sizes, **own}, tensors


def _numbered(name: str) -> str:
    """Return a tensor's name where all layers are counted."""
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    parts = name.split(".")
    return ".".join(["layers", str(int(parts[1]) + 1), *parts[2:]]) if parts[0] == "layers" else name


def _written_first(
    head: Eagle1Head, ends: HeadEnds, target: LanguageModel, speculators: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors, sizes, bias = (
        dict(head.state_dict()),
        layer_sizes(head.anatomy, head.depth, target),
        head.fc.bias is not None,
    )
    if not speculators:
        if head.normed:
            raise InvalidParameter("Only speculators has a form for EAGLE-1's heads with layer norms.")
        tensors["embed_tokens.weight"] = embeddings_of(ends, target)
        if ends.lm_head is not None:
            tensors["lm_head.weight"] = ends.lm_head.weight
        scaled = {} if ends.multiplier == 1 else {"logit_scale": ends.multiplier}
        return {"architectures": ["LlamaForCausalLMEagle"], **sizes, "bias": bias, **scaled}, tensors
    same = ends.embed_tokens is None or torch.equal(ends.embed_tokens.weight, embeddings_of(HeadEnds(), target))
    if head.depth > 1 or not same or ends.lm_head is not None:
        raise InvalidParameter("speculators has a form only for EAGLE-1's heads of one layer with their target's ends.")
    old_names = {new: old for old, new in OLD_NAMES.items()}
    table = {"transformer_layer_config": sizes, "fusion_bias": bias, "layernorms": head.normed}
    named = {_begun_anew(name, old_names): value for name, value in tensors.items()}
    return {**speculator("eagle", "EagleSpeculator", **PROPOSAL), **table}, named


def layer_sizes(own: Anatomy, depth: int, target: LanguageModel) -> dict[str, Any]:
    """Return the sizes of so many layers, under Hugging Face's names."""
    named = {"model_type": "qwen3" if own.normed else "llama", "attention_bias": own.output_bias, "qkv_bias": own.bias}
    vocab = target.facts.vocab_size
    return {**sizes_of(own, depth), **named, "tie_word_embeddings": False, "vocab_size": vocab}
