"""What a route and a merge share: everybody is told what happens."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from polydraft.drafters.outside import known_outside
from polydraft.drafters.protocol import Drafter, states_in
from polydraft.drafters.text import TextDrafter
from polydraft.models import LanguageModel
from polydraft.reading import Features, Reader, Text

Tell = Callable[[Drafter, Any], Any]


class Together(Drafter):
    """Several text drafters, and another drafter or none; derive from it.

    Its state is a dataclass with `members`, the members' states, and `other`, the other drafter's.
    """

    members: tuple[TextDrafter, ...]
    other: Drafter | None

    def models(self) -> tuple[LanguageModel, ...] | None:
        """Return the other drafter's."""
        return () if self.other is None else self.other.models()

    def outside(self, row: int) -> bytes:
        """Ask everybody."""
        return known_outside([*self.members, *([] if self.other is None else [self.other])], row)

    def read(self, state: Any, text: Text, features: Features | None) -> Any:
        """Let everybody read the prompts."""
        members = tuple(one.read(own, text, None) for one, own in zip(self.members, state.members, strict=True))
        other = None if self.other is None else self.other.read(state.other, text, features)
        return replace(state, members=members, other=other)

    def over(self, state: Any, target: Reader) -> Any:
        """Hand the target's reader to the other drafter."""
        return state if self.other is None else replace(state, other=self.other.over(state.other, target))

    def continues(self, state: object) -> bool:
        """Ask the other drafter, else the last member, of its state wherever it stands; the rest may begin anew."""
        last = self.members[-1] if self.other is None else self.other
        return any(map(last.continues, states_in(state)))

    def carried(self, states: Sequence[Any], fresh: Any, known: int) -> Any:
        """Let everybody take what is theirs: a prediction may have come before the members, or gone."""
        pairs = zip(self.members, fresh.members, strict=True)
        other = None if self.other is None else self.other.carried(states, fresh.other, known)
        return replace(fresh, members=tuple(one.carried(states, own, known) for one, own in pairs), other=other)

    def finish(self, state: Any, text: Text, row: int) -> Any:
        """Tell everybody."""
        return self.told(state, lambda one, own: one.finish(own, text, row))

    def ended(self, state: Any) -> bool:
        """Ask the other drafter."""
        return self.other is not None and self.other.ended(state.other)

    def told(self, state: Any, tell: Tell) -> Any:
        """Return the state when everybody was told something."""
        members = tuple(map(tell, self.members, state.members))
        return replace(state, members=members, other=None if self.other is None else tell(self.other, state.other))
