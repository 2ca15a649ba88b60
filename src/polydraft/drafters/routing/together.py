"""What a route and a merge share: everybody is told what happens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from polydraft.drafters.contract import Drafter, finished
from polydraft.drafters.text import TextDrafter
from polydraft.reading import Features, Text

Tell = Callable[[Drafter, Any], Any]


class SeveralDrafters(Drafter):
    """Several text drafters, and another drafter or none; derive from it.

    Its state is a dataclass with `members`, the members' states, and `other`, the other drafter's.
    """

    members: tuple[TextDrafter, ...]
    other: Drafter | None

    def read(self, state: Any, text: Text, features: Features | None) -> Any:
        """Let everybody read the prompts."""
        members = tuple(one.read(own, text, None) for one, own in zip(self.members, state.members, strict=True))
        other = None if self.other is None else self.other.read(state.other, text, features)
        return replace(state, members=members, other=other)

    def finish(self, state: Any, text: Text, row: int) -> Any:
        """Tell everybody."""
        return self.told(state, lambda one, own: finished(one, own, text, row))

    def told(self, state: Any, tell: Tell) -> Any:
        """Return the state when everybody was told something."""
        members = tuple(map(tell, self.members, state.members))
        return replace(state, members=members, other=None if self.other is None else tell(self.other, state.other))
