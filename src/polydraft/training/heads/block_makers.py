"""How block heads are made for a target."""

from dataclasses import replace
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from polydraft.drafters import (
    HeadDrafter,
    write_block,
)
from polydraft.drafters.heads.block_head import BlockHead, BlockShape
from polydraft.drafters.heads.drafter import HeadEnds
from polydraft.drafters.heads.lilicorr import LatticeShape, LiLiCorr
from polydraft.drafters.heads.paths import Markov, Mixing, PathTerm
from polydraft.drafters.heads.xpress import XPress
from polydraft.errors import InvalidParameter
from polydraft.models import Layer
from polydraft.training.heads.losses.block_training import BlockTraining
from polydraft.training.heads.losses.path_training import LATTICE_LOSSES, LatticeTraining, XPressTraining
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.new_heads import (
    ANCHORS,
    BLOCK_LOSSES,
    DRAFTS,
    RANK,
    TERMS,
    XPRESS_LOSSES,
    HeadSize,
    NewHead,
    anatomy_for,
)


def _block(ends: TargetEnds, shape: BlockShape, path: PathTerm, size: HeadSize) -> NewHead:
    head = BlockHead(shape, path, path.told)
    return _of_block(BlockTraining(head, ends, ANCHORS, BLOCK_LOSSES[size.loss]), ends)


def _of_block(training: BlockTraining, ends: TargetEnds) -> NewHead:
    return NewHead(training, HeadDrafter(training.head, HeadEnds(tokens=ends.tokens)), write_block)


def _block_shape(
    target: PreTrainedModel, width: int, reads: tuple[Layer, ...], size: HeadSize, given: BlockHead | None
) -> BlockShape:
    """Return a block head's sizes: those of the head that it begins with, as deep as is asked for.

    Raises:
        InvalidParameter: another number of layers is asked for, or the head to begin with is for another target.
    """
    if given is None:
        anatomy = anatomy_for(target, size, normed=True)
        return BlockShape(anatomy, size.layers or 2, reads, width, size.drafts or DRAFTS, mask_id=None)
    shape = given.shape
    if size.layers not in (None, shape.layers):
        raise InvalidParameter(
            f"The head to begin with has {shape.layers} layers, not {size.layers}; leave layers out."
        )
    if {shape.target_width, shape.anatomy.width} != {width}:
        raise InvalidParameter(
            f"The head to begin with reads states of width {shape.target_width} and is {shape.anatomy.width} wide, and "
            f"the target {width}: it was trained for another target."
        )
    return replace(shape, block=(size.drafts or shape.drafts) + (not shape.shifted))


def dspark(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    """Make a block head with one of DSpark's terms, which begins with the layers of the one it starts from."""
    vocab, width = ends.embedding.shape
    given = start if isinstance(start, BlockHead) else None
    shape = _block_shape(target, width, reads, size, given)
    shape = _masked(target, shape, keeps=given is not None and isinstance(given.path, Markov))
    path = _markov(size, vocab, len(ends.rows), shape.anatomy.width, None if given is None else given.path)
    return _block(ends, shape, path, size)


def _masked(target: PreTrainedModel, shape: BlockShape, *, keeps: bool) -> BlockShape:
    """Return a shape whose mask is a token, the target's end where it had an embedding of its own and keeps none.

    Raises:
        InvalidParameter: the mask is none of the target's tokens.
    """
    config = target.config.get_text_config()
    if shape.mask_id is None and not keeps:
        end = config.eos_token_id
        shape = replace(shape, mask_id=end[0] if isinstance(end, list) else end or 0)
    if shape.mask_id is not None and shape.mask_id >= config.vocab_size:
        raise InvalidParameter(
            f"The mask of the head to begin with is token {shape.mask_id}, and the target has {config.vocab_size} "
            "tokens: it was trained for another target."
        )
    return shape


def _markov(size: HeadSize, vocab: int, rows: int, width: int, given: PathTerm | None) -> PathTerm:
    """Return DSpark's term: the one that is asked for, or else like the given one.

    Raises:
        InvalidParameter: the given one goes on, and another rank is asked for.
    """
    like = given if isinstance(given, Markov) else None
    kind = Markov if like is None else type(like)
    kind = kind if size.term is None else TERMS[size.term]
    if like is not None and type(like) is kind:
        _check_rank(size, like.rank)
    rank = size.rank or (RANK if like is None else like.rank)
    return Markov(vocab, rows, rank) if kind is Markov else kind(vocab, rows, rank, width)  # pyright: ignore[reportCallIssue]  the two others read the slot


def _check_rank(size: HeadSize, rank: int) -> None:
    if size.rank not in (None, rank):
        raise InvalidParameter(f"The head to begin with has a term of rank {rank}, not {size.rank}; leave rank out.")


def _in_place(
    target: PreTrainedModel, width: int, reads: tuple[Layer, ...], size: HeadSize, given: BlockHead | None, kind: type
) -> BlockShape:
    """Return the sizes of a block head whose slots draft their own places, as those with a term of a kind do."""
    shape = _block_shape(target, width, reads, size, given)
    goes_on = given is not None and isinstance(given.path, kind)
    shape = shape if goes_on else replace(shape, shifted=False, block=shape.drafts + 1)
    return _masked(target, shape, keeps=goes_on)


def xpress(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    """Make a block head whose slots are mixed causally."""
    (vocab, width), given = ends.embedding.shape, start if isinstance(start, BlockHead) else None
    like = given.path if given is not None and isinstance(given.path, XPress) else None
    shape = _in_place(target, width, reads, size, given, XPress)
    if like is not None:
        _check_rank(size, like.rank)
        if like.slots != shape.block:
            raise InvalidParameter(f"The head to begin with mixes {like.slots} slots, not {shape.block}.")
    rank = size.rank or (RANK if like is None else like.rank)
    inner = 2 * rank if like is None else like.inner
    path = XPress(vocab, len(ends.rows), rank, shape.anatomy.width, shape.block, inner)
    return _of_block(XPressTraining(BlockHead(shape, path), ends, ANCHORS, XPRESS_LOSSES[size.loss]), ends)


def lilicorr(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    """Make a block head whose slots' likeliest tokens look at each other."""
    width, given = ends.embedding.shape[1], start if isinstance(start, BlockHead) else None
    like = given.path if given is not None and isinstance(given.path, LiLiCorr) else None
    shape = _in_place(target, width, reads, size, given, LiLiCorr)
    if like is not None and like.drafts != shape.drafts:
        raise InvalidParameter(f"The head to begin with has candidates of {like.drafts} drafts, not {shape.drafts}.")
    own = shape.anatomy
    lattice = LatticeShape(8, own.width, 2, own.heads, 2.0, own.width, 1e-4, 8.0, own.eps)
    path = LiLiCorr(own.width, shape.drafts, lattice if like is None else like.shape)
    return _of_block(LatticeTraining(BlockHead(shape, path), ends, ANCHORS, LATTICE_LOSSES[size.loss]), ends)


def mixing(
    target: PreTrainedModel, ends: TargetEnds, reads: tuple[Layer, ...], size: HeadSize, start: nn.Module | None = None
) -> NewHead:
    """Make a block head whose rows know the whole drafted path."""
    width = ends.embedding.shape[1]
    given = start if isinstance(start, BlockHead) else None
    like = given.path if given is not None and isinstance(given.path, Mixing) else None
    shape = _block_shape(target, width, reads, size, given)
    shape = shape if like is not None else replace(shape, mask_id=None)
    sizes = (width, 3 * width // 2) if like is None else (like.size, cast(nn.Linear, like.mix[0]).out_features)
    return _block(ends, shape, Mixing(shape.anatomy.width, *sizes), size)
