"""Training SpecDec's drafter: an encoder-decoder that learns to fill a block of masks behind a text, by glances.

A text y_0, y_1, ... of the target is cut at a random place c. The decoder reads y_0 to y_{c-1} and K masks, and every
token of both sees all. Mask i is to foretell y_{c+i}; masks behind the text's end stand there and foretell nothing.
A pass without gradients counts the masks whose likeliest token is wrong. Of the masks some are then shown the true
token instead, g times as many as were wrong, and the others learn. g falls from 0.5 to 0.3 over the run.

The loss is the mean over all masks that are not shown of 0.9 (-log q(y)) + 0.1 times the mean of -log q over all tokens
(label smoothing). The drafter's encoder, embeddings and output rows begin as the target's, and so do its decoder's
layers, which are the target's first ones; the authors' decoder begins anew.

Source: arXiv 2203.16487; hemingkx/SpecDec, specdec_plugins (models/BlockNAT.py, tasks/translation_lev_modified.py,
criterions/glat_loss.py).
"""

import copy

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from transformers import PreTrainedModel

from polydraft.drafters.draft_kinds import BLOCK, MASK, SPEC
from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models import Encoded
from polydraft.models.sources import decoder_inputs
from polydraft.training.heads.losses.last_state_training import RowLoss
from polydraft.training.heads.losses.masked_training import with_copies, without_copies
from polydraft.training.heads.losses.row_losses import Learner, agreement
from polydraft.training.heads.source_answers import encoded_sources

GLANCED, LESS = 0.5, 0.2
"""How many of the wrong masks are shown at the beginning of a run, and how much less at its end."""
SMOOTHED = 0.1
"""The part of the loss that is the same for all tokens."""
LAYERS = 2
"""How many of the target's decoder layers a drafter usually has."""
DEPTHS = ("num_decoder_layers", "decoder_layers")
"""What configurations call the number of a decoder's layers."""


class GlancingTraining(Learner):
    """SpecDec's drafter with its loss.

    Args:
        network: the draft model.
        target: the target, which does not learn.
        mask_id: the mask.
        block: how many masks it learns to fill in.
        row_loss: a loss of logits against the target's law; None for the authors'.
    """

    def __init__(
        self, network: PreTrainedModel, target: PreTrainedModel, mask_id: int, block: int, row_loss: RowLoss | None
    ) -> None:
        super().__init__()
        self.target = (target,)  # a tuple, so that the target is no part of what is trained and saved
        self.network, self.mask_id, self.block, self.row_loss, self.steps = network, mask_id, block, row_loss, 0
        self.register_buffer("done", torch.zeros((), dtype=torch.int64))
        self.register_state_dict_post_hook(without_copies)
        self.register_load_state_dict_pre_hook(with_copies)

    def begin(self, steps: int) -> None:
        """Know how many steps the run has."""
        self.steps = steps

    def forward(
        self, ids: Int[Tensor, "b t"], valid: Shaped[Tensor, "b t"], source: Int[Tensor, "b s"]
    ) -> dict[str, Tensor]:
        """Return the loss of texts that are cut at a drawn place each, and what masks draft like there."""
        counts = 1 + valid.sum(-1, dtype=torch.int64)
        cuts = 1 + (torch.rand(len(ids), device=ids.device) * (counts - 1)).long()
        places = cuts.unsqueeze(-1) + torch.arange(self.block, device=ids.device)
        asked, last = places < counts.unsqueeze(-1), ids.shape[1] - 1
        labels = ids.gather(1, places.clamp_max(last))
        read, shown = encoded_sources(self.network, source), torch.zeros_like(asked)
        if self.training:
            with torch.no_grad():
                wrong = asked & (self.logits(read, ids, cuts, shown).argmax(-1) != labels)
            shown = self.glanced(asked, wrong.sum(-1))
            self.get_buffer("done").add_(1)
        logits, learnt = self.logits(read, ids, cuts, shown), asked & ~shown
        laws = self.laws(ids, source)[torch.arange(len(ids)).unsqueeze(-1), places.clamp_max(last) - 1]
        known = min(logits.shape[-1], laws.shape[-1])
        own, kept = logits[learnt][:, :known], laws[learnt][:, :known]
        overlaps = torch.zeros_like(logits[..., 0]).masked_scatter(learnt, agreement(own, kept).detach())
        values = smoothed(own, labels[learnt]) if self.row_loss is None else self.row_loss(own, kept)
        amount = learnt.sum(0)
        return {
            "loss": values.sum() / learnt.sum().clamp_min(1),
            "overlap": overlaps.sum(0) / amount.clamp_min(1),
            "count": amount,
        }

    def glanced(self, asked: Bool[Tensor, "b k"], wrong: Int[Tensor, " b"]) -> Bool[Tensor, "b k"]:
        """Draw which masks are shown their tokens: a share of as many as were wrong, of those that foretell one."""
        part = min(int(self.get_buffer("done")) / max(self.steps, 1), 1)
        count = ((GLANCED - LESS * part) * wrong).long()
        keys = torch.rand(asked.shape, device=asked.device).where(asked, -1.0)
        return (keys.argsort(-1, descending=True).argsort(-1) < count.unsqueeze(-1)) & asked

    def logits(
        self, read: Encoded, ids: Int[Tensor, "b t"], cuts: Int[Tensor, " b"], shown: Bool[Tensor, "b k"]
    ) -> Float[Tensor, "b k V"]:
        """Return the logits of the masks behind each text's cut, of which some are shown their tokens."""
        order = torch.arange(int(cuts.max()) + self.block, device=ids.device)
        slot = order - cuts.unsqueeze(-1)  # from 0 in the block
        behind = (slot >= 0) & ~shown.gather(1, slot.clamp(0, self.block - 1))
        tokens = nn.functional.pad(ids, (0, self.block))[:, : len(order)].masked_fill(behind, self.mask_id)
        precision = next(self.network.parameters()).dtype
        beyond = (slot >= self.block).unsqueeze(1).expand(-1, len(order), -1)
        seen = torch.zeros(beyond.shape, dtype=precision, device=ids.device)
        seen = seen.masked_fill(beyond, torch.finfo(precision).min).unsqueeze(1)
        given = decoder_inputs(read, tokens)
        found = self.network(**given, decoder_attention_mask=seen, use_cache=False).logits
        places = cuts.unsqueeze(-1) + torch.arange(self.block, device=ids.device)
        return found.gather(1, places.unsqueeze(-1).expand(-1, -1, found.shape[-1])).float()

    @torch.no_grad()
    def laws(self, ids: Int[Tensor, "b t"], source: Int[Tensor, "b s"]) -> Float[Tensor, "b t V"]:
        """Return the target's laws behind every token of its texts."""
        (target,) = self.target
        return (
            target(**decoder_inputs(encoded_sources(target, source), ids), use_cache=False).logits.float().softmax(-1)
        )


def smoothed(logits: Float[Tensor, "n V"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return the cross entropy of labels, of which a part is that of all tokens alike."""
    chances = logits.log_softmax(-1)
    own = chances.gather(-1, labels.clamp_max(logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    return -(1 - SMOOTHED) * own - SMOOTHED * chances.mean(-1)


def new_filling_model(target: PreTrainedModel, layers: int | None, mask_id: int, block: int) -> PreTrainedModel:
    """Return a copy of an encoder-decoder with the first layers of its decoder, in single precision.

    Raises:
        InvalidParameter: it has fewer layers than are asked for.
        UnsupportedModel: it reads something else than tokens, or does not say how many layers its decoder has.
    """
    config, name = copy.deepcopy(target.config), type(target).__name__
    if target.main_input_name != "input_ids":
        raise UnsupportedModel(f"{name} reads {target.main_input_name}; a spec-drafter is for what reads tokens.")
    depth = next((one for one in DEPTHS if getattr(config, one, None)), None)
    if depth is None:
        raise UnsupportedModel(f"{name} does not say how many layers its decoder has; {' or '.join(DEPTHS)} would.")
    most = getattr(config, depth)
    if layers is not None and layers > most:
        raise InvalidParameter(f"The decoder of {name} has {most} layers; its drafter has no more, and not {layers}.")
    setattr(config, depth, layers or min(LAYERS, most))
    made = type(target)(config).float()
    made.load_state_dict(target.state_dict(), strict=False)
    return filling(made, mask_id, block)


def filling(model: PreTrainedModel, mask_id: int, block: int) -> PreTrainedModel:
    """Let a model's configuration say that it fills a block of masks, and return the model."""
    model.config.update({SPEC: {BLOCK: block, MASK: mask_id}})
    return model
