"""Exponential clocks: how many of the first tokens of an order have rung at a time when no other has."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

CLIP = 40.0
"""A clock whose ring is overdue by this factor counts as rung: exp(-40) is far below rounding."""
MOST_LINEAR = 16
"""Up to this many drafts no product of clipped odds and silences leaves the range of float64."""


def odds_of_ringing(
    rates: Float[Tensor, "*b A"], time: Float[Tensor, "*b n"], clip: float = CLIP
) -> tuple[Float[Tensor, "*b n A"], Float[Tensor, "*b n"]]:
    """Return each clock's odds exp(r t) - 1 of having rung, and the logarithm of the chance that none has."""
    ripe = (time.unsqueeze(-1) * rates.unsqueeze(-2)).clamp_max_(clip)
    silence = -ripe.sum(dim=-1)
    return ripe.expm1_(), silence


def fewer_rung(
    odds: Float[Tensor, "*b n A"], silence: Float[Tensor, "*b n"], counts: Int[Tensor, "*b"], most: int, least: int = 0
) -> Float[Tensor, "*b n A+1"]:
    """Return Pr[at least `least` and fewer than `counts` clocks have rung, all among the first i], for i = 0..A.

    `most` is the largest count.
    """
    result = odds.new_zeros(*odds.shape[:-1], odds.shape[-1] + 1)
    for j, exactly in enumerate(rung_exactly(odds, silence, most)):
        if j >= least:
            result[..., j:].addcmul_(exactly, (j < counts)[..., None, None].to(odds.dtype))
    return result


def rung_exactly(
    odds: Float[Tensor, "*b n A"], silence: Float[Tensor, "*b n"], most: int
) -> Iterator[Float[Tensor, "*b n i"]]:
    """Yield Pr[exactly j clocks have rung, all among the first i] for i = j..A, and that for each j < most.

    With w the odds, this is exp(silence) e_j(w_1, ..., w_i), where e_j(w_1, ..., w_i) is the cumulative sum of
    w_i e_{j-1}(w_1, ..., w_{i-1}): positive terms, no cancellation.
    """
    most = min(most, odds.shape[-1] + 1)
    if most > MOST_LINEAR:
        chain = silence.unsqueeze(-1).expand(*odds.shape[:-1], odds.shape[-1] + 1)
        yield chain.exp()
        logs = odds.log()
        for j in range(1, most):
            chain = (logs[..., j - 1 :] + chain[..., :-1]).logcumsumexp(dim=-1)
            yield chain.exp()
        return
    chain = silence.exp().unsqueeze(-1).expand(*odds.shape[:-1], odds.shape[-1] + 1)
    yield chain
    for j in range(1, most):
        chain = (odds[..., j - 1 :] * chain[..., :-1]).cumsum_(dim=-1)
        yield chain


def rung_tables(
    odds: Float[Tensor, "*b n A"], silence: Float[Tensor, "*b n"], most: int
) -> Float[Tensor, "*b most n A+1"]:
    """Return the tables of `rung_exactly` in one, zero where i < j; for up to `MOST_LINEAR` drafts."""
    tables = odds.new_empty(*odds.shape[:-2], most, odds.shape[-2], odds.shape[-1] + 1)
    tables[..., 0] = 0
    exactly = tables.unbind(dim=-3)
    exactly[0].copy_(silence.exp().unsqueeze(-1))
    for fewer, more in pairwise(exactly):
        torch.mul(odds, fewer[..., :-1], out=more[..., 1:]).cumsum_(dim=-1)
    return tables
