"""Shape search: the tree with the most expected tokens, and the one with the most per second, from acceptance rates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import cast

import numpy as np
from numpy.typing import NDArray

from polydraft.errors import InvalidParameter, is_number, is_whole, shortened
from polydraft.trees.tree import MOST_NODES, TreeShape

ROUNDING = 1e-6
"""What rates may exceed one by in total."""
TIE = 1e-12
"""What more children must add in tokens to be worth having."""
Seconds = Callable[[int], float]
Rates = tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True)
class Acceptance:
    """How likely each child of a node is to be the accepted one, given that the node was reached.

    `rates[d][k - 1][i]` belongs to a node at depth d that has k children, and to its child of rank i; the children's
    rates and the probability that none is accepted sum to one. Depths beyond the last have the last one's rates. An
    empty row says that a node there cannot have k children.

    Approximation: a node's rates depend on its depth and its number of children and on nothing else (Sequoia's
    positional assumption has them depend on the rank alone). Where this is untrue another shape may be better; what is
    generated is exact with any.

    Raises:
        InvalidParameter: no depth, a row of the wrong length, or rates that are negative or sum to more than one.
    """

    rates: Rates

    def __post_init__(self) -> None:
        if not _are_rates(self.rates, 3):
            raise InvalidParameter(
                f"Acceptance rates are tuples of tuples of tuples of numbers, not {shortened(self.rates)}."
            )
        if not self.rates:
            raise InvalidParameter("Acceptance rates must be given for at least one depth.")
        for depth, rows in enumerate(self.rates):
            for children, row in enumerate(rows, start=1):
                if len(row) not in (0, children) or not _are_shares(row):
                    raise InvalidParameter(
                        f"The acceptance rates of {children} children at depth {depth} must be {children} numbers "
                        f">= 0 with a sum of at most 1, but are {shortened(row)}."
                    )

    @classmethod
    def positional(cls, ranks: Sequence[float]) -> "Acceptance":
        """Return the rates of Sequoia's assumption: the child of rank i is accepted with `ranks[i]` everywhere."""
        if not isinstance(cast(object, ranks), Sequence) or not all(map(is_number, ranks)):
            raise InvalidParameter(f"Positional acceptance rates are numbers, one per rank, not {shortened(ranks)}.")
        if not _are_shares(ranks) or len(ranks) >= MOST_NODES:
            raise InvalidParameter(
                f"Positional acceptance rates must be fewer than {MOST_NODES} numbers >= 0 with a sum of at most 1, "
                f"but are {shortened(ranks)}."
            )
        return cls((tuple(tuple(ranks[:children]) for children in range(1, len(ranks) + 1)),))

    def at(self, depth: int, children: int) -> tuple[float, ...]:
        """Return the rates of the children of a node; () if it cannot have so many."""
        rows = self.rates[min(depth, len(self.rates) - 1)]
        return rows[children - 1] if 0 < children <= len(rows) else ()


def _are_shares(rates: Sequence[float]) -> bool:
    return all(rate >= 0 for rate in rates) and sum(rates) <= 1 + ROUNDING


def _are_rates(value: object, deep: int) -> bool:
    """Tell whether a value is so many tuples deep, and numbers inside."""
    if deep == 0:
        return is_number(value)
    return isinstance(value, tuple) and all(_are_rates(one, deep - 1) for one in cast(tuple[object, ...], value))


def expected_tokens(shape: TreeShape, acceptance: Acceptance | Sequence[float]) -> float:
    """Return the mean number of tokens per target call, the next token included.

    It is sum_v prod_{u on the path to v} rate(u) over all nodes v, the root counting 1.
    Source: Sequoia, arXiv 2402.12374, proposition 3.4.

    Raises:
        InvalidParameter: a node has more children than there are rates for.
    """
    rates = _as_acceptance(acceptance)
    reached, total = [1.0], 1.0
    for depth, counts in enumerate(shape.counts):
        below: list[float] = []
        for node, children in zip(reached, counts, strict=False):
            row = rates.at(depth, children)
            if len(row) != children:
                raise InvalidParameter(f"There are no acceptance rates of {children} children at depth {depth}.")
            below.extend(node * rate for rate in row)
        reached, total = below, total + sum(below)
    return total


def step_seconds(shape: TreeShape, verify_seconds: Seconds, draft_seconds: Seconds, overhead: float = 0.0) -> float:
    """Return the time of a decoding step: scoring all nodes, one draft pass per level, and what drafting costs beside.

    Args:
        shape: the tree; the root alone is plain decoding, which has no overhead.
        verify_seconds: time to score and verify n nodes, the root included.
        draft_seconds: time of one draft pass over the f nodes of a level up to the last that has children.
        overhead: time of a step with drafts that depends on neither.

    Raises:
        InvalidParameter: an overhead that is no finite number.
    """
    if not is_number(overhead) or not isfinite(overhead):
        raise InvalidParameter(f"overhead must be a finite number of seconds, but is {overhead!r}.")
    drafting = sum(draft_seconds(len(counts)) for counts in shape.counts)
    return verify_seconds(shape.size) + drafting + (overhead if shape.counts else 0.0)


def best_shape(acceptance: Acceptance | Sequence[float], nodes: int, depth: int) -> TreeShape:
    """Return the tree of at most so many nodes and levels that has the most expected tokens.

    Rule: F(d, r, m), the best subtree of at most m nodes and r levels below a node at depth d, is 1 + max over k, m_1,
    ..., m_k of sum_i rate(d, k, i) F(d + 1, r - 1, m_i) with m_1 + ... + m_k < m. What adds nothing is left out.
    Cost: O(D k^2 m^2) for rates of D depths and up to k children.
    Source: Sequoia, arXiv 2402.12374, section 3.2, generalised to rates that depend on depth and number of children.

    Args:
        acceptance: the rates; a plain sequence is a positional acceptance vector.
        nodes: the most nodes, the root included.
        depth: the most drafts on a path.

    Raises:
        InvalidParameter: fewer than one node or more than 4096, or a negative depth.
    """
    return _Search(_as_acceptance(acceptance), nodes, depth).shape(nodes, depth)


def fastest_shape(
    acceptance: Acceptance | Sequence[float],
    verify_seconds: Seconds,
    draft_seconds: Seconds,
    *,
    max_nodes: int,
    max_depth: int,
    overhead: float = 0.0,
) -> TreeShape:
    """Return the tree with the most expected tokens per second; the root alone where drafting does not pay.

    Of the trees that are best for their size and depth it takes the one with the largest `expected_tokens` over
    `step_seconds`; of equals the smaller. That is the best of all trees if a draft pass costs the same for any number
    of nodes. If it does not, a tree with fewer expected tokens but narrower levels might be a little faster.
    Source: Sequoia, arXiv 2402.12374, section 3.4, with the draft time by level.

    Args:
        acceptance: the rates; a plain sequence is a positional acceptance vector.
        verify_seconds: time to score and verify n nodes, the root included.
        draft_seconds: time of one draft pass over f nodes.
        max_nodes: the most nodes, the root included.
        max_depth: the most drafts on a path.
        overhead: time of a step with drafts that depends on neither.

    Raises:
        InvalidParameter: fewer than one node or more than 4096, or a negative depth.
    """
    rates = _as_acceptance(acceptance)
    search = _Search(rates, max_nodes, max_depth)
    deepest = min(max_depth, max_nodes - 1)
    grown = (search.shape(nodes, depth) for depth in range(1, deepest + 1) for nodes in range(2, max_nodes + 1))
    candidates = dict.fromkeys([TreeShape(()), *grown])

    def tokens_per_second(shape: TreeShape) -> float:
        seconds = step_seconds(shape, verify_seconds, draft_seconds, overhead)
        return expected_tokens(shape, rates) / seconds if seconds > 0 else float("inf")

    return max(candidates, key=tokens_per_second)


@dataclass(frozen=True, eq=False)
class _Table:
    """The best subtrees below a node of one depth, for every number of nodes.

    Args:
        value: the most expected tokens of a subtree of at most m nodes.
        children: how many children its root has.
        sizes: per number of children, for each child how many of the m nodes of it and those before it it gets.
    """

    value: NDArray[np.float64]
    children: NDArray[np.int64]
    sizes: dict[int, list[NDArray[np.int64]]]


class _Search:
    """The dynamic programme's tables, by levels left and depth; they serve every smaller size and depth too."""

    def __init__(self, acceptance: Acceptance, nodes: int, depth: int) -> None:
        if not is_whole(nodes) or not 1 <= nodes <= MOST_NODES:
            raise InvalidParameter(f"A tree has between 1 and {MOST_NODES} nodes, not {nodes!r}.")
        if not is_whole(depth) or depth < 0:
            raise InvalidParameter(f"The depth of a tree must be an integer of at least 0, but is {depth!r}.")
        self.acceptance = acceptance
        self.last = len(acceptance.rates) - 1
        alone = np.minimum(np.arange(nodes + 1), 1)
        leaf = _Table(alone.astype(np.float64), np.zeros_like(alone), {})
        self.tables = [[leaf] * (self.last + 1)]
        for _ in range(min(depth, nodes - 1)):
            deeper = self.tables[-1]
            self.tables.append(
                [self._table(place, deeper[min(place + 1, self.last)].value) for place in range(len(deeper))]
            )

    def shape(self, nodes: int, depth: int) -> TreeShape:
        """Return the best tree of at most so many nodes and levels."""
        depth = min(depth, nodes - 1)
        budgets, counts = [nodes], list[tuple[int, ...]]()
        for place in range(depth):
            table = self.tables[depth - place][min(place, self.last)]
            shares = [_shares(table, budget) for budget in budgets]
            counts.append(_trimmed([len(share) for share in shares]))
            budgets = [size for share in shares for size in share]
        return TreeShape(tuple(level for level in counts if level))

    def _table(self, depth: int, deeper: NDArray[np.float64]) -> _Table:
        value, children = np.minimum(np.arange(len(deeper)), 1).astype(np.float64), np.zeros(len(deeper), np.int64)
        sizes: dict[int, list[NDArray[np.int64]]] = {}
        alone = np.where(np.arange(len(deeper)) > 0, 1.0, -np.inf)
        grown: dict[tuple[float, ...], tuple[NDArray[np.float64], list[NDArray[np.int64]]]] = {(): (alone, [])}
        # by the rates of the children so far, because rows may share beginnings
        for count in range(1, min(len(self.acceptance.rates[depth]), len(deeper) - 2) + 1):
            row = self.acceptance.at(depth, count)
            for rank in range(len(row)):
                if row[: rank + 1] not in grown:
                    total, split = grown[row[:rank]]
                    total, size = _with_child(total, row[rank] * deeper)
                    grown[row[: rank + 1]] = total, [*split, size]
            total, sizes[count] = grown[row]
            better = total > value + TIE
            value, children = np.where(better, total, value), np.where(better, count, children)
        return _Table(value, children, sizes)


def _with_child(total: NDArray[np.float64], gain: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return max over s >= 1 of total[m - s] + gain[s] for every m, and the smallest s that reaches it."""
    nodes = np.arange(len(total))
    left = nodes[:, None] - nodes[1:]
    sums = np.where(left > 0, total[left], -np.inf) + gain[1:]
    size = sums.argmax(axis=1)
    return sums[nodes, size], size + 1


def _shares(table: _Table, nodes: int) -> list[int]:
    """Return how many nodes each child of a subtree's root gets, in drafting order."""
    left, shares = nodes, list[int]()
    for size in reversed(table.sizes.get(int(table.children[nodes]), [])):
        shares.append(int(size[left]))
        left -= shares[-1]
    return shares[::-1]


def _trimmed(counts: list[int]) -> tuple[int, ...]:
    while counts and counts[-1] == 0:
        counts = counts[:-1]
    return tuple(counts)


def _as_acceptance(acceptance: Acceptance | Sequence[float]) -> Acceptance:
    return acceptance if isinstance(acceptance, Acceptance) else Acceptance.positional(acceptance)
