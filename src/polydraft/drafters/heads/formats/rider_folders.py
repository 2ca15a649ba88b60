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
from typing import Any, cast

import torch
from torch import nn

from polydraft.drafters.heads.formats.folder_fields import Fields, Shapes, Tensors
from polydraft.drafters.parallel import refused_mask
from polydraft.drafters.rider_drafter import RiderDrafter
from polydraft.errors import InvalidParameter, shown
from polydraft.models import LanguageModel, PlainFolder, module_of, write_plain

FILE = "lookahead.safetensors"
TABLE = "lookahead.weight"
SPACE, USUAL_MASKS, MOST_MASKS = "space", 5, 16


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


def own_riders(target: LanguageModel, name: str) -> RiderDrafter | None:
    """Return the drafter of the masks that a target was tuned to fill in; None if its configuration names none.

    Args:
        target: the target, whose configurations say which tokens there are and which of them end texts.
        name: what it is called, quoted for messages.

    Raises:
        CheckpointError: the mask is missing, is no token of the target, or ends texts, or a value is none.
    """
    config = getattr(module_of(target), "config", None)
    if getattr(config, "spd_type", None) != SPACE:
        return None
    fields = Fields(name, cast(Any, config).to_dict())
    first, count = fields.count("mask_token_id", least=0), fields.count("mask_num", USUAL_MASKS, most=MOST_MASKS)
    several = fields.flag("mask_diff")
    masks = tuple(range(first, first + count)) if several else (first,) * count
    for mask in dict.fromkeys(masks):
        why = refused_mask(target, mask)
        if why:
            raise fields.wrong("mask_token_id", first, why if mask == first else f"of its masks, {mask}: {why}")
    return RiderDrafter(masks)


def masks_inside(drafter: RiderDrafter) -> dict[str, Any]:
    """Return what the configuration of a target has that was tuned to fill in masks, as `own_riders` reads it.

    Raises:
        InvalidParameter: these are no masks, or neither one token nor tokens in a row.
    """
    masks = drafter.masks
    several = len({*masks}) > 1
    if not masks or masks != tuple(range(masks[0], masks[0] + len(masks)) if several else masks[:1] * len(masks)):
        raise InvalidParameter(f"A configuration names one mask, or masks in a row, but these are {shown(masks)}.")
    return {"spd_type": SPACE, "mask_token_id": masks[0], "mask_num": len(masks), "mask_diff": several}
