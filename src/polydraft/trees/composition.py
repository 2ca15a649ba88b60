"""Drafts composed by row, every row from another drafter; and by branch, one beside another.

**Why a branch beside another is exact.** Every node has one law and one scheme. Two drafts share a node, the root at
least, only where the law of all its children together is still one of the scheme. Under a deterministic scheme the
children are any fixed tokens, so that their union is a draft too. Under `Product` each child is drawn from a row of its
own, whatever the others drew, so that the rows of both stand side by side. Under any other scheme siblings depend on
one another, and a stranger among them would bias the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from polydraft.errors import UnpairedScheme
from polydraft.schemes import Product, Scheme
from polydraft.trees.riders import Riders
from polydraft.trees.shape import Topology
from polydraft.trees.tree import Draft, TokenTree, Verdict


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
        draft: both; the first one's nodes keep their numbers.
        first: how many nodes the first has.
        places: the number of each of the second's nodes.
    """

    draft: Draft
    first: int
    places: Int[Tensor, "b n"]

    def verdicts(self, verdict: Verdict) -> tuple[Verdict, Verdict]:
        """Return what was kept of each draft, in its own numbers: the path as far as it goes through its nodes."""
        own = verdict.path.where(verdict.path < self.first, -1)
        same = (verdict.path.unsqueeze(-1) == self.places.unsqueeze(1)) & (verdict.path >= 0).unsqueeze(-1)
        other = torch.where(same.any(dim=-1), same.int().argmax(dim=-1), -1)
        return _as_far(verdict, own), _as_far(verdict, other)


def branched(first: Draft, second: Draft, scheme: Scheme) -> Branches:
    """Put one draft beside another, below the same roots.

    Under a deterministic scheme nodes of the same path are one node; under `Product` every child keeps the row that it
    was drawn from.

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
    merge = scheme.deterministic and scheme != Product()
    grafts = [_graft(first.tree, second.tree, row, merge=merge) for row in range(len(first.atoms))]
    size, device = max(len(graft.parents) for graft in grafts), first.atoms.device
    parents = torch.tensor([[*graft.parents, *range(len(graft.parents) - 1, size - 1)] for graft in grafts])
    joint = [_joint(first, second, row, graft, size, several=not merge) for row, graft in enumerate(grafts)]
    most = max(len(node) for graft in grafts for node in graft.children)
    tokens, valid, atoms, listed = (torch.stack([getattr(one, name) for one in joint]) for name in _NAMES)
    probs = torch.stack([one.probs[:, :most] if one.probs.dim() == 3 else one.probs for one in joint])
    bounds = (first.most_children, second.most_children)
    draft = Draft(
        TokenTree(tokens.to(device), Topology(parents.to(device)), valid.to(device)),
        atoms.to(device),
        listed.to(device),
        probs.to(device),
        most_children=None if None in bounds else sum(one for one in bounds if one),
        failure=first.failure or second.failure,
    )
    places = torch.tensor([graft.places for graft in grafts], device=device)
    return Branches(draft, first.tree.tokens.shape[1], places)


def _as_far(verdict: Verdict, path: Int[Tensor, "b D"]) -> Verdict:
    """Return a path up to the first node that is not there."""
    there = (path >= 0).long().cumprod(dim=-1).bool()
    return Verdict(path.where(there, -1), there.sum(dim=-1), verdict.next_token)


@dataclass(frozen=True, eq=False)
class _Graft:
    """The joint tree of a row.

    Args:
        parents: of its nodes; the first tree's come first.
        places: the number of each of the second tree's nodes.
        children: of each node, whose child each is (0 the first's, 1 the second's), and its rank among that one's.
    """

    parents: list[int]
    places: list[int]
    children: list[list[tuple[int, int]]]


def _graft(first: TokenTree, second: TokenTree, row: int, *, merge: bool) -> _Graft:
    parents, tokens, valid = (_numbers(one[row]) for one in (first.parents, first.tokens, first.valid))
    places: list[int] = [0]
    known = {(parents[node], tokens[node]): node for node in range(1, len(parents)) if valid[node]}
    children: list[list[tuple[int, int]]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        children[parent] += [(0, len(children[parent]))] if valid[node] else []
    ranks = dict[int, int]()
    above_of, named, usable = (_numbers(one[row]) for one in (second.parents, second.tokens, second.valid))
    listed = zip(above_of, named, usable, strict=True)
    for node, (parent, token, there) in enumerate(listed):
        if not node:
            continue
        above, rank = places[parent], ranks.get(parent, 0)
        ranks[parent] = rank + there
        shared = known.get((above, token)) if merge and there else None
        places.append(len(parents) if shared is None else shared)
        if shared is None:
            parents.append(above)
            children.append([])
            children[above] += [(1, rank)] if there else []
            known.update({(above, token): places[-1]} if there else {})
    return _Graft(parents, places, children)


def _numbers(values: Shaped[Tensor, " n"]) -> list[int]:
    return [int(one) for one in values.cpu().numpy()]


_NAMES = ("tokens", "valid", "atoms", "listed")


@dataclass(frozen=True, eq=False)
class _Joint:
    """The joint draft of a row."""

    tokens: Int[Tensor, " s"]
    valid: Bool[Tensor, " s"]
    atoms: Int[Tensor, " s"]
    listed: Int[Tensor, "s K"]
    probs: Float[Tensor, "s *J K"]


def _joint(first: Draft, second: Draft, row: int, graft: _Graft, size: int, *, several: bool) -> _Joint:
    own, other = first.shortlist.shape[-1], second.shortlist.shape[-1]
    most = max(1, *(len(node) for node in graft.children))
    found = _Joint(
        torch.zeros(size, dtype=torch.int64),
        torch.zeros(size, dtype=torch.bool),
        torch.full((size,), -1),
        torch.full((size, own + other), -1),
        torch.zeros(size, *((most,) if several else ()), own + other, dtype=first.probs.dtype),
    )
    theirs = {place: node for node, place in reversed([*enumerate(graft.places)])}
    columns = dict[int, Tensor]()  # of each node that the second has: where its list stands in the joint one
    for node, children in enumerate(graft.children):
        mine, its = (node if node < first.atoms.shape[1] else None), theirs.get(node)
        laws: list[Tensor] = [torch.zeros(1, own + other), torch.zeros(1, own + other)]
        if mine is not None:
            found.listed[node, :own] = first.shortlist[row, mine].cpu()
            laws[0] = torch.nn.functional.pad(first.probs[row, mine].cpu().reshape(-1, own), (0, other))
        if its is not None:
            columns[its], laws[1] = _moved_law(found.listed[node], second, row, its, own)
        if several:
            rows = [laws[whose][rank % len(laws[whose])] for whose, rank in children]
            found.probs[node] = torch.stack((rows or [laws[0][0] * 0]) + (rows or [laws[0][0] * 0])[-1:] * most)[:most]
        else:
            found.probs[node] = laws[0][0] if mine is not None and laws[0].any() else laws[1][0]
    for node, place in reversed([*enumerate(graft.places)]):
        parent = int(second.tree.parents[row, node])
        found.tokens[place], found.valid[place] = second.tree.tokens[row, node], second.tree.valid[row, node]
        atom = int(second.atoms[row, node])
        found.atoms[place] = columns[parent][atom] if parent >= 0 and atom >= 0 else -1
    count = first.atoms.shape[1]
    found.tokens[:count], found.valid[:count] = first.tree.tokens[row].cpu(), first.tree.valid[row].cpu()
    found.atoms[:count] = first.atoms[row].cpu()
    return found


def _moved_law(
    listed: Int[Tensor, " K"], second: Draft, row: int, node: int, own: int
) -> tuple[Int[Tensor, " k"], Float[Tensor, "J K"]]:
    """List a node's tokens of the second draft behind the first's; return their columns, and its laws there."""
    tokens, laws = (
        second.shortlist[row, node].cpu(),
        second.probs[row, node].cpu().reshape(-1, second.shortlist.shape[-1]),
    )
    same = (tokens.unsqueeze(-1) == listed[:own]) & (tokens >= 0).unsqueeze(-1)
    columns = torch.where(same.any(dim=-1), same.int().argmax(dim=-1), own + torch.arange(len(tokens)))
    listed[own:] = tokens.masked_fill(same.any(dim=-1), -1)
    return columns, torch.zeros(len(laws), len(listed), dtype=laws.dtype).index_add_(1, columns, laws)
