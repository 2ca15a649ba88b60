"""A draft model on another device than its target: tokens go there, and logits come back."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.models.hugging_face import HuggingFaceModel
from polydraft.models.language_model import Cache, Facts, Forward, Layer
from polydraft.probs import sent

HOME = "polydraft_home"
"""Where a draft model notes the device of its target, if it lies on another one itself."""


class ElsewhereModel(HuggingFaceModel):
    """A `HuggingFaceModel` that takes its inputs from the device of its target and returns logits there.

    Its keys stay where it is. Each pass moves its inputs, some kB, and its logits.

    Args:
        model: the draft model, which says by `HOME` where its target is.
    """

    def __init__(self, model: Any) -> None:
        self.home: torch.device = getattr(model, HOME)
        super().__init__(model)

    @property
    def facts(self) -> Facts:
        """What the model says of itself; inputs must be where the target is."""
        return replace(super().facts, device=self.home, queries=False)

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        positions: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n m"],
        cache: Cache,
        starts: Int[Tensor, "b"],
        *,
        hidden_layers: tuple[Layer, ...] = (),
        logits_to_keep: int = 0,
        embeddings: Float[Tensor, "b n d"] | None = None,
        queries: int = 0,
    ) -> Forward:
        """Score tokens where the model is; see `LanguageModel.forward`. Errors are those of `HuggingFaceModel`."""
        there = self.device
        tokens, positions, mask = (sent(one, there) for one in (tokens, positions, mask))
        starts = starts if len(tokens) == 1 else sent(starts, there)
        entering = None if embeddings is None else sent(embeddings, there)
        named: dict[str, Any] = {"hidden_layers": hidden_layers, "logits_to_keep": logits_to_keep}
        found = super().forward(tokens, positions, mask, cache, starts, embeddings=entering, **named)
        hidden: dict[Layer, Tensor] = {layer: states.to(self.home) for layer, states in found.hidden.items()}
        return Forward(found.logits.to(self.home), hidden)

    def embedded(self, tokens: Int[Tensor, "b n"], table: Float[Tensor, "e d"] | None = None) -> Float[Tensor, "b n d"]:
        """Return the tokens' input embeddings where the target is."""
        learnt = None if table is None else sent(table, self.device)
        return super().embedded(sent(tokens, self.device), learnt).to(self.home)

    def unembedded(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n V"]:
        """Return the logits of final hidden states where the target is."""
        return super().unembedded(sent(states, self.device)).to(self.home)
