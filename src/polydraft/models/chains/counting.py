"""Models that count positions by the slots before a pass: rows that are not equally far are scored one by one."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.models.cache import TreeCache
from polydraft.models.language_model import Forward, Layer

Score = Callable[[Tensor, Tensor, TreeCache, Tensor | None, int], Forward]
"""Scores tokens at positions, or embeddings, into a cache that knows their slots; the number is of logits to keep."""


def without(token: int, score: Score) -> Score:
    """Return how to score chains of a model that does not count one token, its padding: such chains one by one."""

    def scored(tokens: Tensor, positions: Tensor, cache: TreeCache, given: Tensor | None, keep: int) -> Forward:
        if not bool((tokens == token).any()):
            return score(tokens, positions, cache, given, keep)
        first, found = cache.first, list[Forward]()
        for place in range(tokens.shape[1]):
            own, at = slice(place, place + 1), first + place
            cache.place(torch.tensor([at]), 1, at + 1)
            found.append(score(tokens[:, own], positions[:, own], cache, None if given is None else given[:, own], 0))
        hidden: dict[Layer, Tensor] = {
            layer: torch.cat([one.hidden[layer] for one in found], dim=1) for layer in found[0].hidden
        }
        return Forward(torch.cat([one.logits for one in found], dim=1)[:, -keep:], hidden)

    return scored


def scored_by_count(
    score: Score,
    tokens: Int[Tensor, "b n"],
    positions: Int[Tensor, "b n"],
    cache: TreeCache,
    starts: Int[Tensor, "b"],
    embeddings: Float[Tensor, "b n d"] | None,
    context: int,
    keep: int,
    *,
    alone: bool = False,
) -> Forward:
    """Score chains that begin in slots `starts`: all rows together if they begin in one slot, else one by one.

    With `alone` several rows are always scored one by one, since each reads a source of its own. What lies behind the
    last slot of a row, or behind the model's context, is no text of it; its logits are zeros.
    """
    firsts: list[int] = starts.tolist()
    together = len(firsts) == 1 or (len({*firsts}) == 1 and not alone)
    if together and firsts[0] + tokens.shape[1] <= context:
        cache.place(starts, tokens.shape[1], firsts[0] + tokens.shape[1])
        cache.first = firsts[0]
        return score(tokens, positions, cache, embeddings, keep)
    most = min(context, cache.shape[2])
    rows = [_row(score, row, first, tokens, positions, cache, embeddings, most) for row, first in enumerate(firsts)]
    hidden: dict[Layer, Tensor] = {layer: torch.cat([one.hidden[layer] for one in rows]) for layer in rows[0].hidden}
    return Forward(torch.cat([one.logits for one in rows])[:, -keep:], hidden)


def _row(
    score: Score,
    row: int,
    first: int,
    tokens: Int[Tensor, "b n"],
    positions: Int[Tensor, "b n"],
    cache: TreeCache,
    embeddings: Float[Tensor, "b n d"] | None,
    most: int,
) -> Forward:
    first = min(first, most - 1)  # a chain that begins behind the context is no text, and its logits do not matter
    width = min(tokens.shape[1], most - first)
    own, given = cache.select([row]), None if embeddings is None else embeddings[row : row + 1, :width]
    own.place(torch.tensor([first]), width, first + width)
    found = score(tokens[row : row + 1, :width], positions[row : row + 1, :width], own, given, 0)
    behind = (0, 0, 0, tokens.shape[1] - width)
    hidden: dict[Layer, Tensor] = {
        layer: torch.nn.functional.pad(states, behind) for layer, states in found.hidden.items()
    }
    return Forward(torch.nn.functional.pad(found.logits, behind), hidden)
