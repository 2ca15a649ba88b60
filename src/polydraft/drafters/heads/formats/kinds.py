"""Which kind of head a folder holds, and its drafter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from polydraft.drafters.heads.autoregressive import EagleDrafter
from polydraft.drafters.heads.formats.blocks import is_block, read_block
from polydraft.drafters.heads.formats.eagle import is_eagle, read_eagle
from polydraft.drafters.heads.formats.medusa import is_medusa, read_medusa
from polydraft.drafters.heads.lattice import BlockDrafter
from polydraft.drafters.heads.medusa import MedusaDrafter
from polydraft.drafters.protocol import Drafter
from polydraft.errors import CheckpointError, lowered
from polydraft.models import PlainFolder, pack_linear_layers, plain_config, read_plain


@dataclass(frozen=True)
class HeadKind:
    """A kind of head.

    Args:
        name: what it is called.
        drafter: the class of its drafter.
        told: tells by a configuration whether a folder holds one.
        read: builds the drafter of what was read; its second argument is the target's number of layers, if known.
    """

    name: str
    drafter: type
    told: Callable[[Mapping[str, Any]], bool]
    read: Callable[[PlainFolder, int | None], Drafter]


KINDS: tuple[HeadKind, ...] = (
    HeadKind("block", BlockDrafter, is_block, read_block),
    HeadKind("EAGLE", EagleDrafter, is_eagle, read_eagle),
    HeadKind("Medusa", MedusaDrafter, is_medusa, read_medusa),
)


def is_head(name: object) -> bool:
    """Tell whether a folder or hub repository holds a draft head, by its configuration; no for what cannot be read."""
    try:
        _, config = plain_config(name)
    except CheckpointError:  # whoever loads it as a model will say so
        return False
    return any(kind.told(config) for kind in KINDS)


def load_head(
    name: object,
    target_layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Drafter:
    """Load a draft head.

    Args:
        name: its folder or hub name.
        target_layers: how many layers its target has, if it is known.
        dtype: the precision to run it in; the target's.
        device: where; the target's.

    Raises:
        CheckpointError: it is missing or damaged, or no head.
    """
    folder = read_plain(name)
    kind = next((one for one in KINDS if one.told(folder.config)), None)
    if kind is None:
        raise CheckpointError(f"{folder.name} holds no draft head of a kind that is known.")
    try:
        drafter = kind.read(folder, target_layers)
    except CheckpointError:
        raise
    except Exception as error:  # whatever is wrong with a folder is said as such
        raise CheckpointError(f"The head in {folder.name} is damaged: {lowered(error)}") from error
    for network in drafter.networks():
        pack_linear_layers(network.to(device=device, dtype=dtype))
    return drafter
