"""Training heads whose passes fill several slots.

P-EAGLE: an element (a, d) is the slot of depth d behind pair a of a text. Those of depth 0 are the pairs themselves,
the others hold the mask. An element sees the pairs up to a, and the slots of its own anchor up to its own depth, as in
use. Deep slots are many and say little that is new, so only some are learnt at a step (conditional drop-token
sampling): of n places that may be asked for, depth d keeps (n - d) max(r^d, s), all of them behind kept ones.

Falcon: a text is cut into blocks of k pairs, from a place that is drawn at each step, so that all lengths of texts are
learnt. A block sees what is before it as a text's pairs that have left their block, and itself. In some blocks of each
text the first pairs are what the block's features are to be (glancing): the later ones learn to follow them. As many
blocks as a share of the features whose likeliest token is wrong; the authors let the share fall from 0.45 to 0.1, and a
step that does not know how far its run is takes the mean.

Sources: P-EAGLE (arXiv 2602.01469, section 4), vllm-project/speculators (`models/peagle`), sgl-project/SpecForge;
Falcon (2412.12639, section 3.2), Bestpay-inc/Falcon (`train/glance.py`).
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.drafters.heads.drafter import HeadEnds
from polydraft.drafters.heads.falcon import FalconHead
from polydraft.drafters.heads.parallel_eagle import ParallelEagle
from polydraft.errors import InvalidParameter
from polydraft.training.heads.losses.eagles import PUBLISHED, ROW_LOSSES, EagleLoss, PairTraining, kept_behind
from polydraft.training.heads.losses.row_losses import (
    STATES,
    HeadBatch,
    RowsAlong,
    TargetEnds,
    agreement,
    places_behind,
    smooth_l1,
    weighted,
)

HEAT = 0.95
"""The temperature at which Falcon's rows are compared."""
SOFT, HARD = 0.9, 0.1
"""How much the target's law weighs in Falcon's loss, and a token that is drawn from it."""


class ParallelTraining(PairTraining):
    """P-EAGLE's head with its loss: the mean over all kept elements of what their rows cost.

    The authors' is the divergence from the target's law over the head's tokens, which is the soft cross entropy but for
    a term without gradient.

    Args:
        rows: which of `ROW_LOSSES` compares rows.
        share: r, which depth keeps how much of the one before.
        least: s, the least share that is kept.

    Raises:
        InvalidParameter: a share outside of (0, 1].
    """

    head: ParallelEagle

    def __init__(
        self,
        head: ParallelEagle,
        target: TargetEnds,
        rows: str = PUBLISHED,
        ends: HeadEnds | None = None,
        share: float = 0.7,
        least: float = 0.2,
    ) -> None:
        super().__init__(head, target, head.drafts, ends=ends)
        if not (0 < share <= 1 and 0 < least <= 1):
            raise InvalidParameter(f"Depths keep shares in (0, 1] of places, not {share} and {least}.")
        self.row_loss, self.share, self.least = ROW_LOSSES[rows], share, least

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the loss of the elements that are kept, and mean overlaps by depth."""
        (target,), ids, depths = self.target, batch.ids, self.head.drafts
        asked = asked_behind(batch.valid.bool(), depths)
        anchors, depth, there = elements(kept_depths(asked, self.share, self.least))
        logits = self.logits(self.made(ids, batch.features, anchors, depth, there))
        known = (anchors + depth + 1).clamp_max(ids.shape[1] - 1)  # of the last token that a slot would know
        labels = target.place_of(ids.gather(1, (known + 1).clamp_max(ids.shape[1] - 1)))
        final = batch.final.gather(1, known.unsqueeze(-1).expand(-1, -1, batch.final.shape[-1]))
        laws = target.laws(final, batch.lse.gather(1, known))
        rows = torch.arange(len(ids), device=ids.device).unsqueeze(-1)
        counted = there & asked[rows, anchors, depth]
        overlap = agreement(logits, laws)
        each = [counted & (depth == one) for one in range(depths)]
        return {
            "loss": weighted(self.row_loss(logits, laws, labels), counted.to(logits)),
            "overlap": torch.stack([weighted(overlap, one.to(overlap)) for one in each]).detach(),
            "count": torch.stack([one.sum() for one in each]),
        }

    def along(self, batch: HeadBatch, length: int) -> Iterator[RowsAlong]:
        """Yield the rows of the slots behind every place that has a pair: a text's pairs, and the slots of some."""
        ids, drafts, (texts, roots) = batch.ids, min(self.head.drafts, length), places_behind(batch, 1)
        pairs = torch.arange(ids.shape[1] - 1, device=ids.device)
        deep = torch.arange(1, drafts, device=ids.device)
        for text in texts.unique():
            own = slice(int(text), int(text) + 1)
            for some in roots[texts == text].split(max(1, STATES // drafts)):
                anchors = torch.cat([pairs, (some - 1).repeat(len(deep))]).unsqueeze(0)
                depth = torch.cat([pairs * 0, deep.repeat_interleave(len(some))]).unsqueeze(0)
                there = torch.ones_like(depth, dtype=torch.bool)
                made = self.made(ids[own], batch.features[own], anchors, depth, there)[0]
                slots = [made[some - 1], *made[len(pairs) :].split(len(some))]
                for number, states in enumerate(slots):
                    yield RowsAlong(text.expand(len(some)), some, number, self.logits(states))

    def made(
        self,
        ids: Int[Tensor, "b t"],
        features: Float[Tensor, "b t r"],
        anchors: Int[Tensor, "b m"],
        depth: Int[Tensor, "b m"],
        there: Bool[Tensor, "b m"],
    ) -> Float[Tensor, "b m d"]:
        """Return the hidden states of elements, of which some are padding."""
        head = self.head
        fused = head.fused(features)
        hidden = fused.gather(1, anchors.unsqueeze(-1).expand(-1, -1, fused.shape[-1]))
        tokens, hidden = head.masked(ids.gather(1, anchors + 1), hidden, depth > 0)
        anchor, deep = anchors.unsqueeze(-1), depth.unsqueeze(-1)
        pairs = (depth.unsqueeze(1) == 0) & (anchors.unsqueeze(1) <= anchor)
        own = (anchors.unsqueeze(1) == anchor) & (depth.unsqueeze(1) <= deep)
        mask = (pairs | own) & there.unsqueeze(1)
        seen = [lambda keys, values: (keys, values)] * head.depth
        return head(self.embedded(tokens), hidden, anchors + depth, seen, mask)


def asked_behind(valid: Bool[Tensor, "b t"], depths: int) -> Bool[Tensor, "b n D"]:
    """Tell for every pair i = 0 .. t - 2 and depth d whether token i + d + 2 is there and valid."""
    later, pairs = torch.nn.functional.pad(valid, (0, depths)), valid.shape[1] - 1
    return torch.stack([later[:, depth + 2 : depth + 2 + pairs] for depth in range(depths)], dim=-1)


def kept_depths(asked: Bool[Tensor, "b n D"], share: float, least: float) -> Bool[Tensor, "b n D"]:
    """Tell which elements are learnt: all of depth 0, and drawn ones of depths below it, each behind a kept one."""
    kept, total = [torch.ones_like(asked[..., 0])], asked[..., 0].sum(-1)
    for depth in range(1, asked.shape[-1]):
        candidates = asked[..., depth] & kept[-1]
        wanted = ((total - depth).clamp_min(0) * max(share**depth, least)).long()
        order = torch.rand(candidates.shape, device=asked.device).where(candidates, -1.0).argsort(-1, descending=True)
        kept.append((order.argsort(-1) < wanted.unsqueeze(-1)) & candidates)
    return torch.stack(kept, dim=-1)


def elements(
    kept: Bool[Tensor, "b n D"],
) -> tuple[Int[Tensor, "b m"], Int[Tensor, "b m"], Bool[Tensor, "b m"]]:
    """Return anchors and depths of kept elements, depth by depth, and which are there: rows may have fewer."""
    flat, pairs = kept.transpose(1, 2).flatten(1), kept.shape[1]
    order = flat.int().argsort(dim=-1, descending=True, stable=True)[:, : int(flat.sum(-1).max())]
    return order % pairs, order // pairs, flat.gather(1, order)


class FalconTraining(PairTraining):
    """Falcon's head with its losses: SmoothL1 of the features, and of their rows .9 divergence + .1 cross entropy.

    The divergence is that from the target's law, but for a term without gradient; the cross entropy is that of a token
    drawn from it; other losses of rows go without. One pass is learnt from. Measured are all passes, where the module
    does not train.

    Args:
        passes: how many drafts are measured.
        weights: of states and rows, and the noise; None for EAGLE-1's, which are the authors'.
        glance: the share of wrong features for each of which a block begins with what is to be made.
    """

    head: FalconHead
    follows = False

    def __init__(
        self,
        head: FalconHead,
        target: TargetEnds,
        passes: int = 5,
        weights: EagleLoss | None = None,
        ends: HeadEnds | None = None,
        glance: float = 0.275,
    ) -> None:
        super().__init__(head, target, passes, weights or EagleLoss(), ends)
        self.glance, self.shortest = glance, 2 * head.block  # so that there is a block wherever the first begins

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the losses of the first block's features, and the overlaps of as many drafts as are measured."""
        own, final, block = self.weights, batch.final, self.head.block
        given, blocks = final, self.drawn_blocks(batch.ids.shape[1] - 1)
        if self.training and own.noise:
            given = final + (torch.rand_like(final) - 0.5) * own.noise * 512 / batch.ids.shape[1]
        shown = self._shown(batch, given, blocks) if self.training and block > 1 else None
        passes = 1 if self.training else -(-self.passes // block)
        losses, overlaps, counts = list[Tensor](), list[Tensor](), list[Tensor]()
        for number, states in enumerate(self.made(batch.ids, given, final, blocks, passes, shown)):
            laws, wanted, there = self._wanted(batch, blocks + number * block)
            logits = self.logits(states)
            if not number:
                labels = batch.ids[:, (blocks + block + 1).clamp_max(batch.ids.shape[1] - 1)]
                costs = own.states * smooth_l1(states, wanted) + own.entropy * self._cost(logits, laws, labels)
                losses.append(weighted(costs, there.to(costs)))
            overlap = agreement(logits, laws).detach()
            overlaps += [weighted(overlap[..., one], there[..., one].to(overlap)) for one in range(block)]
            counts += [there[..., one].sum() for one in range(block)]
        missing = max(self.passes - len(counts), 0)
        found = {"overlap": torch.stack(overlaps[: self.passes]), "count": torch.stack(counts[: self.passes])}
        return {"loss": losses[0], **{name: torch.nn.functional.pad(one, (0, missing)) for name, one in found.items()}}

    def _cost(
        self, logits: Float[Tensor, "b B k v"], laws: Float[Tensor, "b B k v"], labels: Int[Tensor, "b B k"]
    ) -> Float[Tensor, "b B k"]:
        """Return what rows cost: as the authors have it, or by another loss that was asked for."""
        if self.weights.rows != EagleLoss.rows:
            return ROW_LOSSES[self.weights.rows](logits, laws, self.target[0].place_of(labels))
        soft = -(laws * (logits / HEAT).log_softmax(-1)).sum(-1)
        drawn = torch.multinomial(laws.flatten(0, -2), 1).view(*laws.shape[:-1], 1)
        return SOFT * soft - HARD * logits.log_softmax(-1).gather(-1, drawn).squeeze(-1)

    def drawn_blocks(self, pairs: int) -> Int[Tensor, "B k"]:
        """Return the pairs of the blocks that a text is cut into, from a place that is drawn."""
        block, device = self.head.block, next(self.head.parameters()).device
        first = int(torch.randint(block, ()))
        count = (pairs - first) // block
        return first + torch.arange(count * block, device=device).view(count, block)

    def made(
        self,
        ids: Int[Tensor, "b t"],
        given: Float[Tensor, "b t d"],
        final: Float[Tensor, "b t d"],
        blocks: Int[Tensor, "B k"],
        passes: int,
        shown: Bool[Tensor, "b B k"] | None = None,
    ) -> list[Float[Tensor, "b B k d"]]:
        """Return the features of all blocks, then those of the blocks behind each of them, given the text's tokens.

        Args:
            given: the target's states that pairs are made of.
            final: those that are to be made.
            shown: the pairs in whose place stand those of the features that are to be made.
        """
        head, (count, block), (texts, length) = self.head, blocks.shape, ids.shape
        whole = torch.cat([self.embedded(ids[:, 1:]), given[:, :-1]], -1)
        none, order = given.new_zeros(texts, head.carries), torch.arange(length - 1, device=ids.device)
        context, after = head.gated(whole, none)
        carried = torch.cat([none.unsqueeze(1), after], 1)[:, blocks[:, 0]].flatten(0, 1)
        pairs, states = whole[:, blocks], list[Tensor]()
        if shown is not None:
            later = torch.cat([self.embedded(ids[:, 1:]), final[:, :-1]], -1)[:, (blocks + block).clamp_max(length - 2)]
            pairs = later.where(shown.unsqueeze(-1), pairs)
        kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(head.depth)]
        own = torch.block_diag(*[blocks.new_ones(block, block)] * count).bool()
        before = order < blocks[:, :1].repeat_interleave(block, 0)
        for number in range(passes):
            gated, ends = head.gated(pairs.flatten(0, 1), carried)
            gated, places = gated.view(texts, count * block, -1), blocks.flatten() + number * block
            mask = torch.cat([before, *[own] * (number + 1)], 1)
            if not number:  # with the pairs of the text, which see each other alone
                gated, places = torch.cat([context, gated], 1), torch.cat([order, places])
                causal = torch.nn.functional.pad(order.unsqueeze(-1) >= order, (0, count * block))
                mask = torch.cat([causal, mask])
            seen = [kept_behind(layer) for layer in kept]
            places, mask = places.expand(texts, -1), mask.expand(texts, -1, -1)
            found = head.layered(gated, places, seen, mask)[:, -count * block :].unflatten(1, (count, block))
            states.append(found)
            tokens = ids[:, (blocks + (number + 1) * block + 1).clamp_max(length - 1)]
            pairs, carried = torch.cat([self.embedded(tokens), found], -1), ends[:, -1]
        return states

    def _wanted(
        self, batch: HeadBatch, pairs: Int[Tensor, "B k"]
    ) -> tuple[Float[Tensor, "b B k v"], Float[Tensor, "b B k d"], Bool[Tensor, "b B k"]]:
        """Return the target's laws and states of what pairs foretell, and where these may be asked for."""
        (target,), length = self.target, batch.ids.shape[1]
        known = pairs + self.head.block
        there = (known + 1 < length) & batch.valid[:, (known + 1).clamp_max(length - 1)].bool()
        known = known.clamp_max(length - 1)
        return target.laws(batch.final[:, known], batch.lse[:, known]), batch.final[:, known], there

    @torch.no_grad()
    def _shown(
        self, batch: HeadBatch, given: Float[Tensor, "b t d"], blocks: Int[Tensor, "B k"]
    ) -> Bool[Tensor, "b B k"]:
        """Draw the blocks that begin with what is to be made, and how many of their pairs are."""
        block, (states,) = self.head.block, self.made(batch.ids, given, batch.final, blocks, 1)
        laws, _, there = self._wanted(batch, blocks)
        wrong = ((self.logits(states).argmax(-1) != laws.argmax(-1)) & there).sum((1, 2))
        count = (self.glance * wrong).long() // (1 if block == 2 else block)
        keys = torch.rand(there.shape[:2], device=there.device).where(there.all(-1), -1.0)
        drawn = (keys.argsort(-1, descending=True).argsort(-1) < count.unsqueeze(-1)) & (keys >= 0)
        most = torch.randint(1, block, there.shape[:2], device=there.device).unsqueeze(-1)
        return drawn.unsqueeze(-1) & (torch.arange(block, device=there.device) < most)
