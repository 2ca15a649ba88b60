"""Copies of some of a target's keys, by layer and head, which stay over steps and follow the text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters.itself.keys import Keys
from polydraft.errors import UnsupportedModel
from polydraft.models import LanguageModel
from polydraft.reading import Features, Reader
from polydraft.rows import placed

UNCHOSEN = -1
"""The length of a text whose keys are to be chosen."""


@dataclass(frozen=True, eq=False)
class NewestQueries:
    """The queries of a text's newest tokens, those of all layers beside each other.

    Args:
        end: how many tokens the text has up to the last of them.
        states: one row for each token.
        widths: how wide those of each layer are.
    """

    end: int = 0
    states: Float[Tensor, "q w"] | None = None
    widths: tuple[int, ...] = ()

    def cut(self, length: int) -> "NewestQueries":
        """Return those of the tokens in the first `length`."""
        gone = max(self.end - length, 0)
        if not gone or self.states is None:
            return self
        left = self.states[: max(len(self.states) - gone, 0)]
        return NewestQueries(self.end - gone, left, self.widths) if len(left) else NewestQueries()

    def followed(self, first: int, states: Float[Tensor, "n w"], widths: tuple[int, ...], most: int) -> "NewestQueries":
        """Return the newest with those of the tokens from place `first` on, `most` at most."""
        before, end = self.cut(first), first + len(states)
        if before.states is not None and before.end == first:
            states = torch.cat([before.states, states])
        return NewestQueries(end, states[-most:].clone(), widths)

    def of_layer(self, layer: int, known: int, keys: Float[Tensor, "k m e"]) -> Float[Tensor, "k g q e"] | None:
        """Return a layer's queries by the head of keys that they share; None where those of the last are missing.

        Raises:
            UnsupportedModel: queries and keys of the layer are of other sizes.
        """
        if self.states is None or self.end != known:
            return None
        heads, _, width = keys.shape
        if len(self.widths) <= layer or not heads or self.widths[layer] % (heads * width):
            raise UnsupportedModel("The target's queries are not as wide as its keys, so that they choose none.")
        own = self.states.split(self.widths, -1)[layer]
        return own.to(keys.dtype).unflatten(-1, (heads, -1, width)).permute(1, 2, 0, 3)


def with_newest(known: Sequence[NewestQueries], features: Features, most: int) -> tuple[NewestQueries, ...]:
    """Return the rows' newest queries, `most` of each at most, with those that a pass has left.

    Raises:
        UnsupportedModel: the pass has left none.
    """
    noted = features.queries
    if noted is None:
        raise UnsupportedModel(
            "The target's passes hand out no queries, by which these keys are chosen: let them be fused, or run by "
            "transformers' own attention (sdpa); or take Recent(...)."
        )
    found, places = list(known), features.places[:, -noted.states.shape[1] :].tolist()
    for row, own in enumerate(places):
        there = [column for column, place in enumerate(own) if place >= 0]
        if there:
            states = noted.states[row, there[0] : there[-1] + 1]
            found[row] = found[row].followed(own[there[0]], states, noted.widths, most)
    return tuple(found)


@dataclass(frozen=True, eq=False)
class FewKeys:
    """A view's own keys: copies of those that were chosen of each text, and behind them of all tokens since.

    A value with the verbs of `polydraft.rows`. Before a tree is drafted it follows the target: the keys of tokens that
    were committed since are copied behind the others, and where there is no room for them and the tree, keys are chosen
    anew. Each row has a number of copies of its own, and its own time to choose, by its own text. The tree's keys lie
    behind the copies, where the next ones are written. So a step may be taken again with the value of before: whatever
    it writes it writes as before, or behind what that value knows.

    Nothing is kept over texts: keys are chosen anew from the target's.

    Args:
        chosen: per row, how many tokens its text had when its keys were chosen; `UNCHOSEN` where they are to be.
        reader: a reader of the copies; None before the first tree.
        size: how many keys of a row there is memory for.
    """

    chosen: tuple[int, ...]
    reader: Reader | None = None
    size: int = 0

    def select(self, rows: Sequence[int]) -> "FewKeys":
        """Return one row's, over the same memory."""
        (row,) = rows
        there = self.reader is not None and row < len(self.reader.read)
        reader = self.reader.select(rows) if self.reader is not None and there else None
        return FewKeys((self.chosen[row] if there else UNCHOSEN,), reader, self.size if there else 0)

    def put(self, row: int, other: "FewKeys") -> "FewKeys":
        """Return those with the only row of others in place of a row, or behind the last."""
        own, new = self.reader, other.reader
        if own is None or new is None or row > len(own.read) or self.size != other.size or other.chosen[0] < 0:
            return replace(self, chosen=placed(self.chosen, row, UNCHOSEN))
        return replace(self, chosen=placed(self.chosen, row, other.chosen[0]), reader=own.put(row, new))

    def cut(self, row: int, length: int) -> "FewKeys":
        """Return those of a row's first `length` tokens: of what was copied behind the choice so many are kept."""
        if length < self.chosen[row] or self.reader is None or row >= len(self.reader.read):
            return replace(self, chosen=placed(self.chosen, row, UNCHOSEN))
        return replace(self, reader=self.reader.cut(row, length))

    def reuse(self, fresh: "FewKeys", length: int) -> "FewKeys":
        """Return the fresh ones: keys are chosen anew."""
        return fresh

    def following(
        self,
        keys: Keys,
        target: Reader,
        queries: Sequence[NewestQueries],
        nodes: int,
        capacity: int,
        model: LanguageModel | None = None,
    ) -> tuple["FewKeys", Reader]:
        """Return the copies that follow all that is committed, and their reader, from which a tree can grow.

        Args:
            keys: how they are chosen.
            target: the target's reader, which has read all but the last tokens (`Reader.at`).
            queries: per row, those of the newest tokens.
            nodes: the most nodes of the tree, its root counted.
            capacity: how many slots the longest text and one tree need.
            model: which reads the copies; None for the target.
        """
        size = max(self.size, min(keys.budget + max(keys.room, nodes), max(capacity, nodes)))
        own, counts = self._with_room(model or target.model, len(target.read), size), list[int]()
        run, cache = own.model.facts.layers, target.cache
        cache = cache if run == target.model.facts.layers else cache.of_layers(0, run)  # an exit's layers alone
        chosen, device = list(self.chosen), target.model.facts.device
        for row, known in enumerate(target.read):
            read, gone = own.read[row], own.dropped[row]
            alone = cache.select([row])
            if 0 <= chosen[row] <= read <= known and known - gone + nodes <= size:
                slots, first = [_run(read, known, device)], read - gone
            else:
                slots, first, chosen[row] = _chosen(keys, alone, known, queries[row], device, run), 0, known
            count = slots[0].shape[-1]
            own.cache.take(row, alone, slots, _run(known - count, known, device)[0], first)
            counts.append(first + count)
        view = target.over(own.cache, counts, own.model)
        return FewKeys(tuple(chosen), view, size), view

    def _with_room(self, model: LanguageModel, rows: int, size: int) -> Reader:
        """Return the reader, or one with memory for so many rows and slots and the copies that there are."""
        before = self.reader
        if before is not None and len(before.read) == rows and self.size == size:
            return before
        own = Reader(model, model.new_cache(rows, size), (0,) * rows, dropped=(0,) * rows)
        for row in range(0 if before is None else len(before.read)):
            if before is not None and self.chosen[row] >= 0:
                own = own.put(row, before.select([row]))
        return own


def _run(first: int, stop: int, device: torch.device) -> Int[Tensor, "1 m"]:
    return torch.arange(first, stop, device=device).unsqueeze(0)


def _chosen(
    keys: Keys, alone: Any, known: int, queries: NewestQueries, device: torch.device, run: int | None
) -> list[Int[Tensor, "#k s"]]:
    """Return the slots that are kept of a row's known tokens: by layer of those that run, or the same for all layers.

    Without the queries of the last tokens the newest are kept. What is said of layers with windows does not count.
    """
    if known <= keys.budget:
        return [_run(0, known, device)]
    newest = _run(known - keys.budget, known, device)
    if not keys.queries:
        none = torch.zeros(1, 0, 1, device=device)
        return [keys.slots(known, none, none.unsqueeze(2))]
    found, layers = dict[int, Tensor](), range(len(queries.widths))[:run]
    for layer in layers:
        own = None if layer in alone.windowed else alone.keys_of(layer, known)
        asking = None if own is None else queries.of_layer(layer, known, own)
        if own is not None and asking is not None:
            found[layer] = keys.slots(known, own, asking)
    other = next(iter(found.values()), newest)
    return [found.get(layer, other) for layer in layers] if found else [newest]
