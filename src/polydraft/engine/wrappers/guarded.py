"""A drafter that may fail without hurting anyone: the rows in which it fails are decoded plainly."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from polydraft.catalogue import blamed
from polydraft.drafters import Drafter, Session, is_sound
from polydraft.engine.wrappers.door import checked
from polydraft.engine.wrappers.groups import (
    Asked,
    Drafted,
    Failed,
    Group,
    Proposal,
    Split,
    goes_on,
    groups_of,
    together,
)
from polydraft.errors import InvalidDraft, InvalidProbabilities
from polydraft.models import LanguageModel
from polydraft.probs import Noise
from polydraft.reading import Features, Reader, Step, Text
from polydraft.schemes import Scheme
from polydraft.trees import MENDABLE, Draft, Pieces, TreePolicy, in_pieces

NO_LAW = "A draft row is no law of distinct tokens, as where the draft model's logits are not usable."
LOST = "; what it had drawn by then is lost, so that tokens of this step may not follow the target's law"


class Guarded(Drafter):
    """Wrap a drafter so that an error in it ends drafting, not generation, and ends it row by row.

    What it proposes is checked, unless it is sound. The output stays exact: a tree of the root alone is plain decoding,
    and what was drawn before an error is verified: `grow` ends there (`Draft.failure`), and notes what it drew for the
    case that the drafter raises behind it, or returns what cannot be verified. The first error is warned about once
    and kept in `failure`; rows in which the drafter fails are decoded without drafts to their ends. A draft row that is
    no law is such a failure of its text, behind the step in which what was drawn beside and above it is verified.
    Errors of pairing (scheme, vocabulary) are the user's to mend and pass through.

    **Row by row.** After an error in a batch each row is asked for by itself, in the same step: from its own state of
    before (`Drafter.of_row`), with its own random numbers from their beginning. Rows in which it works have the drafts
    that they would have alone, and so the text that they would have alone; they are a batch again from the next step
    on. Rows in which it fails again have what was drawn for them alone, and nothing after this step. A drafter that
    does not part its rows loses all of them. So do errors in `start`, and in what a drafter in which nothing failed yet
    does when a text joins, is cut or leaves, where it would not help to know whose it is.

    Why that is exact: what a row drafts is then a function of its own state and stream, the one that it is without
    neighbours, so that its draft has the law that it reports, whatever the error followed from: the tokens drawn for
    its neighbours, or its own. To draw anew, from other numbers or another state, would not be exact after an error
    that followed from drawn tokens: what is not drawn anew is no draw from its row, given that it stayed. An error that
    comes again where a row is alone is as in a text by itself: what `grow` had drawn is verified. So it is where a row
    alone does not go on from what was drawn for it beside others, since the drafter's rows depend on the batch. Only a
    drafter that draws without `grow`, or grows several trees, and then raises, takes back what it drew; the record of
    its random numbers shows that, and the warning says that this step's tokens may not follow the target's law.

    `failure` may be given: then nothing is drafted from the beginning.

    That the drafter failed is in the state, so that a step which is interrupted and taken again is the same step.
    """

    def __init__(self, drafter: Drafter, failure: str = "") -> None:
        self.drafter = drafter
        self.failure = failure
        self._refused = failure
        self._open: tuple[Any, ...] = ()  # the state from which drafting failed, in a step that may yet be taken again
        self._sound = is_sound(drafter)
        self._vocab_size, self._lost = 0, False
        self.name, self.reads = drafter.name, drafter.reads
        self.riders, self.shares = drafter.riders, drafter.shares

    @property
    def own_name(self) -> str:
        """The drafter's."""
        return self.drafter.own_name

    @property
    def sound(self) -> bool:
        """Whether the drafter inside says so of itself."""
        return self._sound

    def check(self, scheme: Scheme) -> None:
        """Pass the question on."""
        self.drafter.check(scheme)

    def models(self) -> tuple[LanguageModel, ...] | None:
        """Return the drafter's; None where it cannot say."""
        try:
            return self.drafter.models()
        except Exception:  # noqa: BLE001  whatever a drafter does wrong must not lose the text
            return None

    def outside(self, row: int) -> bytes:
        """Pass the question on; a drafter that cannot answer does not draft, here and later."""
        if self._refused:
            return b""
        try:
            told = self.drafter.outside(row)
            if not isinstance(told, bytes):
                raise TypeError(f"outside must return bytes, but is {type(told).__name__}.")
            return told
        except MENDABLE:
            raise
        except Exception as error:  # noqa: BLE001  whatever a drafter does wrong must not lose the text
            self._refused = self._fail(error).reason
            return b""

    def start(self, text: Text, session: Session) -> Any:
        """Start the drafter, or note its failure."""
        self._vocab_size = session.vocab_size
        return (
            Failed(self._refused)
            if self._refused
            else self._tried(partial(self.drafter.start, self._lent(text), session))
        )

    def read(self, state: Any, text: Text, features: Features | None) -> Any:
        """Let the drafter read, but for rows in which it has failed."""

        def read(own: Group) -> Any:
            mine = own.text(text)
            said = features if features is None or mine is text else features.of(own.rows)
            return self.drafter.read(own.state, self._lent(mine), said)

        return self._each(state, len(text.counts), read)

    def over(self, state: Any, target: Reader) -> Any:
        """Hand the target's reader on; groups of a drafter that shares are all rows, or one."""
        count = len(target.read)

        def over(own: Group) -> Any:
            view = target if len(own.rows) == count else target.select([own.rows[0]])
            return self.drafter.over(own.state, view)

        return self._each(state, count, over)

    def draft(
        self, state: Any, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise
    ) -> tuple[Draft | Pieces, Any]:
        """Draft, or propose nothing for rows in which the drafter has failed."""
        if isinstance(state, Failed):
            return Draft.nothing(text.last()), state
        asked, errors, proposals = Asked(text, scheme, policy, noise), list[Exception](), list[Proposal]()
        for group in groups_of(state, len(text.counts)):
            proposals += self._proposed(group, asked, errors)
        draft, well = together(proposals, text.last()), any(not one.failed for one in proposals)
        if not errors:
            self._mended(state)
            return draft, Drafted(asked, tuple(proposals))
        self._open, failed = (state,), self._fail(errors[0], every=not well)
        return draft, Drafted(asked, tuple(proposals)) if well else failed

    def commit(self, state: Any, step: Step) -> Any:
        """Commit, but for rows in which the drafter has failed."""
        if not isinstance(state, Drafted):
            self._open = ()
            return state
        asked, errors, kept = state.asked, list[Exception](), list[Group]()
        for one in state.proposals:
            if one.failed:
                continue
            unsound = one.unsound()  # the step is over: there is nothing to wait for
            if unsound:
                errors.append(InvalidProbabilities(NO_LAW))
            found = self._committed(one, asked, step, errors)
            for row in (one.group.rows[place] for place in unsound):
                found = [own.without(row) for own in found]
            kept += [own for own in found if max(own.rows) >= 0]
        if any(one.failed for one in state.proposals):
            self._open = ()
        return self._settled(len(step.text.counts), [one.group for one in state.proposals], kept, errors)

    def join(self, state: Any, row: int, other: Any) -> Any:
        """Let a new text join, or do nothing once the drafter has failed in all rows."""
        if isinstance(state, Failed):
            return state
        if not isinstance(state, Split):
            return other if isinstance(other, Failed) else self._tried(partial(self.drafter.join, state, row, other))
        left = self.leave(state, row)
        groups = left.groups if isinstance(left, Split) else ()
        if not isinstance(other, Failed):
            groups = self._merged([*groups, Group((row,), other)])
        return _whole(max(state.count, row + 1), groups, state.reason)

    def rewind(self, state: Any, row: int, length: int) -> Any:
        """Let the drafter forget."""
        return self._at(state, row, lambda own, place: self.drafter.rewind(own.state, place, length))

    def leave(self, state: Any, row: int) -> Any:
        """Tell the drafter that a text is over."""
        after = self._at(state, row, lambda own, place: self.drafter.leave(own.state, place))
        if not isinstance(after, Split):
            return after
        groups = [one.without(row) for one in after.groups]
        return replace(after, groups=tuple(one for one in groups if max(one.rows) >= 0))

    def finish(self, state: Any, text: Text, row: int) -> Any:
        """Tell the drafter that a text is complete."""
        count = len(text.counts)

        def finish(own: Group, place: int) -> Any:
            return self.drafter.finish(own.state, self._lent(own.text(text)), place)

        return self._at(state, row, finish, count)

    def ended(self, state: Any) -> bool:
        """Tell whether the drafter has failed in all rows, or says itself that nothing will come."""
        try:
            if isinstance(state, Split):
                return all(self.drafter.ended(one.state) for one in state.groups)
            return isinstance(state, Failed) or self.drafter.ended(state)
        except Exception:  # noqa: BLE001  as above
            return False

    def continues(self, state: Any) -> bool:
        """Ask the drafter, unless it had failed."""
        return not isinstance(state, Failed | Split) and self.drafter.continues(state)

    def carried(self, states: Sequence[Any], fresh: Any, known: int) -> Any:
        """Let the drafter take what is its own, unless it has failed."""
        if isinstance(fresh, Failed):
            return fresh
        return self._tried(lambda: self.drafter.carried(states, fresh, known))

    def of_row(self, state: Any, row: int) -> Any:
        """Return the drafter's state of a row, or that it has failed there."""
        if not isinstance(state, Failed | Split):
            return self.drafter.of_row(state, row)
        groups = state.groups if isinstance(state, Split) else ()
        own = next((one for one in groups if one.place(row) >= 0), None)
        return Failed(state.reason) if own is None else self.drafter.of_row(own.state, own.place(row))

    def _proposed(self, group: Group, asked: Asked, errors: list[Exception]) -> list[Proposal]:
        """Ask for a group's drafts; after an error row by row, with each row's numbers from their beginning."""
        own, draft, after = asked.of(group.rows).recorded(), None, None
        try:
            draft, after = self._drafted(group.state, own)
            failure = next((one.draft.failure for one in in_pieces(draft) if one.draft.failure is not None), None)
        except MENDABLE:
            raise
        except Exception as error:  # noqa: BLE001  whatever a drafter does wrong must not lose the text
            failure = error
        if failure is None:
            return [Proposal(group, draft, after)]
        errors.append(failure)
        singles, lost = self._apart(group), self._lost
        drawn = self._drawn(own, failure) if draft is None else draft
        if not singles:
            return [Proposal(group, drawn, failed=True)]
        self._lost = lost  # what each row draws by itself counts
        own.noise.again()
        alone = [found for one in singles for found in self._proposed(one, asked, errors)]
        fixed = asked.scheme.deterministic  # then nothing was drawn, so that this is no choice among draws
        return [one if fixed or goes_on(drawn, group, one) else one.with_drawn(drawn, group) for one in alone]

    def _drafted(self, state: Any, asked: Asked) -> tuple[Draft | Pieces, Any]:
        """Draft, and check what comes.

        Raises:
            InvalidDraft: nothing can be verified.
        """
        text, scheme, policy = asked.text, asked.scheme, asked.policy
        answer: object = self.drafter.draft(state, self._lent(text), scheme, policy, asked.noise)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise InvalidDraft(f"draft must return a draft and a state, but returned a {type(answer).__name__}.")
        draft, after = answer
        if self._sound:
            return draft, after
        return checked(draft, text, scheme, policy, self._vocab_size, self.riders, asked.drawn()), after

    def _lent(self, text: Text) -> Text:
        """Return a text for the drafter, a copy if it may write to it: the engine's own stays as it is."""
        return text if self._sound else text.copied()

    def _drawn(self, asked: Asked, failure: Exception) -> Draft | Pieces | None:
        """Return what was drawn before an error, if all of it is known; None if nothing was, or if it is lost."""
        drawn, record = asked.drawn(), asked.noise.record
        if drawn is not None:
            with suppress(InvalidDraft):
                known = replace(drawn, failure=failure)
                return checked(known, asked.text, asked.scheme, asked.policy, self._vocab_size)
        self._lost |= record is not None and record.numbers > 0
        return None

    def _committed(self, one: Proposal, asked: Asked, step: Step, errors: list[Exception]) -> list[Group]:
        """Return a group after a step; after an error its rows one by one, each taking its part of the step again."""
        try:
            own = one.step(step)
            own = own if self._sound else replace(own, text=self._lent(own.text), tree=own.tree.copied())
            return [replace(one.group, state=self.drafter.commit(one.after, own))]
        except MENDABLE:
            raise
        except Exception as error:  # noqa: BLE001  whatever a drafter does wrong must not lose the text
            errors.append(error)
        kept, ignored = list[Group](), list[Exception]()
        for single in self._apart(one.group):
            asked.of(single.rows).noise.again()
            again = [two for two in self._proposed(single, asked, ignored) if not two.failed]
            kept += [found for two in again for found in self._committed(two, asked, step, ignored)]
        return kept

    def _apart(self, group: Group) -> list[Group]:
        """Return the rows of a group one by one; none if it is a single row, or the drafter does not part them."""
        if len(group.rows) < 2:
            return []
        try:
            return [
                Group((row,), self.drafter.of_row(group.state, place))
                for place, row in enumerate(group.rows)
                if row >= 0
            ]
        except Exception:  # noqa: BLE001  then all of them have failed by the error that led here
            return []

    def _merged(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Let single rows join the first group, as far as the drafter takes them; those of one that shares stay alone.

        Such a one is given the target's reader of all rows, or of one.
        """
        if self.shares or len(groups) < 2:
            return tuple(groups)
        first, rest = groups[0], [one for one in groups[1:] if len(one.rows) > 1]
        for one in [one for one in groups[1:] if len(one.rows) == 1]:
            place = first.place(-1)
            place = len(first.rows) if place < 0 else place
            rows = (*first.rows[:place], one.rows[0], *first.rows[place + 1 :])
            try:
                first = Group(rows, self.drafter.join(first.state, place, one.state))
            except Exception:  # noqa: BLE001  whoever cannot join is drafted for apart
                rest.append(one)
        return (first, *rest)

    def _each(self, state: Any, count: int, verb: Callable[[Group], Any]) -> Any:
        """Do something in all groups, after an error row by row."""
        if self.ended(state):
            return state
        groups, kept, errors = groups_of(state, count), list[Group](), list[Exception]()
        for group in groups:
            kept += self._done(group, verb, errors)
        return self._settled(count, groups, kept, errors)

    def _done(self, group: Group, verb: Callable[[Group], Any], errors: list[Exception]) -> list[Group]:
        try:
            return [replace(group, state=verb(group))]
        except MENDABLE:
            raise
        except Exception as error:  # noqa: BLE001  whatever a drafter does wrong must not lose the text
            errors.append(error)
        return [found for one in self._apart(group) for found in self._done(one, verb, errors)]

    def _at(self, state: Any, row: int, verb: Callable[[Group, int], Any], count: int = 0) -> Any:
        """Do something in one row; after an error it has failed, and so have all of a state of unknown `count`."""
        if self.ended(state):
            return state
        groups = groups_of(state, count)
        whole = not isinstance(state, Split)
        group = groups[0] if whole else next((one for one in groups if one.place(row) >= 0), None)
        if group is None:
            return state
        try:
            after = verb(group, row if whole else group.place(row))
        except MENDABLE:
            raise
        except Exception as error:  # noqa: BLE001  whatever a drafter does wrong must not lose the text
            left = [one for one in groups if one is not group]
            left += [one for one in self._apart(group) if row not in one.rows]
            return self._settled(state.count if isinstance(state, Split) else count, groups, left, [error])
        if whole:
            return after
        return replace(state, groups=tuple(replace(one, state=after) if one is group else one for one in groups))

    def _settled(self, count: int, before: Sequence[Group], kept: Sequence[Group], errors: Sequence[Exception]) -> Any:
        """Return the state of the groups in which nothing failed, and note the first error.

        Single rows become a group again if others failed. If none did, the error came of drafting for them together.
        """
        if errors:
            self._fail(errors[0], every=not kept)
        if len(_rows(kept)) < len(_rows(before)):
            kept = self._merged(kept)
        return _whole(count, kept, self.failure)

    def _mended(self, state: Any) -> None:
        """Forget a failure from this state: what works when an interrupted step is taken again has not failed."""
        if any(one is state for one in self._open):
            self.failure, self._open = "", ()

    def _tried(self, verb: Callable[[], Any]) -> Any:
        try:
            return verb()
        except MENDABLE:
            raise
        except Exception as error:  # noqa: BLE001  whatever a drafter does wrong must not lose the text
            return self._fail(error)

    def _fail(self, error: Exception, *, every: bool = True) -> Failed:
        """Note a failure, of every row or of some, and warn about the first."""
        said = blamed(error) or f"{type(error).__name__}: {error}"
        first, self.failure = not self.failure, f"{said}{LOST if self._lost else ''}"
        if first:
            rest = "the rest is" if every else "rows in which it fails are"
            warnings.warn(
                f"The {self.name} drafter failed ({self.failure}); {rest} decoded without drafts.",
                RuntimeWarning,
                stacklevel=4,
            )
        return Failed(self.failure)


def _rows(groups: Sequence[Group]) -> set[int]:
    return {row for one in groups for row in one.rows if row >= 0}


def _whole(count: int, groups: Sequence[Group], reason: str) -> Any:
    """Return the state of groups: of one that has all rows in their order its own."""
    if len(groups) == 1 and groups[0].rows == tuple(range(count)):
        return groups[0].state
    return Split(reason, count, tuple(groups)) if groups else Failed(reason)
