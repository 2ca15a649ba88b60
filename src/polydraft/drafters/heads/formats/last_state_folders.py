"""Folders of Medusa's heads, in their three layouts, one of them inside a model.

    A   medusa_lm_head.pt or .safetensors     {i}.{j}.linear.{weight,bias}, {i}.{L}.weight
    B   a full model's folder                 medusa_head.{i}.{j}.linear.{weight,bias}, medusa_head.{i}.{L}.weight
    C   vLLM's, `model_type` "medusa"         blocks.{i}.layers.{j}.{weight,bias}, lm_heads.{i}.weight, token_map

The tensors say how many heads there are: A's published configurations name fewer than were trained. Where output rows
are missing altogether (A of Medusa's first trainer), the target's are taken. In B the model's own weights are left
alone. In C heads may have fewer tokens than the target, named by `token_map`, and `original_lm_head` says that they
share their rows.

Sources: FasterDecoding/Medusa, huggingface/text-generation-inference, vllm-project/vllm.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from polydraft.drafters.heads.drafter import HeadDrafter, MadeFor
from polydraft.drafters.heads.formats.folder_fields import Fields, Shapes, Tensors, output_rows_of
from polydraft.drafters.heads.last_state_heads import MedusaHead, MedusaHeads
from polydraft.errors import InvalidParameter
from polydraft.models import LanguageModel, PlainFolder, write_plain

INSIDE = "medusa_head."
"""Before the names of heads inside a full model (B)."""
OUTSIDE = "medusa_heads."
"""Before the names of heads in some folders of vLLM's (C)."""
BLOCK = re.compile(r"(\d{1,3})\.(\d{1,3})\.linear\.(?:weight|bias)")
ROWS = re.compile(r"(\d{1,3})\.(\d{1,3})\.weight")
OF_VLLM = re.compile(r"(?:blocks|lm_heads)\.(\d{1,3})\..*")
FILE = "medusa_lm_head.safetensors"


def is_medusa(config: Mapping[str, Any]) -> bool:
    """Tell by its configuration whether a folder holds Medusa's heads."""
    return config.get("model_type") == "medusa" or config.get("medusa_num_heads") is not None


def holds_medusa(shapes: Shapes) -> bool:
    """Tell by its tensors whether a folder holds Medusa's heads."""
    first = ("0.0.linear.weight", "blocks.0.layers.0.weight")
    return any(f"{prefix}{name}" in shapes for prefix in (INSIDE, OUTSIDE, "") for name in first)


def read_medusa(folder: PlainFolder, target_layers: int | None = None) -> HeadDrafter[MedusaHeads]:
    """Build the drafter of Medusa's heads; the target's depth does not matter here.

    Raises:
        CheckpointError: a key is missing or left over, a shape is another one, or a value is no number.
        InvalidParameter: heads do not fit each other.
    """
    fields, tensors = Fields.of(folder, folder.config), Tensors.of(folder, (INSIDE, OUTSIDE))
    if any(name.startswith(INSIDE) for name in folder.tensors):
        tensors.drop(*(name for name in folder.tensors if not name.startswith(INSIDE)))
    in_vllm = any(OF_VLLM.fullmatch(name) for name in tensors.left)
    heads = _of_vllm(fields, tensors) if in_vllm else _of_authors(fields, tensors)
    return tensors.drafter(heads, heads.ends(), MadeFor())


def _of_authors(fields: Fields, tensors: Tensors) -> MedusaHeads:
    """Read layouts A and B, and that without output rows."""
    found = [one for name in tensors.left if (one := BLOCK.fullmatch(name) or ROWS.fullmatch(name))]
    blocks = [one for one in found if one.re is BLOCK]
    count = 1 + max((int(one[1]) for one in found), default=0)
    layers = 1 + max((int(one[2]) for one in blocks), default=0)
    has_rows = len(blocks) < len(found)
    width = tensors.matrix("0.0.linear.weight")[0]
    heads: list[MedusaHead] = []
    for place in range(count):
        own = _linear(*tensors.matrix(f"{place}.{layers}.weight")) if has_rows else None
        head = MedusaHead(width, layers, own)
        for layer, linear in enumerate(head.linears):
            tensors.fill(linear, f"{place}.{layer}.linear.")
        if own is not None:
            tensors.fill(own, f"{place}.{layers}.")
        heads.append(head)
    return MedusaHeads(heads, width, vocab_size=fields.made_for().vocab_size)


def _of_vllm(fields: Fields, tensors: Tensors) -> MedusaHeads:
    """Read layout C."""
    there = [int(one[1]) for name in tensors.left if (one := OF_VLLM.fullmatch(name))]
    width = tensors.matrix("blocks.0.layers.0.weight")[0]
    count = max(fields.count("num_heads", 1, each=width), 1 + max(there))
    layers = fields.count("num_hidden_layers", 1, each=width * width)
    shared = fields.flag("original_lm_head")
    biased = fields.flag("medusa_fc_bias", any(name.endswith(".bias") for name in tensors.left))
    vocab = fields.count("vocab_size")
    named = _named(fields, tensors, vocab)
    rows: nn.Linear | None = None
    if shared:
        name = next((one for one in ("lm_heads.0.weight", "lm_head.weight") if tensors.has(one)), None)
        rows = None if name is None else _rows(tensors, name, named)
        tensors.drop(*(f"lm_heads.{place}.weight" for place in range(count)))
    heads: list[MedusaHead] = []
    for place in range(count):
        own = rows if shared else _rows(tensors, f"lm_heads.{place}.weight", named)
        head = MedusaHead(width, layers, own, bias=biased)
        for layer, linear in enumerate(head.linears):
            tensors.fill(linear, f"blocks.{place}.layers.{layer}.")
        heads.append(head)
    scale = fields.number("logit_scale", 1.0)
    with torch.no_grad():
        for one in {head.lm_head for head in heads if head.lm_head is not None}:
            one.weight.mul_(scale)  # which vLLM does to their logits
    return MedusaHeads(heads, width, None if named is None else named.tokens, vocab)


@dataclass(frozen=True, eq=False)
class _Named:
    """The heads' tokens.

    Args:
        order: where each token's output row lies in a table in the folder's order.
    """

    tokens: Int[Tensor, " v"]
    order: Int[Tensor, " v"]
    vocab: int


def _named(fields: Fields, tensors: Tensors, vocab: int) -> _Named | None:
    """Take the heads' tokens; None for all of the target's, or for its first ones."""
    if not tensors.has("token_map"):
        return None
    found = tensors.take("token_map").flatten().long()
    if fields.count("truncated_vocab_size", vocab) >= vocab:
        return None  # as in vLLM, the heads have all tokens
    tokens, order = found.sort()
    if not len(tokens) or int(tokens[0]) < 0 or int(tokens[-1]) >= vocab or len(tokens.unique()) != len(tokens):
        raise tensors.damaged(f"token_map names a token twice, or one that is none of the {vocab}")
    return _Named(tokens, order, vocab)


def _rows(tensors: Tensors, name: str, named: _Named | None) -> nn.Linear:
    """Return output rows in the order of the tokens' ids; a table of all tokens is cut to the heads' own."""
    own = _linear(*tensors.matrix(name))
    tensors.fill(own, name.removesuffix("weight"))
    if named is None:
        return own
    places = {named.vocab: named.tokens, len(named.tokens): named.order}.get(own.out_features)
    if places is None:
        counted = f"{len(named.tokens)} of {named.vocab} tokens"
        raise tensors.damaged(f"{name} has {own.out_features} rows, and token_map names {counted}")
    cut = _linear(len(places), own.in_features)
    with torch.no_grad():
        cut.weight.copy_(own.weight[places])
    return cut


def _linear(rows: int, width: int) -> nn.Linear:
    """Return output rows whose values are still to come."""
    return cast(nn.Linear, nn.utils.skip_init(nn.Linear, width, rows, bias=False))


def write_medusa(
    drafter: HeadDrafter[MedusaHeads],
    folder: Path,
    target: LanguageModel,
    *,
    vllm: bool = False,
    made_for: str = "",
    dtype: torch.dtype = torch.bfloat16,
    card: str = "",
) -> None:
    """Write Medusa's heads as a folder, in the authors' layout (A) or in vLLM's (C).

    Args:
        vllm: write vLLM's layout, which holds output rows in any case.
        made_for: the name of the target.

    Raises:
        InvalidParameter: the heads have fewer tokens than their target, which the authors' layout does not know, or
            not all equally many blocks.
        CheckpointError: it cannot be written.
    """
    heads = drafter.network
    if heads.tokens is not None and not vllm:
        raise InvalidParameter("Medusa's own layout has no heads of fewer tokens; write vLLM's.")
    if len({len(head.blocks) for head in heads}) > 1:
        raise InvalidParameter("Medusa heads with different numbers of blocks cannot be written in one folder.")
    if vllm:
        config, tensors = _vllm_config(heads, target), _vllm_tensors(heads, target)
    else:
        config: dict[str, Any] = {"medusa_num_heads": len(heads), "medusa_num_layers": len(heads.head(0).blocks)}
        # which its authors leave out, and no table may show
        config["vocab_size"] = heads.vocab_size or target.facts.vocab_size
        tensors = _authors_tensors(heads)
    config["base_model_name_or_path"] = made_for
    written = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    write_plain(folder, config, written, card, **({} if vllm else {"file": FILE}))


def _authors_tensors(heads: MedusaHeads) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for place, head in enumerate(heads):
        for layer, linear in enumerate(head.linears):
            weight, bias = linear.weight, linear.bias
            found[f"{place}.{layer}.linear.weight"] = weight
            found[f"{place}.{layer}.linear.bias"] = weight.new_zeros(len(weight)) if bias is None else bias
        if head.lm_head is not None:
            found[f"{place}.{len(head.blocks)}.weight"] = head.lm_head.weight
    return found


def medusa_inside(heads: MedusaHeads) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what a full model's folder has of its heads (B): settings and tensors."""
    settings = {"medusa_num_heads": len(heads), "medusa_num_layers": len(heads.head(0).blocks)}
    return settings, {INSIDE + name: value for name, value in _authors_tensors(heads).items()}


def _vllm_tensors(heads: MedusaHeads, target: LanguageModel) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for place, head in enumerate(heads):
        for layer, linear in enumerate(head.linears):
            found |= {f"blocks.{place}.layers.{layer}.{name}": value for name, value in linear.named_parameters()}
        if head.lm_head is not None and not (place and _shares(heads)):
            found[f"lm_heads.{place}.weight"] = head.lm_head.weight
    if heads.rows is None:
        found["lm_heads.0.weight"] = output_rows_of(heads.ends(), target)
    if heads.tokens is not None:
        found["token_map"] = heads.tokens
    return found


def _vllm_config(heads: MedusaHeads, target: LanguageModel) -> dict[str, Any]:
    first, tokens = heads.head(0), heads.tokens
    vocab = heads.vocab_size or target.facts.vocab_size
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": heads.width,
        "vocab_size": vocab,
        "truncated_vocab_size": vocab if tokens is None else len(tokens),
        "num_heads": len(heads),
        "num_hidden_layers": len(first.blocks),
        "medusa_fc_bias": any(linear.bias is not None for linear in first.linears),
        "original_lm_head": _shares(heads),
    }


def _shares(heads: MedusaHeads) -> bool:
    """Tell whether all heads have the same output rows, those of the target or one table of their own."""
    return len({id(head.lm_head) for head in heads}) == 1 and (len(heads) > 1 or heads.rows is None)
