"""What a guard has of a drafter in which some rows failed: the others, in groups that are drafted for together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Int
from torch import Tensor

from polydraft.probs import Noise
from polydraft.reading import Step, Text
from polydraft.schemes import Scheme
from polydraft.trees import Draft, Piece, Pieces, TreePolicy, in_pieces

NEAR = 1e-3
"""How far the probabilities of a row in a batch may be from those of the row alone, by rounding."""


@dataclass(frozen=True)
class Failed:
    """The state after the drafter failed in all rows: why it did."""

    reason: str


@dataclass(frozen=True, eq=False)
class Group:
    """Rows that are drafted for together.

    Args:
        rows: which row of all each of the state's rows is; -1 for one that is nobody's.
        state: the drafter's.
    """

    rows: tuple[int, ...]
    state: Any

    def place(self, row: int) -> int:
        """Return the state's row; -1 if the group does not have it."""
        return self.rows.index(row) if row in self.rows else -1

    def without(self, row: int) -> "Group":
        """Return the group when a row is nobody's."""
        return Group(tuple(-1 if own == row else own for own in self.rows), self.state)

    def text(self, text: Text) -> Text:
        """Return the text of these rows; one that has no more rows as it is."""
        return text if self.rows == tuple(range(len(text.counts))) else text.of(self.rows)


@dataclass(frozen=True, eq=False)
class Split:
    """The state after the drafter failed in some rows: those that no group has.

    Args:
        reason: why it failed.
        count: how many rows there are.
        groups: the others.
    """

    reason: str
    count: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, eq=False)
class Asked:
    """What a drafter is asked for in a step: the arguments of `draft`."""

    text: Text
    scheme: Scheme
    policy: TreePolicy
    noise: Noise

    def of(self, rows: Sequence[int]) -> "Asked":
        """Return the same of some rows; of -1 of a text that is nobody's."""
        if tuple(rows) == tuple(range(len(self.text.counts))):
            return self
        return Asked(self.text.of(rows), self.scheme, self.policy.select(rows), self.noise.of(rows))

    def recorded(self) -> "Asked":
        """Return the same, with a record of what is drawn."""
        return replace(self, noise=self.noise.recorded())

    def drawn(self) -> Draft | None:
        """Return the draft of these texts that `grow` drew; None if anything else was drawn, or other texts' drafts."""
        found = None if self.noise.record is None else self.noise.record.only()
        if not (isinstance(found, tuple) and found[1] == self.scheme):
            return None
        draft: Draft = found[0]
        roots = draft.tree.tokens[:, 0]
        return draft if roots.equal(self.text.last()) else None


@dataclass(frozen=True, eq=False)
class Proposal:
    """What came of asking for the drafts of a group.

    Args:
        group: the group, with the state of before.
        draft: what can be verified; None for nothing.
        after: the state with which the step goes on.
        failed: whether the drafter failed, so that nothing is drafted for these rows after this step.
    """

    group: Group
    draft: Draft | Pieces | None
    after: Any = None
    failed: bool = False

    def with_drawn(self, drawn: Draft | Pieces | None, group: Group) -> "Proposal":
        """Return what was drawn for these rows in a group instead, after which they have failed."""
        places = [group.rows.index(row) for row in self.group.rows]
        return replace(self, draft=drawn.of(places) if isinstance(drawn, Draft) else None, failed=True)

    def unsound(self) -> list[int]:
        """Return the state's rows of which a draft row was no law; a device is asked, so that the step must be over."""
        pieces = () if self.draft is None else in_pieces(self.draft)
        told = [(piece.rows, piece.draft.sound.tolist()) for piece in pieces if piece.draft.sound is not None]
        return [row for rows, sound in told for row, fine in zip(rows, sound, strict=True) if not fine]

    def step(self, step: Step) -> Step:
        """Return what a step says of these rows, with the riders that were their own."""
        rows = self.group.rows
        if rows == tuple(range(len(step.text.counts))):
            return step
        found = step.of(rows)
        riding = [piece.draft.riders for piece in in_pieces(self.draft)] if self.draft is not None else []
        most = max((0 if riders is None else riders.tokens.shape[1] for riders in riding), default=0)
        return replace(found, scored=found.scored.with_riders(most))


@dataclass(frozen=True, eq=False)
class Drafted:
    """The state between a draft and its step's end.

    Args:
        asked: what the drafter was asked for.
        proposals: what came of it, group by group.
    """

    asked: Asked
    proposals: tuple[Proposal, ...]


def groups_of(state: Any, count: int) -> tuple[Group, ...]:
    """Return the groups of a state of so many rows that is not `Failed`: one of all rows, unless some failed."""
    return state.groups if isinstance(state, Split) else (Group(tuple(range(count)), state),)


def goes_on(drawn: Draft | Pieces | None, group: Group, alone: Proposal) -> bool:
    """Tell whether what is drafted for a row alone begins with what was drawn for it in a group, from the same laws.

    If it does not, there are two draws of one row, and to choose between them might be a choice by what was drawn.
    """
    if not isinstance(drawn, Draft) or isinstance(alone.draft, Pieces):
        return True
    if alone.draft is None:
        return False
    own = drawn.of([group.rows.index(alone.group.rows[0])])
    one, other = own.tree, alone.draft.tree
    count = int(one.valid.sum())
    if count == 1:
        return True
    if count > int(other.valid.sum()) or not (one.valid[0, :count].all() and other.valid[0, :count].all()):
        return False
    same = (one.tokens, other.tokens), (one.parents, other.parents), (own.atoms, alone.draft.atoms)
    if not all(a[0, :count].equal(b[0, :count]) for a, b in same):
        return False
    inner = one.parents[0, 1:count].unique()
    width = min(own.probs.shape[-1], alone.draft.probs.shape[-1])
    rows = (own.probs[0, inner][..., :width], alone.draft.probs[0, inner][..., :width])
    lists = (own.shortlist[0, inner][..., :width], alone.draft.shortlist[0, inner][..., :width])
    return rows[0].shape == rows[1].shape and lists[0].equal(lists[1]) and bool((rows[0] - rows[1]).abs().max() < NEAR)


def together(proposals: Sequence[Proposal], roots: Int[Tensor, "b"]) -> Draft | Pieces:
    """Return the drafts of all groups as one; of rows that no group has the roots alone."""
    every = tuple(range(len(roots)))
    if len(proposals) == 1 and proposals[0].group.rows == every and proposals[0].draft is not None:
        return proposals[0].draft
    pieces = [piece for one in proposals if one.draft is not None for piece in _named(one.group.rows, one.draft)]
    there = {row for piece in pieces for row in piece.rows}
    bare = tuple(row for row in every if row not in there)
    if bare == every:
        return Draft.nothing(roots)
    return Pieces((*pieces, Piece(bare, Draft.nothing(roots[list(bare)])))) if bare else Pieces(tuple(pieces))


def _named(rows: Sequence[int], draft: Draft | Pieces) -> list[Piece]:
    """Return a group's drafts by the names of its rows, without those that are nobody's."""
    named = list[Piece]()
    for piece in in_pieces(draft):
        there = [place for place, own in enumerate(piece.rows) if rows[own] >= 0]
        if there:
            own = piece.draft if len(there) == len(piece.rows) else piece.draft.of(there)
            named.append(Piece(tuple(rows[piece.rows[place]] for place in there), own))
    return named
