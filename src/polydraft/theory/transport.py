"""The largest acceptance rate as a transport of drafted sets to tokens, solved directly: references for small rows."""

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float
from scipy.optimize import linprog  # pyright: ignore  scipy has no stubs
from scipy.sparse import coo_array  # pyright: ignore
from torch import Tensor

from polydraft.errors import InvalidParameter, NotConverged, is_whole
from polydraft.schemes import Scheme, check_scheme, enumerate_drafts

MOST_ITERATIONS = 1 << 31
SOLVER = cast(Callable[..., Any], linprog)
SPARSE = cast(Callable[..., Any], coo_array)


def drafted_sets(scheme: Scheme, draft_probs: Float[Tensor, "*J A"], k: int) -> dict[frozenset[int], float]:
    """Return the probability of every set of tokens that k drafts can be; for small A only.

    Raises:
        InvalidParameter: there are too many drafts to list.
    """
    check_scheme(scheme, "Listing drafts")
    drafts, probability = enumerate_drafts(scheme, draft_probs.double(), k)
    sets: dict[frozenset[int], float] = {}
    for atoms, chance in zip(drafts, probability, strict=True):
        drafted = frozenset(int(atom) for atom in atoms if atom >= 0)
        sets[drafted] = sets.get(drafted, 0.0) + float(chance)
    return sets


def lp_acceptance(
    scheme: Scheme,
    draft_probs: Float[Tensor, "*J A"],
    target_mass: Float[Tensor, " A"],
    k: int,
    max_iterations: int | None = None,
) -> float:
    """Maximise the accepted mass x(C, i) over drafted sets C and tokens i in C by linear programming (HiGHS).

    Subject to sum_i x(C, i) <= Pr[C], sum_C x(C, i) <= target_mass(i) and x >= 0 (arXiv 2310.15141, section 4). The
    target mass may total less than one. Accurate to about 1e-9; for A ** k up to 200 000.

    Raises:
        InvalidParameter: there are too many drafts to list, or `max_iterations` is no integer of at least 0.
        NotConverged: the solver stopped before the optimum.
    """
    if max_iterations is not None and (not is_whole(max_iterations) or not 0 <= max_iterations < MOST_ITERATIONS):
        raise InvalidParameter(
            f"max_iterations must be an integer >= 0 and below {MOST_ITERATIONS}, or None, but is {max_iterations!r}."
        )
    sets = drafted_sets(scheme, draft_probs, k)
    limits = [*sets.values(), *map(float, target_mass)]
    moves = [(place, token) for place, drafted in enumerate(sets) for token in sorted(drafted)]
    if not moves:
        return 0.0
    rows = [place for place, _ in moves] + [len(sets) + token for _, token in moves]
    columns = [*range(len(moves))] * 2
    matrix = SPARSE(([1.0] * len(rows), (rows, columns)), shape=(len(limits), len(moves))).tocsr()
    options: dict[str, float] = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    if max_iterations is not None:
        options["maxiter"] = max_iterations
    solution = SOLVER([-1.0] * len(moves), matrix, limits, method="highs", options=options)
    if solution.status != 0:
        raise NotConverged(f"The transport of {len(sets)} drafted sets was not solved ({solution.message}).")
    return -float(solution.fun)


def flow_acceptance(
    scheme: Scheme, draft_probs: Float[Tensor, "*J A"], target_mass: Float[Tensor, " A"], k: int
) -> float:
    """Return the largest flow from drafted sets (supply Pr[C]) to their tokens (demand target_mass).

    Shortest augmenting paths on floats: every augmentation empties one edge exactly, so their number is bounded as
    for integers, and the result is accurate to rounding whatever the size of the probabilities.

    Raises:
        InvalidParameter: there are too many drafts to list.
    """
    source, sink = -1, -2
    capacity: dict[int, dict[int, float]] = {source: {}, sink: {}}
    size = target_mass.shape[-1]
    for token, mass in enumerate(map(float, target_mass)):
        capacity[token] = {sink: mass}
        capacity[sink][token] = 0.0
    for place, (drafted, chance) in enumerate(drafted_sets(scheme, draft_probs, k).items(), start=size):
        capacity[source][place] = chance
        capacity[place] = {source: 0.0, **dict.fromkeys(drafted, torch.inf)}
        for token in drafted:
            capacity[token][place] = 0.0
    total = 0.0
    while path := _shortest_path(capacity, source, sink):
        amount = min(capacity[one][two] for one, two in path)
        for one, two in path:
            capacity[one][two] -= amount
            capacity[two][one] += amount
        total += amount
    return total


def _shortest_path(capacity: dict[int, dict[int, float]], source: int, sink: int) -> list[tuple[int, int]]:
    """Return the edges of a path with fewest edges along which more can flow; none where nothing can."""
    came_from = {source: source}
    waiting = deque([source])
    while waiting and sink not in came_from:
        here = waiting.popleft()
        for there, left in capacity[here].items():
            if left > 0 and there not in came_from:
                came_from[there] = here
                waiting.append(there)
    path: list[tuple[int, int]] = []
    there = sink
    while there in came_from and there != source:
        path.append((came_from[there], there))
        there = came_from[there]
    return path
