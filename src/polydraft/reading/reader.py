"""A model that reads a batch of texts: its cache, and how much of each text is in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.models import Cache, Forward, LanguageModel, Layer, Queries, ShowsSlots, agree, module_of
from polydraft.probs import sent
from polydraft.reading.values import Features, Scored, Text
from polydraft.rows import placed
from polydraft.trees import Draft, Frontier, Resume, Riders, TokenTree, Verdict, tree_mask


@dataclass(frozen=True, eq=False)
class Reader:
    """A model, its cache, and how many committed tokens of each row it has read.

    Target and draft models are read through it; nobody else prefills, builds masks or counts what was missed. A reader
    is a value: each verb returns the next one. Its cache is written in place, but only in slots behind what this value
    has read, or that hold the same tokens; so a step that was interrupted may be taken again with the reader of before.

    **Rows that are not equally far.** A pass reads a window of the same width in every row, which ends at the token
    that is wanted: rows with less to read read some tokens again, and rows shorter than the window read their first
    token more than once. That costs no mask of its own, and writes what is there already.

    Args:
        model: the model.
        cache: its keys and values: slot j - dropped holds the j-th token.
        read: per row, how many committed tokens were read.
        layers: whose hidden states are handed out.
        dropped: per row, how many of the tokens read have no slot, in a compact view; () for none.
        queries: of how many of the newest tokens queries are handed out.
    """

    model: LanguageModel
    cache: Cache
    read: tuple[int, ...]
    layers: tuple[Layer, ...] = ()
    dropped: tuple[int, ...] = ()
    queries: int = field(default=0, kw_only=True)

    @classmethod
    def new(
        cls,
        model: LanguageModel,
        rows: int,
        capacity: int,
        layers: Sequence[Layer] = (),
        sources: Sequence[Any] | None = None,
        queries: int = 0,
    ) -> "Reader":
        """Return a reader of `rows` texts of which nothing was read, but for what comes with their sources.

        Args:
            model: the model.
            rows: how many texts.
            capacity: slots of each.
            layers: whose hidden states are handed out.
            sources: per row what else the model reads, such as an encoder's input; None for nothing.
            queries: of how many of the newest tokens queries are handed out, if the model gives them away.
        """
        cache = model.new_cache(rows, capacity) if sources is None else model.new_cache(rows, capacity, sources)
        known = () if sources is None else cache.known()
        queries = queries if queries and model.facts.queries else 0
        return cls(model, cache, known or (0,) * rows, tuple(layers), queries=queries)

    def catch_up(self, text: Text, at_most: int | None = None) -> tuple["Reader", Features | None]:
        """Read the committed tokens but for the last, which is the root of the next tree.

        Args:
            text: the committed tokens.
            at_most: how many tokens of each row; None for all.

        Returns:
            the reader, and the hidden states of what was read, if some are asked for; None if nothing was unread.
        """
        ends = [
            max(read, min(count - 1, read + (at_most or count)))
            for read, count in zip(self.read, text.counts, strict=True)
        ]
        width = max(end - read for end, read in zip(ends, self.read, strict=True))
        if not width:
            return self, None
        window = _Window.of(text, ends, width)
        mask = window.mask(self._slots(ends), None)
        given, named = self._inputs(window.tokens, window.places, mask, self._starts(ends, width), 1)
        if self.queries:
            named["queries"] = min(self.queries, width)
        scored = self.model.forward(*given, **named)
        told = self.layers or self.queries
        features = self._features(window.places, scored.hidden, ends, scored.queries) if told else None
        return replace(self, read=tuple(ends)), features

    def score(self, text: Text, tree: TokenTree, beside: Draft | None = None) -> tuple[Scored, "Reader"]:
        """Score a tree in one pass: what was unread, the root with it, then the nodes, then riders.

        Args:
            text: the committed tokens, of which the last is the root.
            tree: the tree.
            beside: its draft, if it brings riders, learnt embeddings or the first layers' work.
        """
        riders = beside.riders if beside else None
        ends, width = text.counts, self._unread(text)
        tokens, places, mask = self._laid_out(text, tree, width, riders)
        nodes = tree.tokens.shape[1]
        # the first layers saw root and nodes alone, and nobody noted hidden states: for anything more all layers run
        resumes = width == 1 and riders is None and not self.layers and not self.queries
        if resumes and beside is not None and beside.resume is not None:
            scored = self._resumed(beside.resume, tokens, places, mask, ends)
        else:
            table = None if beside is None else beside.embeddings
            starts = self._roots(text) if width == 1 else self._starts(ends, width)
            given, named = self._inputs(tokens, places, mask, starts, 0, table)
            if self.queries:
                named["queries"] = tokens.shape[1] - max(width - 1 - self.queries, 0)
            scored = self.model.forward(*given, **named)
        first, noted = width - 1, scored.queries
        hidden: dict[Layer, Tensor] = scored.hidden
        above = 0 if noted is None else noted.states.shape[1] - tokens.shape[1] + first
        features = None
        if first and (self.layers or self.queries):
            read = _columns(hidden, slice(first))
            before = noted and noted[:, :above]
            features = self._features(places[:, :first], read, [end - 1 for end in ends], before)
        found = Scored(
            scored.logits[:, first : first + nodes],
            scored.logits[:, first + nodes :] if riders is not None else None,
            _columns(hidden, slice(first, first + nodes)),
            _columns(hidden, slice(first + nodes, None)),
            features,
            noted and noted[:, above : above + nodes],
        )
        return found, replace(self, read=ends)

    def grow(self, text: Text, frontier: Frontier) -> Float[Tensor, "b f V"]:
        """Score the nodes of one depth of a growing tree: the root's level with all that is unread, then each deeper.

        When the tree has grown, the reader is `grown`.

        Args:
            text: the committed tokens, of which the last is the root.
            frontier: the nodes.
        """
        return self.nodes(text, frontier).logits

    def nodes(self, text: Text, frontier: Frontier) -> Forward:
        """Do as `grow`, and return hidden states too; with the root come those of all that was unread."""
        ends = text.counts
        if frontier.depth == 0:
            width = self._unread(text)
            window = _Window.of(text, ends, width)
            mask = window.mask(self._slots(ends), None)
            given, named = self._inputs(window.tokens, window.places, mask, self._starts(ends, width), 1)
            scored = self.model.forward(*given, **named)
            return replace(scored, logits=scored.logits[:, -1:])
        first, stop = frontier.nodes.start, frontier.nodes.stop
        roots = self._roots(text)
        mask = tree_mask(frontier.ancestors, roots, max(self._slots(ends)) - 1 + stop)
        places = (text.lengths - 1 + frontier.depth).unsqueeze(-1).expand(-1, stop - first)
        given, named = self._inputs(frontier.tokens, places, mask, roots + first)
        return self.model.forward(*given, **named)

    def grown(self, text: Text, draft: Draft) -> "Reader":
        """Return the reader when a tree has grown below a text: the keys of its nodes are put in the tree's order."""
        if draft.scored is not None and draft.failure is None:  # else nothing is drafted from these keys again
            self.cache.keep(self._roots(text), draft.scored[:, 1:])
        return replace(self, read=text.counts)

    def keep(self, text: Text, verdict: Verdict, *, grown: bool = False, ends: Sequence[int] | None = None) -> "Reader":
        """Make the accepted path read text.

        Args:
            text: the text that the tree was drafted for.
            verdict: the accepted path.
            grown: whether the tree was scored as it grew, so that the last node of a path may not have been.
            ends: per row, how many tokens are text, where a row ended before its path did; None where none did.
        """
        self.cache.keep(self._roots(text), verdict.path)
        read = tuple(
            count + max(kept - grown, 0) if read == count else read
            for read, count, kept in zip(self.read, text.counts, verdict.kept, strict=True)
        )
        return replace(self, read=read if ends is None else tuple(map(min, read, ends)))

    def kept(self, row: int, length: int) -> int:
        """Return how many of a row's first `length` tokens need not be read again, if it is rewound to them."""
        return min(length, self.read[row])

    def agrees(self, text: Text) -> bool:
        """Read the last known token of the only row once more, and tell whether it has the keys and values that it had.

        Those of this pass take their place. Nothing is read without a module to ask for its precision, or of a cache
        that does not show its slots.
        """
        model: Any = module_of(self.model)
        cache = self.cache
        if model is None or not self.read[0] or not isinstance(cache, ShowsSlots):
            return True
        slot = self._slots(self.read)[0] - 1
        before = cache.in_slot(slot)
        self.cut(0, self.read[0] - 1).catch_up(text, 1)
        pairs = zip(before, cache.in_slot(slot), strict=True)
        return all(agree(model, now.flatten(), then.flatten()) for then, now in pairs)

    def cut(self, row: int, length: int) -> "Reader":
        """Forget what a row read beyond its first `length` tokens."""
        read = min(length, self.read[row])
        dropped = placed(self.dropped, row, min(self.dropped[row], read)) if self.dropped else ()
        return replace(self, read=placed(self.read, row, read), dropped=dropped)

    def put(self, row: int, other: "Reader") -> "Reader":
        """Let the only row of another reader take the place of a row, or come behind the last."""
        read, gone = other.read[0], other.dropped[0] if other.dropped else 0
        cache = self.cache.put(row, other.cache, read - gone)  # if nothing was read too: a source comes with its row
        dropped = placed(self.dropped or (0,) * len(self.read), row, gone) if self.dropped or gone else ()
        return replace(self, cache=cache, read=placed(self.read, row, read), dropped=dropped)

    def at(self, text: Text) -> "Reader":
        """Return a view of a reader that has read all but the last token, as the target's has when a step begins."""
        return replace(self, read=tuple(text.before_last))

    def select(self, rows: Sequence[int]) -> "Reader":
        """Return a view of one row, over the same keys."""
        (row,) = rows
        dropped = self.dropped[row : row + 1]
        return replace(self, cache=self.cache.select(rows), read=(self.read[row],), dropped=dropped)

    def viewed(self, model: LanguageModel) -> "Reader":
        """Return a view by a variant of the model (`LanguageModel.variant`) over the same keys.

        What it writes behind the committed text is the variant's, which the next pass of the model itself writes again.
        """
        return replace(self, model=model, layers=(), queries=0)

    def over(self, cache: Cache, counts: Sequence[int], model: LanguageModel | None = None) -> "Reader":
        """Return a reader of the same texts over few of their keys.

        It reads on in rows that have equally much to read, as those of `at` do: tokens that have no slot any more
        cannot be read again.

        Args:
            cache: copies of some slots of each row (`Cache.take`), and room behind them.
            counts: how many each row has.
            model: which reads on; None for the same.
        """
        dropped = tuple(read - count for read, count in zip(self.read, counts, strict=True))
        return Reader(model or self.model, cache, self.read, dropped=dropped)

    @property
    def filled(self) -> tuple[int, ...]:
        """Per row, how many slots hold what was read: in a compact view fewer than tokens."""
        return tuple(self._slots(self.read))

    def _unread(self, text: Text) -> int:
        """Return the width of a window that holds every row's root and all that is unread before it."""
        unread = [count - read for count, read in zip(text.counts, self.read, strict=True)]
        if self.dropped and min(unread) != max(unread):
            raise InvalidParameter(
                f"A compact reader reads rows that have equally much to read, but they have {unread}; make it anew."
            )
        return max(1, *unread)

    def _slots(self, ends: Sequence[int]) -> list[int]:
        """Return the slots behind the tokens that end at these places."""
        return [*ends] if not self.dropped else [end - gone for end, gone in zip(ends, self.dropped, strict=True)]

    def _device(self, numbers: Sequence[int]) -> Int[Tensor, "b"]:
        return sent(torch.tensor(list(numbers)), self.model.facts.device)

    def _laid_out(
        self, text: Text, tree: TokenTree, width: int, riders: Riders | None
    ) -> tuple[Int[Tensor, "b s"], Int[Tensor, "b s"], Bool[Tensor, "b s m"]]:
        """Return the tokens of a pass, their places in the text, and which slots they see."""
        roots, slots = text.lengths.unsqueeze(-1) - 1, self._slots(text.counts)
        tokens, places, behind = tree.tokens, roots + tree.depth, tree.ancestors
        if riders is not None:
            tokens = torch.cat([tokens, riders.tokens], dim=1)
            places = torch.cat([places, (roots + riders.places).clamp_min(0)], dim=1)
            count = riders.tokens.shape[1]
            behind = torch.cat([torch.nn.functional.pad(behind, (0, count)), riders.sees], dim=1)
        if width == 1:  # the root alone, which is the tree's own: the usual step
            return tokens, places, tree_mask(behind, self._roots(text), max(slots) - 1 + behind.shape[-1])
        window = _Window.of(text, text.counts, width)
        tokens = torch.cat([window.tokens[:, :-1], tokens], dim=1)
        places = torch.cat([window.places[:, :-1], places], dim=1)
        return tokens, places, window.mask(slots, behind)

    def _inputs(
        self,
        tokens: Int[Tensor, "b s"],
        places: Int[Tensor, "b s"],
        mask: Bool[Tensor, "b s m"],
        starts: Int[Tensor, "b"],
        keep: int = 0,
        table: Float[Tensor, "e d"] | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what a forward pass is given: tokens and places that the model has, the slots, and what is wanted."""
        model, named = self.model, dict[str, Any](logits_to_keep=keep)
        if self.layers:
            named["hidden_layers"] = self.layers
        if table is not None:
            named["embeddings"] = model.embedded(tokens, table)
        tokens, places = tokens.clamp(0, model.facts.vocab_size - 1), places.clamp_max(model.facts.context - 1)
        return (tokens, places, mask, self.cache, starts), named

    def _starts(self, ends: Sequence[int], width: int) -> Int[Tensor, "b"]:
        """Return the first slots of windows that end at these places; one row's on the host, where it is asked for."""
        return _numbers_on([slot - width for slot in self._slots(ends)], self.model.facts.device)

    def _roots(self, text: Text) -> Int[Tensor, "b"]:
        """Return the slots of the last tokens; one row's on the host, where it is asked for."""
        return self._starts(text.counts, 1) if self.dropped else text.roots

    def _resumed(
        self,
        resume: Resume,
        tokens: Int[Tensor, "b s"],
        places: Int[Tensor, "b s"],
        mask: Bool[Tensor, "b s m"],
        ends: Sequence[int],
    ) -> Any:
        """Run the remaining layers over what the first ones made of root and nodes."""
        rest, first = self.model.last_layers(resume.layers), self.cache.of_layers(resume.layers, None)
        starts = self._starts(ends, 1)
        tokens, places = tokens.clamp(0, rest.facts.vocab_size - 1), places.clamp_max(rest.facts.context - 1)
        return rest.forward(tokens, places, mask, first, starts, embeddings=resume.states)

    def _features(
        self,
        places: Int[Tensor, "b w"],
        hidden: Mapping[Layer, Float[Tensor, "b w d"]],
        ends: Sequence[int],
        queries: Queries | None = None,
    ) -> Features:
        """Return the hidden states of a window, each token before its row's end once; the rest counts as padding."""
        known, stop = self._device(self.read).unsqueeze(-1), self._device(ends).unsqueeze(-1)
        following = torch.nn.functional.pad(places[:, 1:], (0, 1), value=1)
        first_again = (places == 0) & (following == 0)
        return Features(places.masked_fill((places < known) | (places >= stop) | first_again, -1), hidden, queries)


class NoKeys(Cache):
    """A cache of no slots, for any rows."""

    def keep(self, base: Int[Tensor, "b"], path: Int[Tensor, "b D"]) -> None:
        """Do nothing."""

    def put(self, row: int, other: Any, length: int) -> "NoKeys":
        """Return the same."""
        return self

    def select(self, rows: Sequence[int]) -> "NoKeys":
        """Return the same."""
        return self


class KeylessReader(Reader):
    """A reader in a loop that reads over another's keys, between its drafts (`drafters.Decoder.lent`)."""

    @classmethod
    def like(cls, reader: Reader) -> "KeylessReader":
        """Return one of the same model and as many rows."""
        return cls(reader.model, NoKeys(), (0,) * len(reader.read))

    def catch_up(self, text: Text, at_most: int | None = None) -> tuple[Reader, Features | None]:
        """Read nothing: whose keys are lent reads the text itself."""
        return self, None


def _columns(hidden: Mapping[Layer, Float[Tensor, "b s d"]], part: slice) -> Mapping[Layer, Float[Tensor, "b w d"]]:
    return {layer: states[:, part] for layer, states in hidden.items()}


@dataclass(frozen=True, eq=False)
class _Window:
    """The last `width` tokens of each row before its end.

    Args:
        tokens: the tokens; a row's first one in place of those before it.
        places: their places in the text.
        width: how many.
    """

    tokens: Int[Tensor, "b w"]
    places: Int[Tensor, "b w"]
    width: int

    @classmethod
    def of(cls, text: Text, ends: Sequence[int], width: int) -> "_Window":
        """Cut the window out of a text."""
        device = text.tokens.device
        first = sent(torch.tensor([end - width for end in ends]), device).unsqueeze(-1)
        places = (first + torch.arange(width, device=device)).clamp_min(0)
        return cls(text.tokens.gather(1, places), places, width)

    def mask(self, slots: Sequence[int], behind: Bool[Tensor, "b n s"] | None) -> Bool[Tensor, "b w m"]:
        """Let every token of the window see itself and those before, and what is behind it also its own ancestors.

        Args:
            slots: per row, the slot behind the window.
            behind: who descends from whom among the root, which is the window's last token, and what comes after it.
        """
        width, device = self.width, self.tokens.device
        inside = torch.ones(1, width, width, dtype=torch.bool, device=device).tril_().expand(len(slots), -1, -1)
        seen = inside if behind is None else _above(inside, behind)
        base = _numbers_on([slot - width for slot in slots], device)
        whole = tree_mask(seen, base, max(slots) + seen.shape[-1] - width)
        if min(slots) < width:
            whole[..., 0] = True  # tokens before the first are the first again
        return whole


def _numbers_on(numbers: Sequence[int], device: torch.device) -> Int[Tensor, "b"]:
    """Return numbers of rows: of a single one on the host, else on the device."""
    found = torch.tensor(list(numbers))
    return found if len(found) == 1 else sent(found, device)


def _above(window: Bool[Tensor, "b w w"], behind: Bool[Tensor, "b n s"]) -> Bool[Tensor, "b t u"]:
    """Put a chain of tokens above a tree whose root is the last of them."""
    width = window.shape[-1]
    if width == 1:
        return behind
    upper = torch.nn.functional.pad(window[:, :-1], (0, behind.shape[-1] - 1), value=False)
    lower = torch.nn.functional.pad(behind, (width - 1, 0), value=True)
    return torch.cat([upper, lower], dim=1)
