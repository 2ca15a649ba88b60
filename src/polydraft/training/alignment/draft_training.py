"""Distilling a draft model on shards of the target's own text and final states, by one of the losses of `draft_losses`.

The rows p of the target follow from its final states and its output rows, so that one pass of the target serves all
runs. Both rows are at the temperature that a text was written at; greedy text is learnt at the temperature that is
sampled at, since at 0 there is no gradient. Rows are made of few places at a time, and made again for the gradient: all
rows of a batch would be places x tokens numbers several times over.

Source: DistillSpec (arXiv 2310.08461, section 4); AdaSPEC (2510.19779, section 3).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter
from polydraft.probs import UNFILTERED, SamplingParams, filtered_scores
from polydraft.training.alignment.divergences import hardest
from polydraft.training.alignment.draft_losses import CHAIN, DraftLoss, Paths
from polydraft.training.alignment.own_text import ChainsOfText
from polydraft.training.alignment.text_calls import ratios
from polydraft.training.heads.losses.masked_training import with_copies, without_copies
from polydraft.training.heads.losses.row_losses import (
    STATES,
    HeadBatch,
    HeadTraining,
    TargetEnds,
    Values,
    agreement,
    chances,
    few_at_a_time,
)

NEAR = 1e-3
"""How far rows that are made of a model's last states may be from its own."""


class LearntRows(NamedTuple):
    """Of each token that was asked for: the row's loss, its overlap, q(x) / p(x) and q(x)."""

    values: Values
    overlap: Values
    ratio: Values
    chance: Values


class DraftTraining(HeadTraining):
    """A draft model with its loss: the mean over all places that the target wrote.

    Args:
        network: the draft model, in single precision.
        target: the target's ends.
        loss: what it learns by.
        params: how the target is sampled. Greedy texts are learnt at this temperature. Its law is filtered, and so are
            the draft's rows where they are drawn from; losses of rows compare the whole rows with the filtered law,
            so that what the draft filters out now can be learnt.
        reference: a draft that is looked at beside it and does not learn, for a loss that leaves out rows.

    Raises:
        InvalidParameter: the loss needs a reference, and there is none.
    """

    heated = True
    sparing = True
    follows = True

    def __init__(
        self,
        network: PreTrainedModel,
        target: TargetEnds,
        loss: DraftLoss,
        params: SamplingParams = UNFILTERED,
        reference: "DraftTraining | None" = None,
    ) -> None:
        super().__init__(target)
        if loss.share < 1 and reference is None:
            raise InvalidParameter("A loss that leaves out rows compares them with a reference's: give a reference.")
        self.network, self.loss, self.heat = network, loss, params.temperature
        self.filters = replace(params, temperature=1.0)
        self.reference = (reference,)  # a tuple, so that it is no part of what is trained and saved
        self.splits = splits(network)
        self.register_state_dict_post_hook(without_copies)
        self.register_load_state_dict_pre_hook(with_copies)

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the `loss`, the mean `overlap` and the `count` of places."""
        heats = batch.heats()
        at = heats.where(heats > 0, self.heat)
        asked, rows = self.places(batch, at)
        learnt = self._hardest(rows.values, batch, at)
        loss = self.loss.weight * learnt.sum() / max(len(learnt), 1)
        if self.loss.paths is not None:
            loss = loss + self._of_texts(self.loss.paths, asked, rows, heats)
        count = torch.tensor(len(rows.values), device=asked.device)
        return {"loss": loss, "overlap": rows.overlap.detach().sum()[None] / count.clamp_min(1), "count": count[None]}

    def places(self, batch: HeadBatch, heats: Float[Tensor, " b"]) -> tuple[Bool[Tensor, "b n"], LearntRows]:
        """Return which tokens were asked for, and what became of these.

        Args:
            heats: of each text's rows, above 0.
        """
        asked, tokens, states, final = self._read(batch)
        own = heats[asked.nonzero()[:, 0]]
        return asked, LearntRows(*few_at_a_time(self._rows, states, final, own, tokens))

    def _read(
        self, batch: HeadBatch
    ) -> tuple[Bool[Tensor, "b n"], Int[Tensor, " m"], Float[Tensor, "m d"], Float[Tensor, "m e"]]:
        """Return which tokens were asked for, these, and the states of draft and target that they follow from."""
        asked = batch.valid[:, 1:].bool()
        return asked, batch.ids[:, 1:][asked], self.states(batch.ids)[:, :-1][asked], batch.final[:, :-1][asked]

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
    ) -> LearntRows:
        logits, laws = self._both(states, final, heats)
        known = tokens.where(tokens < logits.shape[-1], -1)
        drawn = filtered_scores(logits, self.filters)
        chance = chances(drawn.detach(), known)
        return LearntRows(self.loss.rows(logits, laws), agreement(drawn, laws), ratios(drawn, laws, known), chance)

    def _both(
        self, states: Float[Tensor, "m d"], final: Float[Tensor, "m e"], heats: Float[Tensor, " m"]
    ) -> tuple[Float[Tensor, "m V"], Float[Tensor, "m V"]]:
        """Return the draft's logits and the target's law, of the tokens that both have."""
        (target,) = self.target
        logits = self.logits(states) / heats.unsqueeze(-1)
        with torch.no_grad():
            scores = filtered_scores(target.output(final) / heats.unsqueeze(-1), self.filters)
            laws = scores.softmax(-1)[..., : logits.shape[-1]]
        return logits, laws

    def laws_of(self, batch: HeadBatch, heat: float) -> Iterator[tuple[Float[Tensor, "m V"], Float[Tensor, "m V"]]]:
        """Yield the rows q of the draft and p of the target for the tokens that were asked for, `STATES` at a time.

        Rows are in the order of texts and places, and over the tokens that both models have: p sums to less than 1
        where the target has more.

        Args:
            batch: the texts.
            heat: the temperature of all rows, above 0.
        """
        _, _, states, final = self._read(batch)
        for own, other in zip(states.split(STATES), final.split(STATES), strict=True):
            logits, laws = self._both(own, other, torch.full((len(own),), heat, device=own.device))
            yield filtered_scores(logits, self.filters).softmax(-1), laws

    def _hardest(self, values: Values, batch: HeadBatch, heats: Float[Tensor, " b"]) -> Float[Tensor, " learnt"]:
        """Return the values of the rows that are learnt from."""
        (reference,) = self.reference
        if reference is None or not len(values):
            return values
        with torch.no_grad():
            _, known = reference.to(values.device).places(batch, heats)
        return values[hardest(values, known.values, torch.ones_like(values, dtype=torch.bool), self.loss.share)]

    def _of_texts(
        self, paths: Paths, asked: Bool[Tensor, "b n"], rows: LearntRows, heats: Float[Tensor, " b"]
    ) -> Float[Tensor, ""]:
        """Return a loss of the texts that were sampled, per token; 0 where none was."""
        sampled = (heats > 0) & asked.any(-1)
        lengths = asked.sum(-1)[sampled]
        if not bool(sampled.any()):
            return rows.ratio.sum() * 0.0
        ratio, overlap = (chains_from(asked, one, CHAIN)[sampled] for one in (rows.ratio, rows.overlap))
        return paths(ratio, overlap, lengths).sum() / lengths.sum()

    @torch.no_grad()
    def chains(self, batch: HeadBatch, heat: float, length: int) -> ChainsOfText:
        """Return what becomes of chains at every place of texts that were written at one temperature.

        A draft model's rows do not depend on where a step begins, so one pass tells all. At temperature 0 a draft is
        accepted while its likeliest token is the text's.
        """
        if heat:
            asked, rows = self.places(batch, torch.full((len(batch.ids),), heat, device=batch.ids.device))
            overlap, ratio = rows.overlap, rows.ratio
        else:
            asked, tokens, states, _ = self._read(batch)
            best = torch.cat([self.logits(one).argmax(-1) for one in states.split(STATES)])
            overlap = ratio = (best == tokens).float()
        ratio, overlap = (chains_from(asked, one, length).double().cpu() for one in (ratio, overlap))
        return ChainsOfText(ratio, overlap, asked.sum(-1).cpu())

    def ratios(self, batch: HeadBatch, heat: float, length: int) -> tuple[Float[Tensor, "b n g"], Int[Tensor, "b"]]:
        """Return the ratios of chains and the numbers of places; arguments as of `chains`."""
        found = self.chains(batch, heat, length)
        return found.ratio, found.written


def written(asked: Bool[Tensor, "b n"]) -> Bool[Tensor, "b n"]:
    """Tell the first columns of each text, as many as places were asked for: where `from_start` has their values."""
    return torch.arange(asked.shape[1], device=asked.device) < asked.sum(-1, keepdim=True)


def from_start(asked: Bool[Tensor, "b n"], values: Values) -> Float[Tensor, "b n"]:
    """Return the values of the asked places, each text's from the first column on, and 0 behind them."""
    there = written(asked)
    return torch.zeros(there.shape, dtype=values.dtype, device=values.device).masked_scatter(there, values)


def chains_from(asked: Bool[Tensor, "b n"], values: Values, length: int) -> Float[Tensor, "b n g"]:
    """Return the values along the chain of `length` places that begins at each place of a text, 0 behind its end."""
    return nn.functional.pad(from_start(asked, values), (0, length - 1)).unfold(-1, length, 1)


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
