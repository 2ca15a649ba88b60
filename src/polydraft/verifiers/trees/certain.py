"""Targets without a choice: where every row has all its mass on one token, as at temperature 0."""

from jaxtyping import Float
from torch import Tensor

from polydraft.trees import Draft, Verdict
from polydraft.verifiers.trees.walk import place_of, walk


def certain_verdict(draft: Draft, target_probs: Float[Tensor, "b n V"]) -> Verdict | None:
    """Follow the target's own tokens down the trees if it has no choice at any node; return None if it has.

    Every lossless rule here accepts the first copy of a certain token wherever it was drafted, so this is its verdict
    without its arithmetic. Rows are certain if their largest entry is one: the others are below rounding. They are
    looked at on a CPU only; another device would have to be waited for.
    """
    if target_probs.device.type != "cpu" or not _certain(target_probs[:, :1]) or not _certain(target_probs):
        return None
    tokens = target_probs.argmax(dim=-1)

    def decide(rows: Tensor, nodes: Tensor, _: int) -> tuple[Tensor, Tensor]:
        own = tokens[rows, nodes]
        return place_of(draft.tree, rows, nodes, own), own

    path, _, token = walk(draft.tree, decide)
    return Verdict(path, (path >= 0).sum(dim=-1), token)


def _certain(rows: Float[Tensor, "b n V"]) -> bool:
    return bool((rows.amax(dim=-1) == 1).all())
