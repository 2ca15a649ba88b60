"""What a draft may be made of for a target: a draft model, some of its layers, a new model, a head.

Layers are chosen by block influence (ShortGPT, arXiv 2403.03853): BI_l = 1 - E cos(h_l, h_{l+1}) over the states before
and behind a layer. A pruned copy drafts badly until it is healed, which is what the distillation is for.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from polydraft.drafters import MOST_BOOSTED, BoostedDrafter, ModelDrafter
from polydraft.drafters.heads.sublayers import Anatomy
from polydraft.errors import InvalidParameter, hint, shown
from polydraft.models import HuggingFaceModel, Layer
from polydraft.models.derived import without_layers
from polydraft.probs import UNFILTERED, SamplingParams
from polydraft.training.alignment.draft_losses import DRAFT_LOSSES, draft_loss
from polydraft.training.alignment.draft_training import DraftTraining
from polydraft.training.alignment.forms.boosting import BoostTraining, write_boosted
from polydraft.training.alignment.forms.low_rank import correct, write_corrected
from polydraft.training.alignment.forms.narrower import HALF, narrower
from polydraft.training.alignment.model_weights import read_weights
from polydraft.training.heads.head_making import usual_form
from polydraft.training.heads.losses.masked_training import copied, new_llama, write_draft_model
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.makers import MAKERS
from polydraft.training.heads.new_heads import OFFICIAL, HeadSize, NewHead, anatomy_for, usual_reads

TUNED, LORA, LAYERS, WIDTH, SMALL, VOCABULARY, BOOST = (
    *("tuned", "lora", "layers", "width", "small", "vocabulary", "boost"),
)
SHARE = 5
"""One in so many of the target's layers is left."""
NARROWEST, CHANNELS = 64, 64
"""A new model is half as wide as its target, by whole heads of so many channels, but no narrower than this."""
NEW_LAYERS = 2
CUT_KIND, CUT = "mixing", 4
"""The kind of head that drafts fewer tokens, and one in so many of the target's tokens that are left."""
SAMPLES, SAMPLE = "samples", 4
"""Boost tuning's filter by sample, and how many tokens a sample has."""


@dataclass(frozen=True, eq=False)
class Material:
    """What drafts are made of.

    Args:
        target: the target.
        ends: its embedding and output rows.
        given: the user's own draft model, if there is one.
        texts: text of the target, by which layers are chosen; None takes the first ones, for timing alone.
        params: how the target is sampled.
        tokens: those that the target wrote most often, rising; None takes the first ones, for timing alone.
        reference: weights of a draft of the same form that AdaSPEC's filter compares with; None for its beginning.
    """

    target: HuggingFaceModel
    ends: TargetEnds
    given: PreTrainedModel | None = None
    texts: Int[Tensor, "b t"] | None = None
    params: SamplingParams = UNFILTERED
    tokens: Int[Tensor, " v"] | None = None
    reference: Path | None = None


@dataclass(frozen=True)
class DraftForm:
    """One kind of draft.

    Args:
        word: its name.
        make: makes one that learns by a loss of that word.
        rate: the peak learning rate of its weight matrices.
        losses: which losses are tried, and in this order.
        allowed: the words of all losses that it can learn by.
        is_model: whether it is a draft model, or several, else a head.
        reads_layers: whether it reads outputs of the target's layers, not its last states alone.
        tunes: whether it is the given draft, which learns on.
        begins: whether it begins with the weights of the given draft, if there is one.
        folder: the form of its folder, as of `NewHead.write`.
    """

    word: str
    make: Callable[[Material, str], NewHead]
    rate: float
    losses: tuple[str, ...]
    allowed: tuple[str, ...]
    is_model: bool = True
    reads_layers: bool = False
    tunes: bool = False
    begins: bool = False
    folder: str = OFFICIAL

    @property
    def cuts(self) -> bool:
        """Whether it drafts some of the target's tokens alone."""
        return self.word == VOCABULARY

    def reads(self, layers: int) -> tuple[Layer, ...]:
        """Return which of the target's layers are to be kept with its text."""
        return usual_reads(layers) if self.reads_layers else ()

    def chosen_losses(self, asked: Sequence[str]) -> tuple[str, ...]:
        """Return the losses to try, which are the usual ones where none is asked for.

        Raises:
            InvalidParameter: it cannot learn by one of them.
        """
        for one in asked:
            if one not in self.allowed:
                raise InvalidParameter(
                    f"A draft of the form {self.word} learns by {', '.join(self.allowed)}, not {one!r}"
                    f"{hint(one, self.allowed)}."
                )
        return tuple(asked) or self.losses


def _learning(network: PreTrainedModel, material: Material, loss: str) -> NewHead:
    network.requires_grad_(True)
    return _with_loss(network, material, loss)


def _with_loss(
    network: PreTrainedModel, material: Material, loss: str, writer: Callable[..., None] = write_draft_model
) -> NewHead:
    kind, reference = draft_loss(loss), None
    if kind.share < 1:
        reference = DraftTraining(copy.deepcopy(network), material.ends, draft_loss("fkl"), material.params)
        reference.requires_grad_(False)
        if material.reference is not None:
            read_weights(reference, material.reference)
    training = DraftTraining(network, material.ends, kind, material.params, reference)
    return NewHead(training, ModelDrafter(HuggingFaceModel(network, fused=False)), writer)


def check_tunable(word: str, given: object) -> None:
    """Raise `InvalidParameter` where a form of that word has to begin as a given draft, and there is none."""
    if given is None and draft_form(word).tunes:
        raise InvalidParameter(
            f"There is no draft model for --form {word}: name one by --draft, or take another --form."
        )


def _given(word: str, material: Material) -> PreTrainedModel:
    """Return a copy of the given draft."""
    check_tunable(word, material.given)
    given = cast(PreTrainedModel, material.given)
    return copied(given, given.config.get_text_config().num_hidden_layers, None)


def _tuned(material: Material, loss: str) -> NewHead:
    return _learning(_given(TUNED, material), material, loss)


def _corrected(material: Material, loss: str) -> NewHead:
    return _with_loss(correct(_given(LORA, material)), material, loss, write_corrected)


def _boosted(count: int, span: int, material: Material, loss: str) -> NewHead:
    if draft_loss(loss).paths is not None or draft_loss(loss).share < 1:
        raise InvalidParameter(f"Drafts that are boosted learn by a loss of single rows, such as fkl, not {loss!r}.")
    start = _given(BOOST, material) if material.given is not None else _with_fewer_layers(material, SHARE)
    networks = [start, *(copy.deepcopy(start) for _ in range(count - 1))]
    members = [DraftTraining(one, material.ends, draft_loss(loss), material.params) for one in networks]
    training = BoostTraining(members, span).requires_grad_(True)
    return NewHead(training, BoostedDrafter([HuggingFaceModel(one, fused=False) for one in networks]), write_boosted)


def _with_fewer_layers(material: Material, share: int) -> PreTrainedModel:
    """Return a copy of one in so many of the target's layers."""
    model, count = material.target.model, material.target.layers
    keep = max(1, round(count / share))
    if count < 2:
        raise InvalidParameter("A target of one layer has none to drop; take another form.")
    chosen = range(keep) if material.texts is None else kept_layers(block_influence(model, material.texts), keep)
    pruned = without_layers(model, [number for number in range(count) if number not in {*chosen}])
    return copied(pruned, keep, None)


def _fewer_layers(material: Material, loss: str) -> NewHead:
    return _learning(_with_fewer_layers(material, SHARE), material, loss)


def _narrower(material: Material, loss: str) -> NewHead:
    many = _with_fewer_layers(material, HALF)
    cast(nn.Module, many).to(material.target.device)
    return _learning(narrower(many, material.texts), material, loss)


def _small(material: Material, loss: str) -> NewHead:
    target, ends = material.target.model, material.ends
    width = narrowed(material.target.width)
    own = anatomy_for(target, HeadSize())
    channels = min(CHANNELS, own.channels)
    anatomy = Anatomy(width, 3 * width, width // channels, 1, channels, rotation=own.rotation)
    basis = principal(ends.rows, width)
    embedding = ends.embedding @ (
        basis if ends.embedding.shape == ends.rows.shape else principal(ends.embedding, width)
    )
    return _learning(new_llama(target, embedding, ends.rows @ basis, anatomy, NEW_LAYERS), material, loss)


def _head(kind: str, material: Material, loss: str) -> NewHead:
    reads = usual_reads(material.target.layers)
    start = material.given if MAKERS[kind].is_model else None
    return MAKERS[kind].make(material.target.model, material.ends, reads, HeadSize(loss=loss), start)


def _fewer_tokens(material: Material, loss: str) -> NewHead:
    model, tokens = material.target.model, material.tokens
    if tokens is None:
        tokens = torch.arange(kept_tokens(material.target.vocab_size), device=material.target.device)
    reads = usual_reads(material.target.layers)
    ends = replace(TargetEnds.of(model, tokens), filters=material.ends.filters)
    return MAKERS[CUT_KIND].make(model, ends, reads, HeadSize(loss=loss), None)


def kept_tokens(vocab_size: int) -> int:
    """Return how many of so many tokens are left of a cut vocabulary."""
    return max(1, vocab_size // CUT)


def narrowed(width: int) -> int:
    """Return how wide a new model is for a target of a width."""
    return width if width <= NARROWEST else max(NARROWEST, width // 2 // CHANNELS * CHANNELS)


def principal(table: Float[Tensor, "V w"], width: int) -> Float[Tensor, "w d"]:
    """Return the directions in which rows differ the most: E B B^T is the nearest table of that rank (PCA)."""
    if width >= table.shape[1]:
        return torch.eye(table.shape[1], dtype=table.dtype, device=table.device)
    return torch.linalg.eigh(table.mT @ table).eigenvectors[:, -width:]


@torch.no_grad()
def block_influence(model: PreTrainedModel, ids: Int[Tensor, "b t"]) -> Float[Tensor, " l"]:
    """Return BI_l of every layer on a text."""
    states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    alike = [torch.cosine_similarity(one.float(), other.float(), -1).mean() for one, other in pairwise(states)]
    return 1 - torch.stack(alike)


def kept_layers(influence: Float[Tensor, " l"], keep: int) -> list[int]:
    """Return which layers are left: the first, the last, and of the others those of the largest influence.

    The state behind the last layer is taken behind the last norm, so that its influence is not known.
    """
    last = len(influence) - 1
    order = [0, last, *(one for one in influence.argsort(descending=True).tolist() if one not in (0, last))]
    return sorted(order[:keep])


_model_form = partial(DraftForm, allowed=(*DRAFT_LOSSES,))
_boost_form = partial(
    DraftForm,
    begins=True,
    rate=1e-3,
    losses=("fkl",),
    allowed=tuple(word for word, loss in DRAFT_LOSSES.items() if loss.paths is None and loss.share == 1),
)
FORMS: Mapping[str, DraftForm] = {
    TUNED: _model_form(TUNED, _tuned, 1e-3, ("jsd", "lk-alpha", "calls"), tunes=True, begins=True),
    LORA: _model_form(LORA, _corrected, 4e-3, ("jsd", "lk-alpha", "calls"), tunes=True, begins=True),
    LAYERS: _model_form(LAYERS, _fewer_layers, 2e-3, ("fkl+lk-alpha", "jsd")),
    WIDTH: _model_form(WIDTH, _narrower, 2e-3, ("fkl+lk-alpha", "jsd")),
    SMALL: _model_form(SMALL, _small, 4e-3, ("fkl+lk-alpha", "jsd")),
    **{
        kind: DraftForm(
            *(kind, partial(_head, kind), 4e-3, maker.losses[:1], maker.losses),
            is_model=False,
            reads_layers=maker.reads_layers,
            begins=maker.is_model,
            folder=usual_form(kind, None),
        )
        for kind, maker in MAKERS.items()
        if not maker.encodes and not maker.tunes
    },
    VOCABULARY: DraftForm(
        *(VOCABULARY, _fewer_tokens, 4e-3, MAKERS[CUT_KIND].losses[:1], MAKERS[CUT_KIND].losses),
        is_model=False,
        reads_layers=MAKERS[CUT_KIND].reads_layers,
        folder=usual_form(CUT_KIND, 1),
    ),
}
"""Every form by its word but `boost:N`; the kinds of heads are those of `polydraft train head`."""
GIVEN = (TUNED, LORA, "pard-path", f"{BOOST}:2")
"""What may become of a given draft, in the order in which it is looked at where no form is asked for."""
FIRST = (LAYERS, SMALL, CUT_KIND, WIDTH, VOCABULARY)
UNASKED = (*dict.fromkeys((*FIRST, *(word for word, form in FORMS.items() if not form.tunes), f"{BOOST}:2")),)
"""The same of what needs no draft: what paid on small machines first, then all other kinds."""


def draft_form(word: str) -> DraftForm:
    """Return the form of a word.

    Raises:
        InvalidParameter: there is none.
    """
    if word.split(":")[0] == BOOST:
        return _boost(word)
    if word in MAKERS and word not in FORMS:
        what = "is for encoder-decoders" if MAKERS[word].encodes else "has the target learn with it"
        raise InvalidParameter(f"The form {word} {what}, and is made by `polydraft train head {word}`.")
    if word not in FORMS:
        raise InvalidParameter(
            f"A draft is of the form {', '.join(FORMS)} or {BOOST}:N, not {shown(word)}{hint(word, FORMS)}."
        )
    return FORMS[word]


def _boost(word: str) -> DraftForm:
    _, count, *by = word.split(":") if ":" in word else (word, "")
    if not count.isdecimal() or not 2 <= int(count) <= MOST_BOOSTED or by not in ([], [SAMPLES]):
        raise InvalidParameter(
            f"Boosted drafts are {BOOST}:N or {BOOST}:N:{SAMPLES}, N from 2 to {MOST_BOOSTED}, not {shown(word)}."
        )
    return _boost_form(word, partial(_boosted, int(count), SAMPLE if by else 1))


def seeded(form: DraftForm, material: Material, loss: str, seed: int) -> NewHead:
    """Return a new draft whose first weights follow from a seed; nobody else's random numbers are touched."""
    cuda = material.target.device.type == "cuda"
    with torch.random.fork_rng(devices=[material.target.device] if cuda else []):
        torch.manual_seed(seed)
        made = form.make(material, loss)
    made.training.to(material.target.device)
    return made
