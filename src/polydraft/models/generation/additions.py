"""What OpenAI's and vLLM's interfaces do to scores: penalties for what was written, a bias, and a least length.

Hugging Face has no such processors: its repetition penalty scales scores, and counts the prompt too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, is_number, is_whole, shown


@dataclass(frozen=True, eq=False)
class AdditivePenalties:
    """Take something off the scores of tokens that the answer has already, as OpenAI's interface does.

    Rule: with c[v] how often token v was written since the prompt,

        score[v] <- score[v] - frequency c[v] - presence [c[v] > 0].

    It is a function of the history alone, so that at every node of a tree the node's own path counts.

    Args:
        prompt_length: tokens of the prompt, which do not count.
        presence: taken off once.
        frequency: taken off as often as the token was written.

    Source: OpenAI's API reference, "presence_penalty" and "frequency_penalty".
    """

    prompt_length: int
    presence: float = 0.0
    frequency: float = 0.0
    stateless = True

    def __call__(self, history: Int[Tensor, "n t"], scores: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Return the scores with what is taken off."""
        written = history[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(-1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


@dataclass(frozen=True, eq=False)
class TokenBias:
    """Add something to the scores of single tokens, as OpenAI's `logit_bias` does.

    Rule: score[v] <- score[v] + bias[v]. It depends on nothing else.

    Args:
        bias: what is added, by token.
        vocab_size: the number of scores.

    Raises:
        InvalidParameter: a token that there is not, or something that is no number.
    """

    bias: Mapping[int, float]
    vocab_size: int
    stateless = True
    _row: Float[Tensor, " V"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for token, value in self.bias.items():
            if not is_whole(token) or not 0 <= token < self.vocab_size:
                last = self.vocab_size - 1
                raise InvalidParameter(f"logit_bias has the token {shown(token)}, but tokens are 0 to {last}.")
            if not is_number(value) or not -float("inf") < value < float("inf"):
                raise InvalidParameter(f"logit_bias must hold finite numbers, but has {shown(value)}.")
        row = torch.zeros(self.vocab_size)
        row[list(self.bias)] = torch.tensor(list(self.bias.values()), dtype=row.dtype)
        object.__setattr__(self, "_row", row)

    def __call__(self, history: Int[Tensor, "n t"], scores: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Return the scores with what is added."""
        return scores + self._row.to(scores)


@dataclass(frozen=True, eq=False)
class HeldBack:
    """Rule tokens out until the answer has so many, as vLLM's `min_tokens` does with those that end a text.

    Rule: score[v] <- -infinity for the tokens v, at every node whose own path has fewer new tokens than `least`.

    Args:
        prompt_length: tokens of the prompt, which do not count.
        least: new tokens before any of these.
        tokens: the tokens.

    Source: vLLM's sampling parameters, "min_tokens".
    """

    prompt_length: int
    least: int
    tokens: tuple[int, ...]
    stateless = True

    def __call__(self, history: Int[Tensor, "n t"], scores: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Return the scores without the tokens, if the answer is too short."""
        if history.shape[1] - self.prompt_length >= self.least:
            return scores
        return scores.index_fill(-1, torch.tensor(self.tokens, device=scores.device), -torch.inf)
