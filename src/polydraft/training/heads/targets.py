"""The two ends of a target that a head shares: input embeddings and output rows, frozen."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel

STATES = 512
"""Of how many states all of the target's logits are made at a time."""


@dataclass(frozen=True, eq=False)
class TargetEnds:
    """A target's embedding and the rows of its output head that a head drafts from.

    Args:
        embedding: all input embeddings.
        rows: the output rows of the head's tokens.
        tokens: the head's tokens, rising; None for all.
        scale: what embeddings are multiplied by.
        every: all output rows, where `rows` are of some tokens; None where nobody asks for the target's own choice.
    """

    embedding: Float[Tensor, "V d"]
    rows: Float[Tensor, "v d"]
    tokens: Int[Tensor, " v"] | None = None
    scale: float = 1.0
    every: Float[Tensor, "V d"] | None = None

    @classmethod
    def of(cls, target: PreTrainedModel, tokens: Int[Tensor, " v"] | None = None) -> "TargetEnds":
        """Take the ends of a target.

        Raises:
            UnsupportedModel: its output head is no plain product, or its embedding no plain table.
        """
        embed, head = target.get_input_embeddings(), target.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear) or head.bias is not None or type(embed) is not torch.nn.Embedding:
            raise UnsupportedModel(f"Heads cannot be trained for {type(target).__name__} yet: its ends are no tables.")
        every = head.weight.detach()
        rows = (every if tokens is None else every[tokens]).float()
        return cls(embed.weight.detach().float(), rows, tokens, every=None if tokens is None else every)

    def embed(self, ids: Int[Tensor, "*b"]) -> Float[Tensor, "*b d"]:
        """Return input embeddings."""
        return self.embedding[ids] * self.scale

    def output(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """Return logits of final hidden states, of the head's tokens."""
        return states @ self.rows.mT

    @torch.no_grad()
    def laws(self, final: Float[Tensor, "*b d"], total: Float[Tensor, "*b"]) -> Float[Tensor, "*b v"]:
        """Return the target's probabilities of the head's tokens.

        Args:
            final: the target's final hidden states.
            total: log of the sum of exp of all its logits; used where the head has fewer tokens.
        """
        logits = self.output(final)
        if self.tokens is None:
            return logits.softmax(-1)
        whole = torch.maximum(total, logits.logsumexp(-1))  # states are kept rounded, and a law may not exceed 1
        return torch.exp(logits - whole.unsqueeze(-1))

    @torch.no_grad()
    def likeliest_known(self, final: Float[Tensor, "*b d"]) -> Bool[Tensor, "*b"]:
        """Tell where the target's likeliest token is one of the head's.

        All logits of a token are as many as the target's tokens, so they are made of few states at a time.

        Args:
            final: the target's final hidden states.

        Raises:
            InvalidParameter: the head has fewer tokens, and the target's other rows were not given.
        """
        if self.tokens is None:
            return torch.ones(final.shape[:-1], dtype=torch.bool, device=final.device)
        every = self.every
        if every is None:
            raise InvalidParameter("The target's likeliest tokens follow from all of its output rows; give every.")
        best = torch.cat([(part.to(every) @ every.mT).argmax(-1) for part in final.flatten(0, -2).split(STATES)])
        return (self.place_of(best) >= 0).view(final.shape[:-1])

    def place_of(self, ids: Int[Tensor, "*b"]) -> Int[Tensor, "*b"]:
        """Return the head's places of tokens; -1 where it has none."""
        if self.tokens is None:
            return ids
        places = torch.searchsorted(self.tokens, ids).clamp_max(len(self.tokens) - 1)
        return places.where(self.tokens[places] == ids, -1)
