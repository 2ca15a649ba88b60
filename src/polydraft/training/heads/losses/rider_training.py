"""Training riders: PaSS's embeddings before a frozen target, and the texts that SPACE tunes a target on.

Behind token p of a text lie riders 1 to L. They see the text up to p and the riders before them of the same place, at
positions p + 1, p + 2, ...; rider i is to foretell token p + 1 + i. Token p + 1 is left out: in use it comes out of the
pass that scores the riders.

PaSS learns by the mean cross entropy of the text's tokens at places drawn at random (arXiv 2311.13581). Only the L
embeddings learn: a step is a pass of the target with gradients to its inputs. SPACE (arXiv 2402.11809) cuts a text at a
random place of its answer and puts k + 1 masks behind, so that each text has one place; all the target's weights learn,
by the cross entropy of what the text went on with. The last mask has nothing to foretell: the usual shift of labels by
one leaves it over. Here adapters and the masks' embeddings learn, and texts are the target's own.

Source: cteant/SPACE, `src/llmtuner/dsets/preprocess.py`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from polydraft.drafters.rider_drafter import riders_behind
from polydraft.errors import UnsupportedModel
from polydraft.models import HuggingFaceModel
from polydraft.training.heads.losses.last_state_training import RowLoss, asked_for
from polydraft.training.heads.losses.row_losses import (
    HeadBatch,
    HeadTraining,
    TargetEnds,
    agreement,
    cross_entropy,
    soft_cross_entropy,
    summed,
)
from polydraft.training.heads.losses.tuned_target import AdaptedTarget
from polydraft.trees import Chain, TokenTree, topology

IGNORED = -100
"""The label of what is not to be foretold, as in torch and transformers."""
CUTS = 4
"""At how many places each held-out text is cut in turn."""


def check_branches(model: HuggingFaceModel) -> None:
    """Raise `UnsupportedModel` for a target that scores chains only."""
    if not model.facts.branches:
        name = type(model.model).__name__
        raise UnsupportedModel(f"{name} scores chains only, so no riders can lie behind its texts.")


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
        check_branches(HuggingFaceModel(model, fused=False))
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

        The texts are read first, without gradients: riders see their keys, and no token of a text sees a rider. Riders
        that would lie behind the last token of a text have nothing to foretell, and are taken to lie there, since a
        target with learned positions may have no later one.
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
            "position_ids": riders.places.clamp_max(length - 1),
            "past_key_values": read,
            "use_cache": True,
        }
        frozen = {name: weight.detach() for name, weight in body.named_parameters()}  # of which no gradient is asked
        return functional_call(body, frozen, kwargs=given)[0].unflatten(1, (-1, count))


class SpaceTraining(HeadTraining):
    """A target that learns to fill in masks, with its loss: the mean over all tokens and masks of the texts.

    A text's token and a mask weigh the same. By the authors' loss both learn the text's next token. By the others a
    mask's row is compared with the original's law, and the rows of tokens keep to that law: by their cross entropy with
    it, whose gradient is that of the divergence. Half of the texts are cut, each at one place; held-out texts are all
    cut, at several. Overlaps are with the law of the tuned target, for which masks draft.

    Args:
        adapted: the target with adapters and with embeddings of the masks, which learn.
        masks: the K masks.
        target: the ends of the original.
        row_loss: a loss of a mask's logits against the original's law; None for the authors'.
    """

    def __init__(
        self, adapted: AdaptedTarget, masks: Sequence[int], target: TargetEnds, row_loss: RowLoss | None
    ) -> None:
        super().__init__(target)
        self.adapted, self.tokens, self.row_loss = adapted, tuple(masks), row_loss

    def slow(self) -> Sequence[nn.Parameter]:
        """Return the adapters: embeddings of masks learn at four times their rate."""
        return [*self.adapted.adapters]

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the loss of texts that are cut at drawn places, and what masks draft like there."""
        times, count = 1 if self.training else CUTS, len(self.tokens)
        ids, valid = batch.ids.repeat(times, 1), batch.valid.bool().repeat(times, 1)
        cuts = drawn_cuts(valid, count, 0.5 if self.training else 1.0)
        given, labels = cut_at_masks(ids, valid, cuts, self.tokens)
        logits = self.adapted(given)[1]
        with torch.no_grad():
            laws = self.adapted(batch.ids)[1].softmax(-1).repeat(times, 1, 1)
        overlaps, counts = list[Tensor](), list[Tensor]()
        row, last = torch.arange(len(ids), device=ids.device), ids.shape[1] - 1
        for mask in range(count):
            place = (cuts + mask).clamp(0, last)
            there = (cuts >= 0) & (labels[row, (place + 1).clamp_max(last)] != IGNORED)
            counts.append(there.sum())
            shared = agreement(logits[row, place], laws[row, place]).where(there, 0.0)
            overlaps.append(shared.sum().detach() / counts[-1].clamp_min(1))
        found = {"overlap": torch.stack(overlaps), "count": torch.stack(counts)}
        if self.row_loss is None:
            return found | {"loss": next_labels_loss(logits, labels)}
        asked = nn.functional.pad(labels[:, 1:] != IGNORED, (0, 1))
        own, kept = logits[asked], self.target[0].laws(batch.final.float(), batch.lse).repeat(times, 1, 1)[asked]
        order = torch.arange(ids.shape[1], device=ids.device) - cuts.unsqueeze(-1)
        masked = ((cuts.unsqueeze(-1) >= 0) & (order >= 0))[asked]
        values = self.row_loss(own, kept).where(masked, soft_cross_entropy(own, kept))
        return found | {"loss": values.mean()}


def drawn_cuts(valid: Bool[Tensor, "b t"], count: int, share: float) -> Int[Tensor, " b"]:
    """Return where texts are cut so that every mask has a token to foretell; -1 for those that stay whole.

    Args:
        valid: what may be foretold of each text, which are tokens in a row: its answer.
        count: how many masks.
        share: the chance that a text is cut; answers that are too short never are.
    """
    first, room = valid.int().argmax(-1), valid.sum(-1) - count
    drawn = torch.rand(2, len(valid), device=valid.device)
    cuts = first + (drawn[0] * room).long()
    return cuts.where((room > 0) & (drawn[1] < share), -1)


def cut_at_masks(
    ids: Int[Tensor, "b t"], valid: Bool[Tensor, "b t"], cuts: Int[Tensor, " b"], masks: Sequence[int]
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """Return texts and labels to tune a target on, as SPACE does; labels are shifted by one by whoever uses them.

    In place of the token at a cut and of those behind it come the masks, one more of the last that has nothing to
    foretell, and padding that nobody sees.

    Args:
        ids: texts.
        valid: which tokens may be foretold.
        cuts: the place of each text's first mask; -1 for texts that stay.
        masks: the k mask tokens.
    """
    order = torch.arange(ids.shape[1], device=ids.device) - cuts.unsqueeze(-1)
    behind = (cuts.unsqueeze(-1) >= 0) & (order >= 0)
    filled = torch.tensor([*masks, masks[-1]], device=ids.device)
    given = filled[order.clamp(0, len(masks))].where(behind, ids)
    return given, ids.where(valid & ~(behind & (order > len(masks))), IGNORED)


def next_labels_loss(logits: Float[Tensor, "b t V"], labels: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Return the mean cross entropy of the labels, each by the logits one place before it: SPACE's loss.

    Masks weigh as much as the tokens of the text.
    """
    shifted, own = labels[:, 1:].flatten(), logits[:, :-1].flatten(0, 1)
    total = nn.functional.cross_entropy(own, shifted, ignore_index=IGNORED, reduction="sum")
    return total / (shifted != IGNORED).sum().clamp_min(1)
