"""Number the nodes of a drawn tree: drop some, keep the order, leave no gaps, and pad each row at its end."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.trees.frontier import Frontier
from polydraft.trees.shape import Topology
from polydraft.trees.sound import alike
from polydraft.trees.tree import Draft, TokenTree

Keep = Callable[[Float[Tensor, "b n"], Bool[Tensor, "b n"]], Bool[Tensor, "b n"]]
"""Chooses nodes by the draft probability of their paths; see `GrowingPolicy.pruned`."""


@dataclass(frozen=True, eq=False)
class DrawnLevel:
    """The nodes of one depth, those present first in each row.

    Args:
        tokens: token ids; any at padding.
        atoms: their places in their parents' shortlists.
        there: False at padding.
        parents: their parents' numbers among the scored nodes; -1 at the root.
        path: the product of the draft probabilities from the root.
        scored: their own numbers among the scored nodes; -1 if they were not opened.
    """

    tokens: Int[Tensor, "b c"]
    atoms: Int[Tensor, "b c"]
    there: Bool[Tensor, "b c"]
    parents: Int[Tensor, "b c"]
    path: Float[Tensor, "b c"]
    scored: Int[Tensor, "b c"]

    @classmethod
    def of_root(cls, root: Int[Tensor, "b"]) -> "DrawnLevel":
        """Return the level of the roots."""
        tokens = root.unsqueeze(-1)
        absent = torch.full_like(tokens, -1)
        there, path = torch.ones_like(tokens, dtype=torch.bool), torch.ones_like(tokens, dtype=torch.float64)
        return cls(tokens, absent, there, absent, path, absent)

    def numbered(self, places: Int[Tensor, "b f"], numbers: Int[Tensor, "b f"]) -> "DrawnLevel":
        """Return the level with the numbers of the nodes at these places among the scored ones."""
        return replace(self, scored=self.scored.scatter(-1, places, numbers))


@dataclass(frozen=True, eq=False)
class Proposal:
    """The open nodes of one depth with what the drafter proposed for them.

    Args:
        frontier: the nodes.
        listed: their lists.
        law: the rows that their children were drawn from.
    """

    frontier: Frontier
    listed: Int[Tensor, "b f K"]
    law: Float[Tensor, "b f *J K"]


def numbered(root: Int[Tensor, "b"], levels: list[DrawnLevel], proposals: list[Proposal], keep: Keep) -> Draft:
    """Return the draft of all kept nodes.

    Each row's nodes keep their order, parents before children; rows with fewer than the largest are padded with a
    chain of invalid nodes below their last, which is a leaf, so that no node gets a child more.
    """
    drawn = _joined(levels)
    kept = keep(drawn.path, drawn.there) & drawn.there
    size = int(kept.sum(dim=-1).max())
    if size == 1:
        return Draft.nothing(root)
    order = kept.int().argsort(dim=-1, descending=True, stable=True)[:, :size]
    valid = kept.gather(-1, order)
    own = drawn.scored.gather(-1, order).where(valid, -1)
    parents = _parents(drawn, kept, order, valid, proposals[-1].frontier.nodes.stop)
    tree = TokenTree(drawn.tokens.gather(-1, order), Topology(parents), valid)
    busy = torch.zeros_like(valid).scatter(-1, parents[:, 1:].where(valid[:, 1:], 0), True)
    rows = torch.arange(len(root), device=root.device).unsqueeze(-1)
    row_of = own.clamp_min(0)
    listed = torch.cat(alike([one.listed for one in proposals], -1), dim=1)[rows, row_of]
    law = torch.cat(alike(_as_many([one.law for one in proposals]), 0.0), dim=1)[rows, row_of]
    return Draft(
        tree,
        drawn.atoms.gather(-1, order).where(valid, -1),
        listed.where(busy.unsqueeze(-1), -1),
        law.where(busy.view(*busy.shape, *[1] * (law.dim() - 2)), 0.0),
        own,
    )


def _as_many(laws: list[Float[Tensor, "b _ ..."]]) -> list[Float[Tensor, "b _ ..."]]:
    """Give the nodes of all depths the same number of draft rows, by repeating the last."""
    if laws[0].dim() == 3:
        return laws
    most = max(law.shape[2] for law in laws)
    return [law[:, :, torch.arange(most, device=law.device).clamp_max(law.shape[2] - 1)] for law in laws]


def _joined(levels: list[DrawnLevel]) -> DrawnLevel:
    return DrawnLevel(
        torch.cat([level.tokens for level in levels], dim=-1),
        torch.cat([level.atoms for level in levels], dim=-1),
        torch.cat([level.there for level in levels], dim=-1),
        torch.cat([level.parents for level in levels], dim=-1),
        torch.cat([level.path for level in levels], dim=-1),
        torch.cat([level.scored for level in levels], dim=-1),
    )


def _parents(
    drawn: DrawnLevel, kept: Bool[Tensor, "b m"], order: Int[Tensor, "b n"], valid: Bool[Tensor, "b n"], spare: int
) -> Int[Tensor, "b n"]:
    """Return the kept nodes' parents in the final numbering; a padding node's is the node before it.

    No node has the number `spare` among the scored ones, nor a larger one.
    """
    number = kept.long().cumsum(dim=-1) - 1
    of_scored = number.new_zeros(len(number), spare + 1)
    of_scored = of_scored.scatter(-1, drawn.scored.where(kept & (drawn.scored >= 0), spare), number)
    parents = of_scored.gather(-1, drawn.parents.gather(-1, order).clamp_min(0))
    before = torch.arange(order.shape[-1], device=order.device) - 1
    parents = parents.where(valid, before)
    parents[:, 0] = -1
    return parents
