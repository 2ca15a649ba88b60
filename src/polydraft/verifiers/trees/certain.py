"""Targets without a choice: where every row has all its mass on one token, as at temperature 0."""

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.trees import Draft, Verdict
from polydraft.verifiers.trees.law import path_to


def certain_verdict(draft: Draft, target_probs: Float[Tensor, "b n V"]) -> Verdict | None:
    """Follow the target's own tokens down the trees if it has no choice at any node; return None if it has.

    Every lossless rule here accepts the first copy of a certain token wherever it was drafted, so this is its verdict
    without its arithmetic. Rows are certain if their largest entry is one: the others are below rounding. They are
    looked at on a CPU only; another device would have to be waited for.
    """
    if target_probs.device.type != "cpu" or not _certain(target_probs[:, :1]) or not _certain(target_probs):
        return None
    tree, (batch, size, vocab) = draft.tree, target_probs.shape
    rows = torch.arange(batch).unsqueeze(-1)
    token = tree.tokens.clamp(0, vocab - 1)
    agreed = (target_probs[rows, tree.parents, token] == 1) & (token == tree.tokens) & tree.valid
    below = tree.topology.of_children(agreed, 0)
    first = tree.topology.children.gather(-1, below.int().argmax(dim=-1, keepdim=True)).squeeze(-1)
    goes_to = first.where(below.any(dim=-1), torch.arange(size))
    last = torch.zeros_like(goes_to[:, 0])
    for _ in range(tree.topology.height):
        last = goes_to.gather(-1, last.unsqueeze(-1)).squeeze(-1)
    path = path_to(tree, last)
    return Verdict(path, (path >= 0).sum(dim=-1), target_probs[rows[:, 0], last].argmax(dim=-1))


def _certain(rows: Float[Tensor, "b n V"]) -> bool:
    return bool((rows.amax(dim=-1) == 1).all())
