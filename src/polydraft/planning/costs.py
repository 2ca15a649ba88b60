"""What steps take: the target's pass by its tokens, a draft by its shape, looking for continuations, and the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from scipy.optimize import isotonic_regression

from polydraft.errors import InvalidParameter
from polydraft.trees import TreeShape, step_seconds

HICCUP = 1.5
"""A time counts as at most so many times its mean, because a machine is busy now and then."""
UNFORESEEN = 3.0
"""The first draft counts as at most so many times what the models' sizes suggest."""
LONGEST = 24
"""A mean is one of about so many recent times, because machines and lengths of texts change."""
WIDENING = 1 / 64
"""What a further token adds to a pass of the target, in passes over one. It is assumed until two sizes were timed."""
BESIDES = 0.1
"""What a draft takes beside its levels, and what verifying takes, in passes over one token; assumed likewise."""
READING = 1 / 40
"""The cost of one token in a pass over many, in passes over one token."""
ALIKE = 1.5
"""What was learnt of so many times more rows, or fewer, is a first guess."""
FIRST_LOOKS = 8
"""So many steps are looked at before looking may be given up."""
RECENT_LOOKS = 32
"""A mean is one of about so many recent steps with looking: what is found comes in bursts."""
LOOKS_AFTER_PAUSE = 3
"""After a pause what was seen before counts as so many steps at most: texts change."""
Finder = str | None
"""Who found the drafts of a row: "" for a model or a head, a name for what was looked up, None where nobody drafted."""


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of a count: linear between the points and beyond the last, never falling.

    Args:
        points: counts, ascending, with their seconds.

    Raises:
        InvalidParameter: no points, or counts or seconds that do not ascend from at least 1 and 0.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        counts, seconds = [count for count, _ in self.points], [value for _, value in self.points]
        rising = all(before <= after for before, after in zip([0.0, *seconds], [*seconds, float("inf")], strict=True))
        if not counts or counts[0] < 1 or sorted({*counts}) != counts or not rising or max(seconds) == float("inf"):
            raise InvalidParameter(
                f"A cost curve needs ascending counts and finite, ascending times, not {self.points}."
            )

    def __call__(self, count: int) -> float:
        """Return the seconds at a count."""
        counts, seconds = zip(*self.points, strict=True)
        if count <= counts[-1] or len(counts) == 1:
            return float(np.interp(count, counts, seconds))
        slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        return seconds[-1] + slope * (count - counts[-1])

    @classmethod
    def through(cls, samples: Mapping[int, Sequence[float]]) -> "Curve":
        """Return the monotone curve next to the medians of the samples at each count, in least squares."""
        counts = sorted(samples)
        medians = [max(0.0, median(samples[count])) for count in counts]
        return cls(tuple(zip(counts, map(float, isotonic_regression(medians).x), strict=True)))


@dataclass(frozen=True)
class StepCosts:
    """What a decoding step takes, in seconds.

    Args:
        target: the target's pass over n nodes.
        draft: one level of drafting over f nodes.
        start: what a draft takes beyond its levels.
        overhead: the rest of a step with drafts: distributions, verification, bookkeeping.
        plain_overhead: the rest of a step without.
    """

    target: Curve
    draft: Curve
    start: float
    overhead: float
    plain_overhead: float

    def __post_init__(self) -> None:
        for name in ("start", "overhead", "plain_overhead"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise InvalidParameter(f"{name} must be a time >= 0, but is {value}.")

    def verifying(self, nodes: int) -> float:
        """Return the time of a step but for what drafts add to it beside nodes."""
        return self.target(nodes) + self.plain_overhead

    @property
    def drafting(self) -> float:
        """What a step with drafts takes more than a plain one, whatever its tree."""
        return self.start + max(0.0, self.overhead - self.plain_overhead)

    def of(self, shape: TreeShape) -> float:
        """Return the time of a step with trees of this shape; the root alone is plain decoding."""
        return step_seconds(shape, self.verifying, self.draft, self.drafting)


@dataclass(frozen=True)
class Mean:
    """The mean of recent times, and how many there were."""

    value: float
    count: int = 1

    def after(self, seconds: float) -> "Mean":
        """Return the mean with one more time. One that is far below the mean tells that this came of a hiccup."""
        if HICCUP * seconds < self.value and self.count < 3:
            return Mean(seconds)
        count = self.count + 1
        bounded = min(seconds, HICCUP * self.value)
        return Mean(self.value + (bounded - self.value) / min(count, LONGEST), count)


@dataclass(frozen=True)
class Spent:
    """The seconds of one step: `draft`, the pass of the `target`, and the `rest`, verification and bookkeeping."""

    draft: float
    target: float
    rest: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.draft + self.target + self.rest


class LookupCosts:
    """Learn whether looking for continuations pays, for one number of rows.

    Problem: to look takes time in every step and for every row, also where nothing is found, and where all rows
    together are a full batch there is little to be saved.
    Rule: continuations are looked up as long as they save at least as much time, on the mean over recent steps, as
    looking takes. What they save is the time in which the tree of the step would have brought as many tokens, less that
    of the step; nothing where none were taken.

    Args:
        rows: the texts in the batch.
    """

    def __init__(self, rows: int) -> None:
        self.rows, self.took, self._timed = rows, 0.0, 0
        self._saved, self._seen = {True: 0.0, False: 0.0}, {True: 0, False: 0}
        self._begun = {True: 0, False: 0}

    def for_rows(self, rows: int) -> "LookupCosts":
        """Return what this makes one expect of other rows: it takes time for each, and saves no more."""
        after = LookupCosts(rows)
        after.took, after._timed = self.took * rows / self.rows, min(1, self._timed)
        after._saved, after._begun = dict(self._saved), dict(self._begun)
        after._seen = {drafts: min(LOOKS_AFTER_PAUSE, count) for drafts, count in self._seen.items()}
        return after

    def learn(self, took: float | None, saved: float, *, drafts: bool) -> None:
        """Learn from a step in which continuations were looked up.

        Args:
            took: the seconds; None where they could not be told from those of a draft model.
            saved: the seconds that continuations saved; below nothing where they lost some.
            drafts: whether a draft model drafts the rows for which nothing is found.
        """
        if took is not None:
            self._timed += 1
            self.took += (took - self.took) / min(self._timed, RECENT_LOOKS)
        self._begun[drafts] += 1
        self._seen[drafts] += 1
        self._saved[drafts] += (saved - self._saved[drafts]) / min(self._seen[drafts], RECENT_LOOKS)

    def pause(self, *, drafts: bool) -> None:
        """Note that nothing is looked up for a while."""
        self._seen[drafts] = min(LOOKS_AFTER_PAUSE, self._seen[drafts])

    def loss(self, *, drafts: bool) -> float:
        """Return the seconds that a step with looking is expected to lose; none where too little is known."""
        known = self._timed and self._begun[drafts] >= FIRST_LOOKS
        return max(0.0, self.took - self._saved[drafts]) if known else 0.0


class Costs:
    """Learn the seconds of a step for one number of rows: target(rows n) + draft(shape) + rest.

    Every time is that of the table, where it was measured; between two sizes it is interpolated, and beyond them it
    follows from what a level and a node are expected to add. The rest is learnt apart for each finder; that of a step
    is the mean over its rows.

    Args:
        rows: the texts in the batch.
        relative: the expected cost of a pass of the drafter, in passes of the target.
        known: what was measured before, for one row; None for nothing.
    """

    def __init__(self, rows: int, relative: float, known: StepCosts | None = None) -> None:
        self.rows, self.relative = rows, relative
        self._known = known if rows == 1 else None
        self._passes: dict[int, Mean] = {}
        self._drafts: dict[TreeShape, Mean] = {}
        self._shares: dict[TreeShape, float] = {}  # how much of a draft's levels were drawn, where growth may stop
        self._rests: dict[Finder, Mean] = {}
        self.looking = LookupCosts(rows)
        self._sizes: dict[TreeShape, Mean] = {}  # the tokens that trees of a shape came to, not all of them full
        if self._known:
            self._passes = {count: Mean(seconds) for count, seconds in self._known.target.points}
            self._rests = {"": Mean(self._known.overhead), None: Mean(self._known.plain_overhead)}

    def for_rows(self, rows: int) -> "Costs":
        """Return what this makes one expect of a few rows more or fewer; each of its times counts as one."""
        after = Costs(rows, self.relative)
        after._passes = {tokens: Mean(one.value) for tokens, one in self._passes.items() if tokens != self.rows}
        if self.rows in self._passes:
            after._passes[rows] = Mean(self.plain * _widened(rows) / _widened(self.rows))
        after._drafts = {shape: Mean(one.value) for shape, one in self._drafts.items()}
        after._rests = {finder: Mean(one.value) for finder, one in self._rests.items()}
        after.looking = self.looking.for_rows(rows)
        after._sizes = {shape: Mean(one.value * rows / self.rows) for shape, one in self._sizes.items()}
        after._shares = dict(self._shares)
        return after

    def measured(self, shape: TreeShape) -> bool:
        """Tell whether a step with this tree was timed."""
        return shape in self._drafts if shape.counts else self.rows in self._passes

    def learn(
        self,
        spent: Spent,
        tokens: int,
        shape: TreeShape,
        unread: int = 0,
        depth: int | None = None,
        finders: Sequence[Finder] | None = None,
    ) -> None:
        """Learn from a step.

        Args:
            spent: what it took.
            tokens: the tokens that the target scored, of all rows, padding included.
            shape: the tree that the drafter was asked for; the root alone if it was not.
            unread: how many tokens it had to read before, beyond those of a step; what this takes is an estimate, so
                that its time is no lesson.
            depth: the depth that the tree came to; None for the shape's.
            finders: who found the drafts of each row; None for the drafter that was asked, if more than the roots was
                scored.
        """
        passed = spent.target
        if self._passes and tokens not in self._passes:  # a new shape is slow once
            passed = min(passed, HICCUP * self.target(tokens))
        self._passes[tokens] = _with(self._passes.get(tokens), passed)
        rest = spent.rest if shape.counts else spent.rest + spent.draft
        self._learn_rest(rest, ("" if tokens > self.rows else None,) if finders is None else finders)
        if shape.counts:
            self._sizes[shape] = _with(self._sizes.get(shape), tokens)
            least = min(spent.draft, self.relative * shape.depth * self.plain)
            own = max(spent.draft - self.reading(unread), least) if unread else spent.draft
            share = 1.0 if depth is None else (depth + BESIDES) / (shape.depth + BESIDES)
            self._shares[shape] = (old := self._shares.get(shape, share)) + (share - old) / LONGEST
            if not unread or shape not in self._drafts:
                self._drafts[shape] = _with(self._drafts.get(shape), own / share)

    def _learn_rest(self, seconds: float, finders: Sequence[Finder]) -> None:
        """Learn the rest of a step; what was not expected of it counts for each of its finders."""
        expected = self.rest(finders) if self._rests else seconds
        for finder in dict.fromkeys(finders):
            own = self._rests.get(finder)
            if own is None:
                bound = HICCUP * expected + BESIDES * self.plain
                self._rests[finder] = Mean(min(seconds, bound) if self._rests else seconds)
            else:
                self._rests[finder] = own.after(max(0.0, own.value + seconds - expected))

    def rest(self, finders: Sequence[Finder]) -> float:
        """Return the rest of a step whose rows have drafts of these finders; of an unknown one, as of another's."""
        return sum(map(self._rest, finders)) / max(1, len(finders))

    def _rest(self, finder: Finder) -> float:
        if finder in self._rests:
            return self._rests[finder].value
        if finder is None:
            return min((one.value for one in self._rests.values()), default=0.0)
        drafted = [one.value for other, one in self._rests.items() if other is not None]
        plain = self._rests[None].value if None in self._rests else 0.0
        return max(drafted) if drafted else plain + BESIDES * self.plain

    def step(self, shape: TreeShape) -> float:
        """Return the seconds of a step with trees of this shape; the root alone is plain decoding."""
        tokens = round(self._sizes[shape].value) if shape in self._sizes else self.rows * shape.size
        return self.scored(tokens, ("" if shape.counts else None,)) + self.draft(shape)

    def scored(self, tokens: int, finders: Sequence[Finder]) -> float:
        """Return the seconds of a step that scores so many tokens, without drafting; the finders are those of rows."""
        return self.target(tokens) + self.rest(finders)

    @property
    def plain(self) -> float:
        """The seconds of the target's pass over one token of each row."""
        return self.target(self.rows)

    def target(self, tokens: int) -> float:
        """Return the seconds of the target's pass over so many tokens; before any pass was timed, in passes over one.

        A pass takes no longer than one over more tokens: what seems to was a hiccup.
        """
        above = [mean.value for count, mean in self._passes.items() if count >= tokens]
        if tokens in self._passes:
            return min(above)
        if not self._passes:
            return _widened(tokens)
        most = max((count for count in self._passes if count < tokens), default=None)
        least = min((count for count in self._passes if count > tokens), default=None)
        if most is None or least is None:
            (known,) = (count for count in (most, least) if count is not None)
            return self._passes[known].value * _widened(tokens) / _widened(known)
        if most == self.rows:
            return self._passes[least].value  # passes over two tokens cost almost those over eight: other kernels
        share = (tokens - most) / (least - most)
        return (1 - share) * self._passes[most].value + share * self._passes[least].value

    def draft(self, shape: TreeShape) -> float:
        """Return the seconds of drafting trees of this shape, as deep as they were on the mean."""
        return self.full(shape) * self._shares.get(shape, 1.0)

    def level(self, shape: TreeShape) -> float:
        """Return the seconds of drafting one more depth of trees of this shape."""
        return self.full(shape) / (shape.depth + BESIDES)

    def full(self, shape: TreeShape) -> float:
        """Return the seconds of drafting full trees of this shape: of unknown ones, by the level that cost least.

        One or two times may come of a hiccup, so they count as no more than what is expected suggests by far.
        """
        if not shape.counts:
            return 0.0
        own, depth = self._drafts.get(shape), shape.depth + BESIDES
        if own and own.count > 2:
            return own.value
        levels = [mean.value / (one.depth + BESIDES) for one, mean in self._drafts.items() if one != shape]
        if levels:
            expected, trust = min(levels) * depth, HICCUP
        elif self._known:
            expected, trust = self._known.start + sum(self._known.draft(len(level)) for level in shape.counts), HICCUP
        else:
            expected, trust = self.relative * self.plain * depth, UNFORESEEN
        return min(own.value, trust * expected) if own else expected

    def reading(self, unread: int) -> float:
        """Return the expected seconds in which the drafter reads so many tokens of each row."""
        return READING * self.relative * unread * self.rows * self.plain


def costs_for(kept: dict[int, Costs], rows: int, relative: float, known: StepCosts | None = None) -> Costs:
    """Return what is known of steps with so many rows, from now on kept; at first, what those with about as many took.

    Args:
        kept: by rows, what was learnt.
        rows, relative, known: those of `Costs`.
    """
    if rows not in kept:
        near = min(kept, key=lambda other: max(other / rows, rows / other), default=rows * 2)
        alike = near in kept and max(near / rows, rows / near) <= ALIKE
        kept[rows] = kept[near].for_rows(rows) if alike else Costs(rows, relative, known)
    return kept[rows]


def _widened(tokens: int) -> float:
    """Return what a pass over so many tokens is expected to take, in passes over one token."""
    return 1 + WIDENING * (tokens - 1)


def _with(mean: Mean | None, seconds: float) -> Mean:
    return Mean(seconds) if mean is None else mean.after(seconds)
