"""The set that limits the acceptance for any scheme, found among all sets and certified."""

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, NotConverged, is_whole
from polydraft.schemes import Scheme
from polydraft.theory.containment import containment_chain
from polydraft.theory.theory_rows import prefix_sums

LEAST_SQUARES = cast(Callable[..., Any], torch.linalg.lstsq)  # pyright: ignore  not typed in torch
ROUNDS = 300
PRECISE = 1e-13
TOLERANCE = 1e-6
"""Tokens of mass 1e-8 hardly move the norm, and the last digits come slowly; most rows end below 1e-12."""
NEGLIGIBLE = 1e-14


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
