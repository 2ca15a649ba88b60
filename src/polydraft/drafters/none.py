"""No drafts: plain autoregressive decoding is the same loop with this drafter."""

from dataclasses import dataclass

from polydraft.drafters.protocol import Session, Text
from polydraft.probs import Noise
from polydraft.schemes import Scheme
from polydraft.trees import Draft, TreePolicy, Verdict


@dataclass(frozen=True)
class NoDraft:
    """Proposes nothing: every step yields one token from the target. The baseline of every comparison."""

    name = "none"
    reads_hidden: tuple[int, ...] = ()
    sound = True

    def check(self, scheme: Scheme) -> None:
        """Accept every scheme: there is nothing to draw."""

    def start(self, text: Text, session: Session) -> None:
        """Return no state."""

    def draft(self, state: None, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise) -> Draft:
        """Return the root alone."""
        return Draft.nothing(text.last())

    def commit(self, state: None, text: Text, verdict: Verdict) -> None:
        """Return no state."""

    def join(self, state: None, row: int, other: None) -> None:
        """Return no state."""
