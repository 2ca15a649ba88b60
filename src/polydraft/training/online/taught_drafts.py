"""Which drafts can learn while they serve, and what each of them learns by: its own training, on a copy of it.

A draft model learns by a loss of `draft_losses`, a head by the training of its kind in `makers`, begun with the weights
that it has. A version is the weights of one module: the draft model, or the network of a head and what it has of its
own at its ends.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from polydraft.drafters import Drafter
from polydraft.drafters.heads.block_head import BlockHead
from polydraft.drafters.heads.eagle_head import Eagle1Head, Eagle3Head
from polydraft.drafters.heads.last_state_heads import MedusaHeads
from polydraft.drafters.heads.lilicorr import LiLiCorr
from polydraft.drafters.heads.mtp_head import MtpHead
from polydraft.drafters.heads.parallel_eagle import ParallelEagle
from polydraft.drafters.heads.paths import GatedMarkov, Markov, Mixing, RecurrentMarkov
from polydraft.drafters.heads.walks.hydra import Hydra
from polydraft.drafters.heads.walks.joined import JoinedWalk
from polydraft.drafters.heads.walks.redrafter import RecurrentHead
from polydraft.drafters.heads.walks.speculators import LstmSpeculator, MlpSpeculator
from polydraft.drafters.heads.xpress import XPress
from polydraft.drafters.itself.spire import SpireHead
from polydraft.drafters.learnt import parts_to_learn
from polydraft.errors import InvalidParameter
from polydraft.models.checkpoints.silence import ONE_AT_A_TIME
from polydraft.training.alignment.draft_losses import draft_loss
from polydraft.training.alignment.draft_training import DraftTraining
from polydraft.training.heads.head_making import begin_with
from polydraft.training.heads.losses.masked_training import copied
from polydraft.training.heads.losses.row_losses import HeadTraining, TargetEnds
from polydraft.training.heads.makers import MAKERS
from polydraft.training.heads.new_heads import HeadSize, NewHead

LOSS = "fkl+lk-alpha"
"""What a draft model learns by, a word of `DRAFT_LOSSES`; heads learn by their authors' losses."""
KINDS: Mapping[type[nn.Module], str] = {
    Markov: "dspark",
    GatedMarkov: "dspark",
    RecurrentMarkov: "dspark",
    XPress: "xpress",
    LiLiCorr: "lilicorr",
    Mixing: "mixing",
    MedusaHeads: "medusa",
    MlpSpeculator: "mlp",
    LstmSpeculator: "arctic-lstm",
    RecurrentHead: "redrafter",
    Hydra: "hydra",
    JoinedWalk: "joined-walk",
    Eagle1Head: "eagle",
    Eagle3Head: "eagle-3",
    ParallelEagle: "p-eagle",
    MtpHead: "mtp",
    SpireHead: "spire",
}
"""The kinds whose training gives the rows of all chains of a text, by the network, or a block head's path term."""


def module_to_learn(drafter: Drafter | None, target: PreTrainedModel) -> nn.Module:
    """Return the module whose weights are versions: a draft model's own, or one of a head's shapes and weights.

    Raises:
        InvalidParameter: the draft is none that can learn; the text says what can.
        UnsupportedModel: the target's ends are no tables.
    """
    parts = _parts(drafter)
    return parts[0] if len(parts) == 1 else _module_of(_head_to_teach(parts, target))


def taught(drafter: Drafter | None, target: PreTrainedModel) -> tuple[HeadTraining, nn.Module]:
    """Return the training of a draft's copy in single precision, and the module in it whose weights are versions.

    Args:
        drafter: a draft model's, or a head's.
        target: the target, of which no more than its ends is kept.

    Raises:
        InvalidParameter: the draft is none that can learn; the text says what can.
        UnsupportedModel: the target's ends are no tables.
    """
    parts = _parts(drafter)
    with ONE_AT_A_TIME:  # while another thread loads a model, transformers ties no weights of new ones
        if len(parts) == 1:
            network = copied(parts[0], 0, None).requires_grad_(True).eval()
            return DraftTraining(network, TargetEnds.of(target), draft_loss(LOSS)), network
        made = _head_to_teach(parts, target)
    assert isinstance(made.training, HeadTraining)
    return made.training, _module_of(made)


def _parts(drafter: Drafter | None) -> tuple[Any, ...]:
    """Return what learns in a draft: a draft model's module, or a head's network, ends and drafter.

    Raises:
        InvalidParameter: nothing does.
    """
    found = () if drafter is None else parts_to_learn(drafter)
    if not found:
        raise _refused("no draft" if drafter is None else f"the {drafter.name} drafter")
    named = [one for part in found for one in part.state_dict().items()]
    if not all(value.is_floating_point() for name, value in named if not name.endswith("tokens")):
        raise InvalidParameter(
            "--learn is for a draft whose weights are all floating point numbers, and this one's are rounded: name the "
            "unrounded one by --draft, or leave --learn out."
        )
    return found if len(found) == 1 else (*found, drafter)


def _head_to_teach(parts: tuple[Any, ...], target: PreTrainedModel) -> NewHead:
    """Return a head of the same kind, shapes and weights with its training.

    Raises:
        InvalidParameter: the kind is not taught, or it has parts that those of its kind have not here.
    """
    network, ends, drafter = parts
    kind = KINDS.get(type(network.path) if isinstance(network, BlockHead) else type(network))
    if kind is None:
        raise _refused(f"a {network.name} of this kind")
    if isinstance(network, Hydra) and network.prefix is not None:
        kind = "hydra++"
    size = HeadSize(frozen_rows=ends.lm_head is None and MAKERS[kind].own_rows)
    shared = TargetEnds.of(target, None if ends.tokens is None else ends.tokens.to(target.device))
    with torch.random.fork_rng(devices=[]):
        try:
            made = MAKERS[kind].make(target, shared, network.reads, size, network)
            begin_with(made, drafter, Path(kind), shared)
        except InvalidParameter as error:
            raise _refused(f"a {kind} head with parts of its own") from error
    if made.drafter.needs.layers != drafter.needs.layers:
        raise _refused(f"a {kind} head that reads other layers")
    return made


def _module_of(head: NewHead) -> nn.ModuleList:
    return nn.ModuleList(parts_to_learn(head.drafter))


def _refused(what: str) -> InvalidParameter:
    kinds = sorted({*KINDS.values(), "hydra++"})
    return InvalidParameter(
        "--learn is for a draft model of its own, such as pair-draft or a folder of one, and for a head of the kinds "
        f"{', '.join(kinds)} as `polydraft train head` makes them, not for {what}: name one by "
        "--draft, or leave --learn out."
    )
