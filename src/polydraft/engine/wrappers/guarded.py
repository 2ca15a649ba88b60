"""A drafter that may fail without hurting anyone: after an error the rest is decoded plainly."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from polydraft.drafters import Drafter, Session, is_sound
from polydraft.engine.wrappers.door import checked
from polydraft.errors import InvalidDraft, InvalidProbabilities
from polydraft.models import LanguageModel
from polydraft.probs import Noise
from polydraft.reading import Features, Reader, Step, Text
from polydraft.schemes import Scheme
from polydraft.trees import MENDABLE, Draft, Pieces, TreePolicy, in_pieces


@dataclass(frozen=True)
class Failed:
    """The state after the drafter failed: why it did."""

    reason: str


class Guarded(Drafter):
    """Wrap a drafter so that an error in it ends drafting, not generation.

    What it proposes is checked, unless it is sound. The output stays exact: a tree of the root alone is plain decoding,
    and what was drawn before an error is verified if it can be (`Draft.failure`). The first error is warned about once
    and kept in `failure`; the rows of its state are decoded without drafts to their ends. Where draft rows of some
    texts are no laws, these texts alone have no drafts, and it is asked for them again in the next step. Errors of
    pairing (scheme, vocabulary) are the user's to mend and pass through.

    `failure` may be given: then nothing is drafted from the beginning.

    That the drafter failed is in the state, so that a step which is interrupted and taken again is the same step.
    """

    def __init__(self, drafter: Drafter, failure: str = "") -> None:
        self.drafter = drafter
        self.failure = failure
        self._refused = failure
        self._open: tuple[Any, ...] = ()  # the state from which drafting failed, in a step that may yet be taken again
        self._flags: list[Tensor] = []  # of the last draft, on a device: whether its rows were laws
        self._sound = is_sound(drafter)
        self._vocab_size = 0
        self.name, self.reads = drafter.name, drafter.reads
        self.riders, self.shares = drafter.riders, drafter.shares

    @property
    def own_name(self) -> str:
        """The drafter's."""
        return self.drafter.own_name

    def check(self, scheme: Scheme) -> None:
        """Pass the question on."""
        self.drafter.check(scheme)

    def models(self) -> tuple[LanguageModel, ...] | None:
        """Return the drafter's."""
        return self.drafter.models()

    def start(self, text: Text, session: Session) -> Any:
        """Start the drafter, or note its failure."""
        self._vocab_size = session.vocab_size
        return Failed(self._refused) if self._refused else self._tried(partial(self.drafter.start, text, session))

    def read(self, state: Any, text: Text, features: Features | None) -> Any:
        """Let the drafter read, unless it has failed."""
        return state if self.ended(state) else self._tried(partial(self.drafter.read, state, text, features))

    def over(self, state: Any, target: Reader) -> Any:
        """Hand the target's reader on."""
        return state if self.ended(state) else self._tried(partial(self.drafter.over, state, target))

    def draft(
        self, state: Any, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise
    ) -> tuple[Draft | Pieces, Any]:
        """Draft, or propose nothing once the drafter has failed."""
        if not isinstance(state, Failed):
            try:
                draft, after = self._drafted(state, text, scheme, policy, noise)
            except MENDABLE:
                raise
            except Exception as error:  # noqa: BLE001  as below
                self._open, state = (state,), self._fail(error)
            else:
                self._flags = [one.draft.sound for one in in_pieces(draft) if one.draft.sound is not None]
                failure = next((one.draft.failure for one in in_pieces(draft) if one.draft.failure is not None), None)
                if failure is None:
                    self._mended(state)
                    return draft, after
                self._open = (state,)
                return draft, self._fail(failure)
        return Draft.nothing(text.last()), state

    def commit(self, state: Any, step: Step) -> Any:
        """Commit, or do nothing once the drafter has failed."""
        if isinstance(state, Failed):
            self._open = ()
            return state
        rows = [
            fine for flag in self._flags for fine in flag.tolist()
        ]  # the step is over: there is nothing to wait for
        if not all(rows):
            failure = self._fail(InvalidProbabilities("The draft model's logits are not usable."), every=not any(rows))
            if not any(rows):
                return failure
        return self._tried(partial(self.drafter.commit, state, step))

    def join(self, state: Any, row: int, other: Any) -> Any:
        """Let a new text join, or do nothing once the drafter has failed."""
        failed = next((one for one in (state, other) if isinstance(one, Failed)), None)
        return failed or self._tried(partial(self.drafter.join, state, row, other))

    def rewind(self, state: Any, row: int, length: int) -> Any:
        """Let the drafter forget."""
        return state if self.ended(state) else self._tried(partial(self.drafter.rewind, state, row, length))

    def leave(self, state: Any, row: int) -> Any:
        """Tell the drafter that a text is over."""
        return state if self.ended(state) else self._tried(partial(self.drafter.leave, state, row))

    def finish(self, state: Any, text: Text, row: int) -> Any:
        """Tell the drafter that a text is complete."""
        return state if self.ended(state) else self._tried(partial(self.drafter.finish, state, text, row))

    def ended(self, state: Any) -> bool:
        """Tell whether the drafter has failed, or says itself that nothing will come."""
        return isinstance(state, Failed) or self.drafter.ended(state)

    def continues(self, state: Any) -> bool:
        """Ask the drafter, unless it had failed."""
        return not isinstance(state, Failed) and self.drafter.continues(state)

    def _drafted(
        self, state: Any, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise
    ) -> tuple[Draft | Pieces, Any]:
        """Draft, and check what comes.

        Raises:
            InvalidDraft: nothing can be verified.
        """
        answer: object = self.drafter.draft(state, text, scheme, policy, noise)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise InvalidDraft(f"draft must return a draft and a state, but returned a {type(answer).__name__}.")
        draft, after = answer
        return (draft if self._sound else checked(draft, text, scheme, policy, self._vocab_size, self.riders)), after

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
        first, self.failure = not self.failure, f"{type(error).__name__}: {error}"
        if first:
            rest = "the rest is" if every else "rows in which it fails are"
            warnings.warn(
                f"The {self.name} drafter failed ({self.failure}); {rest} decoded without drafts.",
                RuntimeWarning,
                stacklevel=4,
            )
        return Failed(self.failure)
