"""The exception tree, and what is asked of values before they are refused, and how they are shown in an error.

Every exception derives from `PolydraftError`; those of wrong values are a `ValueError` too.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import cast

CUT = "A text was cut short by the model's context"
"""How the warning begins that a text is shorter than was asked for."""
WRITTEN: frozenset[type] = frozenset(
    (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range, type(None))
)
"""The types of values that are written as they are in an error."""
ALIKE = 0.75
"""From this likeness on, as `difflib` measures it, a text is taken for a slip of a word."""
LONGEST_WORD = 60


class PolydraftError(Exception):
    """Base of every error that polydraft raises on purpose; its text is one sentence for the user."""


class InvalidParameter(PolydraftError, ValueError):
    """An argument is outside its range: which one, its value, the rule."""


class InvalidProbabilities(PolydraftError, ValueError):
    """Rows are no distributions: NaN, negative or infinite entries."""


class InvalidDraft(PolydraftError, ValueError):
    """A drafter's proposal is no tree below the text, or no draw from its rows."""


class UnpairedScheme(PolydraftError, ValueError):
    """A verifier, drafter or policy cannot work with this way of drafting."""


class VocabularyMismatch(PolydraftError):
    """Two models do not share their vocabulary."""


class TargetMismatch(PolydraftError):
    """A draft head was trained for another target."""


class ContextOverflow(PolydraftError):
    """A prompt leaves no room in the model's context."""


class UnsupportedModel(PolydraftError):
    """A model's cache or attention cannot score a token tree, and why."""


class RankLost(PolydraftError):
    """A process that holds a part of the target has ended, or a pass failed in one of them: which one, and why."""


class CheckpointError(PolydraftError):
    """A model folder is missing, incomplete or damaged."""


class PromptFileError(PolydraftError):
    """A prompt file cannot be read: which file, which line, and why."""


class ResultsError(PolydraftError):
    """A results folder is damaged or belongs to another run: what differs."""


class StoreError(PolydraftError):
    """A store of texts cannot be read, or belongs to another tokenizer: which file, and why."""


class FetchError(PolydraftError):
    """Something cannot be fetched: what, and why."""


class ServerError(PolydraftError):
    """A server cannot be reached, or its answers cannot be tested: which one, and why."""


class ClusterError(PolydraftError):
    """A Ray cluster cannot be joined, or its nodes cannot do the work: which one, and why."""


class MissingExtra(PolydraftError):
    """An optional package is missing, too old or broken; how to install it."""


class NotConverged(PolydraftError):
    """A computation does not reach the accuracy asked for."""


def is_whole(value: object) -> bool:
    """Tell whether a value is an integer; True and False are none."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def is_number(value: object) -> bool:
    """Tell whether a value is a real number that a float can hold, maybe infinite or NaN; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def shown(value: object) -> str:
    """Return a value as it is written, if that is short and of one line; else its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    try:
        written = repr(value) if type(value) in WRITTEN else ""
    except ValueError:  # an integer of too many digits to be written
        written = ""
    return written if 0 < len(written) <= 60 and "\n" not in written else f"of type {type(value).__name__}"


def require_number(name: str, value: object, rule: str, holds: Callable[[float], bool]) -> None:
    """Check that a value is a number of which something holds.

    Raises:
        InvalidParameter: it is none; the message says that `name` must be `rule`.
    """
    if not is_number(value) or not holds(cast(float, value)):
        raise InvalidParameter(f"{name} must be {rule}, but is {value!r}.")


def near(text: str, words: Iterable[str]) -> str:
    """Return the word that a text is likely meant to be, whatever its case and hyphens; empty if it is like none."""
    plain = {_letters(word): word for word in reversed([*words])}
    found = get_close_matches(_letters(text), plain, n=1, cutoff=ALIKE) if len(text) <= LONGEST_WORD else []
    return plain[found[0]] if found else ""


def hint(text: object, words: Iterable[str]) -> str:
    """Return the question whether another word was meant, in brackets; empty if none is like it."""
    meant = near(text, words) if isinstance(text, str) else ""
    return f" (did you mean {meant}?)" if meant else ""


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def lowered(error: Exception) -> str:
    """Return what an error says, in a line, to stand behind a colon."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text[0].lower()}{text[1:].rstrip('.')}."


def shortened(value: object) -> str:
    """Return a value as text of at most 80 letters, for messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
