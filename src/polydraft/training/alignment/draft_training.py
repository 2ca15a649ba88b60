"""Distilling a draft model: the losses it may learn by, on shards of the target's own text and final states.

The rows p of the target follow from its final states and its output rows, so that one pass of the target serves all
runs. Both rows are at the temperature that a text was written at; greedy text is learnt at the temperature that is
sampled at, since at 0 there is no gradient. Rows are made of few places at a time, and made again for the gradient: all
rows of a batch would be places x tokens numbers several times over.

Source: DistillSpec (arXiv 2310.08461, section 4); the expected calls are those of `text_calls`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, hint
from polydraft.training.alignment.divergences import mixture_divergence, reverse_divergence
from polydraft.training.alignment.own_text import ChainsOfText
from polydraft.training.alignment.text_calls import expected_calls, kept_as_block, ratios
from polydraft.training.heads.losses.masked_training import with_copies, without_copies
from polydraft.training.heads.losses.row_losses import (
    HeadBatch,
    HeadTraining,
    Rows,
    TargetEnds,
    Values,
    agreement,
    forward_divergence,
    lk_alpha,
    lk_lambda,
    total_variation,
)

PLACES = 512
"""Of how many places rows are made at a time."""
CHAIN = 5
"""The drafts of the chains whose calls are learnt."""
TINY = 1e-12
"""A target's chance is taken to be this much at least where a loss has its logarithm."""
NEAR = 1e-3
"""How far rows that are made of a model's last states may be from its own."""


@dataclass(frozen=True)
class DraftLoss:
    """What a draft model learns by.

    Args:
        rows: a loss of each row.
        weight: how much the mean of these counts.
        calls: how much the expected calls per token count, which are of whole texts at the temperature they have.
    """

    rows: Callable[[Rows, Rows], Values]
    weight: float = 1.0
    calls: float = 0.0


def _pair_distance(logits: Rows, target: Rows) -> Values:
    return forward_divergence(logits, target) + lk_alpha(logits, target)


DRAFT_LOSSES: Mapping[str, DraftLoss] = {
    "fkl": DraftLoss(forward_divergence),
    "rkl": DraftLoss(lambda logits, target: reverse_divergence(logits, target.clamp_min(TINY))),
    "jsd": DraftLoss(partial(mixture_divergence, share=0.5)),
    "tvd": DraftLoss(total_variation),
    "lk-alpha": DraftLoss(lk_alpha),
    "lk-lambda": DraftLoss(lk_lambda),
    "fkl+lk-alpha": DraftLoss(_pair_distance),
    "calls": DraftLoss(forward_divergence, weight=0.1, calls=1.0),
}
"""By its word: KL(p || q); KL(q || p); JSD at the middle, scaled; the total variation; -log alpha; LK's mixture; the
sum that the embedded draft was distilled by; and the expected target calls per token under block verification, with a
little KL(p || q) beside it as an anchor, which is for drafts that are close already."""


def draft_loss(word: str) -> DraftLoss:
    """Return the loss of a word.

    Raises:
        InvalidParameter: there is none.
    """
    if word not in DRAFT_LOSSES:
        meant = hint(word, DRAFT_LOSSES)
        raise InvalidParameter(f"A draft model learns by the loss {', '.join(DRAFT_LOSSES)}, not {word!r}{meant}.")
    return DRAFT_LOSSES[word]


class DraftTraining(HeadTraining):
    """A draft model with its loss: the mean over all places that the target wrote.

    Args:
        network: the draft model, in single precision.
        target: the target's ends.
        loss: what it learns by.
        heat: the temperature at which greedy texts are learnt.
    """

    def __init__(self, network: PreTrainedModel, target: TargetEnds, loss: DraftLoss, heat: float = 1.0) -> None:
        super().__init__(target)
        self.network, self.loss, self.heat = network, loss, heat
        self.splits = splits(network)
        self.register_state_dict_post_hook(without_copies)
        self.register_load_state_dict_pre_hook(with_copies)

    def forward(
        self,
        ids: Int[Tensor, "b t"],
        valid: Shaped[Tensor, "b t"],
        features: Float[Tensor, "b t r"],
        final: Float[Tensor, "b t d"],
        lse: Float[Tensor, "b t"],
        heat: Float[Tensor, " b"] | None = None,
    ) -> dict[str, Tensor]:
        """Return the `loss`, the mean `overlap` and the `count` of places; without temperatures they are all 1."""
        heats = torch.ones(len(ids), device=ids.device) if heat is None else heat
        batch = HeadBatch(ids, valid, features, final, lse)
        asked, (values, overlap, ratio) = self.places(batch, heats.where(heats > 0, self.heat))
        loss = self.loss.weight * values.sum() / max(len(values), 1)
        if self.loss.calls:
            loss = loss + self.loss.calls * self._calls(asked, ratio, heats)
        count = torch.tensor(len(values), device=ids.device)
        return {"loss": loss, "overlap": overlap.detach().sum()[None] / count.clamp_min(1), "count": count[None]}

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the same of texts at temperature 1."""
        return self(**vars(batch))

    def places(
        self, batch: HeadBatch, heats: Float[Tensor, " b"]
    ) -> tuple[Bool[Tensor, "b n"], tuple[Values, Values, Values]]:
        """Return which tokens were asked for, and of these the row's loss, its overlap, and q(x) / p(x).

        Args:
            heats: of each text's rows, above 0.
        """
        ids, asked = batch.ids, batch.valid[:, 1:].bool()
        rows = asked.nonzero()[:, 0]
        tokens, final, own = ids[:, 1:][asked], batch.final[:, :-1][asked], heats[rows]
        states = self.states(ids)[:, :-1][asked]
        parts = [
            checkpoint(self._rows, *part, use_reentrant=False)
            for part in zip(*(one.split(PLACES) for one in (states, final, own, tokens)), strict=True)
        ] or [self._rows(states, final, own, tokens)]
        values, overlap, ratio = (torch.cat(found) for found in zip(*cast(Any, parts), strict=True))
        return asked, (values, overlap, ratio)

    def states(self, ids: Int[Tensor, "b t"]) -> Float[Tensor, "b t d"]:
        """Return what rows are made of: the last hidden states, or logits where these are not a product of them."""
        if not self.splits:
            return self.network(input_ids=ids, use_cache=False).logits
        return cast(Any, self.network).get_decoder()(input_ids=ids, use_cache=False).last_hidden_state

    def logits(self, states: Float[Tensor, "m d"]) -> Float[Tensor, "m V"]:
        """Return the draft's logits of its states, of the target's tokens."""
        made = cast(nn.Module, self.network.get_output_embeddings())(states) if self.splits else states
        return made[..., : len(self.target[0].embedding)].float()

    def _rows(
        self,
        states: Float[Tensor, "m d"],
        final: Float[Tensor, "m e"],
        heats: Float[Tensor, " m"],
        tokens: Int[Tensor, " m"],
    ) -> tuple[Values, Values, Values]:
        (target,) = self.target
        logits = self.logits(states) / heats.unsqueeze(-1)
        with torch.no_grad():
            laws = (target.output(final) / heats.unsqueeze(-1)).softmax(-1)[..., : logits.shape[-1]]
        known = tokens.where(tokens < logits.shape[-1], -1)
        return self.loss.rows(logits, laws), agreement(logits, laws), ratios(logits, laws, known)

    def _calls(self, asked: Bool[Tensor, "b n"], ratio: Values, heats: Float[Tensor, " b"]) -> Float[Tensor, ""]:
        """Return the expected calls per token of the texts that were sampled; 0 where none was."""
        sampled = (heats > 0) & asked.any(-1)
        lengths = asked.sum(-1)
        if not bool(sampled.any()):
            return ratio.sum() * 0.0
        path = _from_start(asked, ratio)
        chains = nn.functional.pad(path, (0, CHAIN - 1)).unfold(-1, CHAIN, 1)[sampled]
        calls = expected_calls(kept_as_block(chains), lengths[sampled])
        return calls.sum() / lengths[sampled].sum()

    @torch.no_grad()
    def chains(self, batch: HeadBatch, heat: float, length: int) -> ChainsOfText:
        """Return what becomes of chains at every place of texts that were written at one temperature.

        A draft model's rows do not depend on where a step begins, so one pass tells all. At temperature 0 a draft is
        accepted while its likeliest token is the text's.
        """
        if heat:
            asked, (_, overlap, ratio) = self.places(batch, torch.full((len(batch.ids),), heat))
        else:
            asked = batch.valid[:, 1:].bool()
            states, tokens = self.states(batch.ids)[:, :-1][asked], batch.ids[:, 1:][asked]
            best = torch.cat([self.logits(one).argmax(-1) for one in states.split(PLACES)])
            overlap = ratio = (best == tokens).float()
        pad = nn.functional.pad
        found = (pad(_from_start(asked, one), (0, length - 1)).unfold(-1, length, 1) for one in (ratio, overlap))
        of_ratio, of_overlap = (one.double().cpu() for one in found)
        return ChainsOfText(of_ratio, of_overlap, asked.sum(-1).cpu())


def _from_start(asked: Bool[Tensor, "b n"], values: Values) -> Float[Tensor, "b n"]:
    """Return the values of the asked places, each text's from the first column on, and 0 behind them."""
    lengths = asked.sum(-1)
    there = torch.arange(asked.shape[1], device=asked.device) < lengths.unsqueeze(-1)
    return torch.zeros(there.shape, dtype=values.dtype, device=values.device).masked_scatter(there, values)


@torch.no_grad()
def splits(network: PreTrainedModel) -> bool:
    """Tell whether a model's logits are its output rows times its last states, which some scale or cap."""
    ids = torch.arange(4, device=network.device).unsqueeze(0) % network.config.get_text_config().vocab_size
    was = network.training
    network.eval()
    try:
        states = cast(Any, network).get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        made, own = cast(nn.Module, network.get_output_embeddings())(states), network(input_ids=ids).logits
        return made.shape == own.shape and bool((made - own).abs().max() <= NEAR * (1 + own.abs().max()))
    except (AttributeError, TypeError):
        return False
    finally:
        network.train(was)
