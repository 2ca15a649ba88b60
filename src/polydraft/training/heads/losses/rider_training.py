"""Training riders: PaSS's embeddings before a frozen target, and the texts that SPACE tunes a target on.

Behind token p of a text lie riders 1 to L. They see the text up to p and the riders before them of the same place, at
positions p + 1, p + 2, ...; rider i is to foretell token p + 1 + i. Token p + 1 is left out: in use it comes out of the
pass that scores the riders.

PaSS learns by the mean cross entropy of the text's tokens at places drawn at random (arXiv 2311.13581). Only the L
embeddings learn: a step is a pass of the target with gradients to its inputs. SPACE (arXiv 2402.11809) cuts a text at a
random place of its answer and puts k + 1 masks behind, so that each text has one place; all the target's weights learn,
by the cross entropy of what the text went on with. The last mask has nothing to foretell: the usual shift of labels by
one leaves it over.

Source: cteant/SPACE, `src/llmtuner/dsets/preprocess.py`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from polydraft.drafters.rider_drafter import riders_behind
from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models import HuggingFaceModel
from polydraft.training.heads.losses.last_state_training import RowLoss, asked_for
from polydraft.training.heads.losses.row_losses import (
    HeadBatch,
    HeadTraining,
    TargetEnds,
    agreement,
    cross_entropy,
    summed,
)
from polydraft.trees import Chain, TokenTree, topology

IGNORED = -100
"""The label of what is not to be foretold, as in torch and transformers."""


class PassTraining(HeadTraining):
    """PaSS's embeddings with their loss: the sum over riders of the mean over places of the texts.

    Args:
        lookahead: the embeddings, which learn.
        model: the target, which does not.
        row_loss: a loss of logits against the target's law; None for the cross entropy of the text's tokens.
        places: the most places of a text, drawn anew at every step.

    Raises:
        UnsupportedModel: the target scores chains only.
    """

    def __init__(
        self, lookahead: nn.Embedding, model: PreTrainedModel, target: TargetEnds, row_loss: RowLoss | None, places: int
    ) -> None:
        super().__init__(target)
        if not HuggingFaceModel(model, fused=False).facts.branches:
            raise UnsupportedModel(f"{type(model).__name__} scores chains only, so no riders can lie behind its texts.")
        self.model = (model,)  # a tuple, so that the target is no part of what is trained and saved
        self.lookahead, self.row_loss, self.places = lookahead, row_loss, places

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the losses of all riders, at some places of each text."""
        (target,), ids, drafts = self.target, batch.ids, self.lookahead.num_embeddings
        asked = asked_for(batch.valid.bool(), drafts)
        keys = torch.rand(ids.shape, device=ids.device).where(asked.any(-1), -1.0)
        places = keys.topk(min(self.places, ids.shape[1]), dim=-1).indices
        asked, states = asked.gather(1, places.unsqueeze(-1).expand(-1, -1, drafts)), self.states(ids, places)
        losses, overlaps, counts = list[Tensor](), list[Tensor](), list[Tensor]()
        for draft in range(drafts):
            row, column = asked[..., draft].nonzero(as_tuple=True)
            before = places[row, column] + draft + 1  # the last token that the target's own law knows
            logits = target.output(states[row, column, draft].float())
            laws = target.laws(batch.final[row, before], batch.lse[row, before])
            known = target.place_of(ids[row, before + 1])
            values = cross_entropy(logits, known) if self.row_loss is None else self.row_loss(logits, laws)
            counts.append(asked[..., draft].sum())
            losses.append(values.sum() / counts[-1].clamp_min(1))
            overlaps.append(agreement(logits, laws).sum().detach() / counts[-1].clamp_min(1))
        return summed(losses, overlaps, counts)

    def states(self, ids: Int[Tensor, "b t"], places: Int[Tensor, "b a"]) -> Float[Tensor, "b a L d"]:
        """Return the target's last hidden states at riders behind tokens of texts.

        The texts are read first, without gradients: riders see their keys, and no token of a text sees a rider.
        """
        (model,), (batch, length), count = self.model, ids.shape, self.lookahead.num_embeddings
        chain = topology(Chain(length - 1).shape, batch, ids.device)
        tokens = torch.arange(count, device=ids.device)
        riders = riders_behind(TokenTree(ids, chain, torch.ones_like(ids, dtype=torch.bool)), places, tokens)
        own, hidden = self.lookahead(riders.tokens).to(model.dtype), ~riders.sees.unsqueeze(1)
        body = model.base_model
        with torch.no_grad():
            read = body(input_ids=ids, use_cache=True).past_key_values
        given = {
            "inputs_embeds": own,
            "attention_mask": torch.zeros_like(hidden, dtype=own.dtype).masked_fill(hidden, torch.finfo(own.dtype).min),
            "position_ids": riders.places,
            "past_key_values": read,
            "use_cache": True,
        }
        frozen = {name: weight.detach() for name, weight in body.named_parameters()}  # of which no gradient is asked
        return functional_call(body, frozen, kwargs=given)[0].unflatten(1, (-1, count))


def cut_at_masks(
    ids: Int[Tensor, "b t"],
    answers: Sequence[int],
    masks: Sequence[int],
    random: torch.Generator,
    share: float = 0.5,
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """Return texts and labels to tune a target on, as SPACE does; labels are shifted by one by whoever uses them.

    Some texts are cut at a random place of their answer, behind which come the masks, one more of the last that has
    nothing to foretell, and padding that nobody sees. The others stay, and so do answers that are too short.

    Args:
        ids: texts.
        answers: where each text's answer begins; what is before it is not to be foretold.
        masks: the k mask tokens.
        random: where to cut.
        share: the chance that a text is cut.

    Raises:
        InvalidParameter: there is no mask, or `share` is no probability.
    """
    if not masks or not 0 <= share <= 1:
        raise InvalidParameter(f"A text is cut for some masks, with a chance in [0, 1], not {len(masks)} and {share}.")
    length, count = ids.shape[1], len(masks)
    given, labels = ids.clone(), ids.clone()
    filled = torch.tensor([*masks, masks[-1]], device=ids.device)
    for row, first in enumerate(answers):
        labels[row, :first] = IGNORED
        drawn, room = torch.rand(2, generator=random).tolist(), length - first - count
        if room > 0 and drawn[0] < share:
            cut = first + int(drawn[1] * room)
            given[row, cut : cut + count + 1] = filled
            given[row, cut + count + 1 :] = filled[-1]
            labels[row, cut + count + 1 :] = IGNORED
    return given, labels


def next_labels_loss(logits: Float[Tensor, "b t V"], labels: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Return the mean cross entropy of the labels, each by the logits one place before it: SPACE's loss.

    Masks weigh as much as the tokens of the text.
    """
    shifted = labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), shifted, ignore_index=IGNORED)
