"""How a head of each kind is made for a target: one function for each, and one line in the table."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from polydraft.drafters import (
    AdapterDrafter,
    HeadDrafter,
    ParallelDrafter,
    RiderDrafter,
    SpecDrafter,
    drafter_of,
    own_riders,
    write_adapter,
    write_eagle,
    write_falcon,
    write_medusa,
    write_mlp,
    write_mtp,
    write_pass,
)
from polydraft.drafters.heads.drafter import HeadEnds
from polydraft.drafters.heads.eagle_head import Eagle1Head, Eagle3Head, Eagle3Norms
from polydraft.drafters.heads.falcon import FalconHead
from polydraft.drafters.heads.formats.rider_folders import USUAL_MASKS
from polydraft.drafters.heads.formats.spire_folders import write_spire
from polydraft.drafters.heads.last_state_heads import MedusaHead, MedusaHeads
from polydraft.drafters.heads.mtp_head import MtpHead, MtpModule
from polydraft.drafters.heads.parallel_eagle import DRAFTS as SLOTS
from polydraft.drafters.heads.parallel_eagle import MOST_DRAFTS as MOST_SLOTS
from polydraft.drafters.heads.parallel_eagle import ParallelEagle
from polydraft.drafters.heads.sublayers import Rotation
from polydraft.drafters.heads.walks.speculators import LstmSpeculator, MlpSpeculator
from polydraft.drafters.itself.adapter import Adapter
from polydraft.drafters.itself.spire import SpireHead
from polydraft.drafters.parallel import DEPTH
from polydraft.errors import InvalidParameter, shown
from polydraft.models import HuggingFaceModel, Layer
from polydraft.training.heads.block_makers import dspark, lilicorr, mixing, xpress
from polydraft.training.heads.losses.adapter_training import AdapterTraining
from polydraft.training.heads.losses.eagles import (
    ROW_LOSSES,
    Eagle1Training,
    Eagle3Training,
    EagleLoss,
    MtpTraining,
    own_rows,
)
from polydraft.training.heads.losses.last_state_training import MedusaTraining, new_heads
from polydraft.training.heads.losses.masked_training import (
    PardTraining,
    begun_with,
    copied,
    new_draft_model,
    new_path,
    write_draft_model,
)
from polydraft.training.heads.losses.path_training import LATTICE_LOSSES
from polydraft.training.heads.losses.rider_training import PassTraining, SpaceTraining, check_branches
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.losses.slot_training import FalconTraining, ParallelTraining
from polydraft.training.heads.losses.source_training import GlancingTraining, filling, new_filling_model
from polydraft.training.heads.losses.tuned_target import (
    AdaptedTarget,
    Drift,
    TunedMedusa,
    masks_of,
    medusa_of,
    write_tuned,
)
from polydraft.training.heads.new_heads import (
    DECAY_OF_MTP,
    DEEPSPEC,
    DRAFTS,
    EAGLE_LOSSES,
    HASS_LOSSES,
    MEDUSA_LOSSES,
    MOST_BLOCKS,
    MOST_DEPTHS,
    OFFICIAL,
    OWN,
    PASSES,
    PLACES,
    RANK,
    RIDER_PLACES,
    SOFT_LOSSES,
    SPECULATORS,
    VLLM,
    HeadMaker,
    HeadSize,
    NewHead,
    anatomy_for,
    free_token,
    last_norm,
)
from polydraft.training.heads.pruning import pruned
from polydraft.training.heads.walk_makers import hydra, joined, redrafter, speculator


def _medusa(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    given = [*start.heads] if isinstance(start, MedusaHeads) else []
    layers = size.layers or (len(cast(MedusaHead, given[0]).blocks) if given else 1)
    heads = new_heads(ends, size.drafts or len(given) or DRAFTS, layers)
    drafter = HeadDrafter(heads, heads.ends())

    row_loss = MEDUSA_LOSSES[size.loss]
    return NewHead(MedusaTraining(heads, ends, row_loss=row_loss, places=PLACES), drafter, write_medusa)


def _medusa_2(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    given = [*start.heads] if isinstance(start, MedusaHeads) else []
    layers = size.layers or (len(cast(MedusaHead, given[0]).blocks) if given else 1)
    heads = new_heads(ends, size.drafts or len(given) or DRAFTS, layers, own_rows=True)
    adapted = AdaptedTarget(target)
    training = TunedMedusa(heads, ends, adapted, MEDUSA_LOSSES[size.loss], PLACES)
    return NewHead(training, HeadDrafter(heads, heads.ends()), *_tuned(target, adapted, medusa_of))


def _tuned(
    target: PreTrainedModel, adapted: AdaptedTarget, inside: Callable[..., Any]
) -> tuple[Callable[..., None], Callable[[Dataset[dict[str, Tensor]]], Drift]]:
    """Return what writes a tuned target, and what measures how far it is from the one that it was."""
    return partial(write_tuned, adapted, inside), lambda texts: Drift.of(target, adapted.merged(), texts)


def _space(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    model = HuggingFaceModel(target, fused=False)
    check_branches(model)
    given = own_riders(model, shown(type(target).__name__))  # a target that was tuned goes on with its masks
    masks = (free_token(target),) * USUAL_MASKS if given is None else given.masks
    more = max((size.drafts or 0) - len(masks), 0)
    drafter = RiderDrafter((*masks[: size.drafts], *masks[-1:] * more))
    masks_of(drafter)  # says now which masks no folder can name
    if 2 * drafter.needs.riders > model.context:
        raise InvalidParameter(
            f"{drafter.count} masks need {drafter.needs.riders} tokens beside each text, and the context has "
            f"{model.context}; ask for fewer drafts."
        )
    adapted = AdaptedTarget(target, drafter.masks)
    training = SpaceTraining(adapted, drafter.masks, ends, MEDUSA_LOSSES[size.loss])
    return NewHead(training, drafter, *_tuned(target, adapted, masks_of))


def _eagle_1(
    learnt: int,
    losses: Mapping[str, EagleLoss],
    target: PreTrainedModel,
    ends: TargetEnds,
    reads: tuple[Layer, ...],
    size: HeadSize,
    start: nn.Module | None = None,
) -> NewHead:
    if isinstance(start, Eagle1Head):
        head = Eagle1Head(
            start.anatomy, size.layers or start.depth, bias=start.fc.bias is not None, normed=start.normed
        )
    else:
        head = Eagle1Head(anatomy_for(target, size), size.layers or 1)
    own, passes = HeadEnds(tokens=ends.tokens), size.drafts or DRAFTS
    training = Eagle1Training(head, ends, passes, losses[size.loss], own, min(learnt, passes))
    return NewHead(training, HeadDrafter(head, own), write_eagle)


def _falcon(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    given = start if isinstance(start, FalconHead) else FalconHead(anatomy_for(target, size))
    bias, layers = given.lstm.bias, size.layers or given.depth
    head = FalconHead(given.anatomy, given.block, layers, bias=bias, recurs=given.recurs)
    own = HeadEnds(tokens=ends.tokens)
    training = FalconTraining(head, ends, size.drafts or DRAFTS, EAGLE_LOSSES[size.loss], own)
    return NewHead(training, HeadDrafter(head, own), write_falcon)


def _p_eagle(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    width, given = ends.embedding.shape[1], start if isinstance(start, ParallelEagle) else None
    mask = free_token(target)
    anatomy, norms, layers, drafts = anatomy_for(target, size), Eagle3Norms(), 2, SLOTS
    if given is not None:
        anatomy, norms, mask, layers, drafts = given.anatomy, given.norms, given.mask_id, given.depth, given.drafts
    head = ParallelEagle(anatomy, reads, width, norms, mask, size.layers or layers, size.drafts or drafts)
    own = HeadEnds(tokens=ends.tokens) if size.frozen_rows else own_rows(ends)
    return NewHead(ParallelTraining(head, ends, size.loss, own), HeadDrafter(head, own), write_eagle)


def _eagle_3(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    width = ends.embedding.shape[1]
    if isinstance(start, Eagle3Head):
        head = Eagle3Head(start.anatomy, reads, width, start.norms, size.layers or start.depth)
    else:
        head = Eagle3Head(anatomy_for(target, size), reads, width, layers=size.layers or 1)
    own = HeadEnds(tokens=ends.tokens) if size.frozen_rows else own_rows(ends)
    drafter = HeadDrafter(head, own)
    return NewHead(Eagle3Training(head, ends, size.drafts or DRAFTS, EagleLoss(size.loss), own), drafter, write_eagle)


def _mtp(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    given = start if isinstance(start, MtpHead) else None
    anatomy = None if given is None else given.anatomy
    raw = given is not None and cast(MtpModule, given.steps[0]).raw
    head = MtpHead.plain(anatomy or anatomy_for(target, size, normed=True), raw=raw)
    own = HeadEnds(tokens=ends.tokens)
    weights = EagleLoss(size.loss, decay=DECAY_OF_MTP)
    return NewHead(MtpTraining(head, ends, size.drafts or PASSES, weights, own), HeadDrafter(head, own), write_mtp)


def _pard(
    knows: bool,
    target: PreTrainedModel,
    ends: TargetEnds,
    reads: tuple[Layer, ...],
    size: HeadSize,
    start: nn.Module | None = None,
) -> NewHead:
    if start is None:
        model = new_draft_model(target, ends, anatomy_for(target, size), size.layers or 2)
    else:
        model = begun_with(start, len(ends.embedding), size.layers)
    usual = min(RANK, int(model.config.get_text_config().hidden_size))  # a folder of a higher rank is refused
    path = new_path(model, start, size.rank, usual) if knows else None
    drafter = ParallelDrafter(HuggingFaceModel(model, fused=False), model.config.pard_token, path=path)
    training = PardTraining(model, ends, drafter.mask_id, size.drafts or DEPTH, MEDUSA_LOSSES[size.loss], path)
    return NewHead(training, drafter, write_draft_model)


def _spec(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    begun = None if start is None else drafter_of(start)
    block, mask = size.drafts or getattr(begun, "block", DRAFTS), getattr(begun, "mask_id", free_token(target))
    if start is None:
        model = new_filling_model(target, size.layers, mask, block)
    else:
        had = HuggingFaceModel(start, fused=False).layers
        model = filling(copied(start, had, size.layers), mask, block)
    drafter = SpecDrafter(HuggingFaceModel(model, fused=False), mask, block)
    training = GlancingTraining(model, target, mask, block, MEDUSA_LOSSES[size.loss])
    return NewHead(training, drafter, write_draft_model)


def _pass(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    given = start.num_embeddings if isinstance(start, nn.Embedding) else DRAFTS
    lookahead = nn.Embedding(size.drafts or given, ends.embedding.shape[1], device=ends.embedding.device)
    with torch.no_grad():  # near the tokens' own; equal ones would differ by their places alone
        lookahead.weight.mul_(ends.embedding.std()).add_(ends.embedding.mean(0))
    training = PassTraining(lookahead, target, ends, MEDUSA_LOSSES[size.loss], RIDER_PLACES)
    return NewHead(training, RiderDrafter(lookahead=lookahead), write_pass)


def _adapter(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    given = start.anatomy if isinstance(start, Adapter) else replace(anatomy_for(target, size), rotation=Rotation())
    network, norm = Adapter(given), last_norm(target)
    if norm is not None:  # rows have the size of the target's from the first step on
        with torch.no_grad():
            network.norm.weight.copy_(norm)
    drafter = AdapterDrafter(network, cast(int, reads[0]))
    return NewHead(
        AdapterTraining(network, ends, SOFT_LOSSES[size.loss], size.drafts or DRAFTS), drafter, write_adapter
    )


def _spire(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    if isinstance(start, SpireHead):
        layers, feedback = size.layers or start.depth, start.feedback is not None
        head = SpireHead(start.anatomy, layers, start.sinks, start.window, feedback=feedback)
    else:
        head = pruned(target, size.layers)
    own = HeadEnds(tokens=ends.tokens)
    weights = EagleLoss("entropy" if size.loss == "published" else size.loss)
    return NewHead(MtpTraining(head, ends, size.drafts or PASSES, weights, own), HeadDrafter(head, own), write_spire)


_walk = partial(
    HeadMaker,
    other_forms=(OWN,),
    fewer=(OWN,),
    losses=(*MEDUSA_LOSSES,),
    most_drafts=MOST_DEPTHS,
    most_layers=MOST_BLOCKS,
)
_spec_maker = HeadMaker(_spec, (), fewer=(), losses=(*MEDUSA_LOSSES,), is_model=True, path=False, encodes=True)
_of_layers = partial(HeadMaker, reads_layers=True)
_for_masks = partial(
    HeadMaker, other_forms=(), fewer=(), losses=(*MEDUSA_LOSSES,), most_drafts=MOST_SLOTS, is_model=True
)
MAKERS: Mapping[str, HeadMaker] = {
    "medusa": HeadMaker(_medusa, (VLLM,), fewer=(VLLM,), losses=(*MEDUSA_LOSSES,), path=False),
    "medusa-2": HeadMaker(_medusa_2, (), fewer=(), losses=(*MEDUSA_LOSSES,), path=False, tunes=True),
    "mlp": _walk(partial(speculator, MlpSpeculator, write_mlp), most_layers=0),
    "arctic-rnn": _walk(partial(speculator, MlpSpeculator, partial(write_mlp, arctic=True)), most_layers=0),
    "arctic-lstm": _walk(partial(speculator, LstmSpeculator, write_mlp), most_layers=0),
    "redrafter": _walk(redrafter),
    "hydra": _walk(partial(hydra, False)),
    "hydra++": _walk(partial(hydra, True)),
    "joined-walk": _walk(joined, other_forms=(), fewer=(OFFICIAL,), most_layers=0, reads_layers=True),
    "pass": _walk(_pass, other_forms=(), fewer=(), most_layers=0, path=False),
    "space": _walk(_space, other_forms=(), fewer=(), most_layers=0, path=False, tunes=True, starts=False),
    "eagle": HeadMaker(partial(_eagle_1, 1, EAGLE_LOSSES), fewer=(), losses=(*EAGLE_LOSSES,)),
    "hass": HeadMaker(partial(_eagle_1, 3, HASS_LOSSES), fewer=(), losses=(*HASS_LOSSES,)),
    "eagle-3": _of_layers(_eagle_3, losses=(*ROW_LOSSES,), own_rows=True),
    "p-eagle": _of_layers(_p_eagle, losses=(*ROW_LOSSES,), own_rows=True, most_drafts=MOST_SLOTS, path=False),
    "falcon": HeadMaker(_falcon, (), fewer=(), losses=(*EAGLE_LOSSES,)),
    "mtp": HeadMaker(_mtp, fewer=(OFFICIAL,), losses=(*MEDUSA_LOSSES,), most_layers=1),
    "dspark": _of_layers(dspark, (SPECULATORS, DEEPSPEC), termed=True, ranked=True),
    "xpress": _of_layers(xpress, ranked=True),
    "lilicorr": _of_layers(lilicorr, (), losses=(*LATTICE_LOSSES,)),
    "mixing": _of_layers(mixing, ()),
    "spire": HeadMaker(_spire, (), fewer=(OFFICIAL,), losses=(*MEDUSA_LOSSES,)),
    "adapter": _walk(
        _adapter, other_forms=(), fewer=(), most_drafts=None, most_layers=1, reads_layers=True, exits=True
    ),
    "pard": _for_masks(partial(_pard, False), path=False),
    "pard-path": _for_masks(partial(_pard, True), ranked=True),
    "spec-drafter": _spec_maker,
}
"""Every kind by its word; the rows of a mixing block head know the whole drafted path."""
