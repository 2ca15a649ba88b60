"""The clipped target: how often the optimal rule takes each token before it decides whether to accept it."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.schemes import ConditionalPoisson, Scheme, WithoutReplacement
from polydraft.theory import SuccessiveLaw
from polydraft.theory.containment import certain_and_drawn
from polydraft.theory.rows import prefix_sums, suffix_sums
from polydraft.verifiers.selection.conditional import Conditional
from polydraft.verifiers.selection.independent import Independent
from polydraft.verifiers.selection.ordered import Ordered
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

    order: Int[Tensor, "n A"]
    drafts: Ordered
    certain: Int[Tensor, " n"]
    size: Int[Tensor, " n"]
    mass: Float[Tensor, "n A"]
    taken: Float[Tensor, "n A"]

    @property
    def accepted(self) -> Float[Tensor, "n A"]:
        """min(m, t): how often each token is accepted."""
        return torch.minimum(self.mass, self.taken)

    def by_token(self, row: Float[Tensor, "n A"]) -> Float[Tensor, "n A"]:
        """Put a row in the order back into the tokens' own order."""
        return torch.zeros_like(row).scatter(-1, self.order, row)

    def places(self, drafts: Int[Tensor, "n k"]) -> Int[Tensor, "n k"]:
        """Return the place of each draft in the order, -1 for absent ones."""
        place = torch.arange(self.order.shape[-1], device=drafts.device).expand_as(self.order)
        places = torch.empty_like(self.order).scatter(-1, self.order, place)
        return places.gather(-1, drafts.clamp_min(0)).where(drafts >= 0, -1)


def clip(
    scheme: Scheme, draft_probs: Float[Tensor, "n A"], target_mass: Float[Tensor, "n A"], counts: Int[Tensor, " n"]
) -> Clipped:
    """Clip target masses to what the drafts can bear. Rows are in float64; draft rows need not be normalised.

    Raises:
        UnpairedScheme: the scheme's containment is not known.
    """
    certain = _certain(scheme, draft_probs, counts)
    weights = draft_probs if certain is None else draft_probs.masked_fill(certain, 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights / total.where(total > 0, 1.0)
    order = _by_need(weights, target_mass, certain).argsort(dim=-1, stable=True)
    weights, mass = weights.gather(-1, order), target_mass.gather(-1, order)
    if certain is None:
        drafts, number = _distinct(scheme, weights, counts), torch.zeros_like(counts)
    else:
        certain = certain.gather(-1, order)
        drafts, number = Independent.of(weights, certain, counts), certain.sum(dim=-1)
    size, taken = _clipped(weights, mass, drafts.containment, None if certain is None else number)
    return Clipped(order, drafts, number, size, mass, taken)


def _certain(
    scheme: Scheme, draft_probs: Float[Tensor, "n A"], counts: Int[Tensor, " n"]
) -> Bool[Tensor, "n A"] | None:
    """Mark the tokens drafted for certain; None for the schemes that have none and draw distinct ones."""
    if isinstance(scheme, WithoutReplacement | ConditionalPoisson):
        return None
    return certain_and_drawn(scheme, draft_probs, counts)[0]


def _by_need(
    weights: Float[Tensor, "n A"], target_mass: Float[Tensor, "n A"], certain: Bool[Tensor, "n A"] | None
) -> Float[Tensor, "n A"]:
    """Return a key that grows with target / draft, in logarithms: subnormal draft probabilities count."""
    need = (target_mass.log() - weights.log()).clamp_min(torch.finfo(weights.dtype).min)
    need = need.where(weights > 0, torch.inf)
    return need if certain is None else need.masked_fill(certain, -torch.inf)


def _distinct(scheme: Scheme, weights: Float[Tensor, "n A"], counts: Int[Tensor, " n"]) -> Ordered:
    if isinstance(scheme, WithoutReplacement):
        return Successive(weights, SuccessiveLaw.of(weights, counts))
    return Conditional(weights, counts)


def _clipped(
    weights: Float[Tensor, "n A"],
    mass: Float[Tensor, "n A"],
    containment: Float[Tensor, "n C"],
    certain: Int[Tensor, " n"] | None,
) -> tuple[Int[Tensor, " n"], Float[Tensor, "n A"]]:
    """Return the size of H and t; c and c' are the slopes of the tangents to the curve of m + d from its two ends."""
    needed = prefix_sums(mass)
    spare, size = (containment - needed).max(dim=-1)
    curve = needed + spare.unsqueeze(-1)
    prefix = torch.arange(curve.shape[-1], device=curve.device)
    below, above = prefix_sums(weights), suffix_sums(weights)
    limit = size.unsqueeze(-1)
    least = (curve / below).where((prefix <= limit) & (below > 0), torch.inf).amin(dim=-1, keepdim=True)
    most = ((1 - curve) / above).where((prefix >= limit) & (above > 0), 0.0).amax(dim=-1, keepdim=True).clamp_min(0)
    place = prefix[:-1]
    raised = torch.maximum(mass, (least * weights).where(weights > 0, 0.0))
    lowered = torch.minimum(mass, (most * weights).where(weights > 0, 0.0))
    if certain is not None:
        fixed = certain.unsqueeze(-1)
        raised = torch.where(fixed > 0, mass + spare.unsqueeze(-1) / fixed * (place < fixed), raised)
        lowered = lowered.where(place >= fixed, mass)
    return size, torch.where(place < limit, raised, lowered)
