"""The law of the set of a node's drafts, from which containment, the optimum and the rules that select are computed."""

from dataclasses import dataclass
from enum import Enum

from polydraft.errors import UnpairedScheme
from polydraft.schemes.scheme import Scheme, Uniforms, check_scheme

MOST_CERTAIN = 1 << 20
"""The most tokens that may be taken for certain; no vocabulary is larger."""


class Draws(Enum):
    """How those drafts are drawn that are not certain."""

    ANEW = "independently, from one row"
    IN_TURN = "independently, from the rows of the node in turn"
    SUCCESSIVE = "one after the other, the row renormalised without the tokens already drawn"
    DISTINCT = "independently, given that they are distinct"


@dataclass(frozen=True)
class SetLaw:
    """The law of the set of k drafts: the likeliest tokens of the row for certain, and others that are drawn.

    Args:
        draws: how the others are drawn; tokens are certain beside `Draws.ANEW` only.
        drawn: how many drafts are drawn before any is certain.
        most_certain: how many may be certain at most.
        alike: whether all tokens with any mass count as equally likely, so that the first ones are certain.
    """

    draws: Draws = Draws.ANEW
    drawn: int = 0
    most_certain: int = 0
    alike: bool = False

    def certain(self, drafts: int) -> int:
        """Return how many of so many drafts are certain."""
        return min(max(drafts - self.drawn, 0), self.most_certain)


class SchemeOfLaw:
    """What follows from the numbers by which a scheme draws and the law of the set of its drafts; derive from this."""

    uniforms: Uniforms = Uniforms.OF_TOKENS
    set_law: SetLaw = SetLaw()

    @property
    def deterministic(self) -> bool:
        """Whether the drafts are a function of the draft row."""
        return self.uniforms is Uniforms.NONE

    @property
    def independent(self) -> bool:
        """Whether a node's drafts are drawn anew, whatever was drawn at other nodes and in other steps."""
        return self.uniforms is not Uniforms.SHARED

    @property
    def lone_draft_is_drawn(self) -> bool:
        """Whether a draft that is its node's only one is an independent draw from the row, and not certain."""
        return self.independent and not self.set_law.certain(1)

    @property
    def several_rows(self) -> bool:
        """Whether a node has several draft rows."""
        return self.set_law.draws is Draws.IN_TURN


def set_law_of(scheme: Scheme) -> SetLaw:
    """Return the law of the set of a scheme's drafts.

    Raises:
        UnpairedScheme: the scheme does not say it.
    """
    law = getattr(scheme, "set_law", None)
    if isinstance(law, SetLaw):
        return law
    check_scheme(scheme, "Containment")
    raise UnpairedScheme(f"The containment of drafts that are {scheme.name} is not known; use a scheme with one.")
