"""The kinds of heads that are trained from nothing: what each is made of, its losses, and its drafter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from polydraft.drafters import Drafter, write_walk
from polydraft.drafters.heads.paths import GatedMarkov, Markov, RecurrentMarkov
from polydraft.drafters.heads.sublayers import Anatomy, Rotation
from polydraft.errors import InvalidParameter, hint
from polydraft.models import HuggingFaceModel, Layer
from polydraft.training.heads.losses.block_training import BlockLoss
from polydraft.training.heads.losses.eagles import (
    EagleLoss,
)
from polydraft.training.heads.losses.last_state_training import RowLoss
from polydraft.training.heads.losses.row_losses import (
    Learner,
    TargetEnds,
    accepted_loss,
    lk_alpha,
    lk_lambda,
    soft_cross_entropy,
)
from polydraft.training.heads.losses.tuned_target import Drift

ANCHORS = 48
"""Blocks per text that a block head learns at a step."""
PLACES, RIDER_PLACES = 192, 16
"""Places per text that Medusa's heads learn at a step, and those behind which riders lie."""
MOST_DEPTHS, MOST_BLOCKS = 16, 64
"""The most depths of a head that walks, and the most blocks of each, in its folder."""
PASSES, DECAY_OF_MTP = 3, 0.6
"""FastMTP's number of passes over a text, and how much less each counts than the one before it."""
DRAFTS, RANK, EXIT = 6, 64, 2
"""How many tokens deep heads usually draft, the usual rank of DSpark's term, and where adapters usually stand."""
OFFICIAL, SPECULATORS, VLLM, DEEPSPEC, OWN = "official", "speculators", "vllm", "deepspec", "polydraft"
"""The forms of folders: the usual one of a family's trainers, and others that some families have; the last is of walks,
and this package's own."""
LOSSES = ("published", "entropy", "acceptance", "d-pace", "lk-alpha", "lk-lambda")
"""What heads may learn by: their authors' losses; cross entropy alone; 0.1 of cross entropy and 1.8 of the total
variation, which is what is rejected (DSpark's authors take it); cross entropy with D-PACE's weights, for block heads;
and the LK losses, -log alpha and the mixture of divergence and total variation that leans to the latter as alpha grows.
"""


TERMS: Mapping[str, type[Markov]] = {"vanilla": Markov, "gated": GatedMarkov, "rnn": RecurrentMarkov}
"""How a DSpark head's rows know the drafted path, by its authors' words: by the last token alone; by the last token as
far as the slot lets it through; by a state of all tokens drafted so far and of the slots that they were drawn from."""


@dataclass(frozen=True)
class HeadSize:
    """What a new head is made of.

    Args:
        layers: how many; None for those of the head it begins with, or the kind's usual number: 1, of a block head 2.
        drafts: how many tokens deep it learns to draft; None for as many as the head it begins with has, or 6.
        inner: width inside the gated layers; None for twice the hidden width.
        rank: of the term of DSpark or XPress; None for that of the head it begins with, or 64.
        term: of DSpark, one of `TERMS`; None for that of the head it begins with, or the first.
        loss: one of `LOSSES`.
        exit: of an adapter, behind how many layers of the target it stands; None for that of the adapter it begins
            with, or 2, or 1 of a target of less than five layers.
        frozen_rows: of EAGLE-3: draft from the target's own output rows, which then do not learn, instead of rows that
            begin as their copies. A step is cheaper, a checkpoint is smaller, and little text cannot spoil the rows.

    Raises:
        InvalidParameter: a number below 1, or another loss.
    """

    layers: int | None = None
    drafts: int | None = None
    inner: int | None = None
    rank: int | None = None
    term: str | None = None
    loss: str = "published"
    exit: int | None = None
    frozen_rows: bool = False

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ("layers", "drafts", "inner", "rank", "exit")}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise InvalidParameter(f"A head's {name} must be at least 1, but is {value}.")
        if self.loss not in LOSSES:
            meant = hint(self.loss, LOSSES)
            raise InvalidParameter(f"A head learns by the loss {', '.join(LOSSES)}, not {self.loss!r}{meant}.")
        if self.term is not None and self.term not in TERMS:
            meant = hint(self.term, TERMS)
            raise InvalidParameter(f"A DSpark head's term is {', '.join(TERMS)}, not {self.term!r}{meant}.")


@dataclass(frozen=True, eq=False)
class NewHead:
    """A head to train.

    Args:
        training: the head with its losses.
        drafter: with the same weights.
        writer: writes drafters of its family as folders.
        drift: measures on held-out texts what became of the target; None where it stays.
    """

    training: Learner
    drafter: Drafter
    writer: Callable[..., None]
    drift: Callable[[Dataset[dict[str, Tensor]]], Drift] | None = None

    def write(self, folder: Path, target: HuggingFaceModel, form: str, card: str) -> None:
        """Write the drafter as a folder of a form of its family, with the text of its card."""
        writer: Callable[..., None] = write_walk if form == OWN else self.writer
        writer(self.drafter, folder, target, card=card, **({} if form in (OFFICIAL, OWN) else {form: True}))


@dataclass(frozen=True)
class HeadMaker:
    """One kind of head.

    Args:
        make: makes one for a target, with the ends that it shares, the layers that it reads, its size, and the
            network with whose weights it will begin, whose sizes it has, or None.
        other_forms: the forms of folders that its family has beside the official one.
        fewer: the forms that hold heads of fewer tokens than their target.
        losses: those that it can learn by, of `LOSSES`.
        own_rows: whether it has output rows of its own, as its authors' heads have.
        termed: whether its rows have one of DSpark's terms.
        ranked: whether its term has a rank.
        most_drafts: how deep its folder can say that it drafts; None where there is no bound.
        most_layers: likewise of layers or blocks; 0 where it has none.
        path: whether a row knows the tokens drafted above it; else it is the same for all nodes of a depth.
        reads_layers: whether it reads outputs of the target's layers, not its last hidden states alone, which the text
            for training has in any case.
        is_model: whether it is no head but a draft model, which may begin with any other one of the target's tokens.
        tunes: whether the target learns with it, and its folder is a whole model.
        starts: whether it may begin with the weights of another one.
        exits: whether it stands behind some of the target's layers, whose output is all that it reads.
        encodes: whether its target is an encoder-decoder; else it is a decoder alone.
    """

    make: Callable[[PreTrainedModel, TargetEnds, tuple[Layer, ...], HeadSize, nn.Module | None], NewHead]
    other_forms: tuple[str, ...] = (SPECULATORS,)
    fewer: tuple[str, ...] = (OFFICIAL, SPECULATORS)
    losses: tuple[str, ...] = LOSSES
    own_rows: bool = False
    termed: bool = False
    ranked: bool = False
    most_drafts: int | None = None
    most_layers: int | None = None
    path: bool = True
    reads_layers: bool = False
    is_model: bool = False
    tunes: bool = False
    starts: bool = True
    exits: bool = False
    encodes: bool = False

    @property
    def forms(self) -> tuple[str, ...]:
        """All forms of folders."""
        return (OFFICIAL, *self.other_forms)


MEDUSA_LOSSES: Mapping[str, RowLoss | None] = {
    "published": None,
    "entropy": soft_cross_entropy,
    "acceptance": accepted_loss,
    "lk-alpha": lk_alpha,
    "lk-lambda": lk_lambda,
}
"""What Medusa's rows cost by the word of the loss; None for the cross entropy of the text's tokens."""
SOFT_LOSSES: Mapping[str, RowLoss] = {
    name: soft_cross_entropy if loss is None else loss for name, loss in MEDUSA_LOSSES.items()
}
"""The same of heads whose authors compare rows with the target's."""
EAGLE_LOSSES: Mapping[str, EagleLoss] = {
    "published": EagleLoss(),
    **{name: EagleLoss(name, entropy=1.0) for name in ("acceptance", "lk-alpha", "lk-lambda")},
}
"""The weights of heads that learn features too, EAGLE-1's and Falcon's, by the word of their loss: of its rows, where
another than their authors' is asked for, the whole."""
HASS_LOSSES: Mapping[str, EagleLoss] = {
    **EAGLE_LOSSES,
    "published": EagleLoss(likeliest=1.0),
    "entropy": EAGLE_LOSSES["published"],
}
"""HASS's weights by the word of its loss. Its authors train by "entropy" first, and then a fifth as long by their own.
"""
BLOCK_LOSSES: Mapping[str, BlockLoss] = {
    "published": BlockLoss(),
    "entropy": BlockLoss(1.0, 0.0),
    "acceptance": BlockLoss(),
    "d-pace": BlockLoss(1.0, 0.0, decay=None),
    "lk-alpha": BlockLoss(0.0, 0.0, rows=lk_alpha),
    "lk-lambda": BlockLoss(0.0, 0.0, rows=lk_lambda),
}
"""A block head's weights by the word of its loss."""
XPRESS_LOSSES: Mapping[str, BlockLoss] = {**BLOCK_LOSSES, "published": BlockLoss(0.1, 0.9)}
"""Those of each kind of XPress's rows."""


def free_token(target: PreTrainedModel) -> int:
    """Return the last token of a target that neither begins, pads nor ends texts, to be a mask."""
    config, taken = target.config.get_text_config(decoder=True), set[int]()
    for one in (config, target.generation_config):
        for kind in ("bos", "eos", "pad", "decoder_start"):
            named = getattr(one, f"{kind}_token_id", None)
            taken |= {*named} if isinstance(named, list | tuple) else {named}
    return next(one for one in reversed(range(config.vocab_size)) if one not in taken)


def usual_reads(layers: int) -> tuple[int, ...]:
    """Return the outputs that EAGLE-3 reads: behind the second layer, the middle, and the third from the end.

    The last layer's is not among them: folders of block heads mean the state behind the last norm by it.
    """
    last = layers - 1
    least = min(1, last)
    return tuple(sorted({min(2, last), max(layers // 2, least), max(layers - 3, least)}))


def anatomy_for(target: PreTrainedModel, size: HeadSize, *, normed: bool = False) -> Anatomy:
    """Return layers as wide as a target, with heads of 64 channels where that goes, four to a key head."""
    config = target.config.get_text_config()
    width = config.hidden_size
    channels = next((one for one in (64, 32, 16, 8, 4) if width % one == 0), 2)
    heads = width // channels
    turned = getattr(config, "rope_parameters", None) or {}
    theta = turned.get("rope_theta", 10_000.0) if isinstance(turned, dict) else 10_000.0
    return Anatomy(
        width=width,
        inner=size.inner or 2 * width,
        heads=heads,
        groups=heads // 4 if heads % 4 == 0 else 1,
        channels=channels,
        normed=normed,
        rotation=Rotation(float(theta)),
    )


def last_norm(target: PreTrainedModel) -> Tensor | None:
    """Return the weights of a target's last norm, where it is one that divides by the root mean square."""
    norm = getattr(target.get_decoder(), "norm", None)
    weight = getattr(norm, "weight", None)
    return weight.detach() if isinstance(weight, Tensor) and getattr(norm, "bias", None) is None else None
