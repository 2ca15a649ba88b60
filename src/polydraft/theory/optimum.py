"""The largest acceptance rate that any exact rule can reach: by a scan over prefixes, by a search, in closed form."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, NotConverged, VocabularyMismatch, is_number, is_whole
from polydraft.probs import check_probs, normalised, overlap
from polydraft.schemes import Scheme, check_scheme, require_draft_count, set_law_of
from polydraft.theory.containment import certain_and_drawn, containment_chain, likeliest
from polydraft.theory.successive_law import prefix_sums

LEAST_SQUARES = cast(Callable[..., Any], torch.linalg.lstsq)  # pyright: ignore  not typed in torch
ROUNDS = 300
PRECISE = 1e-13
TOLERANCE = 1e-6
"""Tokens of mass 1e-8 hardly move the norm, and the last digits come slowly; most rows end below 1e-12."""
NEGLIGIBLE = 1e-14


@dataclass(frozen=True, eq=False)
class OptimalSet:
    """The set H of tokens that limits the acceptance, and the acceptance that it allows.

    Args:
        order: the tokens, those that H takes in first at the beginning.
        size: the number of tokens in H, a prefix of the order.
        target_mass: the target mass of H.
        containment: Q(H), the probability that all drafts lie in H.
        acceptance: 1 + target_mass - containment.
    """

    order: Int[Tensor, "*b A"]
    size: Int[Tensor, "*b"]
    target_mass: Float[Tensor, "*b"]
    containment: Float[Tensor, "*b"]
    acceptance: Float[Tensor, "*b"]


def optimal_set(
    scheme: Scheme,
    draft_probs: Float[Tensor, "*rows A"],
    target_mass: Float[Tensor, "*b A"],
    counts: Int[Tensor, "*b"],
) -> OptimalSet:
    """Return the set H that minimises m(H) - Q(H) for a target mass m of total at most one.

    A draft is accepted with probability at most 1 + min_H [m(H) - Q(H)], and some rule reaches it: by max-flow
    min-cut, because drafts inside H can only become tokens of H (arXiv 2502.18779, equation 8, for m a distribution;
    the whole set, with m(H) - Q(H) = |m| - 1, is one of the H). The tokens drafted for certain are in every H but the
    empty one; the others enter by draft / target descending, an infinite ratio first and draft zero last (theorem 6).
    `Product` drafts have no such order, so H is found by submodular minimisation, row after row.

    Shapes: rows are "*b A", for `Product` "*b J A". Cost: O(A log A), and O(k A) per node of the quadrature without
    replacement. The result is in float64.

    Raises:
        NotConverged: the minimisation for `Product` drafts did not come to an end.
        UnpairedScheme: the scheme's containment is not known.
    """
    draft_probs, target_mass = draft_probs.double(), target_mass.double()
    if scheme.several_rows:
        order = _order_by_search(scheme, draft_probs, target_mass, counts)
    else:
        order = _order_by_ratio(scheme, draft_probs, target_mass, counts)
    chain = containment_chain(scheme, draft_probs, order, counts)
    mass = prefix_sums(target_mass.gather(-1, order))
    gap, size = (mass - chain).min(dim=-1)
    at = size.unsqueeze(-1)
    return OptimalSet(
        order, size, mass.gather(-1, at).squeeze(-1), chain.gather(-1, at).squeeze(-1), (1 + gap).clamp(0, 1)
    )


def optimal_acceptance(
    draft_probs: Float[Tensor, "*rows V"], target_probs: Float[Tensor, "*b W"], scheme: Scheme, k: int
) -> Float[Tensor, "*b"]:
    """Return alpha* = 1 + min_H [target(H) - Q(H)], the largest acceptance rate of k drafts.

    Shapes: V = W; draft rows are "*b V", for `Product` "*b J V". See `optimal_set`.

    Raises:
        InvalidParameter: k is not an integer from 1 to 4095, or the scheme is none.
        InvalidProbabilities: a row is not a distribution.
        NotConverged: the minimisation for `Product` drafts did not come to an end.
        UnpairedScheme: the scheme's containment is not known.
        VocabularyMismatch: the rows differ in length.
    """
    check_scheme(scheme, "The optimal acceptance")
    require_draft_count("k", k)
    if draft_probs.shape[-1] != target_probs.shape[-1]:
        raise VocabularyMismatch(
            f"The draft rows have {draft_probs.shape[-1]} tokens and the target rows {target_probs.shape[-1]}; "
            "put both over one vocabulary."
        )
    check_probs(draft_probs, "draft_probs")
    check_probs(target_probs, "target_probs")
    target = target_probs.double()
    counts = torch.full(target.shape[:-1], k, device=target.device)
    return optimal_set(scheme, draft_probs, target / target.sum(dim=-1, keepdim=True), counts).acceptance


def _order_by_ratio(
    scheme: Scheme, draft_probs: Float[Tensor, "*b A"], target_mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
) -> Int[Tensor, "*b A"]:
    certain, _ = certain_and_drawn(set_law_of(scheme), draft_probs, counts)
    ratio = (draft_probs / target_mass).where(draft_probs > 0, -1.0).masked_fill(certain, torch.inf)
    return (-ratio.view(torch.int64)).argsort(dim=-1, stable=True)  # floats >= 0 sort like their bits, but faster


def _order_by_search(
    scheme: Scheme, draft_probs: Float[Tensor, "*b J A"], target_mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
) -> Int[Tensor, "*b A"]:
    rows, size = draft_probs.shape[-2:]
    nodes = draft_probs.cpu().reshape(-1, rows, size), target_mass.cpu().reshape(-1, size), counts.cpu().flatten()
    orders = [minimising_order(scheme, draft, target, count) for draft, target, count in zip(*nodes, strict=True)]
    return torch.stack(orders).view(target_mass.shape).to(target_mass.device) if orders else target_mass.long()


def minimising_order(
    scheme: Scheme,
    draft_probs: Float[Tensor, "*J A"],
    target_mass: Float[Tensor, " A"],
    counts: Int[Tensor, ""],
    rounds: int = ROUNDS,
) -> Int[Tensor, " A"]:
    """Return an order of the tokens, one of whose prefixes H minimises f(H) = target_mass(H) - Q(H) over all sets.

    Q is supermodular for every law of drafts, so f is submodular. Wolfe's algorithm looks for the vector x of least
    norm in the base polytope of f, whose vertices are the increments of f along orders. For every such x,
    f(empty) + sum_i min(x_i, 0) is at most min f, and at the least norm it is equal: the certificate of the prefix
    found. Serves any scheme and one row; 65 tokens and four drafts take some ten milliseconds.

    Source: Fujishige and Isotani, Pacific Journal of Optimization 7 (2011); Wolfe, Mathematical Programming 11 (1976).

    Raises:
        InvalidParameter: `rounds` is no integer of at least 1.
        NotConverged: after `rounds` vertices the certificate is further than 1e-6 from the value found.
    """
    if not is_whole(rounds) or rounds < 1:
        raise InvalidParameter(f"rounds must be an integer >= 1, but is {rounds!r}.")
    point = target_mass - draft_probs.reshape(-1, target_mass.shape[-1]).mean(dim=0)
    corners, shares = target_mass.new_zeros(0, target_mass.shape[-1]), target_mass.new_zeros(0)
    best, best_order, gap = torch.inf, torch.empty(0), torch.inf
    for _ in range(rounds):
        order = point.argsort(stable=True)
        chain = containment_chain(scheme, draft_probs, order, counts)
        values = prefix_sums(target_mass[order]) - chain
        if float(values.min()) < best:
            best, best_order = float(values.min()), order
        corner = torch.empty_like(point).scatter(-1, order, values.diff())
        if len(corners):
            gap = best - float(values[0] + point.clamp_max(0).sum())
            if gap <= PRECISE or float(point @ (point - corner)) <= PRECISE**2:
                break
        corners, shares = _nearest(torch.cat([corners, corner[None]]), torch.cat([shares, shares.new_zeros(1)]))
        before, point = point, shares @ corners
        if len(corners) > 1 and float(point @ point) >= float(before @ before):
            break  # rounding has the last word
    if gap > TOLERANCE:
        raise NotConverged(
            f"The set that limits the acceptance is only known within {gap:.2g}; use a smaller shortlist."
        )
    return best_order


def _nearest(
    corners: Float[Tensor, "m A"], shares: Float[Tensor, " m"]
) -> tuple[Float[Tensor, "i A"], Float[Tensor, " i"]]:
    """Move from a point of the corners' hull to a nearer one that is the nearest of its corners' affine hull."""
    while True:
        aim = _affine_shares(corners)
        falling = aim < -NEGLIGIBLE
        if not bool(falling.any()):
            return corners, aim
        steps = torch.where(falling, shares / (shares - aim), torch.inf)
        step, first = steps.min(dim=-1)
        shares = (1 - step) * shares + step * aim
        kept = (shares > NEGLIGIBLE).index_fill(-1, first, False)  # at least one goes, so this comes to an end
        corners, shares = corners[kept], shares[kept] / shares[kept].sum()


def _affine_shares(corners: Float[Tensor, "m A"]) -> Float[Tensor, " m"]:
    """Return weights with sum one of the point of least norm in the corners' affine hull, without squaring them."""
    if len(corners) == 1:
        return corners.new_ones(1)
    moves = LEAST_SQUARES((corners[1:] - corners[0]).T, -corners[0].unsqueeze(-1), driver="gelsd").solution[:, 0]
    return torch.cat([1 - moves.sum().unsqueeze(-1), moves])


def two_draft_acceptance(
    draft_probs: Float[Tensor, "*b V"], target_probs: Float[Tensor, "*b V"]
) -> Float[Tensor, "*b"]:
    """Return the optimal acceptance of two independent drafts.

    min over H of target(H) + draft(off H)^2 + 2 draft(H) draft(off H): what is accepted is either a token of H or
    comes from a pair of drafts not both in H. The minimum is at a prefix of the tokens by draft / target descending.
    Source: Khisti et al., arXiv 2410.18234, theorem 3.
    """
    head, mass = _prefixes(draft_probs, target_probs)
    rest = (1 - head).clamp_min(0)
    return (mass + rest**2 + 2 * head * rest).amin(dim=-1)


def two_drafts_suffice(
    draft_probs: Float[Tensor, "*b V"], target_probs: Float[Tensor, "*b V"], tolerance: float = 1e-12
) -> Bool[Tensor, "*b"]:
    """Tell whether two independent drafts can always be accepted: target(H) >= draft(H)^2 for every set H.

    Source: Khisti et al., arXiv 2410.18234, theorem 2.

    Raises:
        InvalidParameter: the tolerance is no finite number.
    """
    if not is_number(tolerance) or not isfinite(tolerance):
        raise InvalidParameter(f"tolerance must be a finite number, but is {tolerance!r}.")
    head, mass = _prefixes(draft_probs, target_probs)
    return (mass >= head**2 - float(tolerance)).all(dim=-1)


def top_then_sample_acceptance(
    draft_probs: Float[Tensor, "*b V"], target_probs: Float[Tensor, "*b V"], k: int
) -> Float[Tensor, "*b"]:
    """Return the optimal acceptance of Hu's greedy drafts: target(T) + sum_x min(target(x), draft'(x)).

    T are the k - 1 likeliest tokens of the draft and draft' is the draft row without them, renormalised.
    Source: Hu et al., arXiv 2502.18779, section 4.

    Raises:
        InvalidParameter: k is not an integer from 1 to 4095.
    """
    require_draft_count("k", k)
    draft, target = draft_probs.double(), target_probs.double()
    top = likeliest(draft, torch.full(draft.shape[:-1], k - 1, device=draft.device))
    rest = draft.masked_fill(top, 0.0)
    return (target * top).sum(dim=-1) + overlap(target, normalised(rest, rest))


def _prefixes(
    draft_probs: Float[Tensor, "*b V"], target_probs: Float[Tensor, "*b V"]
) -> tuple[Float[Tensor, "*b V+1"], Float[Tensor, "*b V+1"]]:
    """Return the draft's and the target's mass of every prefix of the tokens by draft / target descending."""
    draft, target = draft_probs.double(), target_probs.double()
    order = (draft / target).where(draft > 0, -1.0).argsort(dim=-1, descending=True)
    return prefix_sums(draft.gather(-1, order)), prefix_sums(target.gather(-1, order))
