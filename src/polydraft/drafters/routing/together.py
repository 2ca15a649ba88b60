"""What a route and a merge share: everybody is told what happens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from polydraft.drafters.outside import known_outside
from polydraft.drafters.protocol import Drafter
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

    def leave(self, state: Any, row: int) -> Any:
        """Tell everybody."""
        return self.told(state, lambda one, own: one.leave(own, row))

    def finish(self, state: Any, text: Text, row: int) -> Any:
        """Tell everybody."""
        return self.told(state, lambda one, own: one.finish(own, text, row))

    def ended(self, state: Any) -> bool:
        """Ask the other drafter."""
        return self.other is not None and self.other.ended(state.other)

    def of_row(self, state: Any, row: int) -> Any:
        """Return everybody's state of the row."""
        return self.told(state, lambda one, own: one.of_row(own, row))

    def rewound(self, state: Any, row: int, length: int) -> tuple[Any, ...]:
        """Return the members' states up to a length; None of a member that cannot go on from what stands in its place,
        such as a prediction of another call.
        """
        pairs = zip(self.members, state.members, strict=True)
        return tuple(one.rewind(own, row, length) if one.continues(own) else None for one, own in pairs)

    def joined(self, state: Any, row: int, other: Any) -> tuple[Any, ...]:
        """Return the members' states with a newcomer's; those of which there is nothing to go on from stay."""
        pairs = zip(self.members, state.members, other.members, strict=True)
        return tuple(own if theirs is None else one.join(own, row, theirs) for one, own, theirs in pairs)

    def told(self, state: Any, tell: Tell) -> Any:
        """Return the state when everybody was told something."""
        members = tuple(map(tell, self.members, state.members))
        return replace(state, members=members, other=None if self.other is None else tell(self.other, state.other))
