"""Folders of Falcon's heads: a configuration of Llama's layers with `k_mask`, and the tensors of their LSTM.

`recurs` is this package's own word: whether the LSTM goes on from pair to pair. The authors' does not, and their
folders say nothing of it.

Source: Bestpay-inc/Falcon, `models/cnets.py` and `models/configs.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds
from polydraft.drafters.heads.falcon import FalconHead
from polydraft.drafters.heads.formats.eagle_folders import anatomy_of, layer_sizes
from polydraft.drafters.heads.formats.folder_fields import (
    Fields,
    Shapes,
    Tensors,
    embeddings_of,
    target_tokens,
    write_head,
)
from polydraft.errors import InvalidParameter
from polydraft.models import LanguageModel, PlainFolder

MOST_BLOCK = 64
"""No head of Falcon's makes more features in a pass."""


def is_falcon(config: Mapping[str, Any]) -> bool:
    """Tell by its configuration whether a folder holds a head of Falcon's."""
    return config.get("k_mask") is not None


def holds_falcon(shapes: Shapes) -> bool:
    """Tell by its tensors whether a folder holds a head of Falcon's."""
    return any(name.removeprefix("model.") == "lstm.weight_ih_l0" for name in shapes)


def read_falcon(folder: PlainFolder, target_layers: int | None = None) -> HeadDrafter[FalconHead]:
    """Build the drafter of a head of Falcon's.

    Raises:
        CheckpointError: a key is missing or left over, a shape is another one, or a setting is not known.
    """
    fields, tensors = Fields.of(folder, folder.config), Tensors.of(folder)
    anatomy = anatomy_of(fields, tensors, "layers.0.")
    head = FalconHead(
        anatomy,
        fields.count("k_mask", most=MOST_BLOCK),
        fields.count("num_hidden_layers", 1, each=anatomy.width),
        bias=fields.flag("bias", True),
        recurs=fields.flag("recurs"),
    )
    tensors.fill(head)
    made_for, embedding = fields.made_for(target_tokens(tensors)), tensors.embedding(anatomy.width)
    return tensors.drafter(head, HeadEnds(embedding), made_for)


def write_falcon(
    drafter: HeadDrafter[FalconHead],
    folder: Path,
    target: LanguageModel,
    *,
    dtype: torch.dtype = torch.bfloat16,
    card: str = "",
) -> None:
    """Write a head of Falcon's as a folder.

    Raises:
        InvalidParameter: it has output rows of its own, or drafts some of its target's tokens.
        CheckpointError: it cannot be written.
    """
    head, ends = drafter.network, drafter.ends
    if ends.tokens is not None or ends.lm_head is not None:
        raise InvalidParameter("Folders of Falcon's hold heads that draft from all of their target's output rows.")
    own = {"k_mask": head.block, "bias": head.lstm.bias, "recurs": head.recurs}
    config = {"architectures": ["FalconDraftModel"], **layer_sizes(head.anatomy, head.depth, target), **own}
    tensors = {**head.state_dict(), "embed_tokens.weight": embeddings_of(ends, target)}
    write_head(folder, config, tensors, ends, target, dtype, card)
