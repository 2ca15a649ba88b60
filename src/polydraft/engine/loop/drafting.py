"""What a part of a batch drafts in a step, how it is stacked with what others draft, and how it is verified."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.catalogue import blamed
from polydraft.drafters import Drafter, DraftRequest, drafts_name, is_sound
from polydraft.engine.emission import Clock, Emission
from polydraft.engine.loop.batch import FREE, Batch, Method, Part
from polydraft.engine.loop.checking import checked
from polydraft.engine.target_law import shortened
from polydraft.errors import InvalidDraft
from polydraft.probs import Noise, sent, to_probs
from polydraft.reading import Step, Text
from polydraft.trees import (
    MENDABLE,
    Draft,
    Fixed,
    Piece,
    Pieces,
    TokenTree,
    TreeShape,
    Verdict,
    in_pieces,
    stacked_riders,
)
from polydraft.verifiers import TreeVerifier

NOTHING = Fixed(TreeShape(()))
"""The policy of a step that drafts nothing."""
MOST_MOVED = 2**22
"""So many probabilities, 16 MiB, are on the host within a few milliseconds."""


@dataclass(frozen=True, eq=False)
class Drafted:
    """What came of asking a part for its drafts.

    Args:
        before: the part as it was.
        after: with which the step goes on; one with a fault is not told of the step.
        draft: what can be verified; None for nothing.
        roots: the last tokens of the batch's texts.
        asked: what the drafter was asked for; None if it was not.
        error: how it failed; None if it did not.
    """

    before: Part
    after: Part
    draft: Draft | Pieces | None
    roots: Int[Tensor, "b"]
    asked: DraftRequest | None = None
    error: Exception | None = None

    @property
    def lost(self) -> bool:
        """Whether something was drawn before an error that nobody knows."""
        record = None if self.asked is None else self.asked.noise.record
        return self.draft is None and record is not None and record.numbers > 0

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The drafts by the batch's rows; where nothing was drafted, the roots alone."""
        rows, there = self.before.rows, self.before.there
        if self.draft is None:
            roots = self.roots if self.before.covers(len(self.roots)) else self.roots[list(there)]
            return (Piece(there, Draft.nothing(roots)),) if there else ()
        pieces = in_pieces(self.draft)
        return tuple(pieces) if rows == tuple(range(len(rows))) else tuple(_named(rows, pieces))

    def of(self, step: Step) -> Step:
        """Return what a step says of these rows, with the riders that were their own."""
        own = self.before.of(step, len(self.roots))
        riders = [piece.draft.riders for piece in self.pieces]
        most = max((0 if one is None else one.tokens.shape[1] for one in riders), default=0)
        return replace(own, scored=own.scored.with_riders(most))

    def unsound(self) -> tuple[int, ...]:
        """Return the rows of which a draft row was no law; a device is asked, so that the step must be over."""
        told = [(one.rows, one.draft.sound.tolist()) for one in self.pieces if one.draft.sound is not None]
        return tuple(row for rows, sound in told for row, fine in zip(rows, sound, strict=True) if not fine)


def reason_of(error: Exception) -> str:
    """Return what is told of an error."""
    return blamed(error) or f"{type(error).__name__}: {error}"


def request_of(part: Part, batch: Batch, noise: Noise) -> DraftRequest:
    """Return what a part is asked for.

    Nothing is asked for if all its rows have room for one token alone; but a drafter that may take this amiss is asked
    as ever.
    """
    spares = bool(batch.last) and batch.last.issuperset(part.there) and is_sound(part.drafter)
    rows = len(batch)
    whole = part.drafter.needs.target and part.aligned(rows)  # its text is that of the target's keys
    text, own = batch.text if whole else part.of(batch.text, rows), part.of(noise, rows)
    return DraftRequest(text, part.method.verifier.scheme, NOTHING if spares else part.policy, own)


def drafted(part: Part, batch: Batch, noise: Noise, clock: Clock) -> Drafted:
    """Ask a part for its drafts; after an error nothing more is asked of it, and what was drawn before is verified."""
    roots, vocab = batch.text.last(), batch.reader.model.facts.vocab_size
    if part.fault:
        return Drafted(part, part, None, roots)
    asked = request_of(part, batch, noise)
    asked = replace(asked, noise=asked.noise.recorded())
    draft, state = None, None
    try:
        draft, state = proposed(part, asked, batch, clock)
        error = next((one.draft.failure for one in in_pieces(draft) if one.draft.failure is not None), None)
    except MENDABLE:
        raise
    except Exception as failure:  # noqa: BLE001  whatever a drafter does wrong must not lose the text
        draft, error = _drawn_before(asked, failure, vocab), failure
    after = replace(part, state=state) if error is None else part.failed(reason_of(error))
    return Drafted(part, after, draft, roots, asked, error)


def proposed(part: Part, asked: DraftRequest, batch: Batch, clock: Clock) -> tuple[Draft | Pieces, Any]:
    """Let a part's drafter draft, and check what comes unless it is sound.

    Raises:
        InvalidDraft: nothing can be verified.
        Exception: whatever the drafter raises.
    """
    drafter, needs, sound = part.drafter, part.drafter.needs, is_sound(part.drafter)
    request = asked if sound else replace(asked, text=asked.text.copied())
    if needs.target:
        own = batch.reader if part.aligned(len(batch)) else batch.reader.select(part.rows)
        request = replace(request, target=own)
    with clock.charge("draft", part.method):
        answer: object = drafter.draft(part.state, request)
    if not (isinstance(answer, tuple) and len(answer) == 2):
        raise InvalidDraft(f"draft must return a draft and a state, but returned a {type(answer).__name__}.")
    draft, after = answer
    if sound:
        return draft, after
    for piece in in_pieces(draft) if isinstance(draft, Draft | Pieces) else ():
        piece.draft.forget_host()
    vocab = batch.reader.model.facts.vocab_size
    drawn = None if needs.branches else _drawn(asked)[0]  # guesses stand beside what a merge drew
    return checked(draft, asked.text, asked.scheme, asked.policy, vocab, needs, drawn), after


def _drawn(asked: DraftRequest) -> tuple[Draft | None, frozenset[int]]:
    """Return the draft of these texts that `grow` drew, and the rows for which it drew from streams of nobody.

    None if anything else was drawn, or other texts' drafts.
    """
    found, unused = (None if asked.noise.record is None else asked.noise.record.only()) or (None, frozenset[int]())
    if not (isinstance(found, tuple) and found[1] == asked.scheme):
        return None, unused
    draft: Draft = found[0]
    return (draft if draft.tree.tokens[:, 0].equal(asked.text.last()) else None), unused


def _drawn_before(asked: DraftRequest, failure: Exception, vocab_size: int) -> Draft | Pieces | None:
    """Return what was drawn before an error, if all of it is known; None if nothing was, or if it is lost.

    For rows whose streams were not used, as where another drafter of a route had drafts for them, nothing was drawn.
    """
    drawn, unused = _drawn(asked)
    if drawn is None:
        return None
    with suppress(InvalidDraft):
        known = checked(replace(drawn, failure=failure), asked.text, asked.scheme, asked.policy, vocab_size)
        rows, idle = range(len(asked.text.counts)), tuple(sorted(unused - asked.noise.unused))
        if not idle or not isinstance(known, Draft):
            return known
        own = tuple(row for row in rows if row not in idle)
        bare = Piece(idle, Draft.nothing(asked.text.last()[list(idle)]))
        return Pieces((Piece(own, known.of(own)), bare)) if own else bare.draft
    return None


def lent(text: Text, drafter: Drafter) -> Text:
    """Return a text for a drafter, a copy if it may write to it: the engine's own stays as it is."""
    return text if is_sound(drafter) else text.copied()


def told_what_was_kept(one: Drafted, step: Step, clock: Clock) -> Part:
    """Return a part after a step whose drafter and policy were told what was kept of their drafts."""
    own, part = one.of(step), one.after
    told = own if is_sound(part.drafter) else replace(own, text=own.text.copied(), tree=own.tree.copied())
    with clock.charge("draft", part.method):
        state = part.drafter.commit(part.state, told)
    return replace(part, state=state, policy=part.policy.after(own.tree, own.verdict))


def _named(rows: Sequence[int], pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces with the batch's rows, without those that are nobody's."""
    named = list[Piece]()
    for piece in pieces:
        there = [place for place, own in enumerate(piece.rows) if rows[own] != FREE]
        if there:
            own = piece.draft if len(there) == len(piece.rows) else piece.draft.of(there)
            named.append(Piece(tuple(rows[piece.rows[place]] for place in there), own))
    return named


def known_tokens(draft: Draft, vocab_size: int) -> TokenTree:
    """Return a draft's tree with some token of the target in place of those it does not have, to be scored."""
    if draft.failure is None:
        return draft.tree
    return replace(draft.tree, tokens=draft.tree.tokens.clamp_max(vocab_size - 1))


def with_unknown(draft: Draft, target_probs: Float[Tensor, "b n V"]) -> Float[Tensor, "b n W"]:
    """Return the target's rows with no probability for the id of tokens that it does not have, if there may be some."""
    return target_probs if draft.failure is None or draft.whole else torch.nn.functional.pad(target_probs, (0, 1))


def beside(pieces: Sequence[Piece], tree: TokenTree, vocab_size: int) -> Draft | None:
    """Return what is to be scored beside the trees of all pieces, or instead of the first layers; None for nothing.

    The first layers' work is used if one piece of all rows, in their order, brings it, and there are no other nodes.
    """
    only = pieces[0].draft
    whole = pieces[0].rows == tuple(range(len(tree.tokens))) and only.tree.tokens.shape == tree.tokens.shape
    resume = only.resume if whole else None
    riders, embeddings = stacked_riders(pieces, tree.tokens.shape[1], vocab_size)
    if riders is None and resume is None:
        return None
    return replace(only, riders=riders, embeddings=embeddings, resume=resume)


def riders_of(pieces: Sequence[Piece]) -> int:
    """Return the most riders that are scored beside a row's tree."""
    return max(0 if one.draft.riders is None else one.draft.riders.tokens.shape[1] for one in pieces)


def place_of_verifying(probs: Float[Tensor, "b n V"]) -> torch.device:
    """Return where drafts are verified: on the host, unless there are so many rows that moving them takes longer.

    Verifying is some hundreds of small operations, which a GPU takes longer to launch than its pass. Where nothing was
    drafted a token is drawn, which is a few. The size of a tree, and so the place, may follow from drawn tokens. That
    changes no law: the same rule takes the same random numbers in both.
    """
    return torch.device("cpu") if probs.shape[1] > 1 and probs.numel() <= MOST_MOVED else probs.device


def verified(verifier: TreeVerifier, piece: Piece, probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
    """Verify a piece by itself, where the target's rows are.

    What comes of a row does not depend on what its neighbours drafted.
    """
    draft = piece.draft.on(probs.device)
    if piece.rows != tuple(range(len(probs))):
        probs, noise = probs[sent(torch.tensor(piece.rows), probs.device)], noise.of(piece.rows)
    own = probs[:, : draft.tree.tokens.shape[1]]
    return verifier.verify(draft, with_unknown(draft, own), noise)


def verdicts(
    verifier: TreeVerifier, piece: Piece, batch: Batch, probs: Float[Tensor, "b n V"], noise: Noise
) -> list[tuple[tuple[int, ...], Verdict]]:
    """Verify a piece; in rows with room for one token as if nothing had been drafted, which comes behind and counts.

    Their random numbers are put back to their beginnings: what comes of such a row alone comes of it beside others.
    """
    bare = tuple(row for row in piece.rows if row in batch.last)
    found = [(piece.rows, verified(verifier, piece, probs, noise))] if len(bare) < len(piece.rows) else []
    if not bare:
        return found
    roots = batch.text.last()
    if bare != tuple(range(len(roots))):
        roots = roots[sent(torch.tensor(bare), roots.device)]
    roots = sent(roots, probs.device)
    noise.of(bare).again()
    plain = Piece(bare, Draft.nothing(roots, apart=verifier.scheme.several_rows))
    return [*found, (bare, verified(verifier, plain, probs, noise))]


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


class RowVerdict(NamedTuple):
    """What became of a row's tree, as numbers of the host.

    Args:
        usable: whether the target's logits behind the text are.
        kept: how many drafts were kept.
        drafted: how many there were.
        deeper: whether the last one kept had children.
        tokens: those of the path, then the next token, then padding.
        forced: how many tokens of the path behind the drafts a grammar forced.
    """

    usable: bool
    kept: int
    drafted: int
    deeper: bool
    tokens: list[int]
    forced: int = 0


def told_of(
    tree: TokenTree, verdict: Verdict, usable: Bool[Tensor, "b n"] | None, going: Collection[int]
) -> tuple[Verdict, list[RowVerdict]]:
    """Read the verdict back, all of it at once, and end it where the target's logits are not usable.

    Rows that have ended may have unusable ones.
    """
    tree, usable = tree.on(verdict.path.device), None if usable is None else sent(usable, verdict.path.device)
    told = _read(tree, verdict, usable)
    if usable is not None and not all(told[row].usable for row in going):
        verdict = _before_unusable(tree, verdict, usable)
        told = _read(tree, verdict, usable[:, :1])
    vars(verdict)["kept"] = tuple(one.kept for one in told)  # else it would be read once more
    return verdict, told


def _read(tree: TokenTree, verdict: Verdict, usable: Bool[Tensor, "b n"] | None) -> list[RowVerdict]:
    if usable is None and tree.tokens.shape[-1] == 1:
        return [RowVerdict(True, 0, 0, False, [token]) for token in verdict.next_token.tolist()]
    kept, drafted = verdict.length.unsqueeze(-1), tree.valid.sum(dim=-1, keepdim=True) - 1
    deeper = torch.zeros_like(kept)
    if tree.tokens.shape[-1] > 1:
        last = torch.nn.functional.pad(verdict.path, (1, 0), value=0).gather(-1, kept)
        deeper = ((tree.parents == last) & tree.valid).any(dim=-1, keepdim=True).long()
    fine = torch.ones_like(drafted) if usable is None else usable.all(dim=-1, keepdim=True).long()
    rows = torch.cat([fine, kept, drafted, deeper, verdict.tokens(tree)], dim=-1).tolist()
    return [RowVerdict(bool(fine), kept, drafted, bool(more), tokens) for fine, kept, drafted, more, *tokens in rows]


def _before_unusable(tree: TokenTree, verdict: Verdict, usable: Bool[Tensor, "b n"]) -> Verdict:
    """Let a path end above its first node whose logits are not usable, with this node's token as the next one.

    What is verified below such a node follows from any law that stands in for the missing one, and the node itself is
    reached as often as by the target. Its token becomes the root of the next step, which ends as plain decoding does.
    """
    ends = torch.nn.functional.pad(verdict.path, (1, 0), value=0)
    fine = usable.gather(-1, ends.clamp_min(0)) | (ends < 0)
    above = fine.long().cumprod(dim=-1).sum(dim=-1).tolist()  # nodes of the path, the root among them
    return shortened(verdict, tree, {row: count for row, count in enumerate(above) if count})


def emissions(
    told: Sequence[RowVerdict],
    drafts: Sequence[tuple[Method, Piece]],
    batch: Batch,
    scores: Float[Tensor, "b n V"],
) -> dict[int, Emission]:
    """Cut each unfinished row's gain at its end, given what was told of the verdict; say who drafted, by which rule."""
    for row in batch.going:
        if not told[row].usable:
            to_probs(scores[row, 0], batch.laws[row].params)  # which raises, and says why
    who = {
        row: (piece.draft.source or drafts_name(method.drafter), method.verifier)
        for method, piece in drafts
        for row in piece.rows
    }
    gains: dict[int, Emission] = {}
    for row in sorted(batch.going):
        _, kept, drafted, deeper, tokens, forced = told[row]
        past = batch.text.tokens[row, : batch.text.counts[row]]
        gained = batch.endings[row].cut(past, tokens[: kept + forced + 1], kept, drafted, deeper)
        source, rule = who[row]
        source, forced = source if gained.drafted else "", min(forced, len(gained.tokens) - gained.accepted)
        gains[row] = replace(gained, source=source, verifier=rule.name, lossless=rule.lossless, forced=forced)
    return gains
