"""Which kind of head a folder holds, and its drafter."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polydraft.drafters.contract import Drafter, owned_networks
from polydraft.drafters.heads.formats.adapter_folders import holds_adapter, is_adapter, read_adapter
from polydraft.drafters.heads.formats.blocks.block_reading import holds_block, is_block, read_block
from polydraft.drafters.heads.formats.eagle_folders import (
    MASK,
    holds_eagle,
    holds_parallel,
    is_eagle,
    is_parallel,
    read_eagle,
)
from polydraft.drafters.heads.formats.eagle_settings import RECYCLE
from polydraft.drafters.heads.formats.falcon_folders import holds_falcon, is_falcon, read_falcon
from polydraft.drafters.heads.formats.folder_fields import Shapes
from polydraft.drafters.heads.formats.last_state_folders import (
    holds_medusa,
    is_medusa,
    read_medusa,
)
from polydraft.drafters.heads.formats.mtp_folders import holds_mtp, is_mtp, read_mtp
from polydraft.drafters.heads.formats.rider_folders import SPACE, holds_pass, is_pass, read_pass
from polydraft.drafters.heads.formats.spire_folders import holds_spire, is_spire, read_spire
from polydraft.drafters.heads.formats.walked.own_walk_folders import holds_walk, is_walk, read_walk
from polydraft.drafters.heads.formats.walked.walk_folders import (
    holds_hydra,
    holds_mlp,
    holds_redrafter,
    is_hydra,
    is_mlp,
    is_redrafter,
    read_hydra,
    read_mlp,
    read_redrafter,
)
from polydraft.drafters.itself.adapter import AdapterDrafter
from polydraft.errors import CheckpointError, InvalidParameter, TargetMismatch, is_whole, lowered, shown
from polydraft.models import (
    HuggingFaceModel,
    LeftOver,
    PlainFolder,
    cheapest,
    pack_linear_layers,
    plain_config,
    plain_shapes,
    read_plain,
)


@dataclass(frozen=True)
class HeadKind:
    """A kind of head.

    Args:
        name: what it is called.
        told: tells by a configuration whether a folder holds one.
        holds: tells it by the shapes of the tensors, where no configuration tells.
        read: builds the drafter of what was read; its second argument is the target's number of layers, if known.
    """

    name: str
    told: Callable[[Mapping[str, Any]], bool]
    holds: Callable[[Shapes], bool]
    read: Callable[[PlainFolder, int | None], Drafter]


KINDS: tuple[HeadKind, ...] = (
    HeadKind("SPIRe", is_spire, holds_spire, read_spire),
    HeadKind("P-EAGLE", is_parallel, holds_parallel, read_eagle),
    HeadKind("block", is_block, holds_block, read_block),
    HeadKind("Falcon", is_falcon, holds_falcon, read_falcon),
    HeadKind("EAGLE", is_eagle, holds_eagle, read_eagle),
    HeadKind("Medusa", is_medusa, holds_medusa, read_medusa),
    HeadKind("MLP speculator", is_mlp, holds_mlp, read_mlp),
    HeadKind("Hydra", is_hydra, holds_hydra, read_hydra),
    HeadKind("ReDrafter", is_redrafter, holds_redrafter, read_redrafter),
    HeadKind("walk", is_walk, holds_walk, read_walk),
    HeadKind("MTP", is_mtp, holds_mtp, read_mtp),
    HeadKind("PaSS", is_pass, holds_pass, read_pass),
    HeadKind("adapter", is_adapter, holds_adapter, read_adapter),
)


def is_head(name: object) -> bool:
    """Tell whether a folder or hub repository holds a draft head; no for what cannot be read.

    Most configurations tell. EAGLE-1's own may be that of a model of one layer, so that the names of the tensors are
    looked at where none tells; of the hub's repositories the weights come for that, which are loaded next in any case.
    """
    try:
        source, config = plain_config(name)
        return _kind(config, lambda: plain_shapes(source)) is not None
    except CheckpointError:  # whoever loads it as a model will say so
        return False


def drafts_inside(name: object) -> str:
    """Return what a model's folder has that drafts for it as well, by its configuration.

    Of names that are none of folders the hub would have to be asked, and then it is nothing.

    Returns:
        "head" (Medusa-2), "masks" (SPACE), or "" for nothing.
    """
    if not isinstance(name, str | Path) or not os.path.isdir(os.path.expanduser(name)):
        return ""
    try:
        _, config = plain_config(name)
    except CheckpointError:  # whoever loads it as a model will say so
        return ""
    if is_medusa(config) and config.get("model_type") not in (None, "medusa"):
        return "head"
    return "masks" if config.get("spd_type") == SPACE else ""


def has_head_inside(name: object) -> bool:
    """Tell by its configuration whether a model's folder holds the head that drafts for it as well (Medusa-2)."""
    return drafts_inside(name) == "head"


def _kind(config: Mapping[str, Any], shapes: Callable[[], Shapes]) -> HeadKind | None:
    """Return the kind of head that a configuration tells, or else the tensors; None if it is no head."""
    told = next((one for one in KINDS if one.told(config)), None)
    if told is not None:
        return told
    found = shapes()
    return next((one for one in KINDS if one.holds(found)), None)


def load_head(
    name: object,
    target_layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    recycle: str | None = None,
    mask_token_id: int | None = None,
) -> Drafter:
    """Load a draft head.

    Args:
        name: its folder or hub name.
        target_layers: how many layers its target has, if it is known.
        dtype: the precision to run it in; the target's.
        device: where; the target's.
        recycle: which of its own states a head of EAGLE-3's or an MTP module reads again: "raw" as its last layer made
            them, "normed", or, of EAGLE-3, "bare", which is "raw" without a norm before the output rows; None for what
            its folder says. Some of SpecForge's mean "raw" where `norm_output` is true, and "bare" where it is false.
        mask_token_id: the token that fills the slots of a P-EAGLE head or of a block head; None for what its folder
            says. SpecForge's P-EAGLE folders name none.

    Raises:
        CheckpointError: it is missing or damaged, no head, or one that has no mask or nothing to recycle so.
        InvalidParameter: `recycle` is no word for it.
    """
    if recycle not in (None, *RECYCLE):
        raise InvalidParameter(f"recycle must be one of {', '.join(RECYCLE)}, but is {shown(recycle)}.")
    folder = read_plain(name)
    if recycle is not None:
        folder = replace(folder, config={**folder.config, "recycle": recycle})
    kind = _kind(folder.config, lambda: {name: tuple(one.shape) for name, one in folder.tensors.items()})
    if kind is None:
        raise CheckpointError(f"{folder.name} holds no draft head of a kind that is known.")
    if recycle is not None and kind.name not in ("EAGLE", "MTP"):
        raise CheckpointError(f"{folder.name} holds a {kind.name} head, and only EAGLE-3's and MTP's recycle states.")
    if mask_token_id is not None:
        if kind.name != "block" and not any(one.endswith(MASK) for one in folder.tensors):
            raise CheckpointError(f"{folder.name} holds a {kind.name} head, and only P-EAGLE's and blocks have masks.")
        own, inner = {"mask_token_id": mask_token_id}, folder.config.get("dflash_config")  # P-EAGLE's looks there first
        told = {**own, "dflash_config": {**inner, **own}} if isinstance(inner, Mapping) else own
        folder = replace(folder, config={**folder.config, **told})
    try:
        drafter = kind.read(folder, target_layers)
    except LeftOver as error:
        raise _of_two_kinds(folder.name, kind, error) from error
    except CheckpointError:
        raise
    except Exception as error:  # whatever is wrong with a folder is said as such
        raise CheckpointError(f"The head in {folder.name} is damaged: {lowered(error)}") from error
    for network in owned_networks(drafter):
        pack_linear_layers(network.to(device=device, dtype=dtype))
    return drafter


def _of_two_kinds(name: str, kind: HeadKind, error: LeftOver) -> CheckpointError:
    """Return what is said of tensors that a kind of head has not: that they are another kind's, if they are."""
    shapes = {name: tuple(one.shape) for name, one in error.left.items()}
    other = next((one.name for one in KINDS if one is not kind and one.holds(shapes)), None)
    if other is None:
        return error
    return CheckpointError(
        f"{name} holds keys of two kinds of heads, {kind.name} and {other} (such as {min(error.left)}): a folder is "
        "for one of them."
    )


def check_adapter(name: object, exit_layer: int | None, width: int | None) -> None:
    """Check what an adapter's configuration says, before weights are read.

    Args:
        name: its folder or hub name.
        exit_layer: behind how many layers it is to stand; None for what its folder says.
        width: how wide the target's states are; None if that is not known.

    Raises:
        CheckpointError: there is none.
        InvalidParameter: its folder says that it stands behind another layer.
        TargetMismatch: it has another width.
    """
    config = plain_config(name)[1]
    told, own = config.get("exit_layer"), config.get("hidden_size")
    if exit_layer is not None and told not in (None, exit_layer):
        raise InvalidParameter(f"The adapter in {shown(str(name))} stands behind {told} layers, not {exit_layer}.")
    if is_whole(own) and width not in (None, own):
        raise TargetMismatch(
            f"The adapter in {shown(str(name))} is {own} wide and the target's states {width}: it was trained for "
            "another target."
        )


def load_adapter(name: object, target: nn.Module, exit_layer: int | None = None) -> AdapterDrafter:
    """Load an adapter for a target that is there already, onto its device and in its precision.

    Args:
        name: its folder or hub name.
        target: the target.
        exit_layer: behind how many layers it stands; None for what its folder says, or 2 if that says nothing.

    Raises:
        CheckpointError: it is missing or damaged, or holds another kind of head.
        InvalidParameter: its folder says that it stands behind another layer.
    """
    model = HuggingFaceModel(target)
    check_adapter(name, exit_layer, model.width)
    dtype: Any = cheapest(model.model.dtype, model.device)
    found = load_head(name, model.layers, dtype, model.device)
    if not isinstance(found, AdapterDrafter):
        raise CheckpointError(f"{shown(str(name))} holds a head of another kind ({found.name}), and no adapter.")
    return found if exit_layer is None else replace(found, exit_layer=exit_layer)
