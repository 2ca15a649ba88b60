"""Training the path terms of XPress and LiLiCorr, whose authors' losses are of more than the rows along the text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polydraft.drafters.heads.block_head import BlockHead
from polydraft.drafters.heads.paths import FilledBlock
from polydraft.training.heads.losses.block_training import BlockLoss, BlockRows, BlockTraining, forced
from polydraft.training.heads.losses.row_losses import (
    TargetEnds,
    cross_entropy,
    decaying,
    lk_alpha,
    total_variation,
    weighted,
)

DECAY = 7.0
"""Of LiLiCorr's drafts: draft i counts exp(-i / 7), as in DFlash's recipe for blocks of 16."""


class XPressTraining(BlockTraining):
    """A block head with XPress's term, with its authors' losses.

    The loss of rows is that of three kinds of them: of those along the text; of Jacobi rounds, whose tokens above each
    draft are the likeliest of the round before, the first round's those of the backbone; and of the backbone alone.

        L(text) + ROUNDS_COUNT mean_j L(round j) + BASE_COUNTS L(backbone)

    The cross entropy in L is of the target's likeliest token, not of the text's, as in the authors' trainer
    (vllm-project/speculators, `models/xpress/metrics.py`).
    """

    ROUNDS, ROUNDS_COUNT, BASE_COUNTS = 3, 0.3, 0.6

    @property
    def one_mean(self) -> bool:
        """Whether all terms of the loss are means by the same weights: D-PACE's follow from the rows of each."""
        return self.weights.decay is not None

    def cost(self, block: FilledBlock, rows: BlockRows) -> Float[Tensor, ""]:
        """Return the loss of blocks."""
        assert block.logits is not None
        labels, base = rows.laws.argmax(-1), block.logits.view_as(rows.logits)

        def of(logits: Tensor) -> Tensor:
            return self.weights.of(logits, rows.laws, labels, rows.there, None)

        rounds, guesses = list[Tensor](), base
        for _ in range(self.ROUNDS):
            places = guesses.argmax(-1)[..., :-1]
            tokens = places if block.ends.tokens is None else block.ends.tokens[places]
            guesses, _ = forced(self.head, block, torch.cat([rows.before[..., :1], tokens], dim=-1))
            rounds.append(of(guesses))
        return of(rows.logits) + self.ROUNDS_COUNT * torch.stack(rounds).mean() + self.BASE_COUNTS * of(base)


RowLoss = Callable[[Float[Tensor, "*b V"], Float[Tensor, "*b V"]], Float[Tensor, "*b"]]


@dataclass(frozen=True)
class LatticeLoss:
    """The weights of LiLiCorr's losses: the defaults are its authors' first recipe, the second is .125, .125, .25.

    Args:
        base: of the backbone's own rows, which choose the candidates: DFlash's.
        entropy: of the cross entropy of the text's token among the candidates.
        margin: of how much the text's token leads the best other by less than `lead`.
        penalty: of how much likelier than a drawn candidate the text's token is for the target, in log-probabilities.
        lead: of scores.
        rows: a loss of rows instead of these three; None for them.
    """

    base: BlockLoss = BlockLoss(1.0, 0.0, decay=DECAY)
    entropy: float = 0.25
    margin: float = 0.0
    penalty: float = 0.25
    lead: float = 2.0
    rows: RowLoss | None = None

    def of(self, base: Float[Tensor, "b a D V"], rows: BlockRows) -> Float[Tensor, ""]:
        """Return the loss of blocks; `base` are the backbone's logits."""
        loss = self.base.of(base, rows.laws, rows.labels, rows.there, None)
        if self.rows is not None:
            weights = decaying(rows.there.shape[-1], DECAY, base) * rows.there
            return loss + weighted(self.rows(rows.logits, rows.laws), weights)
        counts = supervised(rows)
        return loss + weighted(self._terms(rows, counts), counts.to(base))

    def _terms(self, rows: BlockRows, counts: Bool[Tensor, "b a D"]) -> Float[Tensor, "b a D"]:
        """Return the three terms of each draft, weighted, 0 where it does not count."""
        labels = rows.labels.where(counts, -1)
        # Where nothing counts all logits are zero: else what is no candidate would make NaN of the gradient.
        logits = rows.logits.where(counts.unsqueeze(-1), 0.0)
        loss, own = self.entropy * cross_entropy(logits, labels), labels.clamp_min(0).unsqueeze(-1)
        if self.margin:
            other = logits.scatter(-1, own, -torch.inf).amax(-1)
            loss = loss + self.margin * (self.lead - logits.gather(-1, own).squeeze(-1) + other).relu()
        logs = rows.laws.clamp_min(torch.finfo(rows.laws.dtype).tiny).log()
        rejected = (logs.gather(-1, own) - logs).relu()
        return loss + self.penalty * (logits.softmax(-1) * rejected).sum(-1)


def supervised(rows: BlockRows) -> Bool[Tensor, "b a D"]:
    """Tell which drafts count: of whole blocks, while the text's tokens so far are among the candidates."""
    scores = rows.logits.gather(-1, rows.labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    found = (rows.labels >= 0) & scores.isfinite()
    return found.int().cumprod(-1).bool() & rows.there.all(-1, keepdim=True)


LATTICE_LOSSES: Mapping[str, LatticeLoss] = {
    "published": LatticeLoss(),
    "acceptance": LatticeLoss(rows=total_variation),
    "lk-alpha": LatticeLoss(rows=lk_alpha),
}
"""LiLiCorr's losses by their words. Its rows are zero but for the candidates, so that divergences from the target's are
infinite: no loss has one."""


class LatticeTraining(BlockTraining):
    """A block head with LiLiCorr's term, with its authors' losses (NVIDIA/Model-Optimizer, `hf_lilicorr.py`)."""

    def __init__(self, head: BlockHead, target: TargetEnds, anchors: int, lattice: LatticeLoss = LatticeLoss()) -> None:
        super().__init__(head, target, anchors, lattice.base)
        self.lattice = lattice

    @property
    def one_mean(self) -> bool:
        """Whether all terms of the loss are means by the same weights: those of the candidates are others."""
        return False

    def cost(self, block: FilledBlock, rows: BlockRows) -> Float[Tensor, ""]:
        """Return the loss of blocks."""
        assert block.logits is not None
        return self.lattice.of(block.logits.view_as(rows.logits), rows)
