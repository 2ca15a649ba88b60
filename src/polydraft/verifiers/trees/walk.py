"""The walk down a tree: from the root to the child that is kept, until none is."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.trees import TokenTree, Verdict

Decide = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Decides at one node of some rows, given rows, nodes and their depth: the place of the child that is kept among the
node's children, -1 for none, and what is emitted if none is."""


def walk(tree: TokenTree, decide: Decide) -> tuple[Int[Tensor, "b D"], Int[Tensor, "b"], Int[Tensor, "b"]]:
    """Return the kept nodes below the root, padded with -1, the node at which each path ends, and what it emits.

    On a CPU only rows whose paths go on are decided. Another device would have to be waited for to know them, so there
    all rows are decided at every depth, and what comes of rows that have ended is dropped.
    """
    children, height = tree.children, tree.topology.height
    every = torch.arange(len(children), device=children.device)
    path = every.new_full((len(every), height), -1)
    last, emitted, going, rows = torch.zeros_like(every), torch.zeros_like(every), torch.ones_like(every).bool(), every
    for depth in range(height + 1):
        place, value = decide(rows, last[rows], depth)
        emitted[rows] = value.where(going[rows], emitted[rows])
        going[rows] &= place >= 0
        if depth == height:
            break
        if children.device.type == "cpu":
            goes_on = place >= 0
            rows, place = rows[goes_on], place[goes_on]
            if not len(rows):
                break
        below = children[rows, last[rows]].gather(-1, place.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        path[rows, depth] = below.where(going[rows], -1)
        last[rows] = below.where(going[rows], last[rows])
    return path, last, emitted


def verdict_of(ends: Sequence[tuple[list[int], int]], height: int) -> Verdict:
    """Return the verdict that keeps so many nodes of each row, found on the host, and emits this token."""
    path = torch.tensor([[*nodes, *[-1] * (height - len(nodes))] for nodes, _ in ends], dtype=torch.int64)
    lengths = torch.tensor([len(nodes) for nodes, _ in ends])
    return Verdict(path.view(len(ends), height), lengths, torch.tensor([token for _, token in ends]))
