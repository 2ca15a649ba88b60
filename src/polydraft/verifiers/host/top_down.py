"""The top-down lift on the host."""

from collections.abc import Callable
from functools import partial

import numpy as np
from jaxtyping import Float
from torch import Tensor

from polydraft.trees import Draft, Verdict
from polydraft.verifiers.host.tree import HostTree, verdict_of
from polydraft.verifiers.law import HostLaw, HostVerifier
from polydraft.verifiers.selection.ordered import Numbers, Places

LawAt = Callable[[Places, Numbers, Numbers], tuple[Numbers, Numbers]]
"""Gives the shares of a node's drafts and the weights of what is emitted if none is accepted."""


def by_nodes(
    rule: HostVerifier, draft: Draft, target_probs: Float[Tensor, "b n V"], uniforms: Float[Tensor, "b n+1"]
) -> Verdict:
    """Return the verdict of `trees.top_down.by_batch`, row after row, computing the laws of visited nodes only.

    The first uniform draws a token off the shortlist, the others decide at the nodes.
    """
    law_at = rule.law_at if isinstance(rule, HostLaw) else partial(_law_at, rule)
    ends = [_walk(law_at, tree) for tree in HostTree.each(draft, target_probs, uniforms)]
    return verdict_of(ends, draft.tree.topology.height)


def _law_at(rule: HostVerifier, drafts: Places, draft_row: Numbers, target_mass: Numbers) -> tuple[Numbers, Numbers]:
    shares, marginal = rule.at_node(drafts, draft_row, target_mass)
    return shares, np.maximum(target_mass - marginal, 0)


def _walk(law_at: LawAt, tree: HostTree) -> tuple[list[int], int]:
    """Return the kept nodes below the root, and the token that follows."""
    path, node = list[int](), 0
    while True:
        drafts, uniform, mass = tree.drafts(node), float(tree.uniforms[node + 1]), tree.atoms(node)
        if not drafts:
            return path, tree.drawn(node, mass, uniform)
        shares, rest = law_at(tree.places[drafts], tree.draft_row(node), mass)
        sums = shares.cumsum()
        kept = int((uniform >= sums).sum())
        if kept == len(drafts):
            left = (uniform - sums[-1]) / max(1 - sums[-1], 1e-300)
            return path, tree.drawn(node, rest, min(max(left, 0.0), 1.0))
        node = drafts[kept]
        path.append(node)
