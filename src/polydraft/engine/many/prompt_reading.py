"""How prompts of a running batch are read: what is known of them already, and how many tokens are read in a step."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from polydraft.drafters import Drafter, Session, resumed
from polydraft.engine.loop.batch import Batch, Part, attempt
from polydraft.engine.loop.step import LOOP
from polydraft.engine.output import Past, committed
from polydraft.machine_code import clock as seconds
from polydraft.reading import Text, reader_of

LEAST_KNOWN = 8
"""Fewer tokens than these are read sooner than copied."""


class KeptTexts:
    """The last texts that were read, with what is known of them, each with the drafter whose state it has.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._pasts: list[tuple[Past, Drafter]] = []

    def like(self, text: Text, drafter: Drafter) -> Past | None:
        """Return what is known of the text that begins like another, if that is worth a copy.

        To another drafter the state is not shown: it could take it for its own.
        """
        own = [one if whose is drafter else replace(one, drafts=None) for one, whose in self._pasts]
        known = [past.known(text, drafter) for past in own]
        best = max(range(len(known)), key=known.__getitem__, default=None)
        if best is None or known[best] < LEAST_KNOWN:
            return None
        self._pasts.append(self._pasts.pop(best))
        return own[best]

    def add(self, past: Past, drafter: Drafter) -> None:
        """Keep a text, and forget those of which it tells all, or the one that was wanted least lately."""
        if self.size:
            left = [one for one in self._pasts if not (one[1] is drafter and _tells(past, one[0]))]
            self._pasts = [*left, (past, drafter)][-self.size :]


def known_of(batch: Batch, row: int) -> tuple[Past, Part]:
    """Return what is known of a row's text, over the row's own memory, and the part that it belongs to.

    It holds until the row takes its next step or is another's.
    """
    part = batch.part_of(row)
    reader = batch.reader if len(batch) == 1 else batch.reader.select([row])
    text = Text(batch.text.tokens[row : row + 1], batch.text.lengths[row : row + 1])
    drafts = attempt(lambda: part.select(row).state, None)
    return Past(batch.reader.model, committed(text), reader, drafts, None), part


def copied(past: Past, part: Part) -> Past:
    """Return a past in memory of its own, no more than it needs."""
    count = past.text.counts[0]
    reader = reader_of(past.target, 1, count, past.reader.layers).put(0, past.reader)
    if past.drafts is None:
        return replace(past, reader=reader)
    session = Session(part.params, count + 1, past.target.facts.vocab_size, reader, LOOP)
    drafts = resumed(part.drafter, past.drafts, count - 1, past.text, session)
    return replace(past, reader=reader, drafts=drafts)


def _tells(past: Past, other: Past) -> bool:
    """Tell whether all that one past knows of its text is known of another's, too."""
    ours, theirs = past.text.tokens[0], other.text.tokens[0]
    begins = len(ours) >= len(theirs) and torch.equal(ours[: len(theirs)], theirs)
    return begins and past.reader.kept(0, len(theirs) - 1) >= other.reader.read[0]


LEAST_READ = 16
"""Fewer tokens than these are not worth a pass of their own."""
WAITS = 2.0
"""Reading may take so many times as long as the step that it delays."""
LATEST = 5
"""Steps whose median time counts: one that was disturbed by other work says nothing."""

Clock = Callable[[], float]


class PromptChunkSize:
    """Learns from the passes measured so far how many tokens may be read beside texts in progress.

    A pass over w tokens takes a + b w seconds. Of the last one only the sum is known, T for W tokens. More tokens than
    W take at most T w / W, which is so if a = 0; fewer take at most s + (T - s) w / W as long as a is no more than the
    time s of a step, which is a pass itself. So the smaller of both answers keeps to `WAITS` steps, and where T is as
    long as that, both say W again. Which tokens are read when changes no text but by rounding.

    Args:
        most: the most tokens; None to read prompts whole. So many are read where nobody waits.
        clock: tells seconds.
        least: the least tokens beside texts in progress, however long they take.
    """

    def __init__(self, most: int | None, clock: Clock = seconds, least: int = LEAST_READ) -> None:
        self.most, self.clock, self.least = most, clock, least
        self._steps = deque[float](maxlen=LATEST)
        self._last: tuple[int, float] | None = None
        self._since: float | None = None

    def size(self, *, delays: bool) -> int | None:
        """Return how many tokens may be read now.

        Args:
            delays: whether there are texts that wait for it.
        """
        if self.most is None or not delays:
            return self.most
        return min(self.most, max(self.least, self._fitting()))

    def begins(self, *, reads: bool) -> None:
        """Take note that a step begins; one without prompts is not timed: on a GPU the clock waits for the work."""
        self._since = self.clock() if reads and self.most is not None else None

    def has_read(self, tokens: int) -> None:
        """Take note that prompts were read; the last few tokens of one say too little of a pass."""
        if self._since is not None:
            now = self.clock()
            if tokens >= min(self.least, self.most or 0):
                self._last = tokens, now - self._since
            self._since = now

    def has_stepped(self) -> None:
        """Take note that the texts in progress have had their step."""
        if self._since is not None:
            self._steps.append(self.clock() - self._since)

    def _fitting(self) -> int:
        if self._last is None or not self._steps:
            return 0
        (tokens, took), step = self._last, median(self._steps)
        if took <= 0:
            return self.most or 0
        more = tokens * WAITS * step / took
        fewer = tokens * (WAITS - 1) * step / (took - step) if took > step else more
        return int(min(more, fewer))


def clock_of(device: torch.device) -> Clock:
    """Return a clock that waits for the work of a device before it is read."""
    if device.type != "cuda":
        return seconds

    def told() -> float:
        torch.cuda.synchronize(device)
        return seconds()

    return told
