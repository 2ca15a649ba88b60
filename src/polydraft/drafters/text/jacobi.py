"""Jacobi decoding: the target's own guesses for the next places, made better by every step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.contract import Session
from polydraft.drafters.text.guess import Bounds, Guess, TextDrafter, rows_of
from polydraft.reading import Step, Text
from polydraft.rows import per_row, shared


@dataclass(frozen=True)
class JacobiState:
    """The guesses of every row, for places behind its text and no other, and the target's number of tokens."""

    guesses: tuple[tuple[int, ...], ...] = per_row(lambda guesses, length: ())
    vocab_size: int = shared()

    def resumes(self, fresh: "JacobiState") -> bool:
        """Say yes: it follows from the text, but for what is learnt."""
        return True


@dataclass(frozen=True)
class JacobiDrafter(TextDrafter):
    """Drafts what the target held likeliest at the next places, one step ago.

    The guesses for the next m places are the chain; m is its length under the policy, eight if nothing is said. When
    they were scored, the target's likeliest tokens at the nodes behind the accepted ones are the next guesses, from the
    new end of the text on; at temperature 0 this is Jacobi's iteration, with a window that moves. What was computed in
    the right context is the accepted path, whose keys the engine keeps. A place that has no guess yet takes the token m
    places before it, as if the text were to repeat itself.

    No model, no memory beyond the guesses, and one to one and a half tokens per call: most guesses are right tokens at
    a wrong place, which `LookaheadDrafter` remembers.

    Source: Santilli et al., arXiv 2305.10427.
    """

    name = "jacobi"
    sound = True

    def start(self, text: Text, session: Session) -> JacobiState:
        """Return rows without guesses."""
        return JacobiState(((),) * len(text.counts), session.vocab_size)

    def guesses(self, state: JacobiState, text: Text, bounds: Bounds) -> tuple[list[Guess], JacobiState]:
        """Return the guesses of every row as chains, filled up to the policy's length."""
        length = min(bounds.depth, bounds.nodes)
        rows = zip(rows_of(text), state.guesses, strict=True)
        return [Guess.chain(filled(row, known, length)) for row, known in rows], state

    def commit(self, state: JacobiState, step: Step) -> JacobiState:
        """Take the target's likeliest tokens behind the accepted ones.

        The tree may be one that others made too: then those of the first rejected branch, of which each stands below
        the one before it. Rows for which another drafter drafted keep their guesses, as if nobody had asked.
        """
        likeliest = step.scored.logits.argmax(dim=-1).tolist()
        parents, there, paths = (one.tolist() for one in (step.tree.parents, step.tree.valid, step.verdict.path))
        found = list(state.guesses)
        for row, (kept, known) in enumerate(zip(step.verdict.kept, state.guesses, strict=True)):
            if row in step.others:
                continue
            last = paths[row][kept - 1] if kept else 0
            behind = _behind(last, parents[row], there[row])
            found[row] = tuple(likeliest[row][node] for node in behind) if any(there[row][1:]) else known[1:]
        return replace(state, guesses=tuple(found))


def _behind(last: int, parents: Sequence[int], there: Sequence[bool]) -> list[int]:
    """Return the nodes of the first branch below a node, from the top down."""
    found = list[int]()
    for node in range(last + 1, len(parents)):  # parents have smaller numbers than their children
        if there[node] and parents[node] == last:
            found.append(node)
            last = node
    return found


def filled(text: NDArray[np.int64], known: Sequence[int], length: int) -> NDArray[np.int64]:
    """Return so many guesses behind a text: those that are known, then tokens from as many places before."""
    whole = [*text[-length:].tolist(), *known[:length]]
    first = len(whole) - len(known[:length])
    while len(whole) < first + length:
        whole.append(whole[max(0, len(whole) - length)])
    return np.array(whole[first:], np.int64)
