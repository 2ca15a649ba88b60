"""Token recycling: what the target thought likely after each token, when it last scored it."""

import heapq
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.contract import Defaults, Session, digest_of
from polydraft.drafters.text.guess import Bounds, Guess, TextDrafter, check_count, rows_of
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Step, Text
from polydraft.rows import counts, per_row, shared
from polydraft.schemes import Given
from polydraft.trees import BestFirst

RANK_CHANCES = (0.435, 0.065, 0.035, 0.034, 0.017, 0.014, 0.006, 0.005)
"""How often the j-th of a token's successors came next: 802 greedy tokens of SmolLM2 behind 12 prompts of six kinds."""


Table = dict[int, tuple[int, ...]]
"""The likeliest successors of each token that was seen, best first."""


@dataclass(frozen=True, eq=False)
class RecyclingState:
    """A table for each row, which may be one and the same, and how many tokens of its prompt were read."""

    tables: tuple[Table, ...] = per_row(learnt=True)
    vocab_size: int = shared()
    read: tuple[int, ...] = counts(learnt=True)

    def resumes(self, fresh: "RecyclingState") -> bool:
        """Say yes: it follows from the text, but for what is learnt."""
        return True


@dataclass(frozen=True)
class RecyclingDrafter(TextDrafter):
    """Drafts a tree of the target's own earlier thoughts: below each token the successors that it scored highest.

    After every step the target's highest logits at all of the tree's tokens, rejected ones too, are the successors of
    these tokens. The tree is grown best first: the chance of a path is the product of its ranks' chances.

    Args:
        successors: how many are kept of each token.
        shared: whether all texts of this drafter share one table. It is warm for every new text, but a text above
            temperature 0 then depends on those before it, not on its seed alone.

    Raises:
        InvalidParameter: less than one successor.

    Source: Token Recycling, arXiv 2408.08696; there the tree is a fixed one of 80 nodes.
    """

    successors: int = 8
    shared: bool = False
    tables: dict[int, Table] = field(default_factory=dict, init=False, repr=False, compare=False)
    written: list[bytes] = field(default_factory=lambda: [b""], init=False, repr=False, compare=False)
    name = "recycling"
    sound = True

    def __post_init__(self) -> None:
        check_count("successors", self.successors)

    def defaults(self, params: SamplingParams) -> Defaults:
        """Give trees of sixteen guesses."""
        return Defaults(Given(), BestFirst(16, depth=6, children=8))

    def outside(self, row: int) -> bytes:
        """Return a running digest of what was written into the tables that texts share."""
        return self.written[0]

    def start(self, text: Text, session: Session) -> RecyclingState:
        """Return empty tables, or the one that all texts share."""
        tables = tuple(self.tables.setdefault(session.vocab_size, {}) if self.shared else {} for _ in text.counts)
        return RecyclingState(tables, session.vocab_size, (0,) * len(tables))

    def read(self, state: RecyclingState, text: Text, features: Features | None) -> RecyclingState:
        """Learn from the prompt what followed what, as far as that is new."""
        rows = zip(state.tables, rows_of(text), state.read, strict=True)
        tables = tuple(self._with(table, _followed(row[max(0, read - 1) :], table)) for table, row, read in rows)
        return replace(state, tables=tables, read=text.counts)

    def guesses(self, state: RecyclingState, text: Text, bounds: Bounds) -> tuple[list[Guess], RecyclingState]:
        """Grow every row's tree from its last token."""
        pairs = zip(state.tables, rows_of(text), strict=True)
        return [_grown(table, int(row[-1]), bounds) for table, row in pairs], state

    def commit(self, state: RecyclingState, step: Step) -> RecyclingState:
        """Learn from every node that was scored; accepted ones last, which were read in the right context.

        Rows for which another drafter drafted learn nothing: whether it is told of them hangs on their neighbours.
        """
        logits = step.scored.logits[..., : state.vocab_size]
        best = logits.topk(min(self.successors, logits.shape[-1]), dim=-1).indices.tolist()
        nodes, there, kept = step.tree.tokens.tolist(), step.tree.valid.tolist(), step.verdict.path.tolist()
        tables = list[Table]()
        for row, table in enumerate(state.tables):
            if row in step.others:
                tables.append(table)
                continue
            path = [0, *(node for node in kept[row] if node >= 0)]
            scored = [node for node, valid in enumerate(there[row]) if valid]
            new = {nodes[row][node]: tuple(best[row][node]) for node in [*scored, *path]}
            tables.append(self._with(table, new))
        return replace(state, tables=tuple(tables))

    def _with(self, table: Table, new: Table) -> Table:
        """Return a table with new entries; a row's own is a value, the shared one is written to."""
        if not self.shared:
            return {**table, **new} if new else table
        new = {token: after for token, after in new.items() if table.get(token) != after}  # none if it is done again
        if new:
            self.written[0] = digest_of(self.written[0], repr(new).encode())
            table.update(new)
        return table


def _followed(row: NDArray[np.int64], table: Table) -> Table:
    """Return what followed each token of a text, the latest counts, for tokens of which the target has said nothing.

    What one chunk of a prompt said, the next may say anew: the table is the same however the prompt was cut. A chunk
    begins with the last token of the one before.
    """
    tokens = row.tolist()
    return {before: (after,) for before, after in pairwise(tokens) if len(table.get(before, ())) < 2}


def _grown(table: Table, root: int, bounds: Bounds) -> Guess:
    """Return the likeliest paths below a token, best first; of equal ones the earlier comes first."""
    tokens, parents, chances = list[int](), list[int](), list[float]()
    ranked = RANK_CHANCES[: bounds.children]
    waiting: list[tuple[float, int, int, int, int]] = []

    def put(above: int, token: int, depth: int, chance: float) -> None:
        if depth <= bounds.depth:
            for rank, (following, likely) in enumerate(zip(table.get(token, ()), ranked, strict=False)):
                heapq.heappush(waiting, (-chance * likely, above, rank, following, depth))

    put(-1, root, 1, 1.0)
    while waiting and len(tokens) < bounds.nodes:
        loss, above, _, token, depth = heapq.heappop(waiting)
        tokens.append(token)
        parents.append(above)
        chances.append(-loss)
        put(len(tokens) - 1, token, depth + 1, -loss)
    return Guess(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(chances))
