"""Drafts composed by row, every row from another drafter; and by branch, one beside another.

**Why a branch beside another is exact.** Every node has one law and one scheme. Two drafts share a node, the root at
least, only where the law of all its children together is still one of the scheme. Under a deterministic scheme the
children are fixed tokens, and their union is what the scheme takes from a list on which they stand in their order; that
list takes the place of both. Under `Product` each child is drawn from a row of its
own, whatever the others drew, so that the rows of both stand side by side. Under any other scheme siblings depend on
one another, and a stranger among them would bias the text.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from polydraft.errors import UnpairedScheme
from polydraft.schemes import Product, Scheme
from polydraft.trees.frontier import alike
from polydraft.trees.riders import Riders
from polydraft.trees.tree import Draft, TokenTree, Topology, TreeShape, Verdict, topology


@dataclass(frozen=True, eq=False)
class Piece:
    """The draft of some rows.

    Args:
        rows: the rows, in the order of the draft's.
        draft: their draft.
    """

    rows: tuple[int, ...]
    draft: Draft


@dataclass(frozen=True, eq=False)
class Pieces:
    """A draft by rows: every row belongs to one piece.

    Each piece is verified by itself, so that what comes of a row does not depend on what its neighbours drafted. All
    are scored in one pass, as `stacked_tree`.

    Args:
        pieces: the pieces; their rows together are all rows, each once.
    """

    pieces: tuple[Piece, ...]


def in_pieces(draft: Draft | Pieces) -> tuple[Piece, ...]:
    """Return a draft as pieces: one of all rows, if it is not by rows."""
    return draft.pieces if isinstance(draft, Pieces) else (Piece(tuple(range(len(draft.atoms))), draft),)


def restricted(pieces: Sequence[Piece], rows: Collection[int]) -> list[Piece]:
    """Return what the pieces hold of some rows."""
    found = [(piece, [place for place, row in enumerate(piece.rows) if row in rows]) for piece in pieces]
    return [Piece(tuple(piece.rows[one] for one in own), piece.draft.of(own)) for piece, own in found if own]


def cut(draft: Draft, drafts: int, most_children: int | None, *, counted: bool) -> Draft:
    """Return a draft without what comes behind its first nodes.

    It is as if those had not been drawn, where their number was fixed before the first draft: nodes are numbered from
    the root down, so that some get fewer children, the first of those that were drawn, and nobody looks at the others.
    So it is for drafts that are deterministic, or drawn apart under `Product`; others depend on their siblings.

    Args:
        draft: the draft.
        drafts: how many drafts stay.
        most_children: the most children that a node of what stays can have.
        counted: whether drafts that are not there do not count; else they have their numbers all the same.
    """
    there, nodes = draft.tree.valid, torch.arange(draft.tree.valid.shape[1], device=draft.atoms.device)
    stays = there & ((there.long().cumsum(dim=-1) - 1 if counted else nodes) <= drafts)
    width = 1 + int((nodes * stays).max()) if counted else min(1 + drafts, len(nodes))
    parents, probs = draft.tree.parents[:, :width], draft.probs[:, :width]
    inner = torch.zeros_like(parents, dtype=torch.bool).scatter(1, parents[:, 1:], value=True)
    return replace(
        draft,
        tree=TokenTree(draft.tree.tokens[:, :width], Topology(parents), stays[:, :width]),
        atoms=draft.atoms.where(stays, -1)[:, :width],
        shortlist=draft.shortlist[:, :width].where(inner.unsqueeze(-1), -1),
        probs=probs.where(inner.view(*inner.shape, *[1] * (probs.dim() - 2)), 0.0),
        scored=None if draft.scored is None else draft.scored[:, :width],
        most_children=most_children,
        planned=None,
    )


def stacked_tree(pieces: Sequence[tuple[tuple[int, ...], TokenTree]]) -> TokenTree:
    """Return the trees of all rows as one: nodes keep their numbers, smaller trees get invalid nodes behind their own.

    Padding is a chain below a row's last node, so that no node gets a child more.

    Args:
        pieces: rows and their trees; each row once.
    """
    if len(pieces) == 1 and pieces[0][0] == tuple(range(len(pieces[0][0]))):
        return pieces[0][1]
    batch, size = sum(len(rows) for rows, _ in pieces), max(tree.tokens.shape[1] for _, tree in pieces)
    like = pieces[0][1].tokens
    tokens, valid = like.new_zeros(batch, size), torch.zeros(batch, size, dtype=torch.bool, device=like.device)
    parents = (torch.arange(size, device=like.device) - 1).repeat(batch, 1)
    for rows, tree in pieces:
        own, nodes = torch.tensor(rows, device=like.device), tree.tokens.shape[1]
        tokens[own, :nodes], valid[own, :nodes] = tree.tokens, tree.valid
        parents[own, :nodes] = tree.parents
    return TokenTree(tokens, Topology(parents), valid)


def stacked_riders(
    pieces: Sequence[Piece], nodes: int, vocab_size: int
) -> tuple[Riders | None, Float[Tensor, "e d"] | None]:
    """Return the riders of all rows beside a tree of `nodes` nodes, and the learnt embeddings that they name.

    The rows of each piece's table follow those of the pieces before it, and ids are renumbered by that.
    """
    riding = [(piece, piece.draft.riders) for piece in pieces if piece.draft.riders is not None]
    if not riding:
        return None, None
    batch, most = sum(len(piece.rows) for piece in pieces), max(riders.tokens.shape[1] for _, riders in riding)
    like, tables, first = riding[0][1].tokens, list[Tensor](), 0
    tokens, places = like.new_zeros(batch, most), like.new_zeros(batch, most)
    valid = torch.zeros(batch, most, dtype=torch.bool, device=like.device)
    sees = torch.zeros(batch, most, nodes + most, dtype=torch.bool, device=like.device)
    sees[:, torch.arange(most), nodes + torch.arange(most)] = True
    for piece, riders in riding:
        own, count = torch.tensor(piece.rows, device=like.device), riders.tokens.shape[1]
        learnt = riders.tokens >= vocab_size
        tokens[own, :count] = riders.tokens + first * learnt
        places[own, :count], valid[own, :count] = riders.places, riders.valid
        sees[own, :count] = _moved(riders, piece.draft.tree.tokens.shape[1], nodes, nodes + most)
        if piece.draft.embeddings is not None:
            tables.append(piece.draft.embeddings)
            first += len(piece.draft.embeddings)
    return Riders(tokens, places, sees, valid), torch.cat(tables) if tables else None


def _moved(riders: Riders, own: int, nodes: int, width: int) -> Bool[Tensor, "b r s"]:
    """Return what riders see when their tree of `own` nodes has become one of `nodes`."""
    seen: Bool[Tensor, "b r s"] = riders.sees.new_zeros(*riders.sees.shape[:2], width)
    seen[..., :own] = riders.sees[..., :own]
    seen[..., nodes : nodes + riders.tokens.shape[1]] = riders.sees[..., own:]
    return seen


@dataclass(frozen=True, eq=False)
class Branches:
    """Two drafts as one.

    Args:
        draft: both; the first one's nodes keep their numbers, and the second's may take those of its padding.
        first: which nodes are the first's.
        places: the number of each of the second's nodes; -1 for those that are not there.
    """

    draft: Draft
    first: Bool[Tensor, "b m"]
    places: Int[Tensor, "b n"]

    def verdicts(self, verdict: Verdict) -> tuple[Verdict, Verdict]:
        """Return what was kept of each draft, in its own numbers: the path as far as it goes through its nodes."""
        there = verdict.path >= 0
        own = verdict.path.where(there & self.first.gather(1, verdict.path.clamp_min(0)), -1)
        same = (verdict.path.unsqueeze(-1) == self.places.unsqueeze(1)) & there.unsqueeze(-1)
        other = torch.where(same.any(dim=-1), same.int().argmax(dim=-1), -1)
        return _as_far(verdict, own), _as_far(verdict, other)


def branched(first: Draft, second: Draft, scheme: Scheme) -> Branches:
    """Put one draft beside another, below the same roots.

    Under a deterministic scheme nodes of the same path are one node, and a node's children are listed in their order,
    so that they are what the scheme would take from the list. Under `Product` every child keeps the row that it was
    drawn from.

    Args:
        first: a draft.
        second: another, of the same rows.
        scheme: the way in which both were drawn.

    Raises:
        UnpairedScheme: siblings depend on one another under the scheme.
    """
    if not (scheme.deterministic or scheme == Product()):
        raise UnpairedScheme(
            f"Drafts can be put beside one another under a deterministic scheme or Product(), not under {scheme.name}."
        )
    merge = scheme != Product()
    grafts = [_graft(first.tree, second.tree, row, merge=merge) for row in range(len(first.atoms))]
    size, device = max(len(graft.parents) for graft in grafts), first.atoms.device
    most = max(1, *(len(children) for graft in grafts for children in graft.children.values()))
    parents = torch.tensor([[*graft.parents, *range(len(graft.parents) - 1, size - 1)] for graft in grafts])
    joint = [_merged(graft, size, most) if merge else _beside(first, second, graft, size, most) for graft in grafts]
    tokens, valid = torch.zeros(len(grafts), size, dtype=torch.int64), torch.zeros(len(grafts), size, dtype=torch.bool)
    mine = valid.clone()
    for row, graft in enumerate(grafts):
        for node, token in graft.tokens.items():
            tokens[row, node], valid[row, node], mine[row, node] = token, True, node in graft.mine
    bounds = (first.most_children, second.most_children)
    draft = Draft(
        TokenTree(tokens.to(device), Topology(parents.to(device)), valid.to(device)),
        torch.stack([one.atoms for one in joint]).to(device),
        torch.stack([one.listed for one in joint]).to(device),
        torch.stack([one.probs for one in joint]).to(first.probs),
        most_children=None if None in bounds else sum(one for one in bounds if one),
        failure=first.failure or second.failure,
        sound=_sound_in_both(first, second),
    )
    return Branches(draft, mine.to(device), torch.tensor([graft.places for graft in grafts], device=device))


def extended(chain: Draft, behind: Draft) -> Draft:
    """Return two chains as one: in every row the second hangs below the last node that is there of the first.

    Every node keeps the row that its child was drawn from, so that it is a draft as if one drafter had drawn both.

    Args:
        chain: a draft in which no node has two children; without riders.
        behind: another, whose roots are the last nodes of the first.
    """
    ends = chain.tree.valid.sum(dim=-1, keepdim=True) - 1
    there = ends + behind.tree.valid.sum(dim=-1, keepdim=True)
    nodes = torch.arange(int(there.max()), device=ends.device).expand(len(ends), -1)
    above, below = nodes.clamp_max(chain.atoms.shape[1] - 1), (nodes - ends).clamp(0, behind.atoms.shape[1] - 1)
    upper, rows = nodes <= ends, torch.arange(len(ends), device=ends.device).unsqueeze(-1)
    tokens, atoms = (
        one[rows, above].where(upper, other[rows, below])
        for one, other in ((chain.tree.tokens, behind.tree.tokens), (chain.atoms, behind.atoms))
    )
    listed, probs = (
        one[rows, above].where((nodes < ends).unsqueeze(-1), other[rows, below])
        for one, other in (
            alike((chain.shortlist, behind.shortlist), -1),
            alike((chain.probs, behind.probs), 0.0),
        )
    )
    shape = topology(TreeShape(((1,),) * (nodes.shape[1] - 1)), len(ends), ends.device)
    return Draft(
        TokenTree(tokens, shape, nodes < there),
        atoms,
        listed,
        probs,
        whole=chain.whole and behind.whole,
        most_children=1,
        failure=chain.failure or behind.failure,
        sound=_sound_in_both(chain, behind),
        stopped=chain.stopped or behind.stopped,
    )


def _sound_in_both(first: Draft, second: Draft) -> Bool[Tensor, "b"] | None:
    known = [one.sound for one in (first, second) if one.sound is not None]
    return torch.stack(known).all(dim=0) if known else None


def _as_far(verdict: Verdict, path: Int[Tensor, "b D"]) -> Verdict:
    """Return a path up to the first node that is not there."""
    there = (path >= 0).long().cumprod(dim=-1).bool()
    return Verdict(path.where(there, -1), there.sum(dim=-1), verdict.next_token)


@dataclass(frozen=True, eq=False)
class _Graft:
    """The joint tree of a row; all but `parents` is of the nodes that are there.

    Args:
        row: the row.
        parents: of its nodes, padding included.
        tokens: of each node.
        mine: the nodes of the first tree.
        places: the number of each of the second tree's nodes; -1 for those that are not there.
        children: of each node, in drafting order: padding comes behind them, since rules take drafts up to the first
            that is absent.
    """

    row: int
    parents: list[int]
    tokens: dict[int, int]
    mine: frozenset[int]
    places: list[int]
    children: dict[int, list[int]]


def _graft(first: TokenTree, second: TokenTree, row: int, *, merge: bool) -> _Graft:
    """Put a row's second tree beside the first; its nodes take the places of padding below the same node first."""
    parents, named, usable = (_numbers(one[row]) for one in (first.parents, first.tokens, first.valid))
    tokens = {node: token for node, token in enumerate(named) if usable[node]}
    mine, places = frozenset(tokens), [0]
    known = {(parents[node], token): node for node, token in tokens.items()} if merge else {}
    spare: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if node not in tokens:
            spare.setdefault(parent, []).append(node)
    above_of, named, usable = (_numbers(one[row]) for one in (second.parents, second.tokens, second.valid))
    for parent, token, there in list(zip(above_of, named, usable, strict=True))[1:]:
        above = places[parent] if there else -1
        number = known.get((above, token), -1)
        if there and number < 0:
            number = spare[above].pop(0) if spare.get(above) else len(parents)
            parents += [above] if number == len(parents) else []
            tokens[number] = token
            known.update({(above, token): number} if merge else {})
        places.append(number)
    children: dict[int, list[int]] = {node: [] for node in tokens}
    for node in sorted(tokens)[1:]:
        children[parents[node]].append(node)
    return _Graft(row, parents, tokens, mine, places, children)


def _numbers(values: Shaped[Tensor, " n"]) -> list[int]:
    return [int(one) for one in values.cpu().numpy()]


@dataclass(frozen=True, eq=False)
class _Joint:
    """The joint laws of a row."""

    atoms: Int[Tensor, " s"]
    listed: Int[Tensor, "s K"]
    probs: Float[Tensor, "s *J K"]


def _merged(graft: _Graft, size: int, most: int) -> _Joint:
    """List every node's children in their order, each likelier than the next, as deterministic schemes take them."""
    atoms, listed = torch.full((size,), -1), torch.full((size, most), -1)
    probs = torch.zeros(size, most, dtype=torch.float64)
    for node, children in graft.children.items():
        for place, child in enumerate(children):
            atoms[child], listed[node, place], probs[node, place] = place, graft.tokens[child], most - place
    return _Joint(atoms, listed, probs / probs.sum(dim=-1, keepdim=True).clamp_min(1))


def _beside(first: Draft, second: Draft, graft: _Graft, size: int, most: int) -> _Joint:
    """Give every child the row that it was drawn from, on both drafts' lists."""
    own, other = first.shortlist.shape[-1], second.shortlist.shape[-1]
    theirs = {place: node for node, place in enumerate(graft.places) if place >= 0}
    atoms, listed = torch.full((size,), -1), torch.full((size, own + other), -1)
    probs = torch.zeros(size, most, own + other, dtype=torch.float64)
    for node, children in graft.children.items():
        mine, its, columns = node in graft.mine, theirs.get(node, -1), torch.arange(other)
        if mine:
            listed[node, :own] = first.shortlist[graft.row, node].cpu()
        if its >= 0:
            columns = _columns(listed[node], second.shortlist[graft.row, its].cpu(), own)
        for place, child in enumerate(children):
            draft, number, above = (first, child, node) if child in graft.mine else (second, theirs[child], its)
            where = torch.arange(own) if draft is first else columns
            atoms[child] = where[int(draft.atoms[graft.row, number])]
            probs[node, place].index_add_(0, where, _law(draft, graft.row, above, number))
        probs[node, len(children) :] = probs[node, len(children) - 1] if children else 0
    return _Joint(atoms, listed, probs)


def _law(draft: Draft, row: int, node: int, child: int) -> Float[Tensor, " K"]:
    laws = draft.probs[row, node].cpu().double()
    return laws[int(draft.tree.topology.rank[row, child]) % len(laws)]


def _columns(listed: Int[Tensor, " K"], tokens: Int[Tensor, " k"], own: int) -> Int[Tensor, " k"]:
    """List tokens behind those of the first draft, unless they are among them; return where each stands."""
    same = (tokens.unsqueeze(-1) == listed[:own]) & (tokens >= 0).unsqueeze(-1)
    listed[own:] = tokens.masked_fill(same.any(dim=-1), -1)
    return torch.where(same.any(dim=-1), same.int().argmax(dim=-1), own + torch.arange(len(tokens)))
