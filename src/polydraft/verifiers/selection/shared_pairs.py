"""Sharing the mass of pairs between their two tokens so that as much as possible is needed: a maximum flow."""

from itertools import pairwise

NOISE = 1e-15
"""Masses below this are rounding errors."""


def share_pairs(won: list[list[float]], need: list[float]) -> list[list[float]]:
    """Move mass within pairs of tokens until sum_i min(need_i, what i has won) is as large as it can be.

    Problem: the pair {i, j} has the mass won[i][j] + won[j][i], of which i has won the former; a negative need counts
    as zero. Every pair may be divided anew.
    Method: shortest augmenting paths. From tokens that have won more than they need to one that lacks, over tokens i, j
    with won[i][j] > 0; moving v along a path takes v off won[i][j] and puts it on won[j][i] for its steps, so that what
    the first has too much comes to the last. Divisions without such a path are optimal: the pairs within the tokens
    that are reached, which all have what they need, and those alone, give them all they have won. A path empties a
    step, a surplus or a lack exactly, so in floating point there are O(n^3) paths at most too.
    Cost: O(n^2) a path; usually a path is one step and its token's last, so that there are fewer than 2 n of them.
    Source: Edmonds and Karp, J. ACM 19 (1972).

    Args:
        won: n x n, the diagonal zero; changed in place and returned.
        need: what counts of each token's mass.
    """
    extra = [sum(row) - max(least, 0.0) for row, least in zip(won, need, strict=True)]
    while path := _shortest_path(won, extra):
        start, end = path[0], path[-1]
        steps = list(pairwise(path))
        moved = min(extra[start], -extra[end], *(won[i][j] for i, j in steps))
        extra[start], extra[end] = extra[start] - moved, extra[end] + moved
        for i, j in steps:
            won[i][j], won[j][i] = won[i][j] - moved, won[j][i] + moved
    return won


def _shortest_path(won: list[list[float]], extra: list[float]) -> list[int]:
    """Return a path from a token with a surplus to one that lacks, empty if there is none."""
    frontier = [token for token, mass in enumerate(extra) if mass > NOISE]
    unseen = [token for token, mass in enumerate(extra) if mass <= NOISE]
    before = dict.fromkeys(frontier, -1)
    while frontier and unseen:
        reached: list[int] = []
        for token in frontier:
            row = won[token]
            found = [other for other in unseen if row[other] > NOISE]
            if not found:
                continue
            before.update(dict.fromkeys(found, token))
            for other in found:
                if extra[other] < -NOISE:
                    return _traced(before, other)
            reached += found
            unseen = [other for other in unseen if row[other] <= NOISE]
        frontier = reached
    return []


def _traced(before: dict[int, int], token: int) -> list[int]:
    path = [token]
    while (token := before[token]) >= 0:
        path.append(token)
    return path[::-1]
