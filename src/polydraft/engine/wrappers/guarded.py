"""A drafter that may fail without hurting anyone: after an error the rest is decoded plainly."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from polydraft.drafters import Drafter, NoDraft, Session, Text, is_sound, resumed
from polydraft.engine.wrappers.door import checked
from polydraft.errors import UnpairedScheme, VocabularyMismatch
from polydraft.probs import Noise
from polydraft.schemes import Scheme
from polydraft.trees import Draft, TreePolicy, Verdict

MENDABLE = (UnpairedScheme, VocabularyMismatch)
"""Errors of pairing, which a user has to mend."""


@dataclass(frozen=True)
class Failed:
    """The state after the drafter failed: why it did."""

    reason: str


class Guarded:
    """Wrap a drafter so that an error in it ends drafting, not generation.

    What it proposes is checked, unless it is sound. The output stays exact: a tree of the root alone is plain decoding,
    and what was drawn before an error is verified if it can be (`Draft.failure`). The first error is warned about once
    and kept in `failure`. Errors of pairing (scheme, vocabulary) are the user's to mend and pass through.

    `failure` may be given: then nothing is drafted from the beginning.

    That the drafter failed is in the state, so that a step which is interrupted and taken again is the same step.
    """

    def __init__(self, drafter: Drafter, failure: str = "") -> None:
        self.drafter = drafter
        self.name = drafter.name
        self.reads_hidden = drafter.reads_hidden
        self.failure = failure
        self._sound = is_sound(drafter)
        self._vocab_size = 0
        self._failed: Failed | None = None  # in this step: `draft` writes it, `commit` reads it

    def check(self, scheme: Scheme) -> None:
        """Pass the question on."""
        self.drafter.check(scheme)

    def start(self, text: Text, session: Session) -> Any:
        """Start the drafter, or note its failure."""
        return self._begun(session, partial(self.drafter.start, text, session))

    def resume(self, state: Any, before: Text, text: Text, known: int, session: Session) -> Any:
        """Resume the drafter, or start it anew if it had failed."""
        if isinstance(state, Failed):
            return self.start(text, session)
        return self._begun(session, partial(resumed, self.drafter, state, before, text, known, session))

    def _begun(self, session: Session, begin: Callable[[], Any]) -> Any:
        self._vocab_size = session.vocab_size
        if self.failure:
            return Failed(self.failure)
        try:
            return begin()
        except MENDABLE:
            raise
        except Exception as error:  # noqa: BLE001  whatever a drafter does wrong must not lose the text
            return self._fail(error)

    def draft(self, state: Any, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise) -> Draft:
        """Draft, or propose nothing once the drafter has failed."""
        self._failed = None
        if not isinstance(state, Failed):
            try:
                draft = self.drafter.draft(state, text, scheme, policy, noise)
                if not self._sound:
                    draft = checked(draft, text, scheme, policy, self._vocab_size)
            except MENDABLE:
                raise
            except Exception as error:  # noqa: BLE001  as above
                self._failed = self._fail(error)
            else:
                self._failed = None if draft.failure is None else self._fail(draft.failure)
                return draft
        return NoDraft().draft(None, text, scheme, policy, noise)

    def commit(self, state: Any, text: Text, verdict: Verdict) -> Any:
        """Commit, or do nothing once the drafter has failed."""
        if isinstance(state, Failed):
            return state
        if self._failed is not None:
            return self._failed
        try:
            after = self.drafter.commit(state, text, verdict)
        except Exception as error:  # noqa: BLE001  as above
            return self._fail(error)
        self.failure = ""  # what failed in an interrupted step and works when it is taken again has not failed
        return after

    def join(self, state: Any, row: int, other: Any) -> Any:
        """Let a new text join, or do nothing once the drafter has failed."""
        for one in (state, other):
            if isinstance(one, Failed):
                return one
        try:
            return self.drafter.join(state, row, other)
        except Exception as error:  # noqa: BLE001  as above
            return self._fail(error)

    def _fail(self, error: Exception) -> Failed:
        first, self.failure = not self.failure, f"{type(error).__name__}: {error}"
        if first:
            warnings.warn(
                f"The {self.name} drafter failed ({self.failure}); the rest is decoded without drafts.",
                RuntimeWarning,
                stacklevel=4,
            )
        return Failed(self.failure)
