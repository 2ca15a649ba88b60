"""The lowest of successive drafts in a block: how often it is at each place, by products of tables over time."""

from dataclasses import dataclass

import numpy as np
import torch

from polydraft.theory import SuccessiveLaw
from polydraft.theory.ringing import MOST_LINEAR
from polydraft.theory.successive import SCALE
from polydraft.verifiers.selection.ordered import (
    Numbers,
    Places,
    counted,
    integers,
    numbers,
    prefix_sums,
    suffix_sums,
    within,
)


@dataclass(frozen=True, eq=False)
class LowestFirst:
    """Rows of successive drafts and the rule that takes a block's lowest draft.

    With X_j = (places below low and places j..high - 1), the chance that all drafts lie in X_j falls as j grows by the
    chance that the rule takes the token at j. By `SuccessiveLaw`,

        1 - Q(X_j) = s (1 + sum_{i in X_j} q_i / (1 - q_i)
                        + integral e^{-t} sum_{2 <= a + b < k} e_a(w_i: i < low) e_b(w_i: j <= i < high) dt)

    with s = 1 - q(X_j) and w_i = e^{q_i t} - 1. The tables of e_a are those of the containment of prefixes. As j falls,
    e_b grows by w_j e_{b-1}(w_i: j < i < high); tables of these steps depend on `high` alone and are kept, one for each
    row. So the integral is a running sum of products of two tables: positive terms, no cancellation.

    Those products leave the range of float64 for very many drafts. Then X_j is a prefix of an order of its own. Where a
    token off X_j has long rung before some in X_j do, odds were cut (`SuccessiveLaw.rung`): the sum exceeds the true
    chance, which is one to rounding.

    Args:
        law: the law.
        weights: the draft rows.
        lone: q_i / (1 - q_i) over `SCALE`, zero where there is one draft.
        lone_below: the sums of the first of them.
        wanted: one for the degrees a and b of tables that go together.
        measure: the nodes' weights over `SCALE`, for integration over time in units of the mean time of the first ring.
        used: how many nodes have any weight.
        odds: w_i at every node, the last token first.
        before: e^{-t} e_a of every prefix at every node, for every a below the largest count.
        kept: for some rows, the block and its steps of e_1, e_2, ... at every node, the last token first.
    """

    law: SuccessiveLaw
    weights: Numbers
    lone: Numbers
    lone_below: Numbers
    wanted: Numbers
    measure: Numbers
    used: list[int]
    odds: Numbers
    before: Numbers
    kept: dict[int, tuple[int, int, Numbers]]

    @classmethod
    def of(cls, law: SuccessiveLaw, weights: Numbers) -> "LowestFirst":
        """Read the tables of a law, whose rows are `weights` up to a constant."""
        odds, tables = law.rung if 2 < law.most <= MOST_LINEAR else (law.rates[:, None], law.rates[:, :0])
        before = numbers(tables)
        measure = numbers(law.nodes.time * law.nodes.weight * (law.rates.sum(dim=-1, keepdim=True) / SCALE))
        counts, degree = integers(law.counts)[:, None, None], counted(before.shape[1])
        measure = measure * (counts[:, 0] > 2)
        both = np.add.outer(degree, degree)
        wanted = ((both >= 2) & (both < counts)).astype(np.float64)
        lone = _lone(numbers(law.rates)) * (counts[:, 0] > 1)
        lone_below = prefix_sums(lone)
        used = (measure > 0).sum(axis=1).tolist()
        return cls(law, weights, lone, lone_below, wanted, measure, used, numbers(odds)[..., ::-1], before, {})

    def missed_by_prefixes(self) -> Numbers:
        """Return 1 - Q of every prefix of every row: blocks that end before the first place."""
        if self.law.most > MOST_LINEAR:
            return numbers(self.law.missed_chain())
        sums = self.lone_below
        if self.before.shape[1]:
            factors = (self.wanted[:, 0, :, None] * self.measure[:, None]).reshape(len(sums), 1, -1)
            sums = sums + (factors @ self.before.reshape(len(sums), -1, sums.shape[1]))[:, 0]
        counts, outside = integers(self.law.counts)[:, None], suffix_sums(self.weights)
        missed = np.minimum(outside + outside * SCALE * sums, 1)
        missed = np.where(prefix_sums(self.weights > 0) < counts, 1, missed)  # where so many drafts cannot lie inside
        return np.where((outside > 0) & (counts > 0), missed, 0)

    def missed(self, row: Places, low: Places, high: Places, above: Numbers) -> Numbers:
        """Return 1 - Q(X_j) for j = low..high, for blocks of some rows; `above` is the draft mass from `high` on."""
        if self.law.most > MOST_LINEAR:
            return self._missed_in_order(row, low, high)
        size = self.weights.shape[1]
        inside = within(low, high, counted(size))
        outside, sums = np.zeros((2, len(row), size + 1))
        np.cumsum(self.weights[row] * inside, axis=1, out=outside[:, 1:])
        outside += above[:, None]
        np.multiply(self.lone[row], inside, out=sums[:, :0:-1])
        below = self.lone_below[row, low]
        if self.before.shape[1]:
            factors = self._factors(row, low)
            below += factors[:, 0].sum(axis=1)
            blocks = zip(sums, factors[:, 1:], row.tolist(), low.tolist(), high.tolist(), strict=True)
            for line, factor, number, start, stop in blocks:
                steps = self._steps(number, start, stop)[:, : stop - start]
                line[size - stop + 1 : size - start + 1] += factor[:, : self.used[number]].ravel() @ steps
        sums[counted(len(row)), size - high] = below
        return np.minimum(outside + outside * SCALE * sums.cumsum(axis=1)[:, ::-1], 1)

    def _missed_in_order(self, row: Places, low: Places, high: Places) -> Numbers:
        """Return 1 - Q(X_j) from the containment of the prefixes of (places below low, high - 1, ..., low, others)."""
        missed, place = np.zeros((len(row), self.weights.shape[1] + 1)), counted(self.weights.shape[1])
        for line, number, start, stop in zip(missed, row.tolist(), low.tolist(), high.tolist(), strict=True):
            order = np.concatenate([place[:start], place[start:stop][::-1], place[stop:]])
            tokens = torch.tensor(order[None], device=self.law.rates.device)
            chain = numbers(self.law.row(number).missed_chain(tokens))[0]
            line[start : stop + 1] = chain[start : stop + 1][::-1]
        return missed

    def _factors(self, row: Places, low: Places) -> Numbers:
        """Return, for rows, every b and every node, what a step of e_b counts: the sum of the e_a that go with it."""
        return (self.wanted[row] @ self.before[row, :, :, low]) * self.measure[row, None]

    def _steps(self, row: int, low: int, high: int) -> Numbers:
        """Return the steps of all e_b at all nodes for a row's block, one below the other."""
        if row in self.kept:
            start, stop, flat = self.kept[row]
            if stop == high and start <= low:
                return flat
        odds = self.odds[row, : self.used[row], self.weights.shape[1] - high : self.weights.shape[1] - low]
        steps = np.empty((self.before.shape[1] - 1, *odds.shape))
        steps[0], steps[1:, :, 0] = odds, 0
        for b in range(1, len(steps)):
            np.multiply(odds[:, 1:], steps[b - 1, :, :-1].cumsum(axis=1), out=steps[b, :, 1:])
        flat = steps.reshape(-1, high - low)
        self.kept[row] = (low, high, flat)
        return flat


def _lone(rates: Numbers) -> Numbers:
    """Return `SuccessiveLaw.lone`."""
    others = suffix_sums(rates)[:, 1:]
    others[:, 1:] += rates[:, :-1].cumsum(axis=1)
    return rates / SCALE / np.where(others > 0, others, np.inf)
