"""Training heads that read the last state: Medusa's and walks, every token of a text a place to draft from.

The heads read the target's last hidden state at token t. Draft i is token t + i + 2, whose law by the target follows
from the target's own state at token t + i + 1.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.drafters.heads.last_state_heads import MedusaHead, MedusaHeads
from polydraft.drafters.heads.walks.walked_head import WalkedHead
from polydraft.errors import InvalidParameter
from polydraft.training.heads.losses.row_losses import (
    HeadBatch,
    HeadTraining,
    RowsAlong,
    TargetEnds,
    agreement,
    cross_entropy,
    few_at_a_time,
    in_parts,
    places_behind,
    same_tokens,
    summed,
    weighted,
)

MOST_NUMBERS = 2**28
"""Of all rows of a step, 1 GB: more of a walk's are made a few at a time, and a second time for the gradient."""
RowLoss = Callable[[Float[Tensor, "n V"], Float[Tensor, "n V"]], Float[Tensor, " n"]]
"""A loss of a head's logits and the target's probabilities, such as `soft_cross_entropy` or `total_variation`."""


def new_heads(target: TargetEnds, drafts: int, layers: int = 1, *, own_rows: bool = False) -> MedusaHeads:
    """Return heads that all predict what the target's head does, as blocks that change nothing.

    Args:
        layers: blocks of each.
        own_rows: whether every head has output rows of its own, which begin as the target's.
    """
    width, vocab, device = target.rows.shape[1], len(target.embedding), target.rows.device
    rows = [target.copied_rows() if own_rows else None for _ in range(drafts)]
    heads = [MedusaHead(width, layers, one).to(device) for one in rows]
    return MedusaHeads(heads, width, target.tokens, vocab)


class MedusaTraining(HeadTraining):
    """Medusa's heads with their loss.

    It is sum_i decay^i L_i, where L_i is the mean over all places of head i's loss (Medusa's trainer in axolotl:
    cross entropy of the text's tokens, decay 0.8).

    Args:
        decay: how much less a head counts than the one before it.
        row_loss: a loss against the target's law; None for the cross entropy of the text's tokens.
        places: drawn places per text, on average, to bound memory; None for all of them.

    Raises:
        InvalidParameter: the heads have other tokens than the target's rows.
    """

    follows = True

    def __init__(
        self,
        heads: MedusaHeads,
        target: TargetEnds,
        decay: float = 0.8,
        row_loss: RowLoss | None = None,
        places: int | None = None,
    ) -> None:
        super().__init__(target)
        if not same_tokens(heads.tokens, target.tokens) or heads.rows not in (None, len(target.rows)):
            raise InvalidParameter(f"The heads draft other tokens than the {len(target.rows)} of the target's rows.")
        self.heads, self.decay, self.row_loss, self.places = heads, decay, row_loss, places

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the losses of all heads, at places of the texts."""
        (target,), ids, final, lse = self.target, batch.ids, batch.final, batch.lse
        asked = asked_for(batch.valid.bool(), len(self.heads))
        rows, columns = self._drawn(asked.any(-1).nonzero()).unbind(-1)
        states = final[rows, columns]
        losses, overlaps, counts = list[Tensor](), list[Tensor](), list[Tensor]()
        for draft in range(len(self.heads)):
            there = asked[rows, columns, draft]
            known = (columns + draft + 1).clamp_max(ids.shape[1] - 1)
            label = (known + 1).clamp_max(ids.shape[1] - 1)
            laws = self.laws(final[rows, known], lse[rows, known])
            logits = self.logits(draft, states)
            overlap = agreement(logits, laws)
            if self.row_loss is None:
                values = cross_entropy(logits, target.place_of(ids[rows, label]))
            else:
                values = self.row_loss(logits, laws)
            weights = there.to(values)
            losses.append(self.decay**draft * weighted(values.where(there, 0.0), weights))
            counts.append(there.sum())
            overlaps.append((overlap.where(there, 0.0).sum() / counts[-1].clamp_min(1)).detach())
        return summed(losses, overlaps, counts)

    def along(self, batch: HeadBatch, length: int) -> Iterator[RowsAlong]:
        """Yield the heads' rows behind every place but a text's first, before which there is no state."""
        texts, roots = places_behind(batch, 1)
        for depth in range(min(len(self.heads), length)):

            def logits(some: Tensor, own: Tensor, depth: int = depth) -> Tensor:
                return self.logits(depth, batch.final[some, own - 1])

            yield from in_parts(texts, roots, depth, logits)

    def laws(self, final: Float[Tensor, "*b d"], total: Float[Tensor, "*b"]) -> Float[Tensor, "*b V"]:
        """Return the target's laws; arguments are those of `TargetEnds.laws`."""
        return self.target[0].laws(final, total)

    def logits(self, draft: int, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b V"]:
        """Return a draft's logits, given the target's last hidden states at the token before the root."""
        return self.heads.head(draft).logits(states, self.target[0].output)

    def _drawn(self, found: Int[Tensor, "n 2"]) -> Int[Tensor, "m 2"]:
        """Return some of the places, drawn without replacement, if there are more than wanted."""
        if self.places is None:
            return found
        texts = len(found[:, 0].unique())
        return found[torch.randperm(len(found), device=found.device)[: self.places * max(texts, 1)]]


def asked_for(valid: Bool[Tensor, "b t"], drafts: int) -> Bool[Tensor, "b t D"]:
    """Tell for every place t and draft i whether token t + i + 2 is there and valid."""
    later = nn.functional.pad(valid, (0, drafts + 1))
    return torch.stack([later[:, draft + 2 : draft + 2 + valid.shape[1]] for draft in range(drafts)], dim=-1)


class WalkTraining(HeadTraining):
    """A head that walks, with its loss: the sum over depths of the mean over all places of the texts.

    At depth i it reads the text's token p + 1 + i, and its row is compared with the target's own for token p + 2 + i.

    Args:
        row_loss: a loss of logits against the target's law; None for the cross entropy of the text's tokens.
    """

    follows = True

    def __init__(self, network: WalkedHead, target: TargetEnds, row_loss: RowLoss | None) -> None:
        super().__init__(target)
        self.network, self.row_loss = network, row_loss

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the losses of all depths, at every place of the texts."""
        (target,), ids, final, network = self.target, batch.ids, batch.final, self.network
        asked = asked_for(batch.valid.bool(), network.depths)
        losses, overlaps, counts = list[Tensor](), list[Tensor](), list[Tensor]()
        for depth, states in enumerate(self.walked(batch, network.depths)):
            there = asked[..., depth]
            known, own = target.place_of(ids.roll(-depth - 2, 1)[there]), states[there]
            behind, total = (one.roll(-depth - 1, 1)[there] for one in (final, batch.lse))
            rows, numbers = partial(self._rows, depth), len(own) * network.depths * len(target.rows)
            made = few_at_a_time if numbers > MOST_NUMBERS else _at_once
            values, overlap = made(rows, own, behind, total, known)
            counts.append(there.sum())
            losses.append(values.sum() / counts[-1].clamp_min(1))
            overlaps.append(overlap.sum() / counts[-1].clamp_min(1))
        return summed(losses, overlaps, counts)

    def _rows(
        self,
        depth: int,
        states: Float[Tensor, "m s"],
        final: Float[Tensor, "m d"],
        total: Float[Tensor, " m"],
        known: Int[Tensor, " m"],
    ) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
        """Return the loss and the overlap of each row; the text's tokens are places of the head's, or -1."""
        (target,) = self.target
        logits, laws = self.network.rows(states, depth, target.output), target.laws(final, total)
        values = cross_entropy(logits, known) if self.row_loss is None else self.row_loss(logits, laws)
        return values, agreement(logits, laws).detach()

    def walked(self, batch: HeadBatch, depths: int) -> Iterator[Float[Tensor, "b t s"]]:
        """Yield the states of nodes of each depth, below the token that follows each place."""
        (target,), network, valid = self.target, self.network, batch.valid.bool()
        read = batch.final if network.reads == ("final",) else batch.features
        states = network.begin(network.taught(read, valid))
        for depth in range(depths):
            tokens = batch.ids.roll(-depth - 1, 1)
            states = network.read(states, tokens, target.embed(tokens) if network.embeds else None, depth)
            yield states

    def along(self, batch: HeadBatch, length: int) -> Iterator[RowsAlong]:
        """Yield the walks' rows behind every place but a text's first, before which there is no state."""
        (target,), network, (texts, roots) = self.target, self.network, places_behind(batch, 1)
        for depth, states in enumerate(self.walked(batch, min(network.depths, length))):

            def logits(some: Tensor, own: Tensor, depth: int = depth, states: Tensor = states) -> Tensor:
                return network.rows(states[some, own - 1], depth, target.output)

            yield from in_parts(texts, roots, depth, logits)


def _at_once(rows: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> tuple[Tensor, ...]:
    return rows(*given)
