"""How likely each token is drafted at a node, on the host."""

import numpy as np
import torch

from polydraft.schemes import ConditionalPoisson, Coupled, Scheme, WithoutReplacement
from polydraft.theory import inclusion
from polydraft.theory.ringing import MOST_LINEAR
from polydraft.theory.successive import SCALE
from polydraft.verifiers.selection.compiled import compiled
from polydraft.verifiers.selection.conditional import Conditional
from polydraft.verifiers.selection.host_race import HostRace
from polydraft.verifiers.selection.lowest import LowestFirst
from polydraft.verifiers.selection.ordered import Flags, Numbers, Places, numbers, tensor


@np.errstate(divide="ignore")
def drafted_at(scheme: Scheme, draft_row: Numbers, count: int) -> Numbers:
    """Return the probability that each token is among `count` drafts (`theory.inclusion`).

    Args:
        scheme: how the drafts are drawn.
        draft_row: A draft probabilities, or J rows of them under the `Product` scheme.
        count: the number of drafts.

    Raises:
        UnpairedScheme: the scheme's containment is not known.
    """
    if isinstance(scheme, WithoutReplacement | Coupled):
        if count > MOST_LINEAR:
            return numbers(inclusion(scheme, tensor(draft_row), torch.tensor(count)))
        row = LowestFirst.of(draft_row, count)
        return _successive(row.weights, row.lone, row.odds, row.start, row.count)
    if isinstance(scheme, ConditionalPoisson):
        row, mirrored = Conditional.of(draft_row, count), Conditional.of(draft_row[::-1], count)
        return _conditional(row.logs, row.before, mirrored.before)
    law = HostRace.of(scheme, draft_row, count)
    return _independent(law.rows, law.draws, law.certain)


@compiled
def _independent(rows: Numbers, draws: Places, certain: Flags) -> Numbers:
    """Return 1 - prod_j (1 - q_j(i))^draws_j, one for certain tokens."""
    result = np.ones(len(certain))
    for i in range(len(result)):
        missed = 0.0
        for j in range(len(rows)):
            missed += draws[j] * np.log1p(-min(rows[j, i], 1.0)) if draws[j] > 0 else 0.0
        if not certain[i]:
            result[i] = -np.expm1(missed)
    return result


@compiled
def _conditional(logs: Numbers, before: Numbers, after: Numbers) -> Numbers:
    """Return q(i) e_{k-1}(all but i) / e_k(all); `after` are the sums of the row from its end."""
    count, size, result = len(before) - 1, len(logs), np.zeros(len(logs))
    for i in range(size):
        for j in range(count if logs[i] > -np.inf else 0):
            both = before[j, i] + after[count - 1 - j, size - 1 - i]
            result[i] += np.exp(logs[i] + both - before[count, size])
        result[i] = min(result[i], 1.0)
    return result


@compiled
def _successive(weights: Numbers, lone: Numbers, odds: Numbers, start: Numbers, count: int) -> Numbers:
    """Return how often each token rings before `count` others have: 1 - Q(all others) as in `LowestFirst`."""
    size, nodes, result = len(weights), len(start), np.zeros(len(weights))
    after = np.zeros((size + 1, max(count, 1), nodes))
    below, above = np.zeros((max(count, 1), nodes)), np.zeros(size + 1)
    after[size, 0], below[0] = 1.0, start
    for i in range(size - 1, -1, -1):
        above[i] = above[i + 1] + lone[i]
        after[i] = after[i + 1]
        for a in range(1, count if count > 2 else 0):
            for node in range(nodes):
                after[i, a, node] += odds[i, node] * after[i + 1, a - 1, node]
    summed = 0.0
    for i in range(size if count > 0 else 0):
        rung = summed + above[i + 1]
        for a in range(2, count):
            for b in range(a + 1):
                for node in range(nodes):
                    rung += below[b, node] * after[i + 1, a - b, node]
        result[i] = min(weights[i] + weights[i] * SCALE * rung, 1.0)
        summed += lone[i]
        for a in range(count - 1, 0, -1) if count > 2 else range(0, 0, -1):
            for node in range(nodes):
                below[a, node] += odds[i, node] * below[a - 1, node]
    return result
