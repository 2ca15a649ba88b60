"""The clipped target: how often the optimal rule takes each token before it decides whether to accept it."""

from dataclasses import dataclass

import numpy as np

from polydraft.machine_code import compiled
from polydraft.schemes import Draws, Scheme, set_law_of
from polydraft.theory.successive_law import SCALE
from polydraft.verifiers.selection.conditional import Conditional
from polydraft.verifiers.selection.independent import Independent, certain_tokens
from polydraft.verifiers.selection.ordered import Flags, Numbers, OrderedRow, Places, counted
from polydraft.verifiers.selection.successive import Successive


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
    drafts = _ordered(scheme, weights, certain, count)
    size, taken = _clipped(weights, mass, drafts.inside, certain)
    return Clipped(order, drafts, certain, size, mass, taken)


def _ordered(scheme: Scheme, weights: Numbers, certain: int, count: int) -> OrderedRow:
    draws = set_law_of(scheme).draws
    if draws is Draws.SUCCESSIVE:
        return Successive.of(weights, count)
    if draws is Draws.DISTINCT:
        return Conditional.of(weights, count)
    return Independent.of(weights, certain, count)


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
