"""Whether new weights are better than those in use: target calls of both on the same held-out texts.

Both drafts are asked about the same texts, so that the texts' own noise cancels. With a_i and b_i, the calls of text i
under the weights in use and under the new ones, the saving is s = 1 - sum b / sum a. Its error is that of a ratio,

    sqrt(n / (n - 1) sum_i (b_i - (1 - s) a_i)^2) / sum a.

Bounds are normal ones: at least 200 texts stand behind them. A bootstrap would have to be drawn tens of thousands of
times for the levels of late looks. The n-th look is at the level .05 * 6 / (pi n)^2; over all looks, however many,
these come to .05 (union bound).
"""

from dataclasses import dataclass
from math import inf, pi, sqrt
from statistics import NormalDist

import torch
from jaxtyping import Float
from torch import Tensor

LEVEL = 0.05
"""How often, in all looks together, weights that save nothing may pass."""
MARGIN = 0.01
"""A swap must save more than this share of calls; what costs more than this share is rolled back."""


@dataclass(frozen=True)
class Saving:
    """Which share of target calls new weights save.

    Args:
        share: the estimate.
        error: its standard error.
        texts: how many texts it is from.
        tokens: how many tokens these have.
    """

    share: float
    error: float
    texts: int
    tokens: int

    @classmethod
    def of(cls, before: Float[Tensor, " n"], after: Float[Tensor, " n"], tokens: int) -> "Saving":
        """Compare the calls of the same texts; of less than two texts nothing is known."""
        count, whole = len(before), float(before.double().sum())
        if count < 2 or not whole:
            return cls(0.0, inf, count, tokens)
        share = 1 - float(after.double().sum()) / whole
        rest = after.double() - (1 - share) * before.double()
        return cls(share, sqrt(count / (count - 1) * float(torch.dot(rest, rest))) / whole, count, tokens)

    def bounds(self, look: int) -> tuple[float, float]:
        """Return the lower and the upper bound at the level of the n-th look."""
        width = NormalDist().inv_cdf(1 - LEVEL * 6 / (pi * look) ** 2) * self.error
        return self.share - width, self.share + width

    def is_better(self, look: int) -> bool:
        """Tell whether the new weights save more than the margin."""
        return self.bounds(look)[0] > MARGIN

    def is_worse(self, look: int) -> bool:
        """Tell whether the new weights cost more than the margin."""
        return self.bounds(look)[1] < -MARGIN
