"""Training heads whose passes fill several slots.

P-EAGLE: an element (a, d) is the slot of depth d behind pair a of a text. Those of depth 0 are the pairs themselves,
the others hold the mask. An element sees the pairs up to a, and the slots of its own anchor up to its own depth, as in
use. Deep slots are many and say little that is new, so only some are learnt at a step (conditional drop-token
sampling): of n places that may be asked for, depth d keeps (n - d) max(r^d, s), all of them behind kept ones.

Sources: P-EAGLE (arXiv 2602.01469, section 4), vllm-project/speculators (`models/peagle`), sgl-project/SpecForge.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.drafters.heads.drafter import HeadEnds
from polydraft.drafters.heads.parallel_eagle import ParallelEagle
from polydraft.errors import InvalidParameter
from polydraft.training.heads.eagles import PUBLISHED, ROW_LOSSES, PairTraining
from polydraft.training.heads.row_losses import HeadBatch, TargetEnds, agreement, weighted


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
