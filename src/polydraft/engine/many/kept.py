"""What an open batch knows of texts: the last ones that were read and written, and that of a row."""

from dataclasses import replace

import torch
from torch import Tensor

from polydraft.drafters import Drafter, Session, resumed
from polydraft.engine.calls.past import Past, committed
from polydraft.engine.loop.batch import Batch, Part, attempt
from polydraft.engine.loop.prefill import LOOP
from polydraft.reading import Text, reader_of

LEAST = 8
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
        if best is None or known[best] < LEAST:
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
    return _begins(ours, theirs) and past.reader.kept(0, len(theirs) - 1) >= other.reader.read[0]


def _begins(text: Tensor, other: Tensor) -> bool:
    """Tell whether a text begins with another."""
    return len(text) >= len(other) and torch.equal(text[: len(other)], other)
