"""What the engine needs of a language model: a forward pass under any attention mask, over a cache it can edit."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Forward:
    """What one forward pass returns.

    Args:
        logits: one row per scored position, or for the last `logits_to_keep` of them.
        hidden: per requested layer, the hidden states of all scored positions.
    """

    logits: Float[Tensor, "b n V"]
    hidden: dict[int, Float[Tensor, "b s d"]]


@runtime_checkable
class Cache(Protocol):
    """Keys and values of a batch, in numbered slots per row."""

    def keep(self, base: Int[Tensor, "b"], path: Int[Tensor, "b D"]) -> None:
        """Move the slots base + path[i] to base + 1 + i: the accepted nodes become committed tokens.

        Node j of the last scored tree lies in slot base + j; nodes of -1 stay where they are.
        """
        ...

    def join(self, row: int, other: Any, length: int | None = None) -> None:
        """Put the only row of another cache of the same model in place of a row, or only its first `length` slots."""
        ...


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model that can score any set of tokens under any attention mask."""

    @property
    def vocab_size(self) -> int:
        """The number of logits V."""
        ...

    @property
    def context(self) -> int:
        """The largest number of positions."""
        ...

    @property
    def device(self) -> torch.device:
        """Where inputs must be."""
        ...

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache with `capacity` slots per row."""
        ...

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        positions: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n m"],
        cache: Cache,
        starts: Int[Tensor, "b"],
        *,
        hidden_layers: tuple[int, ...] = (),
        logits_to_keep: int = 0,
    ) -> Forward:
        """Score tokens and store their keys and values in slots starts to starts + n - 1.

        Args:
            tokens: token ids.
            positions: their positions in the text; siblings of a tree share one.
            mask: True where a token may attend to a slot; m slots are looked at.
            cache: where keys and values are read and written.
            starts: first slot to write, per row.
            hidden_layers: which layers' hidden states to return; 0 is the embedding.
            logits_to_keep: return logits for the last so many tokens only; 0 for all.
        """
        ...
