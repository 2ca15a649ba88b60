"""How the optimal rule selects: what drafts can bear of the target, and a walk through ever smaller blocks of it."""

from dataclasses import dataclass

import numpy as np

from polydraft.machine_code import compiled
from polydraft.schemes import Draws, Scheme, set_law_of
from polydraft.theory.successive_law import SCALE
from polydraft.verifiers.selection.ordered import FIRST, LOWEST, Conditional, Independent, OrderedRow, certain_tokens
from polydraft.verifiers.selection.rule import Flags, Numbers, Places, counted
from polydraft.verifiers.selection.successive import Successive

NOISE = 1e-14
"""Probabilities below this are rounding errors."""
FREE = 0.8
"""A prefix cuts its block where its slack is below this fraction of that of all shorter ones."""
SPARED = 0.9
"""The fraction of its slack, at most of its block's, that a step leaves to a short prefix; less to longer ones."""


@dataclass(frozen=True, eq=False)
class Clipped:
    """Tokens in order and the probability t with which each is to be taken, for a target mass m of total at most one.

    The order is that of target / draft ascending, after the tokens drafted for certain. H, the first `size` places,
    minimises m(H) - Q(H) over prefixes; with -d for the minimum,

        t = max(m, c draft) on H with t(H) = Q(H),    t = min(m, c' draft) off H with t(off H) = 1 - Q(H);

    where tokens are drafted for certain, they share d on H instead. As sum min(m, t) = 1 - d, a rule that takes tokens
    with probabilities t and accepts a taken one with min(1, m / t) is optimal. There is one: over the draft mass of
    prefixes, the curve of m + d is convex, lies above the convex curve of Q and meets it at H; t follows it but for two
    chords, tangents from the curves' common ends, which lie above the curve of Q as well. So t(prefix) >= Q(prefix) for
    all prefixes, hence t(S) >= Q(S) for all sets S, which is what it takes.

    Args:
        order: the tokens.
        drafts: the draft law in this order.
        certain: how many tokens are drafted for certain.
        size: the number of tokens of H.
        mass: the target mass m in this order.
        taken: the probabilities t in this order.
    """

    order: Places
    drafts: OrderedRow
    certain: int
    size: int
    mass: Numbers
    taken: Numbers

    @property
    def accepted(self) -> Numbers:
        """min(m, t): how often each token is accepted."""
        return np.minimum(self.mass, self.taken)

    def by_token(self, row: Numbers) -> Numbers:
        """Put a row in the order back into the tokens' own order."""
        tokens = np.empty_like(row)
        tokens[self.order] = row
        return tokens

    def places(self, drafts: Places) -> Places:
        """Return the place of each draft in the order, -1 for absent ones."""
        places = np.empty_like(self.order)
        places[self.order] = counted(len(self.order))
        return np.where(drafts >= 0, places[drafts], -1)


def clip(scheme: Scheme, draft_row: Numbers, target_mass: Numbers, count: int) -> Clipped:
    """Clip a node's target mass to what `count` drafts can bear. The draft row need not be normalised.

    Raises:
        UnpairedScheme: the scheme's containment is not known.
    """
    tokens = certain_tokens(scheme, draft_row, count)
    order, certain = _keys(draft_row, target_mass, tokens).argsort(kind="stable"), int(tokens.sum())
    weights, mass = _in_order(draft_row, target_mass, order, certain)
    draws = set_law_of(scheme).draws
    if draws is Draws.SUCCESSIVE:
        drafts = Successive.of(weights, count)
    elif draws is Draws.DISTINCT:
        drafts = Conditional.of(weights, count)
    else:
        drafts = Independent.of(weights, certain, count)
    size, taken = _clipped(weights, mass, drafts.inside, certain)
    return Clipped(order, drafts, certain, size, mass, taken)


@compiled
def _keys(draft: Numbers, mass: Numbers, certain: Flags) -> Numbers:
    """Return a key that grows with target / draft, least for certain tokens.

    In logarithms: subnormal draft probabilities count.
    """
    key, least = np.empty(len(draft)), -np.finfo(np.float64).max
    for i in range(len(draft)):
        if certain[i]:
            key[i] = -np.inf
        else:
            key[i] = max(np.log(mass[i]) - np.log(draft[i]), least) if draft[i] > 0 else np.inf
    return key


@compiled
def _in_order(draft: Numbers, mass: Numbers, order: Places, certain: int) -> tuple[Numbers, Numbers]:
    """Return the draft row without its certain tokens, scaled to one, and the target mass, both in the order."""
    weights, masses = np.zeros(len(order)), np.empty(len(order))
    total = 0.0
    for j in range(len(order)):
        masses[j] = mass[order[j]]
        if j >= certain:
            weights[j] = draft[order[j]]
            total += weights[j]
    if total > 0:
        weights /= total
    return weights, masses


@compiled
def _clipped(weights: Numbers, mass: Numbers, inside: Numbers, certain: int) -> tuple[int, Numbers]:
    """Return the size of H and t; c and c' are the slopes of the tangents to the curve of m + d from its two ends.

    Weights are scaled, so that no slope over subnormal ones overflows.
    """
    number, weights = len(weights), weights * SCALE
    needed, below, above = np.zeros(number + 1), np.zeros(number + 1), np.zeros(number + 1)
    for j in range(number):
        needed[j + 1] = needed[j] + mass[j]
        below[j + 1] = below[j] + weights[j]
    for j in range(number - 1, -1, -1):
        above[j] = above[j + 1] + weights[j]
    size = 0
    for j in range(number + 1):
        if inside[j] - needed[j] > inside[size] - needed[size]:
            size = j
    spare = inside[size] - needed[size]
    least, most = np.inf, 0.0
    for j in range(number + 1):
        if j <= size and below[j] > 0:
            least = min(least, (needed[j] + spare) / below[j])
        if j >= size and above[j] > 0:
            most = max(most, (1 - needed[j] - spare) / above[j])
    taken = np.empty(number)
    for j in range(number):
        if j < certain:
            taken[j] = mass[j] + spare / certain if j < size else mass[j]
        elif j < size:
            taken[j] = mass[j] if certain > 0 or weights[j] <= 0 else max(mass[j], least * weights[j])
        else:
            taken[j] = min(mass[j], most * weights[j]) if weights[j] > 0 else 0.0
    return size, taken


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

    The walk runs on the host, its loops over tokens in machine code.

    Shapes: `places` are the drafts' places in the order, -1 for absent ones; without drafts there are no shares. A
    token drafted twice may have shares at both copies.
    Source: our own. The condition on v is Strassen's theorem (Ann. Math. Statist. 36, 1965).
    """
    need, certain = clipped.accepted, clipped.certain
    if not len(places) or places.max() < 0:
        return np.zeros(len(places))
    if certain < 2:
        return walk(clipped.drafts, need, places, clipped.size, 0)
    first, fixed = certain - 1, (places >= 0) & (places < certain)
    whole, merged = need[:certain].sum(), need.copy()
    merged[:certain], merged[first] = 0, whole  # the tokens drafted for certain are one token, the last of them
    shares = walk(clipped.drafts, merged, np.where(fixed, first, places), clipped.size, first)
    together = shares[fixed].sum() / (whole if whole > 0 else 1)
    return np.where(fixed, together * need[places], shares)


def walk(law: OrderedRow, need: Numbers, places: Places, size: int, first: int) -> Numbers:
    """Walk down the blocks of a node's order.

    Args:
        law: the draft law.
        need: how often each place is to be accepted at least.
        places: the places of the drafts, -1 for absent ones, not all absent.
        size: the size of H.
        first: the place before which nothing is drafted and nothing is needed.
    """
    shares, need, slack = np.zeros(len(places)), need.copy(), np.empty(len(need) + 1)
    top, left = int(places.max()), 1.0
    low, high = (max(size, first), len(need)) if top >= size else (first, size)
    cut = high
    while left >= NOISE:
        low, high = _narrowed(law.inside, need, slack, left, low, high, cut, top)
        line, choice = law.taken(low, high), law.choice(low, high)
        step, weight, cut = _step(law.inside, line, need, slack, left, low, high)
        _accept(law.inside, line, need, places, shares, low, high, step, weight, choice)
        left -= step
    return shares


@compiled
def _narrowed(
    inside: Numbers, need: Numbers, slack: Numbers, left: float, low: int, high: int, cut: int, top: int
) -> tuple[int, int]:
    """Cut a block, return the part with the last draft, at place `top`, and write down the slacks of all prefixes.

    `cut` is a prefix at which the block is cut in any case.
    """
    missing = slack[high] = 0.0
    for j in range(high - 1, low - 1, -1):
        missing += need[j]
        slack[j] = max(left * (inside[high] - inside[j]) - missing, 0.0)
    least, start = slack[low], low
    for j in range(low + 1, high):
        if slack[j] <= FREE * least or j == cut:
            if j > top:
                return start, j
            start = j
        least = min(least, slack[j])
    return start, high


@compiled
def _step(
    inside: Numbers, line: Numbers, need: Numbers, slack: Numbers, left: float, low: int, high: int
) -> tuple[float, float, int]:
    """Return how often a round decides, the weight of the priority of high places in it, and the prefix to cut at.

    The walk ends if some weight gives every token what it needs. Else the simple rule decides alone.
    """
    least, most = 0.0, 1.0
    for j in range(low, high):
        rule = line[j + 1] - line[j]
        more = inside[j + 1] - inside[j] - rule
        ratio = (need[j] / left - rule - NOISE) / more
        if more >= 0:
            least = max(least, ratio)
        else:
            most = min(most, ratio)
    if least <= most:
        return left, least, high
    step, base = left, slack[high]
    for j in range(low + 1, high):
        gain = line[j] - inside[j]
        if gain > NOISE:
            free = slack[j] - base
            spared = SPARED * (high - j) / (high - low) * min(free, slack[low] - base)
            bound = max((free - spared) / gain, 0.0)
            if bound * (line[j + 1] - line[j]) < need[j]:
                step = min(step, bound)
    if left - step < NOISE:
        step = left
    cut, smallest = low, np.inf
    for j in range(low + 1, high):
        gain = line[j] - inside[j]
        if gain > NOISE and step * (line[j + 1] - line[j]) < need[j]:
            remaining = slack[j] - base - step * gain
            if remaining < smallest:
                cut, smallest = j, remaining
    return step, 0.0, cut


@compiled
def _accept(
    inside: Numbers,
    line: Numbers,
    need: Numbers,
    places: Places,
    shares: Numbers,
    low: int,
    high: int,
    step: float,
    weight: float,
    choice: int,
) -> None:
    """Add to every draft's share how often a round accepts it, no more than is missing of what is taken.

    What is taken comes off the needs.
    """
    count, chosen, last = 0, -1, places.argmax()
    for i in range(len(places)):
        if low <= places[i] < high:
            count += 1
            if chosen < 0 or (choice == LOWEST and places[i] < places[chosen]):
                chosen = i
    for i in range(len(places)):
        place = places[i]
        taken = step * weight if i == last else 0.0
        if choice == FIRST or choice == LOWEST:
            taken += step * (1 - weight) if i == chosen else 0.0
        elif low <= place < high:
            taken += step * (1 - weight) / count
        if taken > 0:
            rule = line[place + 1] - line[place]
            supply = step * (rule + weight * (inside[place + 1] - inside[place] - rule))
            shares[i] += taken * (min(need[place] / supply, 1.0) if supply > 0 else 1.0)
    for j in range(low, high):
        rule = line[j + 1] - line[j]
        need[j] = max(need[j] - step * (rule + weight * (inside[j + 1] - inside[j] - rule)), 0.0)
