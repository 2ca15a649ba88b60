"""Successive drafts without replacement: the law of which tokens are drawn, by one quadrature over time."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.schemes.scheme import largest_count, support_size
from polydraft.theory.quadrature import TimeNodes, time_nodes

SCALE = 2.0**60
"""Rates are draft probabilities times this power of two, so that the clock of a subnormal rate rings in finite time."""
CHUNK = 1 << 18
"""The most entries of a table of rows, nodes and tokens that are held at once."""
SURE = 600.0
"""No product of the odds of `MOST_LINEAR` drafts leaves the range of float64 if this bounds its logarithm."""
CLIP = 40.0
"""A clock whose ring is overdue by this factor counts as rung: exp(-40) is far below rounding."""
MOST_LINEAR = 16
"""Up to this many drafts no product of clipped odds and silences leaves the range of float64."""


def prefix_sums(mass: Float[Tensor, "*b A"]) -> Float[Tensor, "*b A+1"]:
    """Return the mass of the first j tokens for j = 0..A."""
    return torch.nn.functional.pad(mass.cumsum(dim=-1), (1, 0))


def suffix_sums(mass: Float[Tensor, "*b A"]) -> Float[Tensor, "*b A+1"]:
    """Return the mass of all but the first j tokens for j = 0..A, added up from the end: small tails stay exact."""
    return torch.nn.functional.pad(mass.flip(-1).cumsum(dim=-1).flip(-1), (0, 1))


def of_others(mass: Float[Tensor, "*b A"]) -> Float[Tensor, "*b A"]:
    """Return the mass of all tokens but each one, without subtracting: small remainders stay exact."""
    return prefix_sums(mass)[..., :-1] + suffix_sums(mass)[..., 1:]


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


@dataclass(frozen=True, eq=False)
class SuccessiveLaw:
    """The law of successive drafts for fixed rows and counts, with everything that no order of tokens changes.

    Let token i ring at an exponential time of rate q(i): the first k rings are the drafts (arXiv 1903.06059). The
    drafts are not all in H iff some token off H rings while fewer than k of H have rung, so with s = 1 - q(H)

        1 - Q(H) = s integral e^{-t} sum_{j<k} e_j(w_i(t): i in H) dt,  w_i(t) = e^{q(i) t} - 1,

    where e_j are the elementary symmetric polynomials. The terms j = 0 and 1 are s and
    s sum_{i in H} q(i) / (1 - q(i)); the others are integrated numerically, with an error below 1e-13. All terms are
    positive, and what is off a set is added up from the end, so that masses of 1e-30 keep their digits.

    Hu et al., arXiv 2502.18779, section 4.2.2 and the proof of theorem 4, give e_k(q; H) / e_k(q) for Q(H) by mistake:
    the law of `ConditionalPoisson`.

    Args:
        rates: the draft rows times `SCALE`.
        counts: the number of drafts of each row, at most the size of its support.
        most: the largest count.
        nodes: the quadrature over time.
    """

    rates: Float[Tensor, "*b A"]
    counts: Int[Tensor, "*b"]
    most: int
    nodes: TimeNodes

    @classmethod
    def of(cls, draft_probs: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]) -> "SuccessiveLaw":
        """Prepare the law for `counts` drafts of each row."""
        rates = draft_probs.double() * SCALE
        counts = torch.minimum(counts, support_size(draft_probs))
        most = largest_count(counts)
        return cls(rates, counts, most, time_nodes(rates, counts, most))

    def chain(self, order: Int[Tensor, "*b A"] | None = None) -> Float[Tensor, "*b C"]:
        """Return Q of the first j tokens of `order`, or of the tokens as they stand, for j = 0..A."""
        return 1 - self.missed_chain(order)

    def missed_chain(self, order: Int[Tensor, "*b A"] | None = None) -> Float[Tensor, "*b C"]:
        """Return 1 - Q of the first j tokens of `order`, or of the tokens as they stand, with all its digits."""
        rates, lone = (_in_order(row, order) for row in (self.rates, self.lone))
        outside = self._above if order is None else suffix_sums(rates)
        missed = self._missed(outside, prefix_sums(lone))
        if self.most > 2:
            for time, weight, fewer in self._fewer(order):
                hazard = (time.unsqueeze(-1) * outside.unsqueeze(-2)).clamp_max_(CLIP).mul_(weight.unsqueeze(-1))
                missed = missed + hazard.mul_(fewer).sum(dim=-2)
        counts = self.counts.unsqueeze(-1)
        crowded = prefix_sums((rates > 0).to(rates.dtype)) < counts  # so many drafts cannot lie inside
        missed = missed.clamp_(0, 1).masked_fill_(crowded, 1.0)
        return missed.masked_fill_((outside <= 0) | (counts <= 0), 0.0)

    def row(self, number: int) -> "SuccessiveLaw":
        """Return the law of one of many rows."""
        rates, time, weight = (table[number, None] for table in (self.rates, self.nodes.time, self.nodes.weight))
        return SuccessiveLaw(rates, self.counts[number, None], self.most, TimeNodes(time, weight))

    @cached_property
    def rung(self) -> tuple[Float[Tensor, "*b n A"], Float[Tensor, "*b most n C"]]:
        """Odds at every node, and Pr[exactly j clocks have rung, all in a prefix], for j below the largest count.

        For up to `MOST_LINEAR` drafts: the odds of more had to be cut so far that clocks which have rung would not.
        """
        odds, silence = odds_of_ringing(self.rates, self.nodes.time, SURE / max(self.most, 1))
        return odds, rung_tables(odds, silence, self.most)

    def inclusion(self) -> Float[Tensor, "*b A"]:
        """Return the probability that each token is drawn."""
        if self.most > MOST_LINEAR:
            return self._inclusion_one_by_one()
        drawn = self._missed(self.rates, of_others(self.lone))
        if self.most > 2:
            for time, weight, odds, silence in self._ordered(None):
                hazard = (time.unsqueeze(-1) * self.rates.unsqueeze(-2)).clamp_max_(CLIP).mul_(weight.unsqueeze(-1))
                drawn = drawn + hazard.mul_(self._others_rung(odds, silence)).sum(dim=-2)
        return drawn.clamp(0, 1).where((self.counts > 0).unsqueeze(-1), 0.0)

    def _inclusion_one_by_one(self) -> Float[Tensor, "*b A"]:
        """Return 1 - Q(all others) for each token in turn: for drafts too many for products of their tables."""
        tokens = torch.arange(self.rates.shape[-1], device=self.rates.device)
        orders = [torch.cat([tokens[:i], tokens[i + 1 :], tokens[i : i + 1]]) for i in range(len(tokens))]
        return torch.stack([1 - self.chain(order.expand_as(self.rates))[..., -2] for order in orders], dim=-1)

    def _missed(self, outside: Float[Tensor, "*b m"], lone: Float[Tensor, "*b m"]) -> Float[Tensor, "*b m"]:
        """Return the chance that a token outside rings first or second, of tables of outside rates and `lone` sums."""
        total = self._above[..., :1]
        total = total.masked_fill(total <= 0, 1.0)
        second = (outside * lone).div_(total / SCALE).masked_fill_((self.counts <= 1).unsqueeze(-1), 0.0)
        return second.add_(outside / total)

    @cached_property
    def _above(self) -> Float[Tensor, "*b C"]:
        return suffix_sums(self.rates)

    @cached_property
    def lone(self) -> Float[Tensor, "*b A"]:
        """What each token adds as the only ring in H: q(i) / (the rate of all others), 0 where there are no others."""
        others = self._above[..., 1:].clone()
        others[..., 1:] += self.rates[..., :-1].cumsum(dim=-1)
        return (self.rates / SCALE).div_(others).masked_fill_(others <= 0, 0.0)

    @cached_property
    def _table(self) -> tuple[Float[Tensor, "*b n A"], Float[Tensor, "*b n"]]:
        return odds_of_ringing(self.rates, self.nodes.time)

    def _fewer(self, order: Int[Tensor, "*b A"] | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield times, weights and Pr[two to counts - 1 clocks have rung, all in a prefix], in chunks of nodes."""
        if order is None and self.most <= MOST_LINEAR and self._fits_in_memory:
            tables = self.rung[1]
            degree = torch.arange(self.most, device=tables.device)
            wanted = ((degree >= 2) & (degree < self.counts.unsqueeze(-1))).to(tables.dtype).unsqueeze(-2)
            fewer = (wanted @ tables.flatten(-2)).view(*tables.shape[:-3], *tables.shape[-2:])
            yield self.nodes.time, self.nodes.weight, fewer
            return
        for time, weight, odds, silence in self._ordered(order):
            yield time, weight, fewer_rung(odds, silence, self.counts, self.most, 2)

    @property
    def _fits_in_memory(self) -> bool:
        return self.nodes.time.numel() * self.rates.shape[-1] <= CHUNK

    def _ordered(self, order: Int[Tensor, "*b A"] | None) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield times, weights, odds in the order asked for and silences, in chunks of nodes; small tables are kept."""
        time, weight = self.nodes.time, self.nodes.weight
        if self._fits_in_memory:
            odds, silence = self._table
            if order is not None:
                odds = odds.gather(-1, order.unsqueeze(-2).expand_as(odds))
            yield time, weight, odds, silence
            return
        rates = _in_order(self.rates, order)
        width = max(1, CHUNK // rates.numel())
        for start in range(0, time.shape[-1], width):
            some = time[..., start : start + width]
            yield some, weight[..., start : start + width], *odds_of_ringing(rates, some)

    def _others_rung(self, odds: Float[Tensor, "*b n A"], silence: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n A"]:
        """Return Pr[two to counts - 1 clocks have rung, token i not among them]: from the tokens before and after i."""
        before = [_widened(table, j) for j, table in enumerate(rung_exactly(odds, silence, self.most))]
        none = torch.zeros_like(silence)
        after = [_widened(table, j) for j, table in enumerate(rung_exactly(odds.flip(-1), none, self.most))]
        after = [table.flip(-1) for table in after]
        result = torch.zeros_like(odds)
        for j in range(2, self.most):
            apart = sum((before[i] * after[j - i] for i in range(j + 1)), torch.zeros_like(odds))
            result = result + apart * (j < self.counts)[..., None, None]
        return result


def _in_order(row: Float[Tensor, "*b A"], order: Int[Tensor, "*b A"] | None) -> Float[Tensor, "*b A"]:
    return row if order is None else row.gather(-1, order)


def _widened(table: Float[Tensor, "*b i"], start: int) -> Float[Tensor, "*b A"]:
    """Put zeros where a table begins late and leave out its last entry."""
    return torch.nn.functional.pad(table[..., :-1], (start, 0))
