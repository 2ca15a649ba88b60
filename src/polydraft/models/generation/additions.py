"""What OpenAI's interface adds to scores: penalties for tokens that were written before, and a bias for single tokens.

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
                raise InvalidParameter(f"logit_bias has the token {shown(token)}, but tokens are 0 to {self._last}.")
            if not is_number(value) or not -float("inf") < value < float("inf"):
                raise InvalidParameter(f"logit_bias must hold finite numbers, but has {shown(value)}.")
        row = torch.zeros(self.vocab_size)
        row[list(self.bias)] = torch.tensor(list(self.bias.values()), dtype=row.dtype)
        object.__setattr__(self, "_row", row)

    @property
    def _last(self) -> int:
        return self.vocab_size - 1

    def __call__(self, history: Int[Tensor, "n t"], scores: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Return the scores with what is added."""
        return scores + self._row.to(scores)
