"""Shares of drafts by value: children with drafts below get more than leaves, and their first parts most.

A child's share has *parts*, `PARTS` equal ones, of falling slope: what a part brings in kept drafts, itself and below.
Tokens have *prices* from 0 to the largest slope, in steps of 1 / `STEPS`. A price between two steps is dithered: a
drawn copy has the step above with a probability, else that below, whatever the others have. All drafts together fill
one unit, part by part in falling order of slope minus price while this is positive; equal parts in drafting order.

Some best prices are slopes apart, by duality, and what lies between two of those orders tokens that are equal. So
slopes are even numbers of steps: with one more price between two of them shares miss up to .12 per cent on average of
the best value of a node, with seven more nothing.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polydraft.machine_code import compiled
from polydraft.verifiers.selection.rule import Numbers, Places, counted

PARTS = 4
STEPS = 16
"""Steps of price to a slope of one: to a draft that is kept, and none below it."""
SWEEPS = 80
SETTLED = 1e-4
"""Prices are left as they are when at most this part of what is taken could still be gained."""
SMALLEST = 5e-324
Slopes = NDArray[np.int64]
"""The slopes of the parts of each draft, in steps of price, "k PARTS"; falling, even, and at least two steps."""


@dataclass(frozen=True, eq=False)
class DraftLaws:
    """The laws of drafts below one or several nodes.

    Args:
        rows: "r A", laws over their own node's atoms.
        nodes: the node of each row.
        kinds: the row of each draft.
        distinct: whether the drafts are two of one node and one row, drawn one after the other without replacement;
            else they are independent.
    """

    rows: Numbers
    nodes: Places
    kinds: Places
    distinct: bool = False


def settled(drafted: DraftLaws, slopes: Slopes, mass: Numbers) -> tuple[Numbers, Numbers]:
    """Return prices at which tokens are taken as often as their mass bears, and how often that is; both "g A".

    By sweeps: for given prices every draft expects a share that falls with its own token's price; each token takes the
    price at which its mass is used up, or none if it never is. A token's price leaves more room for the others, so
    prices rise from zero, sweep by sweep, to the least ones at which nothing is taken too often. They are the dual of

        maximise  E[sum over drafts and parts of slope * part],   E[parts of a token] <= mass,   parts <= one unit.

    Sweeps end where the two differ by at most `SETTLED`, or after `SWEEPS`. Shares are exact without: whatever the
    prices are, what is taken is computed for them, and the caller thins it to the mass where it is more.

    Args:
        drafted: the laws of the drafts.
        slopes: what the parts of the drafts bring.
        mass: how often each token of each node may be taken at most, "g A".
    """
    prices, rows = np.zeros(mass.shape), drafted.rows
    given = drafted.nodes, drafted.kinds, slopes, mass, prices
    if not drafted.distinct:
        return prices, _swept(rows, *given, -1, 0.0, SWEEPS, SETTLED)
    heavy = int(rows[0].argmax())
    light, much = np.where(counted(rows.shape[1]) == heavy, 0.0, rows[0]), float(rows[0, heavy])
    three = np.stack([light / (1 - light), light, light / max(light.sum(), SMALLEST)])
    return prices, _swept(three, counted(3) * 0, *given[1:], heavy, much, SWEEPS, SETTLED)


def shares_at(prices: Numbers, slopes: Slopes) -> Numbers:
    """Return the share of each draft, given the prices of their tokens, averaged over the dither."""
    each, ones = counted(len(prices)), np.ones((len(prices), 1))
    return _swept(ones, each, each, slopes, ones, prices[:, None].copy(), -1, 0.0, 0, 0.0)[:, 0]


@compiled
def _responses(chances: Numbers, kinds: Places, slopes: Slopes, result: Numbers) -> None:
    """Compute the shares that all drafts of a kind expect together at each price of a token of theirs.

    Args:
        chances: Pr[the price of a draft's token is at most x] for x = 0..top, for each kind.
        kinds: the kind of each draft.
        slopes: what the parts of the drafts bring.
        result: the shares, at prices from 0 to top + 1.
    """

    def fold(ahead: Numbers, law: Numbers, parts: Slopes, value: int, after_it: Numbers) -> None:
        """Add the parts of one more draft that are worth at least `value` to a law of parts ahead, below one unit."""
        for some in range(PARTS):
            after_it[some] = 0.0
        before = 1.0
        for more in range(PARTS + 1):
            after = 0.0
            if more < PARTS and parts[more] >= value:
                after = law[min(parts[more] - value, len(law) - 1)]
            if before > after:
                for some in range(PARTS - more):
                    after_it[some + more] += ahead[some] * (before - after)
            before = after
            if after <= 0:
                break

    count = len(kinds)
    result[:] = 0.0
    left, right = np.zeros((count + 1, PARTS)), np.zeros((count + 1, PARTS))
    left[0, 0] = right[count, 0] = 1.0
    for value in range(1, chances.shape[1]):
        for draft in range(count - 1):
            fold(left[draft], chances[kinds[draft]], slopes[draft], value, left[draft + 1])
        for draft in range(count - 1, 0, -1):
            fold(right[draft + 1], chances[kinds[draft]], slopes[draft], value + 1, right[draft])
        for draft in range(count):
            room = 0.0
            for parts in range(PARTS):
                for before in range(parts + 1):
                    room += left[draft, before] * right[draft + 1, parts - before]
                slope = slopes[draft, PARTS - 1 - parts]
                if slope >= value:
                    result[kinds[draft], slope - value] += room / PARTS


@compiled
def _chances(rows: Numbers, nodes: Places, prices: Numbers, result: Numbers) -> None:
    """Compute Pr[the price of a draft's token is at most x] for x = 0..top, for each row."""
    result[:] = 0.0
    top = result.shape[1] - 1
    for row in range(len(rows)):
        for token in range(rows.shape[1]):
            price = prices[nodes[row], token]
            below = min(int(price), top - 1)
            result[row, below] += rows[row, token] * (1 - price + below)
            result[row, below + 1] += rows[row, token] * (price - below)
        for price in range(top):
            result[row, price + 1] += result[row, price]


@compiled
def _pair_responses(chances: Numbers, price: float, slopes: Slopes, result: Numbers) -> None:
    """Compute what two distinct drafts expect at each price of their own token, divided by the other's chance.

    The lines of the result: the first draft, the second, either where the other is the heavy token, of this price, and
    the first where it is the heavy one itself. A part finds no room where the other's price is at or below a gap.
    """
    result[:] = 0.0
    top = chances.shape[1] - 1
    for draft in range(2):
        law = chances[1 - draft]
        for part in range(PARTS):
            for at in range(slopes[draft, part]):
                gap = min(slopes[1 - draft, PARTS - 1 - part] - slopes[draft, part] + at - (1 - draft), top)
                result[draft, at] += (law[top] - law[gap] if gap >= 0 else law[top]) / PARTS
                result[2 + draft, at] += (min(max(price - gap, 0.0), 1.0) if gap >= 0 else 1.0) / PARTS
                if draft == 0:
                    result[4, at] += (chances[2, top] - chances[2, gap] if gap >= 0 else chances[2, top]) / PARTS


@compiled
def _swept(
    rows: Numbers,
    nodes: Places,
    kinds: Places,
    slopes: Slopes,
    mass: Numbers,
    prices: Numbers,
    heavy: int,
    much: float,
    sweeps: int,
    accuracy: float,
) -> Numbers:
    """Move prices until each token's mass is used up; return how often it is taken at the last ones.

    Of two distinct drafts the likeliest token, `heavy` of chance `much`, is kept apart, so that its complement, which
    may be tiny, is never a difference: `rows` are the odds, chance / (1 - chance), of the others, their chances, and
    those without the heavy one. For independent drafts `heavy` is -1.
    """
    top = slopes[:, 0].max()
    chances, tables = np.zeros((len(rows), top + 1)), np.zeros((max(len(rows), 5), top + 2))
    taken, moved = np.zeros(mass.shape), prices.copy()

    def itself(draft: int, price: float, at: int) -> float:  # what it expects where the other's price is its own
        total = 0.0
        for part in range(PARTS):
            if slopes[draft, part] > at:
                gap = slopes[1 - draft, PARTS - 1 - part] - slopes[draft, part] + at - (1 - draft)
                total += min(max(price - gap, 0.0), 1.0) if gap >= 0 else 1.0
        return total / PARTS

    def expected(node: int, token: int, at: int) -> float:  # how often it is taken if its price is `at`
        total = 0.0
        if heavy < 0:
            for row in range(len(rows)):
                if nodes[row] == node:
                    total += rows[row, token] * tables[row, at]
        elif token == heavy:
            total = much * (tables[4, at] + tables[1, at])
        elif rows[1, token] > 0:  # the first meets the second's chance, the second the first's odds, none itself
            price, odds, chance = prices[0, token], rows[0, token], rows[1, token]
            first = max(tables[0, at] - chance * itself(0, price, at), 0.0) + much * tables[2, at]
            second = chance * max(tables[1, at] - odds * itself(1, price, at), 0.0)
            total = odds * first + second + rows[2, token] * much * tables[3, at]
        return total

    for sweep in range(sweeps + 1):
        _chances(rows, nodes, prices, chances)
        if heavy < 0:
            _responses(chances, kinds, slopes, tables)
        else:
            _pair_responses(chances, prices[0, heavy], slopes, tables)
        missing = total = 0.0
        for node in range(mass.shape[0]):
            for token in range(mass.shape[1]):
                price, most = prices[node, token], mass[node, token]
                at = min(int(price), top - 1)
                here, after = expected(node, token, at), expected(node, token, at + 1)
                found = taken[node, token] = here + (after - here) * (price - at)
                total += min(found, most)
                missing += max(found - most, price * (most - found) / STEPS)
                while after >= most and at < top - 1:
                    at, here, after = at + 1, after, expected(node, token, at + 2)
                while here < most and at > 0:
                    at, here, after = at - 1, expected(node, token, at - 1), here
                excess = max(here - most, 0.0)
                moved[node, token] = at + (min(excess / (here - after), 1.0) if here > after else 0.0)
        if missing <= accuracy * total:
            break
        if sweep < sweeps:
            prices[:] = moved
    return taken
