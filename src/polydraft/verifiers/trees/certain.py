"""Targets without a choice: where every row has all its mass on one token, as at temperature 0."""

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from polydraft.trees import Draft, Verdict
from polydraft.verifiers.host.tree import verdict_of
from polydraft.verifiers.selection.ordered import Flags, Places


def certain_verdict(draft: Draft, target_probs: Float[Tensor, "b n V"]) -> Verdict | None:
    """Follow the target's own tokens down the trees if it has no choice at any node; return None if it has.

    Every lossless rule here accepts the first copy of a certain token wherever it was drafted, so this is its verdict
    without its arithmetic. Rows are certain if their largest entry is one: the others are below rounding. They are
    looked at on a CPU only; another device would have to be waited for.
    """
    if target_probs.device.type != "cpu" or not _certain(target_probs[:, :1]) or not _certain(target_probs):
        return None
    tree = draft.tree
    tables = (tree.topology.children, tree.valid, tree.tokens, target_probs)
    rows = zip(*(table.numpy() for table in tables), strict=True)
    return verdict_of([_followed(*row) for row in rows], tree.topology.height)


def _followed(children: Places, valid: Flags, tokens: Places, target: NDArray[np.floating]) -> tuple[list[int], int]:
    """Return the nodes of one row below its root that hold the target's own tokens, and the token that follows."""
    path, node = list[int](), 0
    while True:
        drafts = [child for child in children[node].tolist() if child >= 0 and valid[child]]
        kept = [child for child in drafts if 0 <= tokens[child] < target.shape[1] and target[node, tokens[child]] == 1]
        if not kept:
            return path, int(target[node].argmax())
        node = kept[0]
        path.append(node)


def _certain(rows: Float[Tensor, "b n V"]) -> bool:
    return bool((rows.amax(dim=-1) == 1).all())
