"""Reading with a model whose text cannot branch: what was rejected is taken back by going on from an earlier state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import UnsupportedModel
from polydraft.models import Cache, Forward, LanguageModel, Layer
from polydraft.probs import sent
from polydraft.reading.reader import Reader
from polydraft.reading.values import Features, Scored, Text
from polydraft.rows import placed
from polydraft.trees import Draft, Frontier, TokenTree, Verdict

MOST_REREAD = 12
"""So many tokens are read again with the next chain before a pass of their own moves the states on.

A guess: more costs time on a CPU, where tokens count, and less on a GPU, where passes do."""


@dataclass(frozen=True, eq=False)
class PassMark:
    """What a pass left.

    Args:
        ends: per row, how many tokens of its text and its chain lead there; -1 if it read padding behind them.
        states: the states; None of a model that has none, whose slots lead to every length up to the end.
    """

    ends: tuple[int, ...]
    states: Any


@dataclass(frozen=True, eq=False)
class ChainReader(Reader):
    """A reader of a model that cannot branch: `read` is how far each row's states go.

    Problem: a recurrent state cannot be cut, so after a rejection it has read too much. A pass goes on from the states
    of `read` tokens: it reads again what was committed since, then the chain, row by row, with padding behind shorter
    rows, which would change their states. The states behind a pass are kept as a *mark*, and become the reader's if
    everything up to there was accepted and no padding was read; else they are dropped. So a rejection costs no pass,
    only some tokens more in the next one; when these are over `MOST_REREAD`, a pass without padding moves the states
    on.

    A draft model that cannot branch leaves a mark at each depth, so that it never reads again.

    Args:
        states: what the model remembers of the first `read` tokens of each row; None before the first pass, and of
            models that count positions in slots, which remember all that they have read.
        marks: what the passes of this step left.
        heard: per row, how many tokens' hidden states were handed out.
        trail: the marks of a growing chain; written in place, like the cache.
    """

    states: Any = None
    marks: tuple[PassMark, ...] = ()
    heard: tuple[int, ...] = ()
    trail: list[PassMark] = field(default_factory=list[PassMark])

    def catch_up(self, text: Text, at_most: int | None = None) -> tuple["ChainReader", Features | None]:
        """Read the committed tokens but for the last; rows that end earlier wait for the others, without padding."""
        counts = zip(self.read, text.counts, strict=True)
        ends = [max(read, min(count - 1, read + (at_most or count))) for read, count in counts]
        return self._read_to(text, ends, 1)

    def score(self, text: Text, tree: TokenTree, beside: Draft | None = None) -> tuple[Scored, "ChainReader"]:
        """Score a chain in one pass, behind what was committed since the states.

        Raises:
            UnsupportedModel: the tree branches, or brings riders or learnt embeddings.
        """
        _check_chain(self.model, tree, beside)
        reader, moved = self._moved(text)
        again, nodes = reader._again(text), tree.tokens.shape[1]
        window = _SlotWindow.of(text, reader._starts_of(text), max(again) + nodes - 1, tree.tokens)
        logits, hidden = reader._pass(window, max(text.counts) + nodes - 1)
        first = sent(torch.tensor(again), logits.device) - 1
        new = reader._features_of(window, hidden, text.before_last, max(again) - 1)
        features = _joined([one for one in (moved, new) if one is not None])
        found = Scored(
            _shifted(logits, first, nodes),
            None,
            {layer: _shifted(states, first, nodes) for layer, states in hidden.items()},
            {},
            features,
        )
        full = [own == max(again) or not self.model.facts.remembers for own in again]
        ends = [count - 1 + nodes if own else -1 for own, count in zip(full, text.counts, strict=True)]
        return found, replace(reader, marks=(reader._mark(ends),))

    def nodes(self, text: Text, frontier: Frontier) -> Forward:
        """Score the next node of a growing chain.

        Raises:
            UnsupportedModel: several nodes are to be scored.
        """
        if frontier.tokens.shape[1] != 1:
            raise UnsupportedModel(f"{_name(self.model)} drafts chains; trees branch.")
        if frontier.depth == 0:
            self.trail.clear()
            alike = len({*self._again(text)}) == 1
            reader, _ = self._moved(text) if alike else self._read_to(text, text.before_last)
            if reader is not self:
                self.trail.append(PassMark(reader.read, reader.states))
            again = reader._again(text)
            window = _SlotWindow.of(text, reader._starts_of(text), max(again))
            logits, hidden = reader._pass(window, max(text.counts), 1)
            self.trail.append(reader._mark(text.counts))
            return Forward(logits[:, -1:], dict(hidden))
        places = (text.lengths - 1 + frontier.depth).unsqueeze(-1)
        window = _SlotWindow(frontier.tokens, places, text.roots + frontier.depth)
        logits, hidden = self._pass(window, max(text.counts) + frontier.depth, begin=False)
        self.trail.append(self._mark([count + frontier.depth for count in text.counts]))
        return Forward(logits, dict(hidden))

    def grown(self, text: Text, draft: Draft) -> "ChainReader":
        """Return the reader when a chain has grown below a text."""
        return replace(self, marks=tuple(self.trail))

    def keep(
        self, text: Text, verdict: Verdict, *, grown: bool = False, ends: Sequence[int] | None = None
    ) -> "ChainReader":
        """Go on from the last mark that lies on the accepted path, and within the text; see `Reader.keep`."""
        committed = [count + kept for count, kept in zip(text.counts, verdict.kept, strict=True)]
        committed = committed if ends is None else list(map(min, committed, ends))
        reader = self
        for mark in self.marks:
            reader = reader._taken(mark, committed)
        return replace(reader, marks=(), heard=tuple(committed))

    def cut(self, row: int, length: int) -> "ChainReader":
        """Forget what a row read beyond its first `length` tokens; states forget all, since they cannot be cut."""
        heard = placed(self.heard, row, min(length, self.heard[row]))
        if length >= self.read[row]:
            return replace(self, heard=heard)
        states = None if self.states is None else self.states.without(row)
        return replace(self, read=placed(self.read, row, self.kept(row, length)), states=states, heard=heard)

    def kept(self, row: int, length: int) -> int:
        """Return how many of a row's first `length` tokens need not be read again; of states all or none."""
        return 0 if self.model.facts.remembers and length < self.read[row] else super().kept(row, length)

    def put(self, row: int, other: Reader) -> "ChainReader":
        """Let the only row of another reader take the place of a row, or come behind the last."""
        assert isinstance(other, ChainReader)
        joined = super().put(row, other)
        states = self.states or (None if other.states is None else other.states.nothing(len(self.read)))
        if states is not None:
            states = states.joined(row, states.nothing(1) if other.states is None else other.states)
        heard = placed(self.heard, row, other.heard[0])
        return ChainReader(self.model, joined.cache, joined.read, self.layers, (), states, (), heard)

    def at(self, text: Text) -> "Reader":
        """Refuse: who drafts with the target's own states would need those of the last token.

        Raises:
            UnsupportedModel: always, if the model has states.
        """
        if self.model.facts.remembers:
            raise UnsupportedModel(f"{_name(self.model)} remembers in states, which a drafter cannot share.")
        return super().at(text)

    def select(self, rows: Sequence[int]) -> "ChainReader":
        """Return a view of one row, over the same keys."""
        (row,) = rows
        states = None if self.states is None else self.states.of_row(row)
        whole = super().select(rows)
        return ChainReader(self.model, whole.cache, whole.read, self.layers, (), states, (), (self.heard[row],))

    def over(self, cache: Cache, counts: Sequence[int], model: LanguageModel | None = None) -> Reader:
        """Refuse: positions are counted by slots, or states are no slots.

        Raises:
            UnsupportedModel: always.
        """
        raise UnsupportedModel(f"{_name(self.model)} cannot leave tokens of its text out.")

    def _moved(self, text: Text) -> tuple["ChainReader", Features | None]:
        """Read on in rows that have too much to read again."""
        again = zip(self.read, text.counts, strict=True)
        ends = [count - 1 if count - 1 - read > MOST_REREAD else read for read, count in again]
        return self._read_to(text, ends)

    def _read_to(self, text: Text, ends: Sequence[int], keep: int = 0) -> tuple["ChainReader", Features | None]:
        """Read on to these places: passes of one width for all rows that are not there, so that none reads padding."""
        reader, told = self, list[Features]()
        while True:
            left = [max(0, end - read) for end, read in zip(ends, reader.read, strict=True)]
            waiting = [one for one in left if one]
            if not waiting:
                break
            width = min(waiting) if self.model.facts.remembers else max(waiting)
            stops = [read + min(width, own) for read, own in zip(reader.read, left, strict=True)]
            window = _SlotWindow.of(text, reader._starts_of(text), width)
            _, hidden = reader._pass(window, max(stops), keep)
            features = reader._features_of(window, hidden, stops, width)
            told += [] if features is None else [features]
            mark = reader._mark([stop if own else -1 for stop, own in zip(stops, left, strict=True)])
            heard = tuple(max(stop, known) for stop, known in zip(stops, reader.heard, strict=True))
            reader = replace(reader._taken(mark, stops), heard=heard)
        return reader, _joined(told)

    def _pass(
        self, window: "_SlotWindow", slots: int, keep: int = 0, *, begin: bool = True
    ) -> tuple[Float[Tensor, "b _ V"], Mapping[Layer, Float[Tensor, "b w d"]]]:
        """Score a window, from the reader's states or from where the last pass ended."""
        if begin:
            self.cache.begin(self.states)
        given, named = self._inputs(window.tokens, window.places, window.mask(slots), window.starts, keep)
        found = self.model.forward(*given, **named)
        return found.logits, found.hidden

    def _mark(self, ends: Sequence[int]) -> PassMark:
        return PassMark(tuple(ends), self.cache.states())

    def _taken(self, mark: PassMark, committed: Sequence[int]) -> "ChainReader":
        """Return the reader with the states of a mark in the rows whose committed text it lies on."""
        read, rows = list(self.read), list[int]()
        for row, (end, most) in enumerate(zip(mark.ends, committed, strict=True)):
            reach = min(end, most) if mark.states is None else end
            if read[row] < reach <= most:
                read[row] = reach
                rows.append(row)
        if mark.states is None or not rows:
            return replace(self, read=tuple(read))
        before = self.states or mark.states.nothing(len(read))
        return replace(self, read=tuple(read), states=before.taken(mark.states, rows))

    def _again(self, text: Text) -> list[int]:
        """Return how many tokens each row reads before its chain, the root among them."""
        return [count - start for count, start in zip(text.counts, self._firsts(text), strict=True)]

    def _firsts(self, text: Text) -> list[int]:
        return [min(read, count - 1) for read, count in zip(self.read, text.counts, strict=True)]

    def _starts_of(self, text: Text) -> Int[Tensor, "b"]:
        """Return the slots where a pass begins; one row's on the host, where it is asked for."""
        found = torch.tensor(self._firsts(text))
        return found if len(found) == 1 else sent(found, self.model.facts.device)

    def _features_of(
        self, window: "_SlotWindow", hidden: Mapping[Layer, Float[Tensor, "b w d"]], ends: Sequence[int], width: int
    ) -> Features | None:
        """Return the hidden states of the first `width` columns, each token's once, if somebody reads them."""
        if not self.layers or not width:
            return None
        heard, stop = self._device(self.heard).unsqueeze(-1), self._device(ends).unsqueeze(-1)
        places = window.places[:, :width]
        told: dict[Layer, Tensor] = {layer: states[:, :width] for layer, states in hidden.items()}
        return Features(places.masked_fill((places < heard) | (places >= stop), -1), told)


def reader_of(
    model: Any,
    rows: int,
    capacity: int,
    layers: Sequence[Layer] = (),
    sources: Sequence[Any] | None = None,
    queries: int = 0,
) -> Reader:
    """Return a reader of texts of which nothing was read: of trees, or of chains if the model cannot branch.

    Arguments are those of `Reader.new`.
    """
    whole = Reader.new(model, rows, capacity, layers, sources, queries)
    if model.facts.branches:
        return whole
    states = whole.cache.states() if any(whole.read) else None
    return ChainReader(model, whole.cache, whole.read, whole.layers, states=states, heard=whole.read)


@dataclass(frozen=True, eq=False)
class _SlotWindow:
    """Tokens of each row behind a slot of its own, and anything behind a row's end; `starts` are the first slots."""

    tokens: Int[Tensor, "b w"]
    places: Int[Tensor, "b w"]
    starts: Int[Tensor, "b"]

    @classmethod
    def of(
        cls, text: Text, starts: Int[Tensor, "b"], width: int, chain: Int[Tensor, "b n"] | None = None
    ) -> "_SlotWindow":
        """Cut a window out of a text with a chain behind it, whose first node is the text's last token."""
        device = text.tokens.device
        places = sent(starts, device).unsqueeze(-1) + torch.arange(width, device=device)
        tokens = text.tokens.gather(1, places.clamp_max(text.tokens.shape[1] - 1))
        if chain is not None:
            node = places - text.lengths.unsqueeze(-1) + 1
            drafted = chain.gather(1, node.clamp(0, chain.shape[1] - 1))
            tokens = torch.where(node > 0, drafted, tokens)
        return cls(tokens, places, starts)

    def mask(self, slots: int) -> Bool[Tensor, "b w m"]:
        """Let every token see the slots up to its own."""
        return torch.arange(slots, device=self.places.device) <= self.places.unsqueeze(-1)


def _check_chain(model: Any, tree: TokenTree, beside: Draft | None) -> None:
    if beside is not None and (beside.riders is not None or beside.embeddings is not None):
        raise UnsupportedModel(f"{_name(model)} scores chains only, so nothing can be scored beside them.")
    order = torch.arange(tree.parents.shape[1], device=tree.parents.device) - 1
    if bool(((tree.parents != order) & tree.valid).any()):
        raise UnsupportedModel(
            f"{_name(model)} scores chains only, but the draft branches; its drafter must keep to chains."
        )


def _shifted(values: Float[Tensor, "b w d"], first: Int[Tensor, "b"], count: int) -> Float[Tensor, "b n d"]:
    """Return `count` columns of each row, from a first one of its own."""
    columns = first.unsqueeze(-1) + torch.arange(count, device=values.device)
    return values.gather(1, columns.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def _joined(told: Sequence[Features]) -> Features | None:
    """Return hidden states of several passes as one; None of none."""
    if not told:
        return None
    layers = told[0].states
    states: dict[Layer, Tensor] = {layer: torch.cat([one.states[layer] for one in told], dim=1) for layer in layers}
    return Features(torch.cat([one.places for one in told], dim=1), states)


def _name(model: Any) -> str:
    return type(getattr(model, "model", model)).__name__
