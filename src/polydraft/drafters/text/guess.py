"""What text drafters find: fixed tokens that may follow a row's text, as a tree of guesses."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from polydraft.trees import Found, TreePolicy


@dataclass(frozen=True)
class Bounds:
    """How large a tree of guesses may be.

    Args:
        nodes: the most guesses.
        depth: the longest path.
        children: the most guesses below one of them.
    """

    nodes: int
    depth: int
    children: int

    @classmethod
    def of(cls, policy: TreePolicy) -> "Bounds":
        """Return the bounds that a policy sets: those of the largest tree that it may choose.

        What is guessed is known from the text, so its tree follows the guesses and not the policy's shape.
        """
        shape = policy.largest
        return cls(policy.most_drafts, shape.depth, shape.max_children)

    def chains(self) -> "Bounds":
        """Return the same without branches, as long as there is room for nodes."""
        return Bounds(self.nodes, self.nodes, 1)


@dataclass(frozen=True, eq=False)
class Guess:
    """Guesses for one row, as a tree below its last committed token.

    Args:
        tokens: the guessed tokens.
        parents: the place of the guess above each, always an earlier one; -1 below the root.
        chances: how likely the text is thought to come to each guess; never more than at the guess above.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    chances: NDArray[np.float64]

    @classmethod
    def nothing(cls) -> "Guess":
        """Return no guess."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))

    @classmethod
    def chain(cls, tokens: NDArray[np.int64], chance: float = 1.0) -> "Guess":
        """Return guesses that follow one another, each as likely as the one above times `chance`."""
        count = len(tokens)
        return cls(np.asarray(tokens, np.int64), np.arange(count) - 1, chance ** np.arange(1.0, count + 1))

    @classmethod
    def paths(
        cls, paths: Sequence[NDArray[np.int64]], chances: Sequence[float] | None = None, kept: float = 1.0
    ) -> "Guess":
        """Return several paths from the root as one tree; what they share is there once, and its chances add up.

        Args:
            paths: the paths, each of some tokens.
            chances: of each path; None for equal ones.
            kept: that each of its tokens, the first one too, is as in the path, where those before it are.
        """
        known, tokens, parents, likely = dict[tuple[int, int], int](), list[int](), list[int](), list[float]()
        for path, chance in zip(paths, chances or [1 / max(1, len(paths))] * len(paths), strict=True):
            above = -1
            for token in path.tolist():
                place = known.setdefault((above, token), len(tokens))
                if place == len(tokens):
                    tokens.append(token)
                    parents.append(above)
                    likely.append(0.0)
                chance *= kept
                likely[place] += chance
                above = place
        return cls(np.array(tokens, np.int64), np.array(parents, np.int64), np.minimum(np.array(likely), 1.0))

    def __len__(self) -> int:
        """Return the number of guesses."""
        return len(self.tokens)

    @cached_property
    def promise(self) -> float:
        """The expected number of guesses that the text will follow."""
        return float(self.chances.sum())

    @cached_property
    def depths(self) -> NDArray[np.int64]:
        """The depth of each guess, 1 below the root."""
        found = np.ones(len(self), np.int64)
        for place, above in enumerate(self.parents.tolist()):
            if above >= 0:
                found[place] = found[above] + 1
        return found

    @property
    def depth(self) -> int:
        """The length of the longest path."""
        return int(self.depths.max(initial=0))

    def found_by(self, source: str) -> Found:
        """Return what a policy is told of it."""
        return Found(tuple(self.parents.tolist()), source)

    def within(self, bounds: Bounds, vocab_size: int | None = None) -> "Guess":
        """Return the likeliest guesses within bounds, without tokens that the target does not have, and what is below.

        Siblings are in the order of their chances, the likeliest first.
        """
        order = np.argsort(-self.chances, kind="stable")  # above comes first: it is as likely, and earlier
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        taken, below = dict[int, int](), dict[int, int]()
        if bounds.depth:
            for place in order.tolist():
                above = parents[place]
                there = above < 0 or above in taken
                fits = self.depths[place] <= bounds.depth and below.get(above, 0) < bounds.children
                if there and fits and (vocab_size is None or tokens[place] < vocab_size):
                    below[above] = below.get(above, 0) + 1
                    taken[place] = len(taken)
                if len(taken) == bounds.nodes:
                    break
        own = np.fromiter(taken, np.int64, len(taken))
        return Guess(
            self.tokens[own],
            np.array([taken.get(parents[place], -1) for place in taken], np.int64),
            self.chances[own],
        )

    def first(self, count: int) -> "Guess":
        """Return the first guesses: of those `within` bounds the likeliest."""
        return Guess(self.tokens[:count], self.parents[:count], self.chances[:count])

    def followed(self, path: Sequence[int]) -> int:
        """Return how many tokens of a path the guesses follow."""
        below: dict[tuple[int, int], int] = {}
        for place, (above, token) in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True)):
            below.setdefault((above, token), place)
        at, count = -1, 0
        for token in path:
            if (at, token) not in below:
                break
            at, count = below[at, token], count + 1
        return count


def merged(guesses: Sequence[Guess]) -> Guess:
    """Return the guesses of several as one tree; what several guess is there once.

    A token is as likely as if each were right by itself: 1 - prod (1 - chance).
    """
    if len(guesses) == 1:
        return guesses[0]
    known, tokens, parents, missed = dict[tuple[int, int], int](), list[int](), list[int](), list[float]()
    for guess in guesses:
        places = list[int]()
        for token, above, chance in zip(
            guess.tokens.tolist(), guess.parents.tolist(), guess.chances.tolist(), strict=True
        ):
            parent = places[above] if above >= 0 else -1
            place = known.setdefault((parent, token), len(tokens))
            if place == len(tokens):
                tokens.append(token)
                parents.append(parent)
                missed.append(1.0)
            missed[place] *= 1 - chance
            places.append(place)
    return Guess(np.array(tokens, np.int64), np.array(parents, np.int64), 1 - np.array(missed))
