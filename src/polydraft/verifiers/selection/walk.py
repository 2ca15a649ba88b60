"""The selection law of a node's drafts, by a walk through ever smaller blocks of the order of tokens."""

# torch's stubs do not say what Tensor.tolist returns:
# pyright: reportUnknownMemberType=false

from typing import cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.verifiers.selection.clipped import Clipped
from polydraft.verifiers.selection.ordered import Numbers, OrderedRow, numbers, running

NOISE = 1e-14
"""Probabilities below this are rounding errors."""


def accepted_shares(clipped: Clipped, places: Int[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Return Pr[draft i is accepted | the drafts]: averaged over the drafts, min(m, t) of every token.

    Problem: given t with t(S) >= Q(S) = Pr[all drafts in S] for all sets S and t(all) = 1, find a law on the tokens of
    each drafted set, t on average. Tokens are in an order in which t / draft does not decrease. Then only prefixes H_j
    matter, because all draft laws here have (Q(H + i) - Q(H)) / q_i >= (Q(H) - Q(H - j)) / q_j for j in H and i off it:
    if S minimises t - Q, and i off S comes before j in S, then S + i does too.

    A walk starts with H or the places off H. In a block (l, h], where t(H_h) = Q(H_h) and t(H_l) = Q(H_l), let u be how
    often the block's simple rule takes each token. Take the largest s <= 1 with t - s u >= (1 - s) Q on all prefixes in
    the block. Since u / draft does not increase, (t - s u) / draft does not decrease, so this holds for all sets. With
    probability s the simple rule decides. Otherwise t becomes (t - s u) / (1 - s), and some prefix has t(H_j) = Q(H_j):
    a token of H_j is taken only if all drafts are in H_j. The walk goes on in (j, h] if a draft is there and in (l, j]
    if not. Blocks shrink, so there are at most A rounds, and in a block of one token the simple rule is the only one:
    nothing is left over and nothing has to converge. Rounding errors enter with their own size.

    Why the inequality, for successive drafts: compare sets in which i or j is drafted, given all other clocks, and let
    T be the time at which k - 1 others have rung. The left side gains (1 - e^{-q_i T}) / q_i, the right side
    e^{-q_i T} (1 - e^{-q_j T}) / q_j, both the same for a ring after T; and (1 - e^{-x}) / x >= e^{-x}.

    What is taken is accepted until a token has had min(m, t), so a walk also ends where the simple rule mixed with the
    priority of high places takes at least what is still missing of every token of the block; most walks end like that.

    The walk is sequential and runs on the host, row after row.

    Shapes: `places` are the drafts' places in the order, -1 for absent ones; a row without drafts has no shares. The
    result is in float64. A token drafted twice may have shares at both copies.
    Source: our own. That t(S) >= Q(S) is what it takes is Strassen's theorem (Ann. Math. Statist. 36, 1965).
    """
    shares = np.zeros(tuple(places.shape))
    need, taken = numbers(clipped.accepted), numbers(clipped.taken)
    sizes, fixed = cast(list[int], clipped.size.tolist()), cast(list[int], clipped.certain.tolist())
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for index, drafts in enumerate(cast(list[list[int]], places.tolist())):
            present = [place for place in drafts if place >= 0]
            if present:
                row = clipped.drafts.row(index)
                found = _shares(row, taken[index], need[index], present, sizes[index], fixed[index])
                shares[index, [place >= 0 for place in drafts]] = found
    return torch.tensor(shares, device=places.device)


def _shares(row: OrderedRow, taken: Numbers, need: Numbers, places: list[int], size: int, certain: int) -> list[float]:
    """Return the shares of one row's drafts; tokens drafted for certain are one token on the walk."""
    if certain < 2:
        return walk(row, taken, need, places, size)
    first = certain - 1
    one_taken, one_needed = (np.append(mass[:certain].sum(), mass[certain:]) for mass in (taken, need))
    shares = walk(row, one_taken, one_needed, [max(place - first, 0) for place in places], max(size - first, 0))
    pairs = list(zip(shares, places, strict=True))
    together = sum(share for share, place in pairs if place < certain)
    whole = float(one_needed[0]) or 1.0
    return [together * float(need[place]) / whole if place < certain else share for share, place in pairs]


def walk(row: OrderedRow, taken: Numbers, need: Numbers, places: list[int], size: int) -> list[float]:
    """Walk one row.

    Args:
        row: the draft law.
        taken: t of every place.
        need: what is to be accepted of every place, at most t.
        places: the places of the drafts.
        size: the size of H, where t(H) = Q(H).
    """
    shares = [0.0] * len(places)
    priority, excess, need, left = np.diff(row.inside), running(taken) - row.inside, need.copy(), 1.0
    top = max(places)
    low, high = (size, len(taken)) if top >= size else (0, size)
    while True:
        line = row.taken(low, high)
        rule, gain = line[1:] - line[:-1], line - row.inside[low : high + 1]
        mix = mixture(need[low:high] / left, rule, priority[low:high])
        step, cut = (left, high) if mix is not None else _step(excess[low : high + 1], gain, left)
        high_weight = mix or 0.0
        supply = step * ((1 - high_weight) * rule + high_weight * priority[low:high])
        chosen = row.pick(low, high, places)
        for draft in chosen:
            shares[draft] += step * (1 - high_weight) / len(chosen) * _kept(need, supply, places[draft], low)
        if high_weight > 0:
            top = max(place for place in places if place < high)
            shares[places.index(top)] += step * high_weight * _kept(need, supply, top, low)
        left -= step
        if left < NOISE:
            return shares
        excess[low : high + 1] -= step * gain
        need[low:high] = np.maximum(need[low:high] - supply, 0)
        cut += low
        low, high = (cut, high) if any(cut <= place < high for place in places) else (low, cut)


def mixture(need: Numbers, rule: Numbers, priority: Numbers) -> float | None:
    """Return a weight w with w priority + (1 - w) rule >= need up to rounding, or None if there is none in [0, 1]."""
    more, short = priority - rule, need - rule - NOISE
    ratio = short / more
    least = ratio.max(where=more > 0, initial=0.0)
    most = ratio.min(where=more < 0, initial=1.0)
    if least > most or (short[more == 0] > 0).any():
        return None
    return float(least)


def _step(excess: Numbers, gain: Numbers, left: float) -> tuple[float, int]:
    """Return the largest step that keeps the excess of all prefixes, at most what is left, and the prefix it meets."""
    if len(gain) < 3:
        return left, 1
    bound = excess[1:-1] / gain[1:-1]
    bound[gain[1:-1] <= NOISE] = np.inf
    cut = int(bound.argmin())
    step = min(max(float(bound[cut]), 0.0), left)
    return (left, 1) if left - step < NOISE else (step, cut + 1)


def _kept(need: Numbers, supply: Numbers, place: int, low: int) -> float:
    """Return how much of what is taken of a token is accepted: no more than is missing."""
    offered = float(supply[place - low])
    return min(1.0, float(need[place]) / offered) if offered > 0 else 1.0
