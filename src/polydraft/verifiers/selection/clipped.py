"""The clipped target: how often the optimal rule takes each token before it decides whether to accept it."""

from dataclasses import dataclass

import numpy as np

from polydraft.schemes import ConditionalPoisson, Scheme, WithoutReplacement
from polydraft.theory.containment import certain_and_drawn
from polydraft.verifiers.selection.conditional import Conditional
from polydraft.verifiers.selection.independent import Independent
from polydraft.verifiers.selection.ordered import (
    Flags,
    Numbers,
    Ordered,
    Places,
    counted,
    prefix_sums,
    suffix_sums,
    tensor,
)
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
    drafts: Ordered
    certain: Places
    size: Places
    mass: Numbers
    taken: Numbers

    @property
    def accepted(self) -> Numbers:
        """min(m, t): how often each token is accepted."""
        return np.minimum(self.mass, self.taken)

    def by_token(self, row: Numbers) -> Numbers:
        """Put a row in the order back into the tokens' own order."""
        tokens = np.empty_like(row)
        tokens[counted(len(row))[:, None], self.order] = row
        return tokens

    def places(self, drafts: Places) -> Places:
        """Return the place of each draft in the order, -1 for absent ones."""
        row, places = counted(len(drafts))[:, None], np.empty_like(self.order)
        places[row, self.order] = counted(self.order.shape[1])
        return np.where(drafts >= 0, places[row, drafts], -1)


def clip(scheme: Scheme, draft_probs: Numbers, target_mass: Numbers, counts: Places) -> Clipped:
    """Clip target masses to what the drafts can bear. Draft rows need not be normalised.

    Raises:
        UnpairedScheme: the scheme's containment is not known.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        certain = _certain(scheme, draft_probs, counts)
        weights = draft_probs if certain is None else np.where(certain, 0.0, draft_probs)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total > 0, total, 1.0)
        order = _by_need(weights, target_mass, certain).argsort(axis=1, kind="stable")
        row = counted(len(order))[:, None]
        weights, mass = weights[row, order], target_mass[row, order]
        drafts = _ordered(scheme, weights, None if certain is None else certain[row, order], counts)
        number = np.zeros_like(counts) if certain is None else certain.sum(axis=1)
        size, taken = _clipped(weights, mass, drafts.containment, number)
    return Clipped(order, drafts, number, size, mass, taken)


def _certain(scheme: Scheme, draft_probs: Numbers, counts: Places) -> Flags | None:
    """Mark the tokens drafted for certain; None for the schemes that have none and draw distinct ones."""
    if isinstance(scheme, WithoutReplacement | ConditionalPoisson):
        return None
    certain: Flags = certain_and_drawn(scheme, tensor(draft_probs), tensor(counts))[0].numpy()
    return certain


def _by_need(weights: Numbers, target_mass: Numbers, certain: Flags | None) -> Numbers:
    """Return a key that grows with target / draft, in logarithms: subnormal draft probabilities count."""
    need = np.maximum(np.log(target_mass) - np.log(weights), np.finfo(np.float64).min)
    need = np.where(weights > 0, need, np.inf)
    return need if certain is None else np.where(certain, -np.inf, need)


def _ordered(scheme: Scheme, weights: Numbers, certain: Flags | None, counts: Places) -> Ordered:
    if isinstance(scheme, WithoutReplacement):
        return Successive.of(weights, counts)
    if isinstance(scheme, ConditionalPoisson):
        return Conditional(weights, counts)
    return Independent.of(weights, certain, counts)


def _clipped(weights: Numbers, mass: Numbers, containment: Numbers, certain: Places) -> tuple[Places, Numbers]:
    """Return the size of H and t; c and c' are the slopes of the tangents to the curve of m + d from its two ends."""
    needed, below, above = prefix_sums(mass), prefix_sums(weights), suffix_sums(weights)
    size = (containment - needed).argmax(axis=1)
    limit, prefix = size[:, None], counted(needed.shape[1])
    row = counted(len(size))
    spare = (containment[row, size] - needed[row, size])[:, None]
    curve = needed + spare
    least = np.where((prefix <= limit) & (below > 0), curve / below, np.inf).min(axis=1, keepdims=True)
    most = np.where((prefix >= limit) & (above > 0), (1 - curve) / above, 0).max(axis=1, keepdims=True)
    place, some = prefix[:-1], weights > 0
    raised = np.maximum(mass, np.where(some, least * weights, 0))
    lowered = np.minimum(mass, np.where(some, most * weights, 0))
    if certain.any():
        fixed = certain[:, None]
        raised = np.where(fixed > 0, mass + spare / fixed * (place < fixed), raised)
        lowered = np.where(place >= fixed, lowered, mass)
    return size, np.where(place < limit, raised, lowered)
