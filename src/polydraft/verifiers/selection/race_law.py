"""How often a race among the drafts takes each token, and rates for it."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.schemes import Product, Scheme
from polydraft.theory.containment import certain_and_drawn

WIDEST = 24.0
"""The logarithm of the largest ratio of two rates."""
LATEST = 40.0
"""A race is over after this many times the mean time of its slowest runner."""
EXACT_NODES = 176
"""Enough for an error below 1e-12 at the widest ratio of rates."""


@dataclass(frozen=True, eq=False)
class RaceLaw:
    """Tokens that are drafted for certain, and independent draws from one or several rows.

    Args:
        rows: the draft rows, which sum to one or are zero, without the certain tokens.
        draws: the number of draws from each row.
        certain: the certain tokens.
    """

    rows: Float[Tensor, "n J A"]
    draws: Float[Tensor, "n J"]
    certain: Bool[Tensor, "n A"]

    @classmethod
    def of(cls, scheme: Scheme, draft_probs: Float[Tensor, "n J A"], counts: Int[Tensor, " n"]) -> "RaceLaw":
        """Return the law of a scheme's drafts; all schemes but `Product` have one row."""
        if isinstance(scheme, Product):
            certain = torch.zeros_like(draft_probs[:, 0], dtype=torch.bool)
            draws = _draws_in_turn(draft_probs, counts)
        else:
            certain, drawn = certain_and_drawn(scheme, draft_probs[:, 0], counts)
            draft_probs = draft_probs.masked_fill(certain.unsqueeze(1), 0.0)
            draws = drawn.unsqueeze(-1).clamp_min(0)
        mass = draft_probs.sum(dim=-1, keepdim=True)
        rows = draft_probs / mass.where(mass > 0, 1.0)
        return cls(rows, draws.where(mass.squeeze(-1) > 0, 0).double(), certain)

    @property
    def expected(self) -> Float[Tensor, "n A"]:
        """The mean number of drafts of each token."""
        return (self.rows * self.draws.unsqueeze(-1)).sum(dim=-2) + self.certain

    def taken(self, log_rates: Float[Tensor, "n A"], nodes: int = EXACT_NODES) -> Float[Tensor, "n A"]:
        """Return how often the race takes each token.

        Draft j has an exponential clock of rate a(x_j); the first to ring is taken, which is draft j with probability
        a(x_j) / (the sum of the drafts' rates). With phi_j(s) = sum_i q_j(i) e^{-a_i s}, D the certain tokens and n_j
        the draws from row j, token i is taken with probability

            sum_j n_j q_j(i) a_i integral e^{-a_i s} e^{-a(D) s} phi_j^{n_j - 1} prod_{l != j} phi_l^{n_l} ds,

        and i in D with probability a_i integral e^{-a(D) s} prod_l phi_l^{n_l} ds. Gauss-Legendre in log(1 + s).
        The logarithms of the rates lie in [-`WIDEST`, 0].
        """
        rates = log_rates.exp()
        time, weight = _nodes(log_rates, nodes)
        late = (-time.unsqueeze(-1) * rates.unsqueeze(-2)).exp_()
        phi = late @ self.rows.transpose(-1, -2)
        held = weight * (-time * (rates * self.certain).sum(dim=-1, keepdim=True)).exp()
        draws = self.draws.unsqueeze(-2)
        powers = phi.pow(draws)
        result = torch.zeros_like(rates)
        for j in range(phi.shape[-1]):
            others = powers[..., :j].prod(dim=-1) * powers[..., j + 1 :].prod(dim=-1)
            last = draws[..., j] * phi[..., j].pow((draws[..., j] - 1).clamp_min(0)) * others * held
            result = result + self.rows[:, j] * (last.unsqueeze(-2) @ late).squeeze(-2)
        whole = (powers.prod(dim=-1) * held).sum(dim=-1, keepdim=True)
        return rates * (result + self.certain * whole)

    def rows_at(self, kept: Int[Tensor, " m"]) -> "RaceLaw":
        """Return the law of some rows."""
        return RaceLaw(self.rows[kept], self.draws[kept], self.certain[kept])


def _draws_in_turn(draft_probs: Float[Tensor, "n J A"], counts: Int[Tensor, " n"]) -> Int[Tensor, "n J"]:
    """Return how many drafts come from each row in turn; the first row without mass ends them."""
    number = draft_probs.shape[1]
    live = (draft_probs > 0).any(dim=-1).long().cumprod(dim=-1).sum(dim=-1)
    drawn = torch.where(live < number, torch.minimum(counts, live), counts).unsqueeze(-1)
    turn = torch.arange(number, device=draft_probs.device)
    return (drawn - turn + number - 1).div(number, rounding_mode="floor").clamp_min(0)


def _nodes(log_rates: Float[Tensor, "n A"], number: int) -> tuple[Float[Tensor, "n t"], Float[Tensor, "n t"]]:
    places, shares = (table.to(log_rates.device) for table in _unit_nodes(number))
    length = (LATEST * (-log_rates.amin(dim=-1, keepdim=True)).exp()).log1p()
    time = (length * places).expm1()
    return time, length * shares * (time + 1)


@lru_cache(maxsize=8)
def _unit_nodes(number: int) -> tuple[Float[Tensor, " t"], Float[Tensor, " t"]]:
    """Return Gauss-Legendre nodes and weights on [0, 1]."""
    places, shares = (
        torch.tensor(table.tolist(), dtype=torch.float64) for table in np.polynomial.legendre.leggauss(number)
    )
    return (places + 1) / 2, shares / 2
