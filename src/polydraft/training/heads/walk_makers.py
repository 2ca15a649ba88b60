"""How heads that walk are made for a target."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from polydraft.drafters import (
    HeadDrafter,
    write_hydra,
    write_redrafter,
    write_walk,
)
from polydraft.drafters.heads.drafter import HeadEnds
from polydraft.drafters.heads.walks.hydra import Hydra
from polydraft.drafters.heads.walks.joined import JoinedWalk
from polydraft.drafters.heads.walks.redrafter import RecurrentHead
from polydraft.drafters.heads.walks.speculators import LstmSpeculator, MlpSpeculator
from polydraft.drafters.heads.walks.walked_head import WalkedHead
from polydraft.errors import InvalidParameter
from polydraft.models import Layer
from polydraft.training.heads.losses.last_state_training import RowLoss, WalkTraining
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.new_heads import (
    DRAFTS,
    MEDUSA_LOSSES,
    SOFT_LOSSES,
    HeadSize,
    NewHead,
    anatomy_for,
)


def speculator(
    kind: type[MlpSpeculator],
    writer: Callable[..., None],
    target: PreTrainedModel,
    ends: TargetEnds,
    reads: tuple[Layer, ...],
    size: HeadSize,
    start: nn.Module | None = None,
) -> NewHead:
    """Make an MLP speculator, or one with an LSTM's gates."""
    (vocab, width), given = ends.embedding.shape, start if isinstance(start, kind) else None
    inner, depths = (width, DRAFTS) if given is None else (given.inner, given.depths)
    like = {"shared": given.shared} if isinstance(given, LstmSpeculator) else {}
    scaled, rows = given is None or given.scaled, len(ends.rows)
    network = kind(width, inner, vocab, size.drafts or depths, rows=rows, scaled=scaled, **like)
    return _walked(network, ends, MEDUSA_LOSSES[size.loss], writer)


def redrafter(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    """Make a walk with one recurrent state for all depths."""
    width, given = ends.embedding.shape[1], start if isinstance(start, RecurrentHead) else None
    layers, inner = (2, None) if given is None else (len(given.blocks), given.inner)
    depths = size.drafts or (DRAFTS if given is None else given.depths)
    recurrent = given is None or given.recurrent
    network = RecurrentHead(width, size.layers or layers, len(ends.rows), inner, recurrent=recurrent, depths=depths)
    if network.inner == 2 * width:
        with torch.no_grad():  # what the target makes of h alone is a beginning
            network.lm_head.weight.copy_(nn.functional.pad(ends.rows, (0, width)))
    return _walked(network, ends, MEDUSA_LOSSES[size.loss], write_redrafter)


def hydra(
    prefixed: bool,
    target: PreTrainedModel,
    ends: TargetEnds,
    reads: tuple[Layer, ...],
    size: HeadSize,
    start: nn.Module | None = None,
) -> NewHead:
    """Make Hydra's heads, prefixed by a layer over the text's states or not."""
    width, given = ends.embedding.shape[1], start if isinstance(start, Hydra) else None
    if given is not None and (given.prefix is not None) != prefixed:
        has = "has the layer of Hydra++" if given.prefix is not None else "has no layer before its heads"
        raise InvalidParameter(f"The head to begin with {has}; train head hydra{'' if prefixed else '++'}.")
    depths, layers = size.drafts or DRAFTS, size.layers or (4 if prefixed else 1)
    if given is not None:
        depths, layers = size.drafts or given.depths, size.layers or given.layers
    anatomy = (anatomy_for(target, size) if prefixed else None) if given is None else given.anatomy
    network = Hydra(width, depths, layers, None if given is None else given.own_rows, anatomy)
    return _walked(network, ends, SOFT_LOSSES[size.loss], write_hydra)


def joined(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    """Make a walk from three layers of the target, joined."""
    depths = size.drafts or (start.depths if isinstance(start, JoinedWalk) else DRAFTS)
    network = JoinedWalk(ends.embedding.shape[1], depths, reads)
    return _walked(network, ends, SOFT_LOSSES[size.loss], write_walk)


def _walked(network: WalkedHead, ends: TargetEnds, loss: RowLoss | None, writer: Callable[..., None]) -> NewHead:
    return NewHead(WalkTraining(network, ends, loss), HeadDrafter(network, HeadEnds(tokens=ends.tokens)), writer)
