"""Growing trees whose shape follows the draft, one proposal call per depth for all rows of the batch."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.probs import Noise, sent
from polydraft.schemes import Coupled, Scheme
from polydraft.trees.dynamic.numbering import DrawnLevel, Proposal, numbered
from polydraft.trees.dynamic.policy import (
    Drawn,
    DynamicPolicy,
    EstimatingPolicy,
    MergingPolicy,
    Opened,
    PruningPolicy,
    check_policy,
)
from polydraft.trees.frontier import MENDABLE, Frontier, Overlap, Propose
from polydraft.trees.sound import any_law, both, usable_rows
from polydraft.trees.tree import Draft


def grow_dynamic(
    root: Int[Tensor, "b"],
    policy: DynamicPolicy,
    scheme: Scheme,
    propose: Propose,
    noise: Noise,
    overlap: Overlap | None = None,
    *,
    trusted: bool = False,
) -> Draft:
    """Draw token trees of which each row's has a shape of its own; arguments and errors are those of `grow`.

    Rows do not disturb each other: each depth draws from streams of its own, and the nodes of a row are numbered
    without gaps at the end, so that a row's tree is what it would be alone, then padded to the largest of the batch.

    Where something fails after drafts were drawn, in whichever row, all rows' trees end there.

    On a device every depth is as wide as the policy may ever want it, since the host would have to wait for the true
    width. It waits for the size and the shape of the finished trees, and, where a policy `stops`, once a depth: asking
    whether any row goes on takes far less time than a pass of the draft model for nothing.

    Raises:
        UnpairedScheme: the policy drops drafts after they were drawn, and the scheme draws them at random.
    """
    check_policy(policy, scheme)
    bounds = policy.shape
    levels, proposals = [DrawnLevel.of_root(root)], list[Proposal]()
    drawn: Drawn | None = None
    failure: Exception | None = None
    sound: Tensor | None = None
    while len(proposals) < bounds.depth:
        try:
            grown = _expanded(policy, scheme, propose, noise, levels, proposals, drawn, overlap, trusted)
        except MENDABLE:
            raise
        except Exception as error:  # whatever it is, what was drawn must be verified
            if drawn is None:
                raise
            failure = error
            break
        if grown is None:
            break
        levels[-1], sound = grown.level, both(sound, grown.sound)
        proposals.append(grown.proposal)
        if grown.children is None:
            break
        children, drawn = grown.children
        levels.append(children)
    keep = policy.keep if isinstance(policy, PruningPolicy) else None
    draft = numbered(root, levels, proposals, keep)
    return replace(draft, most_children=bounds.max_children, failure=failure, sound=sound)


@dataclass(frozen=True, eq=False)
class _Expanded:
    """What becomes of the deepest nodes.

    Args:
        level: they themselves, with the numbers of those that were opened.
        proposal: what the drafter proposed for these.
        children: the nodes of the next depth, and the policy's view of them; None if nothing was to be drawn.
        sound: which of the open nodes have a law, or are padding; None on the host if all have.
    """

    level: DrawnLevel
    proposal: Proposal
    children: tuple[DrawnLevel, Drawn] | None
    sound: Bool[Tensor, "b f"] | None = None


def _expanded(
    policy: DynamicPolicy,
    scheme: Scheme,
    propose: Propose,
    noise: Noise,
    levels: list[DrawnLevel],
    proposals: list[Proposal],
    drawn: Drawn | None,
    overlap: Overlap | None,
    trusted: bool,
) -> _Expanded | None:
    """Open some of the deepest nodes and draw their children; return None if none is opened."""
    is_open = levels[-1].there if drawn is None else policy.open(drawn) & levels[-1].there
    asks = policy.stops or is_open.device.type == "cpu"
    if drawn is not None and asks and not bool(is_open.any()):
        return None
    level, frontier = _opened(levels[-1], is_open, proposals, policy.widest(drawn.depth) if drawn else 1)
    above = [one.given for one in proposals]
    listed, given, sound = usable_rows(propose(frontier.frontier), frontier.frontier, above, trusted=trusted)
    law = any_law(given, sound)
    rows = law.mean(dim=-2) if law.dim() == 4 else law
    guess = overlap(frontier.frontier) if overlap and isinstance(policy, EstimatingPolicy) else None
    count, places = _drafts_so_far(levels), frontier.places
    view = Opened(len(proposals), frontier.there, frontier.path, rows, count, drawn, places, guess)
    busy = frontier.there if sound is None else frontier.there & sound
    doubt = None if sound is None else sound | ~frontier.there
    counts = policy.counts(view).clamp_max(policy.shape.max_children).where(busy, 0)
    most = _largest(counts, policy.shape.max_children)
    if most == 0:
        return _Expanded(level, Proposal(frontier.frontier, listed, law, given), None, doubt)
    members = _members(policy, view, law, most)
    law = _row_of_each(law, members) if isinstance(policy, MergingPolicy) else law
    uniforms = _uniforms(policy, scheme, listed, law, len(proposals), noise)
    drafts = scheme.sample(law, counts, uniforms, most).where(busy.unsqueeze(-1), -1)
    chances = policy.accepted(view, most) if isinstance(policy, EstimatingPolicy) else None
    children = _children(view, frontier, listed, drafts, members, chances)
    return _Expanded(level, Proposal(frontier.frontier, listed, law, given), children, doubt)


def _largest(numbers: Int[Tensor, "..."], bound: int) -> int:
    """Return the largest of some numbers; on a device their bound, which need not be waited for."""
    return int(numbers.max()) if numbers.device.type == "cpu" else bound


@dataclass(frozen=True, eq=False)
class _Open:
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


def _opened(
    level: DrawnLevel, is_open: Bool[Tensor, "b c"], proposals: list[Proposal], widest: int
) -> tuple[DrawnLevel, _Open]:
    """Number the open nodes of a level after those scored before; return the level with these numbers."""
    first = proposals[-1].frontier.nodes.stop if proposals else 0
    width = _largest(is_open.sum(dim=-1), min(widest, is_open.shape[-1]))
    places = is_open.int().argsort(dim=-1, descending=True, stable=True)[:, :width]
    there = is_open.gather(-1, places)
    nodes = range(first, first + width)
    own = torch.eye(width, dtype=torch.bool, device=places.device).expand(len(places), -1, -1)
    if proposals:
        above = proposals[-1].frontier
        parents = (level.parents.gather(-1, places) - above.nodes.start).clamp_min(0).unsqueeze(-1)
        inherited = above.ancestors.gather(1, parents.expand(-1, -1, above.ancestors.shape[-1]))
        own = torch.cat([inherited, own], dim=-1)
    numbers = torch.arange(first, nodes.stop, device=places.device).where(there, -1)
    frontier = Frontier(nodes, level.tokens.gather(-1, places), len(proposals), own)
    return level.numbered(places, numbers), _Open(frontier, there, level.path.gather(-1, places), places)


def _children(
    view: Opened,
    parents: _Open,
    listed: Int[Tensor, "b f K"],
    drafts: Int[Tensor, "b f k"],
    members: Int[Tensor, "b f k"],
    chances: Float[Tensor, "b f k"] | None,
) -> tuple[DrawnLevel, Drawn]:
    """Turn the drafts of open nodes into the nodes of the next depth, those present first in each row."""
    most = drafts.shape[-1]
    alive = ((drafts >= 0) & view.there.unsqueeze(-1)).flatten(1)
    width = _largest(alive.sum(dim=-1), alive.shape[-1])
    places = alive.int().argsort(dim=-1, descending=True, stable=True)[:, :width]
    there, above = alive.gather(-1, places), places // most
    atoms = drafts.clamp_min(0)
    chance = view.rows.gather(-1, atoms).flatten(1).gather(-1, places)
    share = chance if chances is None else chances.flatten(1).gather(-1, places)
    level = DrawnLevel(
        tokens=listed.gather(-1, atoms).flatten(1).gather(-1, places).clamp_min(0),
        atoms=drafts.flatten(1).gather(-1, places).where(there, -1),
        there=there,
        parents=above + parents.frontier.nodes.start,
        path=view.path.gather(-1, above) * share.double(),
        scored=torch.full_like(places, -1),
    )
    member, count = members.flatten(1).gather(-1, places), view.drafts + there.sum(dim=-1)
    return level, Drawn(view.depth + 1, there, level.path, above, view.rows, chance, count, level.tokens, member)


def _members(policy: DynamicPolicy, view: Opened, law: Float[Tensor, "b f *J K"], most: int) -> Int[Tensor, "b f k"]:
    """Return which of a node's draft rows each of its drafts is drawn from."""
    if isinstance(policy, MergingPolicy):
        if law.shape[-2] != policy.members:
            raise InvalidParameter(f"The policy merges {policy.members} members, but the drafter has {law.shape[-2]}.")
        return policy.members_of(view, most)
    several = law.shape[-2] if law.dim() == 4 else 1
    turns = torch.arange(most, device=law.device) % several
    return turns.expand(*view.there.shape, most)


def _row_of_each(law: Float[Tensor, "b f J K"], members: Int[Tensor, "b f k"]) -> Float[Tensor, "b f k K"]:
    return law.gather(-2, members.unsqueeze(-1).expand(*members.shape, law.shape[-1]))


def _drafts_so_far(levels: list[DrawnLevel]) -> Int[Tensor, "b"]:
    return torch.stack([level.there.sum(dim=-1) for level in levels]).sum(dim=0) - 1


def _uniforms(
    policy: DynamicPolicy,
    scheme: Scheme,
    listed: Int[Tensor, "b f K"],
    law: Float[Tensor, "b f *J K"],
    depth: int,
    noise: Noise,
) -> Float[Tensor, "b f u"]:
    """Return the numbers that the drafts of a depth are drawn with; a row's do not depend on the rows beside it."""
    width = max(policy.shape.max_children, law.shape[-1])
    if scheme.deterministic:
        return law.new_zeros(1).expand(*law.shape[:2], width)
    if isinstance(scheme, Coupled):
        return noise.tied(depth, listed)
    return sent(noise.at(depth).uniform(law.shape[1], width), law.device)
