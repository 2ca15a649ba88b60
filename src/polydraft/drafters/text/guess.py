"""Guesses: fixed tokens as a tree, the drafts made of them, and drafters that guess."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Session
from polydraft.errors import InvalidParameter, is_whole, shown
from polydraft.probs import SamplingParams
from polydraft.reading import Step, Text
from polydraft.schemes import Given, Scheme, require_scheme
from polydraft.trees import Chain, Draft, Lookup, TokenTree, Topology, TreePolicy, topology


@dataclass(frozen=True)
class Bounds:
    """How large a tree of guesses may be: the most guesses, the longest path, and the most guesses below one."""

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
        places, likely = Places(), dict[int, float]()
        for path, chance in zip(paths, chances or [1 / max(1, len(paths))] * len(paths), strict=True):
            above = -1
            for token in path.tolist():
                above = places.setdefault((above, token), len(places))
                chance *= kept
                likely[above] = likely.get(above, 0.0) + chance
        return _tree_of(places, np.minimum(np.array([*likely.values()]), 1.0))

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

    def found_by(self, source: str) -> Lookup:
        """Return what a policy is told of it."""
        return Lookup(tuple(self.parents.tolist()), source)

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
    places, missed = Places(), dict[int, float]()
    for guess in guesses:
        own = list[int]()
        columns = (guess.tokens.tolist(), guess.parents.tolist(), guess.chances.tolist())
        for token, above, chance in zip(*columns, strict=True):
            parent = own[above] if above >= 0 else -1
            place = places.setdefault((parent, token), len(places))
            missed[place] = missed.get(place, 1.0) * (1 - chance)
            own.append(place)
    return _tree_of(places, 1 - np.array([*missed.values()]))


Places = dict[tuple[int, int], int]
"""The place of each guess in a tree, by the place of the one above and its token; in the order of the places."""


def _tree_of(places: Places, chances: NDArray[np.float64]) -> Guess:
    pairs = np.array([*places], np.int64).reshape(-1, 2)
    return Guess(pairs[:, 1].copy(), pairs[:, 0].copy(), chances)


def check_setting(name: str, value: object, rule: str, *, holds: bool) -> None:
    """Check one of a drafter's settings.

    Raises:
        InvalidParameter: the rule does not hold; the message says that `name` must be `rule`.
    """
    if not holds:
        raise InvalidParameter(f"{name} must be {rule}, but is {shown(value)}.")


def check_count(name: str, value: Any, least: int = 1, kind: str = "a whole number") -> None:
    """Check a number of things.

    Raises:
        InvalidParameter: it is no whole number, or a smaller one.
    """
    check_setting(name, value, f"{kind} of at least {least}", holds=is_whole(value) and value >= least)


LOOKUP = "lookup"
"""The source of drafts that came from text, for those who learn from them."""


class GivenDrafter(Drafter):
    """A drafter of fixed tokens; derive from it and give `start`, `draft` and `commit`.

    Its tokens are not drawn, so that naive match is the optimal rule for them, and every sampling setting is exact: a
    tree of guesses is chosen before anything of the step is drawn.
    """

    def defaults(self, params: SamplingParams) -> Defaults:
        """Give chains of eight."""
        return Defaults(Given(), Chain(8))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` unless the scheme is `Given`."""
        require_scheme(scheme, (Given,), f"The {self.name} drafter")


class TextDrafter(GivenDrafter):
    """A drafter of fixed tokens, which it knows from text and from earlier steps; derive from it and give `guesses`.

    A policy bounds its trees: their depth, their nodes, and the children of a node. If `by_text_alone`, its guesses
    follow from the text, whatever was drafted before.
    """

    by_text_alone: ClassVar[bool] = False

    def guesses(self, state: Any, text: Text, bounds: Bounds) -> tuple[list[Guess], Any]:
        """Return what may follow every row's text, and the state with which the step goes on; tokens may be unknown."""
        raise NotImplementedError

    def start(self, text: Text, session: Session) -> Any:
        """Return the target's number of tokens, beyond which nothing is drafted."""
        return session.vocab_size

    def draft(self, state: Any, request: DraftRequest) -> tuple[Draft, Any]:
        """Return every row's guesses within the policy's bounds."""
        text, scheme, policy = request.text, request.scheme, request.policy
        bounds = Bounds.of(policy)
        if not policy.shape.counts:
            return Draft.nothing(text.last()), state
        found, state = self.guesses(state, text, bounds)
        vocab_size = self.vocab_size(state)
        return given(text, [one.within(bounds, vocab_size) for one in found], scheme), state

    def vocab_size(self, state: Any) -> int:
        """Return the target's number of tokens."""
        return state if isinstance(state, int) else state.vocab_size

    def commit(self, state: Any, step: Step) -> Any:
        """Keep the state: the next draft reads the text itself."""
        return state


def rows_of(text: Text) -> list[NDArray[np.int64]]:
    """Return the committed tokens of every row on the host."""
    tokens = text.tokens.cpu().numpy()
    return [row[:length] for row, length in zip(tokens, text.counts, strict=True)]


def given(text: Text, guesses: Sequence[Guess], scheme: Scheme) -> Draft:
    """Return guesses as a draft whose every node has a row of its children alone.

    Under a deterministic scheme a node's children are what it takes from their list, under `Product` each is drawn from
    a row that has nothing else. Under all other schemes a lone child is drawn from such a row; siblings are no draw of
    these, so guesses must be chains.

    Args:
        text: the committed text.
        guesses: per row.
        scheme: the scheme that the draft is verified under.
    """
    size = 1 + max(map(len, guesses))
    if size == 1:
        return Draft.nothing(text.last(), apart=scheme.several_rows)
    batch, ranks = len(guesses), [_ranks(guess) for guess in guesses]
    most = 1 + max(int(one.max(initial=0)) for one in ranks)
    tokens, valid = np.zeros((batch, size), np.int64), np.zeros((batch, size), bool)
    parents, atoms = np.tile(np.arange(size) - 1, (batch, 1)), np.full((batch, size), -1)
    listed = np.full((batch, size, most), -1)
    valid[:, 0] = True
    for row, guess in enumerate(guesses):
        count = len(guess)
        tokens[row, 1 : count + 1], valid[row, 1 : count + 1] = guess.tokens, True
        parents[row, 1 : count + 1], atoms[row, 1 : count + 1] = guess.parents + 1, ranks[row]
        listed[row, guess.parents + 1, ranks[row]] = guess.tokens
    device = text.tokens.device
    chains = all((guess.parents == np.arange(len(guess)) - 1).all() for guess in guesses)
    shape = topology(Chain(size - 1).shape, batch, device) if chains else Topology(_sent(parents, device))
    tree = TokenTree(_sent(tokens, device), shape, _sent(valid, device))
    tree.tokens[:, 0] = text.last()
    laws = _apart(listed) if scheme.several_rows else _falling(listed)
    return Draft(tree, _sent(atoms, device), _sent(listed, device), _sent(laws, device), most_children=most)


def given_chain(text: Text, found: Sequence[NDArray[np.int64]]) -> Draft:
    """Return the draft of one given chain per row; rows with shorter chains are padded with invalid nodes."""
    return given(text, [Guess.chain(tokens) for tokens in found], Given())


def _ranks(guess: Guess) -> NDArray[np.int64]:
    seen, found = dict[int, int](), np.zeros(len(guess), np.int64)
    for place, above in enumerate(guess.parents.tolist()):
        found[place] = seen[above] = seen.get(above, -1) + 1
    return found


def _falling(listed: NDArray[np.int64]) -> NDArray[np.float32]:
    """Give each child more than the next, as deterministic schemes take them; a lone one all."""
    there = (listed >= 0) * np.arange(listed.shape[-1], 0, -1.0)
    return (there / there.sum(-1, keepdims=True).clip(1)).astype(np.float32)


def _apart(listed: NDArray[np.int64]) -> NDArray[np.float32]:
    """Give each child a row of its own; rows beyond the last child are like the last one's."""
    most = listed.shape[-1]
    last = (listed >= 0).sum(-1, keepdims=True) - 1
    place = np.minimum(np.arange(most), last)
    return (place[..., None] == np.arange(most)).astype(np.float32)


def _sent(values: NDArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)
