"""The selection law of a node's drafts, by a walk through ever smaller blocks of the order of tokens."""

from dataclasses import dataclass

import numpy as np

from polydraft.verifiers.selection.clipped import Clipped
from polydraft.verifiers.selection.ordered import Flags, Numbers, OrderedRows, Places, counted, entry, within

NOISE = 1e-14
"""Probabilities below this are rounding errors."""
FREE = 0.8
"""A prefix cuts its block where its slack is below this fraction of that of all shorter ones."""
SPARED = 0.9
"""The fraction of its slack, at most of its block's, that a step leaves to a short prefix; less to longer ones."""


def accepted_shares(clipped: Clipped, places: Places) -> Numbers:
    """Return Pr[draft i is accepted | the drafts]: averaged over the drafts, min(m, t) of every token.

    Problem: given needs v = min(m, t), find a law on the tokens of each drafted set that takes every token i at least
    v_i of the time, on average. There is one iff v(off S) <= 1 - Q(S) for all sets S, with Q(S) = Pr[all drafts in S].
    Tokens are in an order in which v / draft does not decrease. Then only prefixes H_j matter, because all draft laws
    here have (Q(H + i) - Q(H)) / q_i >= (Q(H) - Q(H - j)) / q_j for j in H and i off it: if S minimises v - Q, and i
    off S comes before j in S, then S + i does too.

    A walk starts with H or the places off H. In a block (l, h], of which the walk has probability L left, prefix j has
    slack D_j = L (Q(H_h) - Q(H_j)) - v(j..h) >= 0. Let u be how often the block's simple rule takes each token. With
    probability s the simple rule decides, v becomes (v - s u)+ and L becomes L - s. Since u / draft does not increase,
    v / draft does not decrease after that either, so prefixes are all one has to look at. Tokens reach v = 0 in their
    order, and what is taken beyond is slack lost; so for every j whose token has not yet reached it, D_j falls in
    proportion to s, and D of the others is at least that of the first such j. Hence one can see how large s may be.

    A block may be cut at any j where D_j <= D_i for all i < j: from then on a token of the lower part is taken only if
    all drafts are there. The lower part has the slacks D_i - D_j, the upper the slacks D_i: all >= 0. A step ends where
    the least D allows such a cut; it spares some slack, so that what follows is not tight, and least near the block's
    end, or token after token would be cut off there. The walk goes on in the part with the last draft. Blocks shrink,
    so there are at most A rounds, and in a block of one token the simple rule is the only one: nothing is left over and
    nothing has to converge. Rounding errors enter with their own size.

    Why the inequality, for successive drafts: compare sets in which i or j is drafted, given all other clocks, and let
    T be the time at which k - 1 others have rung. The left side gains (1 - e^{-q_i T}) / q_i, the right side
    e^{-q_i T} (1 - e^{-q_j T}) / q_j, both the same for a ring after T; and (1 - e^{-x}) / x >= e^{-x}.

    What is taken is accepted until a token has had v. A walk also ends where the simple rule mixed with the priority of
    high places takes at least v of every token of the block; most walks end like that, after a few rounds.

    The walk runs on the host, all rows together.

    Shapes: `places` are the drafts' places in the order, -1 for absent ones; a row without drafts has no shares. A
    token drafted twice may have shares at both copies.
    Source: our own. The condition on v is Strassen's theorem (Ann. Math. Statist. 36, 1965).
    """
    shares = np.zeros(places.shape)
    rows: Places = np.flatnonzero(places.max(axis=1, initial=-1) >= 0)
    if len(rows):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            law, every = clipped.drafts.rows(), len(rows) == len(places)
            some = law if every else law.kept(rows)
            shares[rows] = _shares(
                some, clipped.accepted[rows], places[rows], clipped.size[rows], clipped.certain[rows]
            )
    return shares


def _shares(law: OrderedRows, need: Numbers, places: Places, sizes: Places, certain: Places) -> Numbers:
    """Return the shares; the tokens drafted for certain are one token on the walk, at the last of their places."""
    if certain.max() < 2:
        return walk(law, need, places, sizes, np.maximum(certain - 1, 0))
    first = np.maximum(certain - 1, 0)
    place, fixed = counted(need.shape[1]), (places >= 0) & (places < certain[:, None])
    whole = np.where(place < certain[:, None], need, 0).sum(axis=1)
    merged = np.where(place < first[:, None], 0, need)
    rows = counted(len(need))
    merged[rows, first] = np.where(certain > 0, whole, merged[rows, first])
    shares = walk(law, merged, np.where(fixed, first[:, None], places), sizes, first)
    together = np.where(fixed, shares, 0).sum(axis=1) / np.where(whole > 0, whole, 1)
    own = np.take_along_axis(need, np.maximum(places, 0), axis=1)
    return np.where(fixed, together[:, None] * own, shares)


@dataclass
class _State:
    """Rows on their walk: where they come from, their blocks, a prefix to cut at, and what is left to do.

    `need` is zero outside the block, whose places `inside` marks. Of the prefixes in between, `below` marks those
    without the place of the last draft, and `last` is that draft.
    """

    row: Places
    need: Numbers
    places: Places
    last: Flags
    below: Flags
    inside: Flags
    low: Places
    high: Places
    cut: Places
    left: Numbers

    def kept(self, rows: Places) -> "_State":
        return _State(*(getattr(self, name).take(rows, axis=0) for name in _State.__match_args__))


def walk(law: OrderedRows, need: Numbers, places: Places, sizes: Places, first: Places) -> Numbers:
    """Walk all rows.

    Args:
        law: the draft laws.
        need: how often each place is to be accepted at least.
        places: the places of the drafts, -1 for absent ones; no row is without drafts.
        sizes: the sizes of H.
        first: the places before which nothing is drafted and nothing is needed.
    """
    shares = np.zeros(places.shape)
    state = _started(need, places, sizes, first)
    while True:
        slack = _narrowed(law, state)
        line = law.taken(state.low, state.high)
        rule = np.where(state.inside, line[:, 1:] - line[:, :-1], 0)
        more = law.priority * state.inside - rule
        weight = _mixture(state.need / state.left[:, None] - rule, more)
        ends = weight >= 0
        if ends.all():
            step = state.left
        else:
            step, state.cut = _step(state, slack, line - law.inside, rule)
            step, weight = np.where(ends, state.left, step), np.where(ends, weight, 0)
        if ends.any():
            rule += weight[:, None] * more
        supply = step[:, None] * rule
        shares[state.row] += _accepted(law, state, step, weight, supply)
        state.need -= supply
        np.maximum(state.need, 0, out=state.need)
        state.left = state.left - step
        going = np.flatnonzero(state.left >= NOISE)
        if len(going) < len(state.left):
            if not len(going):
                return shares
            state, law = state.kept(going), law.kept(going)


def _started(need: Numbers, places: Places, sizes: Places, first: Places) -> _State:
    """Choose between H and the places off H."""
    top = places.max(axis=1)
    off = top >= sizes
    low, high = np.where(off, np.maximum(sizes, first), first), np.where(off, need.shape[1], sizes)
    last = counted(places.shape[1]) == places.argmax(axis=1)[:, None]
    below = counted(need.shape[1])[1:] <= top[:, None]
    inside = within(low, high, counted(need.shape[1]))
    return _State(counted(len(need)), need * inside, places, last, below, inside, low, high, high, np.ones(len(need)))


def _narrowed(law: OrderedRows, state: _State) -> Numbers:
    """Cut the blocks, keep the part with the last draft, and return the slacks that all prefixes had."""
    between = counted(law.priority.shape[1])[1:]
    slack = state.left[:, None] * (entry(law.inside, state.high)[:, None] - law.inside)
    slack[:, :-1] -= state.need[:, ::-1].cumsum(axis=1)[:, ::-1]
    np.maximum(slack, 0, out=slack)
    free = slack[:, 1:-1] <= FREE * np.minimum.accumulate(slack[:, :-2], axis=1)
    free |= between == state.cut[:, None]
    free &= state.inside[:, 1:]
    free &= state.inside[:, :-1]
    state.low = np.where(free & state.below, between, state.low[:, None]).max(axis=1)
    state.high = np.where(free > state.below, between, state.high[:, None]).min(axis=1)
    state.inside = within(state.low, state.high, counted(law.priority.shape[1]))
    state.need *= state.inside
    return slack


def _mixture(short: Numbers, more: Numbers) -> Numbers:
    """Return the least weight w in [0, 1] with w more >= short up to rounding, -1 if there is none."""
    ratio = (short - NOISE) / more
    least = np.where(more >= 0, ratio, 0).max(axis=1, initial=0)
    most = np.where(more < 0, ratio, 1).min(axis=1)
    return np.where(least <= np.minimum(most, 1), least, -1)


def _step(state: _State, slack: Numbers, gain: Numbers, rule: Numbers) -> tuple[Numbers, Places]:
    """Return how often the simple rule decides, at most what is left, and the prefix to cut at."""
    low, high, gain = state.low[:, None], state.high[:, None], gain[:, :-1]
    slack = slack[:, :-1] - entry(slack, state.high)[:, None]
    place = counted(slack.shape[1])
    tight = (gain > NOISE) & (place > low)
    spared = (high - place) * (SPARED / (high - low)) * np.minimum(slack, entry(slack, state.low)[:, None])
    bound = np.maximum((slack - spared) / gain, 0)
    bound = np.where(tight & (bound * rule < state.need), bound, np.inf)
    step = np.minimum(bound.min(axis=1), state.left)
    step = np.where(state.left - step < NOISE, state.left, step)
    growing = tight & (step[:, None] * rule < state.need)
    return step, np.where(growing, slack - step[:, None] * gain, np.inf).argmin(axis=1)


def _accepted(law: OrderedRows, state: _State, step: Numbers, weight: Numbers, supply: Numbers) -> Numbers:
    """Return how often each draft is accepted in a round: no more than is missing of what is taken."""
    chosen = law.picked(state.low, state.high, state.places)
    simple = step * (1 - weight) / chosen.sum(axis=1)
    taken = chosen * simple[:, None] + state.last * (step * weight)[:, None]
    row = counted(len(chosen))[:, None]
    offered = supply[row, state.places]  # -1, an absent draft, reads the last place: it is not taken
    return taken * np.where(offered > 0, np.minimum(state.need[row, state.places] / offered, 1), 1)
