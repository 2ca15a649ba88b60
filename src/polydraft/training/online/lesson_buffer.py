"""Texts that a draft learns from while it serves, within so many bytes: half of them the newest, half from all time.

A text that leaves the newest half is offered to a sample of all texts that have left it. Each of them draws a number,
and those of the lowest numbers stand in the sample, as many as fit from the lowest on. Which these are does not depend
on when they came (reservoir sampling by random keys; Vitter's algorithm R, 1985, is for texts of one size).

One text in eight, by a hash of its prompt, is kept apart for ever to choose by: it is never learnt from, however often
it comes. Of these the last text of each prompt is kept, so that nobody who repeats himself counts for many.
"""

import random
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from polydraft.training.heads.losses.row_losses import HeadBatch

HELD_OUT = 8
"""One text in so many is kept to choose by."""


@dataclass(frozen=True, eq=False)
class TaughtText:
    """A finished text of the target with the states that its rows follow from.

    Args:
        ids: prompt and text.
        given: how many tokens are the prompt's.
        heat: the temperature that it was written at.
        final: the target's last hidden state at every token, in bfloat16.
        number: how many lessons came before it.
        features: the states of the layers that a head reads, joined, likewise; None where the draft reads no others.
    """

    ids: tuple[int, ...]
    given: int
    heat: float
    final: Tensor
    number: int = 0
    features: Tensor | None = None

    @property
    def size(self) -> int:
        """How many bytes it takes."""
        states = [one for one in (self.final, self.features) if one is not None]
        return 8 * len(self.ids) + sum(one.numel() * one.element_size() for one in states)

    @property
    def written(self) -> int:
        """How many tokens the target wrote."""
        return len(self.ids) - self.given

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens that it stands behind."""
        return self.ids[: self.given]

    @property
    def is_held_out(self) -> bool:
        """Whether it is for choosing, as all texts behind its prompt are."""
        told = blake2b(repr(self.prompt).encode(), digest_size=8).digest()
        return int.from_bytes(told, "little") % HELD_OUT == 0


@dataclass(eq=False)
class LessonRing:
    """Lessons within so many bytes.

    Args:
        most_bytes: of all of them together.
        random: which of the old ones stay.
        most: how many there are at most; None for as many as fit.
    """

    most_bytes: int
    random: random.Random
    most: int | None = None
    newest: deque[TaughtText] = field(default_factory=deque[TaughtText])
    numbered: list[tuple[float, int, TaughtText]] = field(default_factory=list[tuple[float, int, TaughtText]])
    bar: float = 1.0
    left: int = 0

    @property
    def sample(self) -> list[TaughtText]:
        """The old ones that stay, by the numbers that they drew."""
        return [one for *_, one in self.numbered]

    def add(self, lesson: TaughtText) -> None:
        """Take a lesson; one that is larger than a half is not kept."""
        if lesson.size > self.most_bytes // 2:
            return
        self.newest.append(lesson)
        while not self._fit(self.newest):
            self._offer(self.newest.popleft())

    def _fit(self, lessons: Sequence[TaughtText] | deque[TaughtText]) -> bool:
        """Tell whether these are no more than a half."""
        few = self.most is None or len(lessons) <= self.most // 2
        return few and _size(lessons) <= self.most_bytes // 2

    def _offer(self, lesson: TaughtText) -> None:
        """Let a lesson that is no longer new stand in the sample, or not.

        Where one was left out, all that draw a higher number are: what would fit behind it may not take its place.
        """
        self.left += 1
        number = self.random.random()
        if number < self.bar:
            insort(self.numbered, (number, self.left, lesson))
            while not self._fit(self.sample):
                self.bar = self.numbered.pop()[0]

    def drop(self, prompt: tuple[int, ...]) -> None:
        """Forget the texts behind a prompt."""
        self.newest = deque(one for one in self.newest if one.prompt != prompt)
        self.numbered = [one for one in self.numbered if one[-1].prompt != prompt]

    @property
    def lessons(self) -> list[TaughtText]:
        """All that are kept."""
        return [*self.sample, *self.newest]

    @property
    def size(self) -> int:
        """Their bytes."""
        return _size(self.newest) + _size(self.sample)

    def some(self, count: int) -> list[TaughtText]:
        """Return so many lessons, drawn by chance."""
        every = self.lessons
        return self.random.sample(every, min(count, len(every)))


class LessonBuffer:
    """The lessons to learn from, and those to choose by.

    Args:
        most_bytes: of all of them together; those to choose by may have half of it.
        seed: of what is drawn.
        held: how many there are to choose by at most, which bounds the time of a comparison; None for as many as fit.
    """

    def __init__(self, most_bytes: int, seed: int = 0, held: int | None = None) -> None:
        chance, half = random.Random(seed), most_bytes // 2
        self.learnt, self.held_out = LessonRing(half, chance), LessonRing(half, chance, held)
        self.count = 0

    def add(self, lesson: TaughtText) -> None:
        """Take a lesson."""
        self.count += 1
        if lesson.is_held_out:
            self.held_out.drop(lesson.prompt)
            self.held_out.add(lesson)
        else:
            self.learnt.add(lesson)

    @property
    def size(self) -> int:
        """Bytes of all lessons."""
        return self.learnt.size + self.held_out.size

    def digest(self) -> str:
        """Return a digest of all that is kept, in its order."""
        found = blake2b(digest_size=16)
        for one in (*self.learnt.lessons, *self.held_out.lessons):
            found.update(repr((one.ids, one.given, one.heat)).encode())
        return found.hexdigest()


def _size(lessons: Sequence[TaughtText] | deque[TaughtText]) -> int:
    return sum(one.size for one in lessons)


def batched(lessons: Sequence[TaughtText]) -> HeadBatch:
    """Return lessons as a batch, padded behind their ends."""
    longest = max(len(one.ids) for one in lessons)
    ids = torch.zeros(len(lessons), longest, dtype=torch.int64)
    valid = torch.zeros(len(lessons), longest, dtype=torch.uint8)
    final = torch.zeros(len(lessons), longest, lessons[0].final.shape[-1])
    read = lessons[0].features
    features = torch.zeros(len(lessons), longest, 0 if read is None else read.shape[-1])
    for row, one in enumerate(lessons):
        ids[row, : len(one.ids)] = torch.tensor(one.ids)
        valid[row, one.given : len(one.ids)] = 1
        final[row, : len(one.ids)] = one.final.float()
        if one.features is not None:
            features[row, : len(one.ids)] = one.features.float()
    heats = torch.tensor([one.heat for one in lessons])
    return HeadBatch(ids, valid, features, final, torch.zeros(ids.shape), heats)
