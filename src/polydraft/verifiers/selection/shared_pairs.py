"""Sharing the mass of pairs between their two tokens so that as much as possible is needed: a maximum flow."""

import numpy as np

from polydraft.machine_code import compiled
from polydraft.verifiers.selection.ordered import Numbers

NOISE = 1e-15
"""Masses below this are rounding errors."""


@compiled
def share_pairs(won: Numbers, need: Numbers) -> Numbers:
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
    number = len(need)
    before, queue, extra = np.empty(number, np.int64), np.empty(number, np.int64), np.empty(number)
    for i in range(number):
        extra[i] = won[i].sum() - max(need[i], 0.0)
    while True:
        tail, end = 0, -1
        for i in range(number):
            before[i] = -2  # not seen
            if extra[i] > NOISE:
                before[i], queue[tail], tail = -1, i, tail + 1
        head = 0
        while head < tail and end < 0:
            i, head = queue[head], head + 1
            for j in range(number):
                if before[j] == -2 and won[i, j] > NOISE:
                    before[j], queue[tail], tail = i, j, tail + 1
                    if extra[j] < -NOISE:
                        end = j
                        break
        if end < 0:
            return won
        moved, j = -extra[end], end
        while before[j] >= 0:
            moved, j = min(moved, won[before[j], j]), before[j]
        moved = min(moved, extra[j])
        extra[j], extra[end], j = extra[j] - moved, extra[end] + moved, end
        while before[j] >= 0:
            i = before[j]
            won[i, j], won[j, i], j = won[i, j] - moved, won[j, i] + moved, i
