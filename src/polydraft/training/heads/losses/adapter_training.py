"""Training Kangaroo's adapter: its rows against the target's at every place of a text, in one pass.

What it reads of drafts is what the target's own first layers make of them, so a place of the text is like a draft at
any depth: all drafts have one overlap.

Source: arXiv 2404.18911; Equationliu/Kangaroo, `train.py`, which compares softmax rows as here.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.drafters.itself.adapter import Adapter
from polydraft.training.heads.losses.last_state_training import RowLoss
from polydraft.training.heads.losses.row_losses import (
    HeadBatch,
    HeadTraining,
    TargetEnds,
    agreement,
    cross_entropy,
    weighted,
)


class AdapterTraining(HeadTraining):
    """An adapter with its loss.

    Args:
        network: the adapter.
        target: the target's ends.
        row_loss: compares its rows with the target's; None for the cross entropy of the text's tokens.
        drafts: how many drafts its overlap is told of.
    """

    def __init__(self, network: Adapter, target: TargetEnds, row_loss: RowLoss | None, drafts: int) -> None:
        super().__init__(target)
        self.network, self.row_loss, self.drafts = network, row_loss, drafts

    def logits(self, features: Float[Tensor, "b t r"]) -> Float[Tensor, "b t v"]:
        """Return the adapter's rows of texts, of whose features the output of its own layer stands first."""
        states = features[..., : self.network.anatomy.width]
        length = states.shape[1]
        places = torch.arange(length, device=states.device)
        mask = (places.unsqueeze(-1) >= places).expand(len(states), -1, -1)
        made = self.network(states, places.expand(len(states), -1), lambda keys, values: (keys, values), mask)
        return self.target[0].output(made)

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the loss, and the overlap of every draft, which is one number."""
        (target,) = self.target
        there, logits = batch.valid[:, 1:].float(), self.logits(batch.features[:, :-1])
        laws = target.laws(batch.final[:, :-1], batch.lse[:, :-1])
        if self.row_loss is None:
            values = cross_entropy(logits, target.place_of(batch.ids[:, 1:]))
        else:
            values = self.row_loss(logits, laws)
        overlap = weighted(agreement(logits, laws), there).detach()
        every = overlap.new_ones(self.drafts)
        return {"loss": weighted(values, there), "overlap": overlap * every, "count": there.sum() * every}
