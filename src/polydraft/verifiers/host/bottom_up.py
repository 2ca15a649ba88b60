"""Trials from the leaves up on the host."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from polydraft.probs import Noise
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.host.tree import HostTree, verdict_of
from polydraft.verifiers.selection.ordered import Numbers, Places


class HostDivision(NamedTuple):
    """What `trees.trials.Division` is for many nodes.

    Args:
        children: the scale of each child when its trials begin, earlier siblings having failed.
        rest: the mass that is left for the node itself, to be emitted.
        scale: the node's scale when its own trial begins.
    """

    children: Numbers
    rest: Numbers
    scale: float


DivideAt = Callable[[Places, Numbers, Numbers, float], HostDivision]
"""Divides the mass of a node, given its drafts, draft row, target row and scale."""


def first_success_at(divide: DivideAt, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
    """Return the verdict of `trees.trials.first_success`, dividing the mass of nodes only that are reached."""
    trees = HostTree.each(draft, target_probs, noise.uniform(draft.tree.tokens.shape[-1] + 2))
    ends = [_tried(divide, tree, 0, 1.0, []) for tree in trees]
    return verdict_of([end for end in ends if end is not None], draft.tree.topology.height)  # roots always succeed


def _tried(divide: DivideAt, tree: HostTree, node: int, scale: float, path: list[int]) -> tuple[list[int], int] | None:
    """Try a node's children and then itself; return the path to the first success and the token that follows."""
    drafts, rest, success = tree.drafts(node), None, scale
    if drafts:
        children, rest, own = divide(tree.places[drafts], tree.draft_row(node), tree.atoms(node), scale)
        for child, chance in zip(drafts, children.tolist(), strict=True):
            found = _tried(divide, tree, child, chance, [*path, child])
            if found:
                return found
        left = float(rest.sum())
        success = share_at(left, left + 1 - own)
    if node and tree.uniforms[node + 2] >= success:  # a failure at the root would be a rounding error
        return None
    return path, tree.drawn(node, tree.atoms(node) if rest is None else rest, float(tree.uniforms[1]))


def share_at(part: float, whole: float) -> float:
    """Return part / whole, at most one; zero where the whole is zero."""
    return min(part / whole, 1.0) if whole > 0 else 0.0
