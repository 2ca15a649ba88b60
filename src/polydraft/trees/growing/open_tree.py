"""Trees in the middle of their growth, of which each row's has a shape of its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.trees.frontier import Frontier, ProposedRows, alike, both
from polydraft.trees.growing.growth import Drawn, GrowingPolicy, Opened
from polydraft.trees.tree import Draft, TokenTree, Topology, TreeShape

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


class OpenTree:
    """Trees whose shapes follow the draft, in the middle of their growth.

    Rows do not disturb each other: each depth draws from streams of its own, and the nodes of a row are numbered
    without gaps at the end, so that a row's tree is what it would be alone, then padded to the largest of the batch.

    Where something fails after drafts were drawn, in whichever row, all rows' trees end there.

    """

    shares_streams = False

    def __init__(self, root: Int[Tensor, "b"], policy: GrowingPolicy, bounds: TreeShape) -> None:
        self._root, self._policy, self._bounds = root, policy, bounds
        self._levels, self._proposals = [DrawnLevel.of_root(root)], list[Proposal]()
        self._drawn: Drawn | None = None
        self._drafts = torch.zeros_like(root)
        self._sound: Bool[Tensor, " b"] | None = None
        self._ended = False
        self._opened: _Opened | None = None
        self._planned: _PlannedChildren | None = None
        self.depth = 0
        """That of the nodes that get children next."""
        self.first: Tensor | None = None
        """The draft rows of the root, once they are known."""

    @property
    def most_children(self) -> int:
        """The most children of any node."""
        return self._bounds.max_children

    def frontier(self) -> Frontier | None:
        """Return the next nodes that get draft rows; None where growth ends."""
        if self._ended or self.depth == self._bounds.depth:
            return None
        level, drawn = self._levels[-1], self._drawn
        is_open = level.there if drawn is None else self._policy.opened(drawn) & level.there
        if drawn is not None and not bool(is_open.any()):
            return None
        self._opened = self._numbered(level, is_open)
        return self._opened.frontier

    def planned(
        self, found: ProposedRows, estimate: Callable[[], Float[Tensor, "b f"]] | None
    ) -> tuple[Float[Tensor, "b f *J K"], Int[Tensor, "b f"], int]:
        """Return the rows to draw from, the nodes' numbers of children, and the largest of these."""
        one, law, policy = self._opened, found.any_law(), self._policy
        assert one is not None
        rows, several = (law.mean(dim=-2), law.shape[-2]) if law.dim() == 4 else (law, 1)
        view = Opened(self.depth, one.there, one.path, rows, self._drafts, self._drawn, one.places, estimate, several)
        busy = one.there if found.sound is None else one.there & found.sound
        counts = policy.counts(view).clamp_max(self._bounds.max_children).where(busy, 0)
        most = int(counts.max())
        if most:
            members = policy.row_of_each_child(view, most)
            if members is None:
                members = (torch.arange(most, device=law.device) % several).expand(*one.there.shape, most)
            else:
                law = law.gather(-2, members.unsqueeze(-1).expand(*members.shape, law.shape[-1]))
            self._planned = _PlannedChildren(view, busy, members, policy.acceptance(view, most))
        return law, counts, most

    def add(self, found: ProposedRows, law: Float[Tensor, "b f *J K"], drafts: Int[Tensor, "b f k"] | None) -> None:
        """Take in the drafts of a depth; None where no node has children."""
        one, above = self._opened, self._levels[-1]
        assert one is not None
        children = None if drafts is None else self._children(found.listed, drafts)
        nodes = one.frontier.nodes
        numbers = torch.arange(nodes.start, nodes.stop, device=one.places.device).where(one.there, -1)
        self._sound = both(self._sound, None if found.sound is None else found.sound | ~one.there)
        self._levels[-1] = replace(above, scored=above.scored.scatter(-1, one.places, numbers))
        self._proposals.append(Proposal(one.frontier, found.listed, law))
        self.first = found.probs if self.first is None else self.first
        if children is None:
            self._ended = True
        else:
            level, self._drawn = children
            self._levels.append(level)
            self._drafts, self.depth = self._drawn.drafts, self.depth + 1

    def draft(self, failure: Exception | None) -> Draft:
        """Return the draft of what was drawn and is kept."""
        draft = numbered(self._root, self._levels, self._proposals, self._policy.pruned)
        return replace(draft, most_children=self._bounds.max_children, failure=failure, sound=self._sound)

    def _numbered(self, level: DrawnLevel, is_open: Bool[Tensor, "b c"]) -> "_Opened":
        """Number the open nodes of a level after those scored before."""
        above = self._proposals[-1].frontier if self._proposals else None
        start = above.nodes.stop if above else 0
        width = int(is_open.sum(dim=-1).max())
        places = is_open.int().argsort(dim=-1, descending=True, stable=True)[:, :width]
        ancestors = torch.eye(width, dtype=torch.bool, device=places.device).expand(len(places), -1, -1)
        if above:
            parents = (level.parents.gather(-1, places) - above.nodes.start).clamp_min(0).unsqueeze(-1)
            inherited = above.ancestors.gather(1, parents.expand(-1, -1, above.ancestors.shape[-1]))
            ancestors = torch.cat([inherited, ancestors], dim=-1)
        frontier = Frontier(range(start, start + width), level.tokens.gather(-1, places), self.depth, ancestors)
        return _Opened(frontier, is_open.gather(-1, places), level.path.gather(-1, places), places)

    def _children(self, listed: Int[Tensor, "b f K"], drafts: Int[Tensor, "b f k"]) -> tuple[DrawnLevel, Drawn]:
        """Turn the drafts of open nodes into the nodes of the next depth, those present first in each row."""
        one, plan = self._opened, self._planned
        assert one is not None and plan is not None
        view, most = plan.view, drafts.shape[-1]
        alive = ((drafts >= 0) & plan.busy.unsqueeze(-1)).flatten(1)
        width = int(alive.sum(dim=-1).max())
        places = alive.int().argsort(dim=-1, descending=True, stable=True)[:, :width]
        there, above = alive.gather(-1, places), places // most
        atoms = drafts.clamp_min(0)
        chance = view.rows.gather(-1, atoms).flatten(1).gather(-1, places)
        share = chance if plan.acceptance is None else plan.acceptance.flatten(1).gather(-1, places)
        level = DrawnLevel(
            tokens=listed.gather(-1, atoms).flatten(1).gather(-1, places).clamp_min(0),
            atoms=drafts.flatten(1).gather(-1, places).where(there, -1),
            there=there,
            parents=above + one.frontier.nodes.start,
            path=view.path.gather(-1, above) * share.double(),
            scored=torch.full_like(places, -1),
        )
        member, count = plan.members.flatten(1).gather(-1, places), view.drafts + there.sum(dim=-1)
        return level, Drawn(view.depth + 1, there, level.path, above, view.rows, chance, count, level.tokens, member)


@dataclass(frozen=True, eq=False)
class _Opened:
    """The open nodes of one depth.

    Args:
        frontier: as the drafter sees them.
        there: False at padding.
        path: the product of the draft probabilities from the root.
        places: their places among the nodes of their depth.
    """

    frontier: Frontier
    there: Bool[Tensor, "b f"]
    path: Float[Tensor, "b f"]
    places: Int[Tensor, "b f"]


@dataclass(frozen=True, eq=False)
class _PlannedChildren:
    """What was decided of the open nodes' children before these are drawn.

    Args:
        view: the nodes as the policy sees them.
        busy: those that may have children.
        members: from which of a node's draft rows each child is drawn.
        acceptance: the chance of each child to be accepted; None for its draft probability.
    """

    view: Opened
    busy: Bool[Tensor, "b f"]
    members: Int[Tensor, "b f k"]
    acceptance: Float[Tensor, "b f k"] | None
