"""Shares of a node's drafts by value: children with drafts below get more than leaves, and their first parts most.

A child's share has *parts*, `PARTS` equal ones, of falling slope: what a part brings in kept drafts, itself and below.
Tokens have *prices* from 0 to the largest slope, in steps of `STEP`. A token between two steps is dithered: a drawn
copy has the price above with the probability `above`, else that below, whatever the others have. A draft fills the
node's one unit part by part, all drafts together in falling order of slope minus price while this is positive; equal
parts in drafting order.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polydraft.machine_code import compiled
from polydraft.verifiers.selection.rule import Numbers, Places, counted

PARTS = 4
STEPS = 20
"""Steps of price to a slope of one: to a draft that is kept, and none below it."""
SWEEPS = 40
SETTLED = 1e-3
"""Prices that move by less than this part of a step are left as they are."""
Slopes = NDArray[np.int64]
"""The slopes of the parts of each draft, in steps of price, "k PARTS"; falling, and at least one step."""


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices of tokens, in steps.

    Args:
        below: whole steps.
        above: the probability of one step more.
    """

    below: Places
    above: Numbers


def settled(rows: Numbers, slopes: Slopes, mass: Numbers, *, distinct: bool) -> tuple[Prices, Numbers]:
    """Return prices at which tokens are taken as often as their mass bears, and how often that is.

    By sweeps: for given prices every draft expects a share that falls with its own token's price; each token takes the
    price at which its mass is used up, or none if it never is. A token's price leaves more room for the others, so
    prices rise from zero, sweep by sweep, to the least ones at which nothing is taken too often. They are the dual of

        maximise  E[sum over drafts and parts of slope * part],   E[parts of a token] <= mass,   parts <= one unit,

    whose prices are on the steps if slopes are. It does not have to end: whatever the prices are, what is taken is
    computed for them, and thinned to the mass where it is more.

    Args:
        rows: "k A", the law of each draft.
        slopes: what the parts of the drafts bring.
        mass: how often each token may be taken at most.
        distinct: whether two drafts are drawn one after the other without replacement, `rows` being the row of the
            first twice; else they are independent.
    """
    top, heavy = int(slopes[:, 0].max()), int(rows[0].argmax()) if distinct else -1
    below, above, sweeps = np.zeros(len(mass), dtype=np.int64), np.zeros(len(mass)), 0
    while True:
        chances = _chances(rows, below, above, top, heavy)
        weighted = _weighted(rows[0], below, above, top, heavy) if distinct else chances[0]
        response = chances if distinct else _responses(chances, slopes)
        new_below, new_above, taken, moved = _sweep(
            rows, slopes, mass, below, above, chances[-1], weighted, response, heavy
        )
        if moved < SETTLED or sweeps == SWEEPS:
            return Prices(below, above), taken
        below, above, sweeps = new_below, new_above, sweeps + 1


def shares_at(prices: Prices, slopes: Slopes, drafts: Places) -> Numbers:
    """Return the share of each draft at these prices, averaged over the dither; all drafts are present."""
    top, below, above = int(slopes[:, 0].max()), prices.below[drafts], prices.above[drafts]
    response, each = _responses(_own_chances(below, above, top), slopes), counted(len(drafts))
    return response[each, below] * (1 - above) + response[each, below + 1] * above


@compiled
def _chances(rows: Numbers, below: Places, above: Numbers, top: int, left_out: int) -> Numbers:
    """Return Pr[the price of each draft's token is at most x] for x = 0..top, without the token that is left out."""
    count, size = rows.shape
    chances = np.zeros((count, top + 1))
    for draft in range(count):
        for token in range(size):
            if token == left_out:
                continue
            chances[draft, below[token]] += rows[draft, token] * (1 - above[token])
            if above[token] > 0:
                chances[draft, below[token] + 1] += rows[draft, token] * above[token]
        for price in range(top):
            chances[draft, price + 1] += chances[draft, price]
    return chances


@compiled
def _weighted(row: Numbers, below: Places, above: Numbers, top: int, left_out: int) -> Numbers:
    """Return the same with row / (1 - row) in place of the row."""
    sums = np.zeros(top + 1)
    for token in range(len(row)):
        if token == left_out:
            continue
        weight = row[token] / (1 - row[token])
        sums[below[token]] += weight * (1 - above[token])
        if above[token] > 0:
            sums[below[token] + 1] += weight * above[token]
    for price in range(top):
        sums[price + 1] += sums[price]
    return sums


@compiled
def _own_chances(below: Places, above: Numbers, top: int) -> Numbers:
    """Return what `_chances` is for drafts that are known."""
    chances = np.zeros((len(below), top + 1))
    for draft in range(len(below)):
        for price in range(below[draft], top + 1):
            chances[draft, price] = 1.0 if price > below[draft] else 1 - above[draft]
    return chances


@compiled
def _responses(chances: Numbers, slopes: Slopes) -> Numbers:
    """Return the share that a draft expects at each price of its own token, the others being independent."""

    def fold(ahead: Numbers, law: Numbers, parts: Slopes, value: int, result: Numbers) -> None:
        """Add the parts of one more draft that are worth at least `value` to a law of parts ahead, below one unit."""
        for some in range(PARTS):
            result[some] = 0.0
        before = 1.0
        for more in range(PARTS + 1):
            after = 0.0
            if more < PARTS and parts[more] >= value:
                after = law[min(parts[more] - value, len(law) - 1)]
            if before > after:
                for some in range(PARTS - more):
                    result[some + more] += ahead[some] * (before - after)
            before = after
            if after <= 0:
                break

    count, top = len(chances), chances.shape[1] - 1
    response = np.zeros((count, top + 2))
    left, right, room = np.zeros((count + 1, PARTS)), np.zeros((count + 1, PARTS)), np.zeros(PARTS)
    left[0, 0] = right[count, 0] = 1.0
    for value in range(1, top + 1):
        for draft in range(count - 1):
            fold(left[draft], chances[draft], slopes[draft], value, left[draft + 1])
        for draft in range(count - 1, 0, -1):
            fold(right[draft + 1], chances[draft], slopes[draft], value + 1, right[draft])
        for draft in range(count):
            total = 0.0
            for parts in range(PARTS):
                for before in range(parts + 1):
                    total += left[draft, before] * right[draft + 1, parts - before]
                room[parts] = total
            for part in range(PARTS):
                if slopes[draft, part] >= value:
                    response[draft, slopes[draft, part] - value] += room[PARTS - 1 - part] / PARTS
    return response


@compiled
def _sweep(
    rows: Numbers,
    slopes: Slopes,
    mass: Numbers,
    below: Places,
    above: Numbers,
    second: Numbers,
    weighted: Numbers,
    response: Numbers,
    heavy: int,
) -> tuple[Places, Numbers, Numbers, float]:
    """Return the prices at which each token's mass is used up, how often it is taken at the old ones, and the move.

    Args:
        rows: the draft rows.
        slopes: what the parts of the drafts bring.
        mass: how often each token may be taken.
        below: the old prices of all tokens, in whole steps.
        above: the probability of one step more.
        second: the chances of the second draft's prices, for two distinct drafts.
        weighted: those of the first, row / (1 - row) in place of the row.
        response: what drafts expect, for independent ones.
        heavy: the likeliest token of distinct drafts, which is left out of both so that its complement, which may be
            tiny, is never a difference; -1 where drafts are independent.
    """

    def mine(token: int, gap: int) -> float:
        """Return the chance that a token's price is above a step."""
        if gap < 0 or below[token] > gap:
            return 1.0
        return above[token] if below[token] == gap else 0.0

    rest = rows[0, :heavy].sum() + rows[0, heavy + 1 :].sum() if heavy >= 0 else 0.0

    def expected(token: int, price: int) -> float:
        """Return how often a token is taken if its own price is `price`."""
        total = 0.0
        if heavy < 0:
            for draft in range(len(rows)):
                total += rows[draft, token] * response[draft, price]
            return total
        own, most = rows[0, token], rows[0, heavy]
        for draft in range(2):
            law = second if draft == 0 else weighted
            for part in range(PARTS):
                value = slopes[draft, part] - price
                if value < 1:
                    break
                gap = (
                    slopes[1 - draft, PARTS - 1 - part] - value - (1 - draft)
                )  # at such prices the other leaves no room
                free = law[-1] - (law[min(gap, len(law) - 1)] if gap >= 0 else 0.0)
                if token != heavy:
                    self, much = (own, most) if draft == 0 else (own / (1 - own), most / rest if rest > 0 else 0.0)
                    free += much * mine(heavy, gap) - self * mine(token, gap)
                    total += (own / (1 - own) if draft == 0 else own) * max(free, 0.0) / PARTS
                elif rest > 0:
                    total += (own / rest if draft == 0 else own) * max(free, 0.0) / PARTS
        return total

    size, furthest = rows.shape[1], 0.0
    new_below, new_above, taken = np.zeros(size, dtype=np.int64), np.zeros(size), np.zeros(size)
    for token in range(size):
        taken[token] = expected(token, below[token]) * (1 - above[token])
        if above[token] > 0:
            taken[token] += expected(token, below[token] + 1) * above[token]
        low, high, much, little = 0, len(second) - 1, expected(token, 0), 0.0
        if much > mass[token]:
            while high - low > 1:
                middle = (low + high) // 2
                found = expected(token, middle)
                if found >= mass[token]:
                    low, much = middle, found
                else:
                    high, little = middle, found
            new_below[token] = low
            new_above[token] = (much - mass[token]) / (much - little) if much > little else 0.0
        furthest = max(furthest, abs(new_below[token] + new_above[token] - below[token] - above[token]))
    return new_below, new_above, taken, furthest
