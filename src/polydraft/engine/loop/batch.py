"""One batch: rows of texts in mid-text, and what drafts for them; a value with the verbs of `polydraft.rows`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

import polydraft.rows as states
from polydraft.catalogue import every_scheme
from polydraft.drafters import Drafter, proposes
from polydraft.engine.target_law import Ending, TargetLaw
from polydraft.errors import UnpairedScheme
from polydraft.models import LanguageModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Reader, Text, reader_of
from polydraft.schemes import require_pairs
from polydraft.trees import MENDABLE, TreePolicy
from polydraft.verifiers import TreeVerifier, require_few

FREE = -1
"""A row of a state that is no row of the batch: nobody's."""
Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Method:
    """What drafts for a text and verifies, from its prompt to its end.

    Args:
        drafter: proposes token trees.
        verifier: decides what to keep of them, and owns the scheme by which they are drawn.
        policy: the shape of the first tree.
    """

    drafter: Drafter
    verifier: TreeVerifier
    policy: TreePolicy

    def is_same(self, other: "Method") -> bool:
        """Tell whether drafter, verifier and policy are the same objects."""
        same = self.drafter is other.drafter and self.verifier is other.verifier
        return same and self.policy is other.policy


def check_drafting(method: Method) -> None:
    """Check that a drafter can draw such trees as the verifier needs them.

    Raises:
        UnpairedScheme: it cannot draft under the verifier's scheme, or the scheme has no drafts for so many children.
    """
    drafter, verifier, policy = method.drafter, method.verifier, method.policy
    try:
        drafter.check(verifier.scheme)
    except UnpairedScheme as refusal:
        raise UnpairedScheme(f"{str(refusal).rstrip('.')}; {_fitting_verifier(drafter)}.") from refusal
    if proposes(drafter):
        most = drafter.needs.most_children(policy)
        if most > 1:  # chains suit every scheme and rule
            require_pairs(verifier.scheme, most)
            require_few(verifier, most)
        policy.check(verifier.scheme)


def _fitting_verifier(drafter: Drafter) -> str:
    """Say which verifier to pass: naive match, exact for all drafts, with the first scheme that the drafter takes."""
    for scheme in every_scheme():
        try:
            drafter.check(scheme)
        except UnpairedScheme:
            continue
        return f"pass a verifier of such drafts, for example verifier=TopDown(NaiveMatch({scheme}))"
    return "it takes none of this package's schemes, so pass a verifier of its own"


@dataclass(frozen=True)
class Fault:
    """What failed in a drafter.

    Args:
        method: whose drafter.
        reason: how it failed first.
        every: whether nothing more is drafted for any of its rows.
    """

    method: Method
    reason: str
    every: bool


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of a batch that have one method and are drafted for together.

    Args:
        method: the method.
        params: the sampling settings that the drafter was told of.
        policy: that of the next tree; another than the method's if it learns from what was accepted.
        state: the drafter's, of rows of its own.
        rows: which row of the batch each of these is; `FREE` for nobody's.
        fault: why nothing is drafted for these rows any more; empty while something is.
    """

    method: Method
    params: SamplingParams
    policy: TreePolicy
    state: Any
    rows: tuple[int, ...]
    fault: str = ""

    @property
    def drafter(self) -> Drafter:
        """The method's."""
        return self.method.drafter

    @property
    def there(self) -> tuple[int, ...]:
        """The batch's rows among these."""
        return tuple(row for row in self.rows if row != FREE)

    @property
    def reads_prompts(self) -> bool:
        """Whether the drafter is to read prompts: a drafter of whom nothing is asked now reads them later.

        Hidden states and queries come once.
        """
        needs = self.drafter.needs
        return not self.fault and bool(self.policy.shape.counts or needs.layers or needs.queries)

    def covers(self, batch: int) -> bool:
        """Tell whether these are all rows of a batch, in order."""
        return self.rows == tuple(range(batch))

    def aligned(self, batch: int) -> bool:
        """Tell whether these are all rows of a batch, in order, some of which may be nobody's."""
        return len(self.rows) == batch and all(row in (place, FREE) for place, row in enumerate(self.rows))

    def of(self, value: Value, batch: int) -> Value:
        """Return what a value of the batch says of these rows: itself where they are all of them."""
        return value if value is None or self.covers(batch) else value.of(self.rows)  # type: ignore[attr-defined]

    def failed(self, reason: str) -> "Part":
        """Return the part when nothing is drafted for it any more."""
        return replace(self, state=None, fault=reason)

    def select(self, row: int) -> "Part":
        """Return one of the batch's rows by itself, over the same memory."""
        place = self.rows.index(row)
        state = None if self.fault else states.select(self.state, [place])
        return replace(self, state=state, policy=self.policy.select([place]), rows=(row,))

    def apart(self) -> list["Part"]:
        """Return the rows one by one; none if there is one, or if the state has no row by itself."""
        return attempt(lambda: [self.select(row) for row in self.there], []) if len(self.rows) > 1 else []

    def takes(self, other: "Part", row: int, batch: int) -> bool:
        """Tell whether the only row of another part can be drafted for with these, as a row of the batch.

        A drafter that looks at the target's keys is shown those of all rows, or of one.
        """
        if not (self.method.is_same(other.method) and self.params == other.params):
            return False
        if self.fault or other.fault:
            return bool(self.fault and other.fault)
        if self.drafter.needs.target and self._with(row) != tuple(range(batch)):
            return False
        return True

    def put(self, row: int, other: "Part") -> "Part":
        """Return the part with the only row of another, as a row of the batch."""
        rows = self._with(row)
        place = rows.index(row)
        if self.fault:
            return replace(self, rows=rows)
        policy = self.policy.put(place, other.policy)
        return replace(self, state=states.put(self.state, place, other.state), policy=policy, rows=rows)

    def without(self, rows: Sequence[int]) -> "Part":
        """Return the part when some of the batch's rows are another's; the state keeps them."""
        return replace(self, rows=tuple(FREE if row in rows else row for row in self.rows))

    def cut(self, row: int, length: int) -> "Part":
        """Return the part without what it knows of a row beyond its first `length` tokens."""
        if self.fault or row not in self.rows:
            return self
        return replace(self, state=states.cut(self.state, self.rows.index(row), length))

    def left(self, row: int) -> "Part":
        """Return the part when a row of the batch is another's, or over."""
        return attempt(lambda: self.cut(row, 0), self).without([row])

    def _with(self, row: int) -> tuple[int, ...]:
        """Return the rows with one more: in its own place, in a free one, or behind the last."""
        free = row if row in self.rows else FREE
        place = self.rows.index(free) if free in self.rows else len(self.rows)
        return (*self.rows[:place], row, *self.rows[place + 1 :])


@dataclass(frozen=True, eq=False)
class Spare:
    """Memory for all rows that a batch may come to have.

    Args:
        reader: a reader of so many rows.
        tokens: room for their tokens, "b t".
    """

    reader: Reader
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of texts in mid-text; a batch without rows is one, too.

    A step and the verbs return the next batch. They write in place only where no row is going: behind what was
    committed, in rows that are over, and in spare memory. So what was interrupted may be done again.

    Args:
        text: the committed tokens, with room behind them.
        laws: per row, how the target's logits become distributions.
        endings: per row, where it ends.
        noise: one stream of random numbers per row.
        steps: per row, the steps it has taken.
        going: the rows that have not ended.
        reader: the target, and what it has read.
        parts: what drafts and verifies; each row belongs to one of them.
        faults: what failed in drafters since the last step.
        spare: memory for more rows; None where each new row makes its own.
    """

    text: Text
    laws: tuple[TargetLaw, ...]
    endings: tuple[Ending, ...]
    noise: Noise
    steps: tuple[int, ...]
    going: frozenset[int]
    reader: Reader
    parts: tuple[Part, ...]
    faults: tuple[Fault, ...] = ()
    spare: Spare | None = None

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def unread(self) -> int:
        """The most tokens that the target has still to read of a prompt."""
        pairs = zip(self.text.counts, self.reader.read, strict=True)
        return max((count - 1 - read for count, read in pairs), default=0)

    @cached_property
    def last(self) -> frozenset[int]:
        """The rows that have room for one more token: nothing that is drafted for them could become text."""
        counts, endings = self.text.counts, self.endings
        return frozenset(row for row in self.going if endings[row].is_last(counts[row]))

    @property
    def movable(self) -> bool:
        """Whether rows may change places: not where layers remember, nor where a drafter looks at the target's rows."""
        return self.spare is not None and not any(part.drafter.needs.target for part in self.parts)

    def part_of(self, row: int) -> Part:
        """Return the part that drafts for a row."""
        return next(part for part in self.parts if row in part.rows)

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> "Batch":
        """Return one row by itself, over the same memory."""
        (row,) = rows
        return Batch(
            text=self.text.of(rows),
            laws=(self.laws[row],),
            endings=(self.endings[row],),
            noise=self.noise.of(rows),
            steps=(self.steps[row],),
            going=frozenset({0} if row in self.going else ()),
            reader=self.reader.select(rows),
            parts=(replace(self.part_of(row).select(row), rows=(0,)),),
        )

    @torch.inference_mode()
    def put(self, row: int, other: "Batch") -> "Batch":
        """Return the batch with the only row of another in place of a row, or behind the last.

        What drafts for it comes with it.
        """
        own = self._longer() if row == len(self) else self
        count, tokens, lengths = other.text.counts[0], own.text.tokens, own.text.lengths.clone()
        tokens[row, :count] = other.text.tokens[0, :count]
        lengths[row] = count
        layers = tuple(dict.fromkeys((*own.reader.layers, *other.reader.layers)))
        queries = max(own.reader.queries, other.reader.queries)
        return replace(
            own,
            text=Text(tokens, lengths),
            laws=placed(own.laws, row, other.laws[0]),
            endings=placed(own.endings, row, other.endings[0]),
            noise=own.noise.joined(row, other.noise),
            steps=placed(own.steps, row, other.steps[0]),
            going=own.going | {row},
            reader=replace(own.reader.put(row, other.reader), layers=layers, queries=queries),
            parts=_parts_with(own.parts, row, other.parts[0], max(len(self), row + 1)),
            faults=(*own.faults, *other.faults),
        )

    @torch.inference_mode()
    def drop(self, row: int) -> "Batch":
        """Return the batch without a row that is over, in whose place the last one comes; of a batch that can move.

        Of several rows the last is dropped first: then it is always a row that goes on which moves, and to do it again
        writes the same.
        """
        spare, last, tokens, lengths = self.spare, len(self) - 1, self.text.tokens, self.text.lengths.clone()
        assert spare is not None
        reader, count = self.reader, self.text.counts[last]
        if row != last:
            reader = reader.put(row, reader.select([last]))
            tokens[row, :count] = tokens[last, :count]
            lengths[row] = lengths[last]
        short = tuple(placed(own, row, own[last])[:last] for own in (self.laws, self.endings, self.steps))
        return replace(
            self,
            text=Text(spare.tokens[:last], lengths[:last]),
            laws=short[0],
            endings=short[1],
            steps=short[2],
            noise=Noise(placed(self.noise.generators, row, self.noise.generators[last])[:last]),
            going=frozenset(row if own == last else own for own in self.going - {row}),
            reader=replace(reader, cache=spare.reader.cache.select(range(last)), read=reader.read[:last]),
            parts=_peopled(_renamed(part.left(row), last, row) for part in self.parts),
        )

    @torch.inference_mode()
    def cut(self, row: int, length: int) -> "Batch":
        """Return the batch without what is known of a row's text beyond its first `length` tokens."""
        parts = tuple(part.cut(row, length) for part in self.parts)
        return replace(self, reader=self.reader.cut(row, length), parts=parts)

    def reuse(self, fresh: "Batch", length: int) -> "Batch":
        """Return what another batch of one row, which is fresh, may keep of this one (`polydraft.rows.reuse`)."""
        pairs = zip(self.parts, fresh.parts, strict=True)
        parts = tuple(replace(own, state=states.reuse(own.state, new.state, length)) for own, new in pairs)
        return replace(self, reader=self.reader.cut(0, length), parts=parts)

    def _longer(self) -> "Batch":
        """Return the batch with an empty row behind the last, in spare memory.

        Where there is none, the first row's memory is there (`empty`), and `Reader.put` makes that of others.
        """
        count, lengths = len(self) + 1, torch.nn.functional.pad(self.text.lengths, (0, 1), value=1)
        if self.spare is None:
            tokens = torch.nn.functional.pad(self.text.tokens, (0, 0, 0, 1))
            reader = self.reader if count > 1 else replace(self.reader, read=(0,))
            return replace(self, text=Text(tokens, lengths), reader=reader)
        cache, read = self.spare.reader.cache.select(range(count)), (*self.reader.read, 0)
        return replace(
            self,
            text=Text(self.spare.tokens[:count], lengths),
            reader=replace(self.reader, cache=cache, read=read),
        )


def empty(target: LanguageModel, size: int, capacity: int) -> Batch:
    """Return a batch without rows; with memory for so many if rows of the target's cache can change places."""
    tokens = torch.zeros(size, capacity, dtype=torch.int64, device=target.facts.device)
    text, moves = Text(tokens[:0], tokens[:0, 0]), target.facts.branches
    whole = reader_of(target, size if moves else 1, capacity)
    reader = replace(whole, cache=whole.cache.select(()) if moves else whole.cache, read=())
    spare = Spare(whole, tokens) if moves else None
    return Batch(text, (), (), Noise(()), (), frozenset(), reader, (), spare=spare)


def faults_of(told: Sequence[tuple[Method, str]], parts: Sequence[Part]) -> tuple[Fault, ...]:
    """Return what failed in drafters, given what is told of it and the parts with which the batch goes on."""
    return tuple(
        Fault(method, reason, all(part.fault for part in parts if part.method is method)) for method, reason in told
    )


def attempt(verb: Callable[[], Value], instead: Value) -> Value:
    """Do something with a drafter's state on which no row's drafts depend; if it fails, go on as if it was not done."""
    try:
        return verb()
    except MENDABLE:
        raise
    except Exception:  # noqa: BLE001  whatever a drafter does wrong must not lose the text
        return instead


def placed(values: tuple[Value, ...], place: int, value: Value) -> tuple[Value, ...]:
    """Return values with another in a place, or behind the last."""
    return (*values[:place], value, *values[place + 1 :])


def joined(parts: Sequence[Part], row: int, new: Part, batch: int) -> tuple[Part, ...]:
    """Return parts with the only row of another: in one that takes it, else by itself."""
    new = replace(new, rows=(row,))
    for place, part in enumerate(parts):
        if part.takes(new, row, batch):
            grown = attempt(lambda part=part: part.put(row, new), None)
            if grown is not None:
                return placed(tuple(parts), place, grown)
    return (*parts, new)


def _parts_with(parts: Sequence[Part], row: int, new: Part, batch: int) -> tuple[Part, ...]:
    """Return the parts with a row of the batch given to the only row of another part; whoever had it is without it.

    A part whose drafter looks at the target's keys comes apart where it has not all rows any more.
    """
    own = next((part for part in parts if row in part.rows), None)
    if own is not None and own.takes(replace(new, rows=(row,)), row, batch):
        grown = attempt(lambda: own.put(row, new), None)
        if grown is not None:
            return tuple(grown if part is own else part for part in parts)
    kept = joined([part.left(row) if part is own else part for part in parts], row, new, batch)
    return _peopled(one for part in kept for one in in_sight(part, batch))


def in_sight(part: Part, batch: int) -> list[Part]:
    """Return a part, or its rows one by one if its drafter looks at the target's keys and it has not all rows."""
    split = part.drafter.needs.target and not part.fault and not part.aligned(batch)
    return (part.apart() if split else []) or [part]


def _peopled(parts: Any) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.there)


def _renamed(part: Part, old: int, new: int) -> Part:
    return replace(part, rows=tuple(new if row == old else row for row in part.rows))
