"""Stop strings in a text that comes in pieces: what may be the beginning of one waits."""

from collections.abc import Sequence

from polydraft.errors import InvalidParameter, shown


class StopFilter:
    """Let a text pass up to the first stop string.

    The first is the one that is complete first; of two that end with the same character it is the longer one. So what
    passes does not depend on how the text was cut into pieces.

    Args:
        stop: the strings; none let everything pass at once.
        included: whether the stop string itself passes too.
    """

    def __init__(self, stop: Sequence[str], *, included: bool) -> None:
        self.stop = tuple(stop)
        self.included = included
        self.found: str | None = None
        self._held = ""

    def add(self, text: str, *, looks: bool = True) -> str:
        """Return the text that is certain to come before a stop string; nothing after one.

        Args:
            text: what is new.
            looks: whether a stop string may end with it; one that may not is text like any other.
        """
        if self.found is not None:
            return ""
        held, text = len(self._held), self._held + text
        found = ((text.find(one, max(0, held + 1 - len(one))), one) for one in self.stop if looks)
        ends = [(place + len(one), place, one) for place, one in found if place >= 0]
        if ends:
            end, place, self.found = min(ends)
            self._held = ""
            return text[: end if self.included else place]
        kept = self._beginning(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def rest(self) -> str:
        """Return what was held back, and no longer is."""
        text, self._held = self._held, ""
        return text

    def _beginning(self, text: str) -> int:
        """Return the length of the longest end of a text with which a stop string begins."""
        most = min(len(text), max(map(len, self.stop), default=1) - 1)
        return next((n for n in range(most, 0, -1) if any(one.startswith(text[-n:]) for one in self.stop)), 0)


def checked_stop(stop: object) -> tuple[str, ...]:
    """Return stop strings, of which one alone may be given, as a tuple.

    Raises:
        InvalidParameter: they are something else, or one is empty.
    """
    given = (stop,) if isinstance(stop, str) else stop
    if not isinstance(given, Sequence) or any(not isinstance(one, str) or not one for one in given):
        raise InvalidParameter(f"stop must be texts of at least one character, but is {shown(stop)}.")
    return tuple(given)
