"""Nodes in time for integrals over exponential clocks: few of them, whatever the rates."""

import math
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, is_number, is_whole

FAINT = 1e-15
"""What may happen before the first node and after the last one."""
SOONEST = 12.0
"""An integrand of rings is smooth on the scale of this time, in units of the mean time of the first ring."""
LONGEST = 24.0
"""The longest stretch of log time that one panel of nodes covers."""
DENSITY = 1.8
"""Half the number of nodes per unit of the transformed time."""
DENSEST = 4
"""What that may be multiplied by."""
MOST_RINGS = 1 << 16
"""The most rings that are waited for."""
EVENED = 1e-14
"""Nodes are as even as they may be for errors of this size."""
LEAST = 2.0**-1074
"""The smallest positive number of float64, in place of a sum of no rates."""
LATEST = 700.0
"""The logarithm of the latest time at which nodes may begin."""
BOUNDS = (
    ((1.0, 0.0, 0.0), 100 * FAINT),
    ((0.0, 1.0, 0.0), 100 * (2 * FAINT) ** (1 / 2)),
    ((0.0, 0.0, 1.0), 100 * (6 * FAINT) ** (1 / 3)),
    ((1 / 3, 1 / 3, 1 / 3), 100 * FAINT ** (1 / 3)),
    ((0.0, 0.0, 1.0), SOONEST),
)
"""The powers of s, r and e in the bounds of `_log_scale`, for times, and their factors."""


@dataclass(frozen=True, eq=False)
class TimeNodes:
    """Nodes t and weights w with sum_i w_i f(t_i) = integral f(t) dt / t.

    Args:
        time: the nodes, ascending.
        weight: the weights, for integration over the logarithm of time.
    """

    time: Float[Tensor, "*b n"]
    weight: Float[Tensor, "*b n"]


def time_nodes(rates: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"], most: int, density: float = 1.0) -> TimeNodes:
    """Return nodes from where a third ring is impossible to where `counts` clocks have rung.

    The nodes are Gauss-Legendre, evened out (`_unit_nodes`), in y = log(1 + t / a): linear where nothing has a feature
    yet, logarithmic after it. The scale a is `SOONEST`, or 100 times the time before which a third ring has probability
    `FAINT`. An integrand of rings is analytic for |Im log t| < pi / 2, so the error falls geometrically: about 3.6
    nodes per unit of y leave less than 1e-13, with some for both ends and for the k-th ring, the steeper the larger k.
    Rows with fewer than three drafts need no nodes: they get arbitrary ones, or none if all rows are such. `most` is
    the largest count, and `density` multiplies the number of nodes, which is read back from the device once.

    Rates may span all of float64, subnormal ones included, as long as the time of the last ring is in its range: rates
    of at least 1e-304 (`SuccessiveLaw` scales probabilities so).

    Shapes: `counts` at most the support's size; the number of nodes is that of the row which needs most, and the last
    ones of rows which need fewer have weight zero.

    Raises:
        InvalidParameter: `most` is no integer up to `MOST_RINGS`, or `density` no positive number up to `DENSEST`.
    """
    if not is_whole(most) or most > MOST_RINGS or not is_number(density) or not 0 < density <= DENSEST:
        raise InvalidParameter(
            f"most must be an integer up to {MOST_RINGS} and density a number above 0 and at most {DENSEST}, but are "
            f"{most!r} and {density!r}."
        )
    if most < 3:
        return TimeNodes(rates[..., :0], rates[..., :0])
    slowest = rates.sort(dim=-1).values.cumsum(dim=-1)
    start = _log_scale(slowest).clamp_max(LATEST).masked_fill(counts < 3, 0.0)
    stretch = _log_end(slowest, counts, most) - start
    length = torch.logaddexp(torch.zeros_like(stretch), stretch).masked_fill(counts < 3, 1.0)
    longest = float(length.max()) if length.numel() else 0.0
    panels = max(1, math.ceil(longest / LONGEST))
    ends = density * (4 + DENSITY * math.sqrt(most))
    places, shares = _row_nodes(panels, ends, density * DENSITY, length, longest)
    scale, length = start.exp().unsqueeze(-1), length.unsqueeze(-1)
    half = (length * places / 2).expm1_()  # e^x - 1 as a product, whose factors stay in range where e^x does not
    time = (scale * half).mul_(half + 2).clamp_max_(torch.finfo(torch.float64).max)
    return TimeNodes(time, (scale / time).add_(1).mul_(shares).mul_(length))


def _row_nodes(
    panels: int, ends: float, density: float, length: Float[Tensor, "*b"], longest: float
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
    """Return nodes and weights on [0, 1], in each row half as many per panel as `ends + density * length / panels`."""
    most = math.ceil(ends + density * longest / panels)
    places, shares = _unit_tables(panels, most, length.device)
    half = (ends + length * (density / panels)).ceil().clamp_max(most).long() if length.numel() > 1 else most
    return places[half].expand(*length.shape, -1), shares[half].expand(*length.shape, -1)


@lru_cache(maxsize=64)
def _unit_tables(panels: int, most: int, device: torch.device) -> tuple[Float[Tensor, "h n"], Float[Tensor, "h n"]]:
    """Return tables whose row h has 2 h nodes a panel, and then the end with weight zero."""
    both = [_unit_nodes(panels, 2 * half) if half else (torch.zeros(0), torch.zeros(0)) for half in range(most + 1)]
    size = 2 * most * panels
    places = [torch.nn.functional.pad(places, (0, size - len(places)), value=1.0) for places, _ in both]
    shares = [torch.nn.functional.pad(shares, (0, size - len(shares))) for _, shares in both]
    return torch.stack(places).to(device, torch.float64), torch.stack(shares).to(device, torch.float64)


@lru_cache(maxsize=256)
def _unit_nodes(panels: int, each: int) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return nodes and weights on [0, 1], cut into panels.

    Gauss-Legendre nodes crowd at the ends, though functions that are analytic in a strip are as hard in the middle. So
    x becomes arcsin(c x) / arcsin(c) with c = 1 / cosh(|log EVENED| / n): a third of the nodes is spared (Kosloff and
    Tal-Ezer, J. Comput. Phys. 104, 1993; Hale and Trefethen, SIAM J. Numer. Anal. 46, 2008).
    """
    legendre, weights = np.polynomial.legendre.leggauss(each)
    bend = 1 / math.cosh(math.log(EVENED) / each)
    bent = np.arcsin(bend * legendre) / math.asin(bend)
    slope = bend / math.asin(bend) / np.sqrt(1 - (bend * legendre) ** 2)
    places, shares = (torch.tensor(table.tolist(), dtype=torch.float64) for table in (bent, weights * slope))
    starts = torch.arange(panels, dtype=torch.float64).unsqueeze(-1)
    return ((starts + (places + 1) / 2) / panels).flatten(), (shares / 2 / panels).repeat(panels)


def _log_scale(slowest: Float[Tensor, "*b A"]) -> Float[Tensor, "*b"]:
    """Return the logarithm of a time before which nothing that is not smooth has weight; `slowest` are sums of rates.

    With e the sum of all rates, r that without the fastest clock and s that without the fastest two, Pr[three rings by
    t] is at most s t, (r t)^2 / 2, (e t)^3 / 6 and e r s t^3. In logarithms.
    """
    powers, constants = _bounds(slowest.device)
    sums = slowest[..., -3:].clamp_min(LEAST).log()
    return (constants - sums @ powers).amax(dim=-1)


@lru_cache(maxsize=8)
def _bounds(device: torch.device) -> tuple[Float[Tensor, "3 5"], Float[Tensor, "5"]]:
    powers, factors = zip(*BOUNDS, strict=True)
    as_tensor = partial(torch.tensor, dtype=torch.float64, device=device)
    return as_tensor(powers).T, as_tensor(factors).log()


def _log_end(slowest: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"], most: int) -> Float[Tensor, "*b"]:
    """Return the logarithm of a time by which `counts` clocks have rung but for probability `FAINT`.

    Fewer than k of n clocks have rung if all off some set of fewer than k are silent. With R the rate of all but the
    fastest k - 1, each such set has probability at most exp(-R t), and there are sum_{j<k} binomial(n, j) of them. For
    many clocks it is better to say that they form k groups of rate R / 2k. `slowest` are sums of rates.
    """
    rest = slowest.gather(-1, (slowest.shape[-1] - counts.clamp_min(1)).unsqueeze(-1)).squeeze(-1)
    return math.log(_overdue(slowest.shape[-1], most)) - rest.clamp_min(LEAST).log()


@lru_cache(maxsize=1024)
def _overdue(size: int, most: int) -> float:
    """Return R t at a time by which `most` of `size` clocks have rung (`_end`)."""
    sets = -math.log(FAINT) + math.log(sum(math.comb(size, fewer) for fewer in range(most)))
    return min(sets, 2 * most * (36 + math.log(most)))
