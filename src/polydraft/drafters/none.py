"""No drafts: plain autoregressive decoding is the same loop with this drafter."""

from dataclasses import dataclass

from polydraft.drafters.contract import Drafter, DraftRequest, Session
from polydraft.reading import Step, Text
from polydraft.schemes import Scheme
from polydraft.trees import Draft


@dataclass(frozen=True)
class NoDraft(Drafter):
    """Proposes nothing: every step yields one token from the target. The baseline of every comparison."""

    name = "none"
    sound = True
    proposes = False

    def check(self, scheme: Scheme) -> None:
        """Accept every scheme: there is nothing to draw."""

    def start(self, text: Text, session: Session) -> None:
        """Return no state."""

    def draft(self, state: None, request: DraftRequest) -> tuple[Draft, None]:
        """Return the root alone."""
        return Draft.nothing(request.text.last()), None

    def commit(self, state: None, step: Step) -> None:
        """Return no state."""
