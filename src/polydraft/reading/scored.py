"""What a model said of the tokens that it read in one pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.models import Layer


@dataclass(frozen=True, eq=False)
class Features:
    """Hidden states of committed tokens.

    Args:
        places: each token's place in its row's text, from 0; -1 at padding.
        states: by layer, the hidden states: the output of so many layers (0 is the embedding), or "final", behind the
            last norm.
    """

    places: Int[Tensor, "b w"]
    states: Mapping[Layer, Float[Tensor, "b w d"]]

    def of(self, rows: Sequence[int]) -> "Features":
        """Return those of some rows; of -1 none."""
        own = torch.tensor(list(rows), device=self.places.device)
        places = self.places[own.clamp_min(0)].where((own >= 0).unsqueeze(-1), -1)
        return Features(places, {layer: states[own.clamp_min(0)] for layer, states in self.states.items()})


@dataclass(frozen=True, eq=False)
class Scored:
    """One pass over what was unread of a text, the nodes of a tree, and riders.

    Args:
        logits: at the nodes, the root first.
        riders: at the riders; None if there are none.
        nodes: hidden states at the nodes, by layer, for the layers that somebody reads.
        riding: likewise at the riders.
        read: hidden states of the committed tokens before the root that were read in the same pass; None if the root
            alone was unread.
    """

    logits: Float[Tensor, "b n V"]
    riders: Float[Tensor, "b r V"] | None
    nodes: Mapping[Layer, Float[Tensor, "b n d"]]
    riding: Mapping[Layer, Float[Tensor, "b r d"]]
    read: Features | None = None

    def of(self, rows: Sequence[int]) -> "Scored":
        """Return what was said of some rows; of -1 anything."""
        own = torch.tensor(list(rows), device=self.logits.device).clamp_min(0)
        return Scored(
            self.logits[own],
            None if self.riders is None else self.riders[own],
            {layer: states[own] for layer, states in self.nodes.items()},
            {layer: states[own] for layer, states in self.riding.items()},
            None if self.read is None else self.read.of(rows),
        )

    def with_riders(self, count: int) -> "Scored":
        """Return the same for a drafter that brought so many riders, where others may have brought more."""
        if self.riders is None or self.riders.shape[1] == count:
            return self
        riding = {layer: states[:, :count] for layer, states in self.riding.items()}
        return replace(self, riders=self.riders[:, :count] if count else None, riding=riding)
