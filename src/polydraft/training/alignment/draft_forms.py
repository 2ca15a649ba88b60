"""What a draft may be made of for a target: a draft model, some of its layers, a new model, a head.

Layers are chosen by block influence (ShortGPT, arXiv 2403.03853): BI_l = 1 - E cos(h_l, h_{l+1}) over the states before
and behind a layer. A pruned copy drafts badly until it is healed, which is what the distillation is for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from polydraft.drafters import ModelDrafter
from polydraft.drafters.heads.sublayers import Anatomy
from polydraft.errors import InvalidParameter, hint
from polydraft.models import HuggingFaceModel, Layer
from polydraft.models.derived import without_layers
from polydraft.training.alignment.draft_training import DraftTraining, draft_loss
from polydraft.training.heads.losses.masked_training import copied, new_llama, write_draft_model
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.makers import MAKERS
from polydraft.training.heads.new_heads import HeadSize, NewHead, anatomy_for, usual_reads

TUNED, LAYERS, SMALL = "tuned", "layers", "small"
SHARE = 5
"""One in so many of the target's layers is left."""
NARROWEST, CHANNELS = 64, 64
"""A new model is half as wide as its target, by whole heads of so many channels, but no narrower than this."""
NEW_LAYERS = 2
NOT_THERE = ("lora", "width", "vocabulary", "boost")


@dataclass(frozen=True, eq=False)
class Material:
    """What drafts are made of.

    Args:
        target: the target.
        ends: its embedding and output rows.
        given: the user's own draft model, if there is one.
        texts: text of the target, by which layers are chosen; None takes the first ones, for timing alone.
        heat: the temperature that is sampled at.
    """

    target: HuggingFaceModel
    ends: TargetEnds
    given: PreTrainedModel | None = None
    texts: Int[Tensor, "b t"] | None = None
    heat: float = 1.0


@dataclass(frozen=True)
class DraftForm:
    """One kind of draft.

    Args:
        word: its name.
        make: makes one that learns by a loss of that word.
        rate: the peak learning rate of its weight matrices.
        losses: which losses are tried, and in this order.
        allowed: the words of all losses that it can learn by.
        is_model: whether it is a draft model, else a head.
    """

    word: str
    make: Callable[[Material, str], NewHead]
    rate: float
    losses: tuple[str, ...]
    allowed: tuple[str, ...]
    is_model: bool = True

    def reads(self, layers: int) -> tuple[Layer, ...]:
        """Return which of the target's layers are to be kept with its text."""
        return () if self.is_model else usual_reads(layers)

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
    training = DraftTraining(network, material.ends, draft_loss(loss), material.heat)
    return NewHead(training, ModelDrafter(HuggingFaceModel(network, fused=False)), write_draft_model)


def _tuned(material: Material, loss: str) -> NewHead:
    if material.given is None:
        raise InvalidParameter("There is no draft model to tune: name one by --draft, or take another form.")
    had = material.given.config.get_text_config().num_hidden_layers
    return _learning(copied(material.given, had, None), material, loss)


def _fewer_layers(material: Material, loss: str) -> NewHead:
    model, count = material.target.model, material.target.layers
    keep = max(1, round(count / SHARE))
    if count < 2:
        raise InvalidParameter("A target of one layer has none to drop; take another form.")
    chosen = range(keep) if material.texts is None else kept_layers(block_influence(model, material.texts), keep)
    pruned = without_layers(model, [number for number in range(count) if number not in {*chosen}])
    return _learning(copied(pruned, keep, None), material, loss)


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
    return MAKERS[kind].make(material.target.model, material.ends, reads, HeadSize(loss=loss), None)


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


DRAFT_WORDS = ("fkl", "rkl", "jsd", "tvd", "lk-alpha", "lk-lambda", "fkl+lk-alpha", "calls")
_model_form = partial(DraftForm, allowed=DRAFT_WORDS)
FORMS: Mapping[str, DraftForm] = {
    TUNED: _model_form(TUNED, _tuned, 1e-3, ("jsd", "lk-alpha", "calls")),
    LAYERS: _model_form(LAYERS, _fewer_layers, 2e-3, ("fkl+lk-alpha", "jsd")),
    SMALL: _model_form(SMALL, _small, 4e-3, ("fkl+lk-alpha", "jsd")),
    **{
        kind: DraftForm(kind, partial(_head, kind), 4e-3, maker.losses[:1], maker.losses, is_model=False)
        for kind, maker in MAKERS.items()
        if not maker.encodes and not maker.tunes
    },
}
"""Every form by its word; the kinds of heads are those of `polydraft train head`."""
UNASKED = (LAYERS, SMALL, "mixing")
"""What is tried if no form is asked for and no draft is given, the cheapest first."""


def draft_form(word: str) -> DraftForm:
    """Return the form of a word.

    Raises:
        InvalidParameter: there is none, or it is not there yet.
    """
    if word not in FORMS:
        there = ", ".join(NOT_THERE)
        raise InvalidParameter(
            f"A draft is of the form {', '.join(FORMS)}, not {word!r}{hint(word, FORMS)}; {there} are not made yet."
        )
    return FORMS[word]


def seeded(form: DraftForm, material: Material, loss: str, seed: int) -> NewHead:
    """Return a new draft whose first weights follow from a seed; nobody else's random numbers are touched."""
    cuda = material.target.device.type == "cuda"
    with torch.random.fork_rng(devices=[material.target.device] if cuda else []):
        torch.manual_seed(seed)
        made = form.make(material, loss)
    made.training.to(material.target.device)
    return made
