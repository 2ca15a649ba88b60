"""Drafts composed by row: every row from another drafter, or verified by another rule."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.trees.riders import Riders
from polydraft.trees.shape import Topology
from polydraft.trees.tree import Draft, TokenTree


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


def by_row(values: Sequence[tuple[tuple[int, ...], Int[Tensor, "_ *d"]]], batch: int) -> Int[Tensor, "b *d"]:
    """Put what belongs to the rows of each piece into the rows' order."""
    found = values[0][1].new_zeros(batch, *values[0][1].shape[1:])
    for rows, own in values:
        found[torch.tensor(rows, device=own.device)] = own
    return found
