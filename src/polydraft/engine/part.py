"""Some rows of a batch with one drafter, one verifier and one policy: rows of a batch need not have the same."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.drafters import Drafter, is_sound
from polydraft.engine.clock import UNTIMED, Clock
from polydraft.engine.stopping import shortened
from polydraft.engine.wrappers.door import known_tokens, with_unknown
from polydraft.probs import Noise, SamplingParams, sent
from polydraft.reading import Features, Reader, Step, Text
from polydraft.trees import (
    Draft,
    Fixed,
    Piece,
    TokenTree,
    TreePolicy,
    TreeShape,
    Verdict,
    in_pieces,
    stacked_riders,
)
from polydraft.verifiers import TreeVerifier

NOTHING = Fixed(TreeShape(()))
"""The policy of a step that drafts nothing."""


@dataclass(frozen=True, eq=False)
class Part:
    """What drafts for some rows of a batch, and verifies.

    Args:
        drafter: proposes token trees.
        verifier: decides what to keep of them.
        policy: the policy of the next tree; another than the first if it learns from what was accepted.
        state: the drafter's state, of rows of its own.
        rows: which row of the batch each of these is; -1 for one that is free.
        origin: the policy of the first tree.
        params: the sampling settings that the drafter was told of.
        alone: whether these are all rows of the batch, in order.
    """

    drafter: Drafter
    verifier: TreeVerifier
    policy: TreePolicy
    state: Any
    rows: tuple[int, ...]
    origin: TreePolicy
    params: SamplingParams
    alone: bool = True

    @property
    def is_to_read(self) -> bool:
        """Whether the drafter is to read prompts: those of whom nothing is asked now read them later.

        Hidden states come once.
        """
        return bool(self.policy.shape.counts or self.drafter.reads)

    def takes(self, other: "Part") -> bool:
        """Tell whether the rows of another part can be rows of this one."""
        same = self.drafter is other.drafter and self.verifier is other.verifier and self.origin is other.origin
        same = same and self.params == other.params and (self.alone or not self.drafter.shares)
        return same and not (self.drafter.ended(self.state) or other.drafter.ended(other.state))

    def text(self, text: Text) -> Text:
        """Return the text of these rows."""
        return text if self.alone else text.of(self.rows)

    def read(self, text: Text, features: Features | None, clock: Clock = UNTIMED) -> "Part":
        """Let the drafter read prompts; see `Drafter.read`."""
        own = features if features is None or self.alone else features.of(self.rows)
        with clock.charge("prefill"):
            return replace(self, state=self.drafter.read(self.state, self.text(text), own))

    def drafted(
        self, text: Text, target: Reader, noise: Noise, last: frozenset[int] = frozenset(), clock: Clock = UNTIMED
    ) -> tuple[list[Piece], "Part"]:
        """Let the drafter draft; return the drafts by rows of the batch, and the part that goes on.

        Nothing is asked for if all rows are among the `last`, those with room for one token; but a drafter that may
        take this amiss is asked as ever.
        """
        fresh, before, own = noise if self.alone else noise.of(self.rows), self.state, self.text(text)
        spares = bool(last) and last.issuperset({*self.rows} - {-1}) and is_sound(self.drafter)
        if self.drafter.shares:  # a part that shares has one row, or began with all: then it drafts for all of them
            one = not self.alone and len(self.rows) == 1
            before, own = (
                self.drafter.over(before, target.select(self.rows) if one else target),
                own if one else text,
            )
        scheme, policy = self.verifier.scheme, NOTHING if spares else self.policy
        with clock.charge("draft", self.drafter):
            draft, state = self.drafter.draft(before, own, scheme, policy, fresh)
        pieces = in_pieces(draft)
        return (list(pieces) if self.alone else list(self._placed(pieces))), replace(self, state=state)

    def committed(self, step: Step, pieces: Sequence[Piece], clock: Clock = UNTIMED) -> "Part":
        """Tell drafter and policy what was kept of its drafts."""
        own = step if self.alone else step.of(self.rows)
        riders = max((0 if one.draft.riders is None else one.draft.riders.tokens.shape[1] for one in pieces), default=0)
        own = replace(own, scored=own.scored.with_riders(riders))
        with clock.charge("draft", self.drafter):
            state = self.drafter.commit(self.state, own)
        return replace(self, state=state, policy=self.policy.after(own.tree, own.verdict))

    def finished(self, text: Text, rows: Collection[int], clock: Clock = UNTIMED) -> "Part":
        """Tell the drafter which rows of the batch have come to their ends with the last step."""
        part, own = self, [place for place, row in enumerate(self.rows) if row in rows]
        for place in own:
            with clock.charge("draft", self.drafter):
                part = replace(part, state=part.drafter.finish(part.state, self.text(text), place))
        return part

    def joined(self, row: int, other: Any) -> "Part":
        """Return the part with a new text in a row of the batch; the drafter's state of it is given."""
        place = self.rows.index(row) if row in self.rows else len(self.rows)
        place = self.rows.index(-1) if place == len(self.rows) and -1 in self.rows else place
        rows = (*self.rows[:place], row, *self.rows[place + 1 :])
        state = self.drafter.join(self.state, place, other)
        policy = self.policy.select([-1 if own == place else own for own in range(len(rows))])
        alone = self.alone and (rows == self.rows or row == len(self.rows))
        return replace(self, state=state, policy=policy, rows=rows, alone=alone)

    def rewound(self, row: int, length: int) -> "Part":
        """Return the part with a row's text forgotten beyond its first `length` tokens."""
        if row not in self.rows:
            return self
        return replace(self, state=self.drafter.rewind(self.state, self.rows.index(row), length))

    def left(self, row: int) -> "Part":
        """Return the part without a row of the batch, which it may not have had."""
        if row not in self.rows:
            return replace(self, alone=False)
        place = self.rows.index(row)
        rows = (*self.rows[:place], -1, *self.rows[place + 1 :])
        return replace(self, state=self.drafter.leave(self.state, place), rows=rows, alone=False)

    def moved(self, places: Mapping[int, int], batch: int) -> "Part":
        """Return the part in a batch whose rows have other places; the state's rows stay where they are.

        Args:
            places: where rows of the batch are now; those that are not named are over.
            batch: how many rows the batch has.
        """
        gone = [row for row in self.rows if row >= 0 and row not in places]
        part = self
        for row in gone:
            part = part.left(row)
        rows = tuple(places[row] if row >= 0 else -1 for row in part.rows)
        return replace(part, rows=rows, alone=rows == tuple(range(batch)))

    def _placed(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Name the rows of pieces as the batch does, and drop free ones."""
        placed: list[Piece] = []
        for piece in pieces:
            there = [place for place, own in enumerate(piece.rows) if self.rows[own] >= 0]
            if there:
                draft = piece.draft if len(there) == len(piece.rows) else piece.draft.of(there)
                placed.append(Piece(tuple(self.rows[piece.rows[place]] for place in there), draft))
        return placed


def parts_with(parts: Sequence[Part], row: int, new: Part) -> tuple[Part, ...]:
    """Return the parts with a row given to the only row of another part.

    It joins the part that has the same drafter, verifier, policy and sampling settings, unless that has failed; else it
    is a part by itself. The part that had the row is without it then, and goes with its last.
    """
    ours = next((place for place, part in enumerate(parts) if part.takes(new)), None)
    kept = [part if place == ours else part.left(row) for place, part in enumerate(parts)]
    if ours is None:
        kept.append(replace(new, rows=(row,), alone=False))
    else:
        kept[ours] = kept[ours].joined(row, new.state)
    return tuple(part for part in kept if any(own >= 0 for own in part.rows))


def scored_trees(pieces: Sequence[Piece], vocab_size: int) -> list[tuple[tuple[int, ...], TokenTree]]:
    """Return the pieces' trees with some token of the target in place of those that it does not have."""
    return [(piece.rows, known_tokens(piece.draft, vocab_size)) for piece in pieces]


def beside(pieces: Sequence[Piece], tree: TokenTree, vocab_size: int) -> Draft | None:
    """Return what is to be scored beside the trees of all pieces, or instead of the first layers; None for nothing.

    The first layers' work is used if one piece of all rows, in their order, brings it.
    """
    only = pieces[0].draft
    resume = only.resume if pieces[0].rows == tuple(range(len(tree.tokens))) else None
    riders, embeddings = stacked_riders(pieces, tree.tokens.shape[1], vocab_size)
    if riders is None and resume is None:
        return None
    return replace(only, riders=riders, embeddings=embeddings, resume=resume)


def verified(verifier: TreeVerifier, piece: Piece, probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
    """Verify a piece by itself: what comes of a row does not depend on what its neighbours drafted."""
    if piece.rows != tuple(range(len(probs))):
        probs, noise = probs[sent(torch.tensor(piece.rows), probs.device)], noise.of(piece.rows)
    own = probs[:, : piece.draft.tree.tokens.shape[1]]
    return verifier.verify(piece.draft, with_unknown(piece.draft, own), noise)


def verdicts(
    verifier: TreeVerifier,
    pieces: Sequence[Piece],
    last: frozenset[int],
    text: Text,
    probs: Float[Tensor, "b n V"],
    noise: Noise,
) -> list[tuple[tuple[int, ...], Verdict]]:
    """Verify pieces, each by itself; in the `last` rows as if nothing had been drafted, which comes behind and counts.

    Their random numbers are put back to their beginnings: what comes of such a row alone comes of it beside others.
    """
    found = [(one.rows, verified(verifier, one, probs, noise)) for one in pieces if not last.issuperset(one.rows)]
    bare, roots = tuple(row for one in pieces for row in one.rows if row in last), text.last()
    if not bare:
        return found
    if bare != tuple(range(len(roots))):
        roots = roots[sent(torch.tensor(bare), roots.device)]
    noise.of(bare).again()
    return [
        *found,
        (bare, verified(verifier, Piece(bare, Draft.nothing(roots, apart=verifier.scheme.several_rows)), probs, noise)),
    ]


def joint(verdicts: Sequence[tuple[tuple[int, ...], Verdict]]) -> Verdict:
    """Return the verdicts of all pieces as one; of a row that has several the last counts."""
    if len(verdicts) == 1 and verdicts[0][0] == tuple(range(len(verdicts[0][0]))):
        return verdicts[0][1]
    rows, width = 1 + max(max(own) for own, _ in verdicts), max(verdict.path.shape[-1] for _, verdict in verdicts)
    like = verdicts[0][1].next_token
    path: Int[Tensor, "b D"] = like.new_full((rows, width), -1)
    length, following = like.new_zeros(rows), like.new_zeros(rows)
    for own, verdict in verdicts:
        places = sent(torch.tensor(own), like.device)
        path[places] = torch.nn.functional.pad(verdict.path, (0, width - verdict.path.shape[-1]), value=-1)
        length[places], following[places] = verdict.length, verdict.next_token
    return Verdict(path, length, following)


def told_of(
    tree: TokenTree, verdict: Verdict, usable: Bool[Tensor, "b n"] | None, going: Collection[int]
) -> tuple[Verdict, list[list[int]]]:
    """Read the verdict back, all of it at once, and end it where the target's logits are not usable.

    Rows that have ended may have unusable ones.

    Returns:
        the verdict; and per row: whether the root's logits are usable, drafts kept, drafts, whether the last one kept
        had any, tokens.
    """
    told = _read(tree, verdict, usable)
    if usable is not None and not all(told[row][0] for row in going):
        verdict = _before_unusable(tree, verdict, usable)
        told = _read(tree, verdict, usable[:, :1])
    vars(verdict)["kept"] = tuple(kept for _, kept, *_ in told)  # else it would be read once more
    return verdict, told


def _read(tree: TokenTree, verdict: Verdict, usable: Bool[Tensor, "b n"] | None) -> list[list[int]]:
    if usable is None and tree.tokens.shape[-1] == 1:
        return [[1, 0, 0, 0, token] for token in verdict.next_token.tolist()]
    drafted, deeper = tree.valid.sum(dim=-1, keepdim=True) - 1, _has_drafts(tree, verdict).long().unsqueeze(-1)
    fine = torch.ones_like(drafted) if usable is None else usable.all(dim=-1, keepdim=True).long()
    return torch.cat([fine, verdict.length.unsqueeze(-1), drafted, deeper, verdict.tokens(tree)], dim=-1).tolist()


def _before_unusable(tree: TokenTree, verdict: Verdict, usable: Bool[Tensor, "b n"]) -> Verdict:
    """Let a path end above its first node whose logits are not usable, with this node's token as the next one.

    What is verified below such a node follows from any law that stands in for the missing one, and the node itself is
    reached as often as by the target. Its token becomes the root of the next step, which ends as plain decoding does.
    """
    ends = torch.nn.functional.pad(verdict.path, (1, 0), value=0)
    fine = usable.gather(-1, ends.clamp_min(0)) | (ends < 0)
    above = fine.long().cumprod(dim=-1).sum(dim=-1).tolist()  # nodes of the path, the root among them
    return shortened(verdict, tree, {row: count for row, count in enumerate(above) if count})


def _has_drafts(tree: TokenTree, verdict: Verdict) -> Bool[Tensor, "b"]:
    """Tell for each row whether the node at which the path ends had drafts."""
    if tree.tokens.shape[-1] == 1:
        return torch.zeros_like(verdict.length, dtype=torch.bool)
    ends = torch.nn.functional.pad(verdict.path, (1, 0), value=0)
    last = ends.gather(-1, verdict.length.unsqueeze(-1))
    return ((tree.parents == last) & tree.valid).any(dim=-1)
