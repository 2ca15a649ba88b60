"""A drafter that may fail without hurting anyone: after an error the rest is decoded plainly."""

import warnings
from dataclasses import dataclass
from typing import Any

from polydraft.drafters import Drafter, NoDraft, Session, Text
from polydraft.errors import UnpairedScheme, VocabularyMismatch
from polydraft.probs import Noise
from polydraft.schemes import Scheme
from polydraft.trees import Draft, TreePolicy, Verdict


@dataclass(frozen=True)
class Failed:
    """The state after the drafter raised: why it did."""

    reason: str


class Guarded:
    """Wrap a drafter so that an error in it ends drafting, not generation.

    The output stays exact: a tree of the root alone is plain decoding. The first error is warned about once and
    kept in `failure`. Errors of pairing (scheme, vocabulary) are the user's to mend and pass through.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name = drafter.name
        self.reads_hidden = drafter.reads_hidden
        self.failure = ""

    def check(self, scheme: Scheme) -> None:
        """Pass the question on."""
        self.drafter.check(scheme)

    def start(self, text: Text, session: Session) -> Any:
        """Start the drafter, or note its failure."""
        if self.failure:
            return Failed(self.failure)
        try:
            return self.drafter.start(text, session)
        except (UnpairedScheme, VocabularyMismatch):
            raise
        except Exception as error:  # noqa: BLE001  whatever a drafter does wrong must not lose the text
            return self._fail(error)

    def draft(self, state: Any, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise) -> Draft:
        """Draft, or propose nothing once the drafter has failed."""
        if not self.failure:
            try:
                return self.drafter.draft(state, text, scheme, policy, noise)
            except Exception as error:  # noqa: BLE001  as above
                self._fail(error)
        return NoDraft().draft(None, text, scheme, policy, noise)

    def commit(self, state: Any, text: Text, verdict: Verdict) -> Any:
        """Commit, or do nothing once the drafter has failed."""
        if not self.failure:
            try:
                return self.drafter.commit(state, text, verdict)
            except Exception as error:  # noqa: BLE001  as above
                return self._fail(error)
        return state

    def join(self, state: Any, row: int, other: Any) -> Any:
        """Let a new text join, or do nothing once the drafter has failed."""
        if not self.failure:
            try:
                return self.drafter.join(state, row, other)
            except Exception as error:  # noqa: BLE001  as above
                return self._fail(error)
        return state

    def _fail(self, error: Exception) -> Failed:
        self.failure = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"The {self.name} drafter failed ({self.failure}); the rest is decoded without drafts.",
            RuntimeWarning,
            stacklevel=4,
        )
        return Failed(self.failure)
