"""Riders in folders: PaSS's embeddings in one of their own, and SPACE's masks in their target's configuration.

    PaSS     lookahead.safetensors   lookahead.weight [L, H]
             config.json             `model_type` "pass", `num_lookahead` L, `base_model_name_or_path`
    SPACE    a whole model, whose config.json names its masks: `spd_type` "space", `mask_token_id`,
             `mask_num` (5 where it is missing, as its authors trained), `mask_diff` (whether masks are the tokens
             `mask_token_id`, `mask_token_id` + 1, ...; else all are one)

Both are this package's own: PaSS's authors published no folder, and nothing in SPACE's names the mask, which is a flag
of their commands. `mask_num` and `mask_diff` are the names of these flags.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polydraft.drafters.heads.formats.folder_fields import Fields, Shapes, Tensors
from polydraft.drafters.rider_drafter import RiderDrafter
from polydraft.errors import InvalidParameter
from polydraft.models import LanguageModel, PlainFolder, write_plain

FILE = "lookahead.safetensors"
TABLE = "lookahead.weight"
USUAL_MASKS, MOST_MASKS = 5, 16


def is_pass(config: Mapping[str, Any]) -> bool:
    """Tell by its configuration whether a folder holds PaSS's embeddings."""
    return config.get("model_type") == "pass"


def holds_pass(shapes: Shapes) -> bool:
    """Tell by its tensors whether a folder holds PaSS's embeddings."""
    return TABLE in shapes


def read_pass(folder: PlainFolder, target_layers: int | None = None) -> RiderDrafter:
    """Build the drafter of PaSS's embeddings; the target's depth does not matter here.

    Raises:
        CheckpointError: a key is missing or left over, a shape is another one, or a value is no number.
    """
    fields, tensors = Fields.of(folder, folder.config), Tensors.of(folder)
    count, width = tensors.matrix(TABLE)
    if not count or not width:
        raise tensors.damaged(f"{TABLE} has shape {[count, width]}, which holds no embedding")
    if fields.count("num_lookahead") != count:
        raise fields.wrong("num_lookahead", fields.get("num_lookahead"), f"{TABLE} holds {count} embeddings")
    made = nn.Embedding(count, width)
    tensors.fill(made, "lookahead.")
    tensors.check_taken()
    return RiderDrafter(lookahead=made.requires_grad_(False))


def write_pass(
    drafter: RiderDrafter,
    folder: Path,
    target: LanguageModel,
    *,
    made_for: str = "",
    dtype: torch.dtype = torch.bfloat16,
    card: str = "",
) -> None:
    """Write learnt embeddings as a folder.

    Args:
        made_for: the name of the target.

    Raises:
        InvalidParameter: the riders are tokens of the target.
        CheckpointError: it cannot be written.
    """
    if drafter.lookahead is None:
        raise InvalidParameter("Riders that are tokens of their target have no folder; its own config.json names them.")
    config = {"model_type": "pass", "num_lookahead": drafter.count, "base_model_name_or_path": made_for}
    write_plain(folder, config, {TABLE: drafter.lookahead.weight.to(dtype)}, card, FILE)


def own_riders(config: Mapping[str, Any], name: str) -> RiderDrafter | None:
    """Return the drafter of the masks that a target was tuned to fill in; None if its configuration names none.

    Args:
        config: the target's configuration.
        name: what it is called, quoted for messages.

    Raises:
        CheckpointError: the mask is missing, is no token of the target, or ends texts, or a value is none.
    """
    if config.get("spd_type") != "space":
        return None
    fields = Fields(name, config)
    first, count = fields.count("mask_token_id", least=0), fields.count("mask_num", USUAL_MASKS, most=MOST_MASKS)
    several = fields.flag("mask_diff")
    masks = tuple(range(first, first + count)) if several else (first,) * count
    known, ends = fields.count("vocab_size"), fields.get("eos_token_id")
    if masks[-1] >= known:
        raise fields.wrong("mask_token_id", first, f"the last mask is token {masks[-1]}, and there are {known}")
    if {*masks} & {*(ends if isinstance(ends, list | tuple) else (ends,))}:
        raise fields.wrong("mask_token_id", first, "a mask must not be a token that ends texts")
    return RiderDrafter(masks)
