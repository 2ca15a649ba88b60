"""How often a race among the drafts takes each token, and rates for it."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.schemes import IID, Product, Scheme
from polydraft.theory.containment import certain_and_drawn

WIDEST = 24.0
"""The logarithm of the largest ratio of two rates."""
EARLIEST = -3.5
"""Where the integrals start, in the variable of `_nodes`: at a time of e^-33."""
LATEST = 40.0
"""A race is over after this many times the mean time of its slowest runner."""
EXACT_NODES = 128
"""Enough for an error near 1e-12 at the widest ratio of rates."""


@dataclass(frozen=True, eq=False)
class RaceLaw:
    """Tokens that are drafted for certain, and independent draws from one or several rows.

    Args:
        rows: the draft rows, which sum to one or are zero, without the certain tokens.
        draws: the number of draws from each row.
        certain: the certain tokens; None if the scheme has none.
    """

    rows: Float[Tensor, "n J A"]
    draws: Float[Tensor, "n J"]
    certain: Bool[Tensor, "n A"] | None

    @classmethod
    def of(cls, scheme: Scheme, draft_probs: Float[Tensor, "n J A"], counts: Int[Tensor, " n"]) -> "RaceLaw":
        """Return the law of a scheme's drafts; all schemes but `Product` have one row."""
        certain = None
        if isinstance(scheme, Product):
            draws = _draws_in_turn(draft_probs, counts)
        elif isinstance(scheme, IID):
            draws = counts.unsqueeze(-1)
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
        drawn = (self.rows * self.draws.unsqueeze(-1)).sum(dim=-2)
        return drawn if self.certain is None else drawn + self.certain

    def taken(self, log_rates: Float[Tensor, "n A"], nodes: int = EXACT_NODES) -> Float[Tensor, "n A"]:
        """Return how often the race takes each token.

        Draft j has an exponential clock of rate a(x_j); the first to ring is taken, which is draft j with probability
        a(x_j) / (the sum of the drafts' rates). With phi_j(s) = sum_i q_j(i) e^{-a_i s}, D the certain tokens and n_j
        the draws from row j, token i is taken with probability

            sum_j n_j q_j(i) a_i integral e^{-a_i s} e^{-a(D) s} phi_j^{n_j - 1} prod_{l != j} phi_l^{n_l} ds,

        and i in D with probability a_i integral e^{-a(D) s} prod_l phi_l^{n_l} ds; by a trapezoidal rule (`_nodes`).
        The logarithms of the rates lie in [-`WIDEST`, 0].
        """
        rates = log_rates.exp()
        time, weight = _nodes(log_rates, nodes)
        late = (rates.unsqueeze(-2) * -time.unsqueeze(-1)).exp_()
        if self.certain is not None:
            weight = weight * (-time * (rates * self.certain).sum(dim=-1, keepdim=True)).exp()
        phi, draws = late @ self.rows.transpose(-1, -2), self.draws.unsqueeze(-2)
        last = draws * phi.pow((draws - 1).clamp_min(0)) * weight.unsqueeze(-1) * _others(phi, draws)
        result = last.transpose(-1, -2) @ late
        result = (self.rows * result).sum(dim=-2) if result.shape[-2] > 1 else (self.rows * result).squeeze(-2)
        if self.certain is not None:
            whole = (phi.pow(draws).prod(dim=-1) * weight).sum(dim=-1, keepdim=True)
            result = result + self.certain * whole
        return rates * result

    def rows_at(self, kept: Int[Tensor, " m"]) -> "RaceLaw":
        """Return the law of some rows."""
        return RaceLaw(self.rows[kept], self.draws[kept], None if self.certain is None else self.certain[kept])

    def contained(self, order: Int[Tensor, "n A"]) -> Float[Tensor, "n A"]:
        """Return Pr[all drafts are among the first j + 1 tokens of an order] for every j."""
        sums = self.rows.gather(-1, order.unsqueeze(-2).expand_as(self.rows)).cumsum(dim=-1)
        chain = sums.pow(self.draws.unsqueeze(-1)).prod(dim=-2)
        if self.certain is None:
            return chain
        held = self.certain.gather(-1, order).cumsum(dim=-1)
        return chain.where(held == held[..., -1:], 0.0)


def _others(phi: Float[Tensor, "n t J"], draws: Float[Tensor, "n 1 J"]) -> Float[Tensor, "n t J"] | float:
    """Return the product of the other rows' powers of phi, for every row."""
    if phi.shape[-1] == 1:
        return 1.0
    powers = phi.pow(draws)
    every = range(phi.shape[-1])
    return torch.stack([powers[..., [other for other in every if other != j]].prod(dim=-1) for j in every], dim=-1)


def _draws_in_turn(draft_probs: Float[Tensor, "n J A"], counts: Int[Tensor, " n"]) -> Int[Tensor, "n J"]:
    """Return how many drafts come from each row in turn; the first row without mass ends them."""
    number = draft_probs.shape[1]
    live = (draft_probs > 0).any(dim=-1).long().cumprod(dim=-1).sum(dim=-1)
    drawn = torch.where(live < number, torch.minimum(counts, live), counts).unsqueeze(-1)
    turn = torch.arange(number, device=draft_probs.device)
    return (drawn - turn + number - 1).div(number, rounding_mode="floor").clamp_min(0)


def _nodes(log_rates: Float[Tensor, "n A"], number: int) -> tuple[Float[Tensor, "n t"], Float[Tensor, "n t"]]:
    """Return times and weights of the trapezoidal rule in u with time = exp(u - e^{-u}).

    The integrands fall doubly exponentially in u at both ends, where the rule converges exponentially in the number of
    nodes (Takahasi and Mori, Publ. RIMS 9, 1974).
    """
    length = math.log(LATEST) - EARLIEST - log_rates.amin(dim=-1, keepdim=True)
    u = length * _unit_nodes(number, log_rates.device) + EARLIEST
    steep = (-u).exp()
    time = (u - steep).exp()
    return time, (length / (number - 1)) * time * (steep + 1)


@lru_cache(maxsize=8)
def _unit_nodes(number: int, device: torch.device) -> Float[Tensor, " t"]:
    return torch.linspace(0, 1, number, dtype=torch.float64, device=device)
