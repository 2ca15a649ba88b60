"""Guesses of fixed tokens as a draft, and what all drafters share that make them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polydraft.drafters.protocol import Defaults, Drafter, DraftRequest, Session
from polydraft.drafters.text.guess import Bounds, Guess
from polydraft.probs import SamplingParams
from polydraft.reading import Step, Text
from polydraft.schemes import Given, Scheme, require_scheme
from polydraft.trees import Chain, Draft, TokenTree, Topology, topology

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

    A policy bounds its trees: their depth, their nodes, and the children of a node.
    """

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
    """Return each guess's place among its siblings."""
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
