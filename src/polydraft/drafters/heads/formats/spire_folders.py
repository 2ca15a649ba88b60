"""Folders of SPIRe's heads, a form of this package's own: a configuration of the target's layers, and their tensors.

layers.{i}.*        the layers, with the names that the target's have
norm.weight         [d]
feedback.weight     [d, d]; absent where `feedback` is false
config.json         `attention_sinks`, `attention_window` (null for all tokens), `feedback`
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds
from polydraft.drafters.heads.formats.eagle_folders import anatomy_of, layer_sizes
from polydraft.drafters.heads.formats.folder_fields import (
    Fields,
    Shapes,
    Tensors,
    classes_of,
    draft_tokens,
    target_tokens,
    write_head,
)
from polydraft.drafters.itself.spire import SpireHead
from polydraft.models import LanguageModel, PlainFolder

CLASS, FEEDBACK = "SpireModel", "feedback.weight"


def is_spire(config: Mapping[str, Any]) -> bool:
    """Tell by its configuration whether a folder holds a head of SPIRe's."""
    return CLASS in classes_of(config)


def holds_spire(shapes: Shapes) -> bool:
    """Tell by its tensors whether a folder holds a head of SPIRe's."""
    return FEEDBACK in shapes and "layers.0.self_attn.q_proj.weight" in shapes


def read_spire(folder: PlainFolder, target_layers: int | None = None) -> HeadDrafter[SpireHead]:
    """Build the drafter of a head of SPIRe's.

    Raises:
        CheckpointError: a key is missing or left over, a shape is another one, or a setting is not known.
    """
    fields, tensors = Fields.of(folder, folder.config), Tensors.of(folder)
    anatomy = anatomy_of(fields, tensors, "layers.0.")
    head = SpireHead(
        anatomy,
        fields.count("num_hidden_layers", each=anatomy.width),
        fields.count("attention_sinks"),
        None if fields.get("attention_window") is None else fields.count("attention_window"),
        feedback=fields.flag("feedback", True),
    )
    made_for = fields.made_for(target_tokens(tensors))
    ends = HeadEnds(tokens=draft_tokens(tensors))
    tensors.fill(head)
    return tensors.drafter(head, ends, made_for)


def write_spire(
    drafter: HeadDrafter[SpireHead],
    folder: Path,
    target: LanguageModel,
    *,
    dtype: torch.dtype = torch.bfloat16,
    card: str = "",
) -> None:
    """Write a head of SPIRe's as a folder.

    Raises:
        CheckpointError: it cannot be written.
    """
    head = drafter.network
    seen = {"attention_sinks": head.sinks, "attention_window": head.window, "feedback": head.feedback is not None}
    config = {
        "architectures": [CLASS],
        **layer_sizes(head.anatomy, head.depth, target),
        **seen,
        "num_target_layers": target.facts.layers,
    }
    write_head(folder, config, head.state_dict(), drafter.ends, target, dtype, card)
