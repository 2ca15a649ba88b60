"""Training a block head: many anchors of every text at once, each with a block of its own (DFlash, DSpark).

Queries are the blocks' slots alone; keys are the context and the blocks. A slot sees context before its anchor, and its
own block. Labels are the text that the target wrote; the laws come from the target's own final hidden states.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.drafters.heads.block_head import BlockHead
from polydraft.drafters.heads.drafter import BoundEnds
from polydraft.drafters.heads.paths import FilledBlock, Place
from polydraft.training.heads.losses.row_losses import (
    STATES,
    HeadBatch,
    HeadTraining,
    RowsAlong,
    TargetEnds,
    agreement,
    chances,
    cross_entropy,
    d_pace,
    decaying,
    places_behind,
    unsure,
    weighted,
)


@dataclass(frozen=True)
class BlockLoss:
    """The weights of a block head's losses: DSpark's are the default, with TV counted as 1 - overlap.

    Args:
        entropy: of the cross entropy of the text's tokens.
        variation: of the total variation between the head's and the target's rows.
        confidence: of the binary cross entropy of the confidence head.
        decay: drafts i count exp(-i / decay); None for D-PACE's weights, whose sum over a batch is divided out.
        rows: a further loss of rows, weighted like the others, such as `lk_alpha`; None for none.
    """

    entropy: float = 0.1
    variation: float = 1.8
    confidence: float = 1.0
    decay: float | None = 4.0
    rows: Callable[[Tensor, Tensor], Tensor] | None = None

    def of(
        self,
        logits: Float[Tensor, "*b D V"],
        laws: Float[Tensor, "*b D V"],
        labels: Int[Tensor, "*b D"],
        there: Bool[Tensor, "*b D"],
        sure: Float[Tensor, "*b D"] | None,
    ) -> Float[Tensor, ""]:
        """Return the loss of blocks of rows: each term's weighted mean, times what it counts.

        Args:
            logits: the head's, given the text's own tokens above each draft.
            labels: the text's tokens, as places of the head's; -1 for those that it has not.
            there: which drafts may be asked for; no draft behind one that may not.
            sure: what the confidence head says, in (0, 1); None without one.
        """
        entropy, overlap = cross_entropy(logits, labels), agreement(logits, laws)
        weights = self.counts(logits, labels, there)
        loss = self.entropy * weighted(entropy, weights) + self.variation * weighted(1 - overlap, weights)
        if self.rows is not None:
            loss = loss + weighted(self.rows(logits, laws), weights)
        if sure is not None and self.confidence:
            loss = loss + self.confidence * weighted(unsure(sure, overlap), weights)
        return loss

    @torch.no_grad()
    def counts(
        self, logits: Float[Tensor, "*b D V"], labels: Int[Tensor, "*b D"], there: Bool[Tensor, "*b D"]
    ) -> Float[Tensor, "*b D"]:
        """Return what each draft counts; arguments as of `of`."""
        if self.decay is None:
            return d_pace(chances(logits, labels), there)
        return decaying(labels.shape[-1], self.decay, logits) * there


@dataclass(frozen=True, eq=False)
class BlockRows:
    """The rows of blocks that follow the text, and what they are compared with.

    Args:
        before: the text's token above each draft.
        logits: the head's.
        laws: the target's.
        labels: the text's tokens, as places of the head's; -1 for those that it has not.
        there: which drafts may be asked for; no draft behind one that may not.
        sure: what the confidence head says; None without one.
    """

    before: Int[Tensor, "b a D"]
    logits: Float[Tensor, "b a D V"]
    laws: Float[Tensor, "b a D V"]
    labels: Int[Tensor, "b a D"]
    there: Bool[Tensor, "b a D"]
    sure: Float[Tensor, "b a D"] | None


class BlockTraining(HeadTraining):
    """A block head with its losses.

    Args:
        anchors: blocks per text.
    """

    follows = True

    def __init__(self, head: BlockHead, target: TargetEnds, anchors: int, weights: BlockLoss = BlockLoss()) -> None:
        super().__init__(target)
        self.head, self.anchors, self.weights = head, anchors, weights
        self.held = anchors * head.shape.drafts * len(target.rows) if self.one_mean else 0

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the losses of blocks behind drawn anchors."""
        (target,), ids, final = self.target, batch.ids, batch.final
        anchors, there = drawn_anchors(batch.valid.bool(), self.anchors, self.head.shape.drafts)
        depth = torch.arange(self.head.shape.drafts, device=ids.device)
        places = (anchors.unsqueeze(-1) + depth).clamp_max(ids.shape[1] - 1)  # of the last token known to each draft
        block = block_slots(self.head, target, ids, batch.features, anchors)
        before = ids.gather(1, places.flatten(1)).view(places.shape)
        logits, sure = forced(self.head, block, before)
        labels = target.place_of(ids.gather(1, (places + 1).clamp_max(ids.shape[1] - 1).flatten(1)).view(places.shape))
        states = final.gather(1, places.flatten(1).unsqueeze(-1).expand(-1, -1, final.shape[-1]))
        total = batch.lse.gather(1, places.flatten(1))
        laws = target.laws(states, total).view(*places.shape, -1)
        count = there.flatten(0, 1).sum(0)
        mean = (agreement(logits, laws) * there).flatten(0, 1).sum(0) / count.clamp_min(1)
        loss = self.cost(block, BlockRows(before, logits, laws, labels, there, sure))
        weight = self.weights.counts(logits, labels, there).sum()
        return {"loss": loss, "weight": weight, "overlap": mean.detach(), "count": count}

    @property
    def one_mean(self) -> bool:
        """Whether all terms of the loss are means by the same weights, so that a step can be taken in parts."""
        return True

    def along(self, batch: HeadBatch, length: int) -> Iterator[RowsAlong]:
        """Yield the rows of a block behind every place, of as many blocks at once as have some hundreds of rows."""
        (target,), ids, drafts = self.target, batch.ids, self.head.shape.drafts
        texts, roots = places_behind(batch)
        order = torch.arange(drafts, device=ids.device)
        for text in texts.unique():
            own = slice(int(text), int(text) + 1)
            for anchors in roots[texts == text].split(max(1, STATES // drafts)):
                block = block_slots(self.head, target, ids[own], batch.features[own], anchors.unsqueeze(0))
                before = ids[own][:, (anchors.unsqueeze(-1) + order).clamp_max(ids.shape[1] - 1)]
                logits, _ = forced(self.head, block, before)
                for depth in range(min(drafts, length)):
                    yield RowsAlong(text.expand(len(anchors)), anchors, depth, logits[0, :, depth])

    def cost(self, block: FilledBlock, rows: BlockRows) -> Float[Tensor, ""]:
        """Return the loss of blocks."""
        return self.weights.of(rows.logits, rows.laws, rows.labels, rows.there, rows.sure)


def drawn_anchors(
    valid: Bool[Tensor, "b t"], count: int, drafts: int
) -> tuple[Int[Tensor, "b a"], Bool[Tensor, "b a D"]]:
    """Return places of anchors, drawn without replacement, and which of their drafts may be asked for.

    A place is an anchor if the token behind it is the target's. A block is cut at the first token that is not, and at
    the text's end. Rows with fewer places repeat some, whose drafts do not count.
    """
    wanted = nn.functional.pad(valid[:, 1:], (0, 1))
    keys = torch.rand(valid.shape, device=valid.device).where(wanted, -1.0)
    best, anchors = keys.topk(min(count, valid.shape[1]), dim=-1)
    anchors, order = anchors.sort(dim=-1)
    steps = anchors.unsqueeze(-1) + 1 + torch.arange(drafts, device=valid.device)
    inside = steps < valid.shape[1]
    asked = valid.gather(1, steps.clamp_max(valid.shape[1] - 1).flatten(1)).view(steps.shape) & inside
    return anchors, asked.int().cumprod(-1).bool() & (best.gather(1, order) >= 0).unsqueeze(-1)


def block_slots(
    head: BlockHead,
    target: TargetEnds,
    ids: Int[Tensor, "b t"],
    features: Float[Tensor, "b t r"],
    anchors: Int[Tensor, "b a"],
) -> FilledBlock:
    """Return all blocks of all texts, text by text, filled in one pass."""
    (batch, length), block = ids.shape, head.shape.block
    context, joined = torch.arange(length, device=ids.device).expand(batch, -1), head.context(features)
    held = head.keys(joined, context)
    places = (anchors.unsqueeze(-1) + torch.arange(block, device=ids.device)).flatten(1)
    owner = torch.arange(anchors.shape[1], device=ids.device).repeat_interleave(block)
    of_anchor = anchors.repeat_interleave(block, dim=1)
    embedded = target.embed(ids.gather(1, anchors)).flatten(0, 1)
    filled = None if head.shape.mask_id is None else target.embed(torch.tensor(head.shape.mask_id, device=ids.device))
    query = head.query(embedded, filled).view(batch, -1, embedded.shape[-1])
    masks = []
    for layer in range(head.shape.layers):
        before = head.sees(layer, places, context, of_anchor) & (context.unsqueeze(1) < of_anchor.unsqueeze(-1))
        inside = head.sees(layer, places, places, of_anchor) & (owner.unsqueeze(-1) == owner)
        masks.append(torch.cat([before, inside], dim=-1))

    def seen(layer: int):
        return lambda keys, values: (torch.cat([held[layer][0], keys], 2), torch.cat([held[layer][1], values], 2))

    slots = head.slots(query, places, [seen(layer) for layer in range(head.shape.layers)], masks)
    earlier = (anchors - 1).clamp_min(0)
    newest = joined.gather(1, earlier.unsqueeze(-1).expand(-1, -1, joined.shape[-1])).flatten(0, 1)
    return head.block(
        slots.view(-1, block, slots.shape[-1]),
        ids.gather(1, earlier).flatten(),
        newest if head.path.anchored else None,
        (anchors > 0).flatten() if head.path.anchored else None,
        BoundEnds(target.embed, target.output, target.tokens),
    )


def forced(
    head: BlockHead, block: FilledBlock, before: Int[Tensor, "b a D"]
) -> tuple[Float[Tensor, "b a D V"], Float[Tensor, "b a D"] | None]:
    """Return every draft's logits given tokens above it, and what the confidence head says of them."""
    path, slots, tokens = head.path, block.drafting, before.flatten(0, 1)
    embedded = block.ends.embed(tokens) if path.embeds else None
    (state, made), states = path.begin(block), list[Tensor]()
    for depth in range(slots.shape[1]):
        at = slice(depth, depth + 1)
        place = Place(slots[:, at], range(depth, depth + 1), made)
        state = path.read(state, tokens[:, at], None if embedded is None else embedded[:, at], place)
        states.append(state)
    every, place = torch.cat(states, dim=1), Place(slots, range(slots.shape[1]), made)
    logits = block.ends.output(path.mixed(every, place)) if block.logits is None else block.logits
    logits = path.corrected(logits, every, place)
    sure = None if head.confidence is None else head.sure(slots, every).view(before.shape)
    return logits.view(*before.shape, -1), sure
