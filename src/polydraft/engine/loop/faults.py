"""What becomes of the rows of a part in whose drafter something failed: each is asked for by itself.

The output stays exact: a tree of the root alone is plain decoding, and what was drawn before an error is verified.
`grow` ends there (`Draft.failure`), and notes what it drew for the case that the drafter raises behind it, or returns
what cannot be verified.

After an error in a part each row is asked for alone, in the same step: from its own state of before, with its own
random numbers from their beginning. Rows in which the drafter works have the drafts, and so the text, that they would
have alone; from the next step on they are a part again. Rows in which it fails again have what was drawn for them
alone, and nothing after this step. A state that has no row by itself loses all of them. Errors of pairing (scheme,
vocabulary) are the user's to mend and pass through.

Why that is exact: what a row drafts is then a function of its own state and stream, the one that it is without
neighbours, so that its draft has the law that it reports, whatever the error followed from: the tokens drawn for its
neighbours, or its own. To draw anew, from other numbers or another state, would not be exact after an error that
followed from drawn tokens: what is not drawn anew is no draw from its row, given that it stayed. An error that comes
again where a row is alone is as in a text by itself: what `grow` had drawn is verified. So it is where a row alone does
not go on from what was drawn for it beside others, since the drafter's rows depend on the batch. Only a drafter that
draws without `grow`, or grows several trees, and then raises, takes back what it drew; the record of its random numbers
shows that, and the warning says that this step's tokens may not follow the target's law.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from polydraft.engine.emission import Clock
from polydraft.engine.loop.batch import Batch, Part, joined
from polydraft.engine.loop.drafting import Drafted, drafted, reason_of, told_what_was_kept
from polydraft.probs import Noise
from polydraft.reading import Step
from polydraft.trees import MENDABLE, Draft, Pieces, in_pieces

NO_LAW = "A draft row is no law of distinct tokens, as where the draft model's logits are not usable."
LOST = "; what it had drawn by then is lost, so that tokens of this step may not follow the target's law"
NEAR = 1e-3
"""How far the probabilities of a row in a batch may be from those of the row alone, by rounding."""


def row_by_row(part: Part, verb: Callable[[Part], Part], error: Exception) -> list[Part]:
    """Do something with each row of a part alone, after an error with all of them."""
    found = list[Part]()
    for single in part.apart():
        try:
            found.append(verb(single))
        except MENDABLE:
            raise
        except Exception as again:  # noqa: BLE001  whatever a drafter does wrong must not lose the text
            found.append(single.failed(reason_of(again)))
    return found or [part.failed(reason_of(error))]


def drafted_apart(one: Drafted, batch: Batch, noise: Noise, clock: Clock) -> tuple[list[Drafted], str]:
    """Ask each row of a part for its drafts alone, after an error with all of them; return what is told of that, too.

    Under a deterministic scheme nothing was drawn, so that to take what comes of a row alone is no choice among draws.
    """
    assert one.asked is not None and one.error is not None
    told, singles = reason_of(one.error), one.before.apart()
    if not singles:
        return [one], told + LOST * one.lost
    left = noise.places()
    one.asked.noise.again()
    found = [drafted(single, batch, noise, clock) for single in singles]
    kept = list[Drafted]()
    for single in found:
        (row,) = single.before.rows
        drawn = _of_row(one.draft, one.before.rows.index(row))
        if one.asked.scheme.deterministic or _goes_on(drawn, single):
            kept.append(single)
            continue
        noise.of([row]).moved_to([left[row]])  # what verifies must not be what has drawn
        kept.append(replace(single, draft=drawn, after=single.before.failed(single.after.fault or one.after.fault)))
    lost = any(single.lost or (one.lost and single.error is not None) for single in found)
    return kept, told + LOST * lost


def committed_apart(one: Drafted, batch: Batch, noise: Noise, step: Step, error: Exception, clock: Clock) -> list[Part]:
    """Let each row of a part draft and take its share of a step alone, after an error with all of them."""
    found = list[Part]()
    for single in one.before.apart():
        noise.of(single.rows).again()
        again = drafted(single, batch, noise, clock)
        try:
            found.append(again.after if again.after.fault else told_what_was_kept(again, step, clock))
        except MENDABLE:
            raise
        except Exception as failure:  # noqa: BLE001  whatever a drafter does wrong must not lose the text
            found.append(single.failed(reason_of(failure)))
    return found or [one.after.failed(reason_of(error))]


def without_rows(parts: Sequence[Part], rows: Sequence[int], reason: str) -> list[Part]:
    """Return parts when nothing more is drafted for some of their rows."""
    found = list[Part]()
    for part in parts:
        over = tuple(row for row in part.there if row in rows)
        left = part.without(over)
        found += [part] if not over else [own for own in (left, replace(part.failed(reason), rows=over)) if own.there]
    return found


def settled(found: Sequence[Part], batch: int) -> list[Part]:
    """Return what became of the rows of a part: those in which the drafter works are one again if others failed.

    If none did, the error came of drafting for them together: they stay apart.
    """
    if len(found) < 2 or not any(part.fault for part in found):
        return list(found)
    parts = tuple[Part, ...]()
    for part in sorted(found, key=lambda part: -len(part.rows)):
        parts = joined(parts, part.rows[0], part, batch) if len(part.rows) == 1 else (*parts, part)
    return list(parts)


def _of_row(draft: Draft | Pieces | None, place: int) -> Draft | None:
    if draft is None:
        return None
    piece = next(one for one in in_pieces(draft) if place in one.rows)
    return piece.draft.of([piece.rows.index(place)])


def _goes_on(drawn: Draft | None, alone: Drafted) -> bool:
    """Tell whether what is drafted for a row alone begins with what was drawn for it beside others, from the same laws.

    If it does not, there are two draws of one row, and to choose between them might be a choice by what was drawn.
    """
    draft = _of_row(alone.draft, 0)
    if drawn is None:
        return True
    own, ours = drawn, drawn.tree
    if int(ours.valid.sum()) == 1:
        return True
    if draft is None:
        return False
    theirs = draft.tree
    count = int(ours.valid.sum())
    if count > int(theirs.valid.sum()) or not (ours.valid[0, :count].all() and theirs.valid[0, :count].all()):
        return False
    same = (ours.tokens, theirs.tokens), (ours.parents, theirs.parents), (own.atoms, draft.atoms)
    if not all(a[0, :count].equal(b[0, :count]) for a, b in same):
        return False
    inner = ours.parents[0, 1:count].unique()
    width = min(own.probs.shape[-1], draft.probs.shape[-1])
    rows = (own.probs[0, inner][..., :width], draft.probs[0, inner][..., :width])
    lists = (own.shortlist[0, inner][..., :width], draft.shortlist[0, inner][..., :width])
    return rows[0].shape == rows[1].shape and lists[0].equal(lists[1]) and bool((rows[0] - rows[1]).abs().max() < NEAR)
