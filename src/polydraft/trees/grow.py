"""Growing a token tree level by level: one proposal call per depth for all rows and all nodes of that depth."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.probs import Noise
from polydraft.schemes import Scheme
from polydraft.trees.policies import TreePolicy
from polydraft.trees.shape import topology
from polydraft.trees.tree import Draft, TokenTree


@dataclass(frozen=True, eq=False)
class Frontier:
    """The nodes of one depth, about to get children.

    Args:
        nodes: their numbers in the tree.
        tokens: their token ids.
        depth: their depth; 0 is the root's.
        ancestors: for each, which of the tree's first `nodes.stop` nodes it descends from, itself included.
    """

    nodes: range
    tokens: Int[Tensor, "b f"]
    depth: int
    ancestors: Bool[Tensor, "b f n"]


Propose = Callable[[Frontier], tuple[Int[Tensor, "b f K"], Float[Tensor, "b f K"]]]
"""Gives each frontier node its shortlist of K token ids and their draft probabilities."""


def grow(root: Int[Tensor, "b"], policy: TreePolicy, scheme: Scheme, propose: Propose, noise: Noise) -> Draft:
    """Draw a token tree: at each depth ask for the draft rows, draw the children, go on with them.

    Args:
        root: the last committed token of each row.
        policy: decides the number of children of every node.
        scheme: the law by which the children of a node are drawn; the verifier's.
        propose: gives the draft rows of all nodes of a depth in one call; deepest nodes are never asked.
        noise: random numbers, one stream per row.
    """
    shape, batch, device = policy.shape, len(root), root.device
    tree = topology(shape, batch, device)
    tokens = root.new_zeros(batch, shape.size)
    tokens[:, 0] = root
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    valid[:, 0] = True
    atoms = torch.full_like(tokens, -1)
    shortlist, probs = atoms.unsqueeze(-1), tokens.new_zeros(batch, shape.size, 1, dtype=torch.float32)
    for depth, counts in enumerate(shape.counts):
        nodes, below = shape.levels[depth], shape.levels[depth + 1]
        busy = range(nodes.start, nodes.start + len(counts))
        frontier = Frontier(
            busy, tokens[:, busy.start : busy.stop], depth, tree.ancestors[:, busy.start : busy.stop, : busy.stop]
        )
        listed, law = propose(frontier)
        if depth == 0:
            shortlist = atoms.unsqueeze(-1).repeat(1, 1, listed.shape[-1])
            probs = law.new_zeros(batch, shape.size, law.shape[-1])
        shortlist[:, busy.start : busy.stop] = listed
        probs[:, busy.start : busy.stop] = law
        drafts = _draw(scheme, law, counts, noise)
        local = tree.parents[0, below.start : below.stop] - busy.start
        drawn = drafts[:, local, tree.rank[0, below.start : below.stop]]
        there = (drawn >= 0) & valid[:, tree.parents[0, below.start : below.stop]]
        atoms[:, below.start : below.stop] = drawn.where(there, torch.full_like(drawn, -1))
        valid[:, below.start : below.stop] = there
        tokens[:, below.start : below.stop] = (
            listed[:, local].gather(-1, drawn.clamp_min(0).unsqueeze(-1)).squeeze(-1).clamp_min(0)
        )
    return Draft(TokenTree(tokens, tree, valid), atoms, shortlist, probs)


def _draw(scheme: Scheme, law: Float[Tensor, "b f K"], counts: tuple[int, ...], noise: Noise) -> Int[Tensor, "b f k"]:
    most = max(counts)
    wanted = torch.tensor(counts, device=law.device).expand(law.shape[:2])
    if scheme.deterministic:
        uniforms = law.new_zeros(1).expand(*law.shape[:2], max(most, law.shape[-1]))
    else:
        uniforms = noise.uniform(len(counts), max(most, law.shape[-1])).to(law.device)
    return scheme.sample(law, wanted, uniforms, most)
