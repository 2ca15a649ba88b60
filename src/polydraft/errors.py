"""The exception tree.

PolydraftError
├── InvalidParameter (also ValueError)   an argument outside its range: which one, its value, the rule
├── InvalidProbabilities (also ValueError)  rows that are no distributions: NaN, negative or infinite entries
├── InvalidDraft (also ValueError)       a drafter's proposal that is no tree below the text, or no draw from its rows
├── UnpairedScheme (also ValueError)     a verifier, drafter or policy that cannot work with this way of drafting
├── VocabularyMismatch                   target and draft do not share their tokens
├── ContextOverflow                      a prompt that leaves no room in the model's context
├── UnsupportedModel                     a model whose cache or attention cannot score a token tree, and why
├── CheckpointError                      a model folder that is missing, incomplete or damaged
├── PromptFileError                      a prompt file that cannot be read: which file, which line, and why
├── ResultsError                         a results folder that cannot be used or belongs to another run: what differs
├── StoreError                           a store of texts that cannot be read or used: which file, and why
├── FetchError                           something that cannot be fetched: what, and why
├── MissingExtra                         an optional package that is missing, too old or broken; how to install it
└── NotConverged                         a computation that does not reach the accuracy asked for

`is_whole` and `is_number` are asked of a number before it is compared with a range: another type is `InvalidParameter`
too, which `require_number` raises. `shown` writes a value into an error's sentence, `near` finds the word that a wrong
one was meant to be, and `hint` asks for it.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import cast

CUT = "A text was cut short by the model's context"
"""How the warning begins that a text is shorter than was asked for."""


class PolydraftError(Exception):
    """Base of every error that polydraft raises on purpose; its text is one sentence for the user."""


class InvalidParameter(PolydraftError, ValueError):
    """An argument is outside its range."""


class InvalidProbabilities(PolydraftError, ValueError):
    """A row of logits or probabilities does not define a distribution."""


class InvalidDraft(PolydraftError, ValueError):
    """A drafter proposed something that cannot be verified."""


class UnpairedScheme(PolydraftError, ValueError):
    """A drafter or verifier is asked to work with a scheme that it is not made for."""


class VocabularyMismatch(PolydraftError):
    """Two models do not share their vocabulary."""


class TargetMismatch(PolydraftError):
    """A draft head was trained for another target."""


class ContextOverflow(PolydraftError):
    """The prompt does not fit into the model's context."""


class UnsupportedModel(PolydraftError):
    """The model cannot score a token tree."""


class CheckpointError(PolydraftError):
    """A model folder cannot be loaded."""


class PromptFileError(PolydraftError):
    """A prompt file cannot be read."""


class ResultsError(PolydraftError):
    """A folder of results is damaged or belongs to a run with other settings."""


class StoreError(PolydraftError):
    """A store of texts cannot be read, or belongs to another tokenizer."""


class FetchError(PolydraftError):
    """Something cannot be fetched."""


class MissingExtra(PolydraftError):
    """An optional package is not installed, has another version, or cannot be imported."""


class NotConverged(PolydraftError):
    """A solver or an enumeration stopped before it reached the accuracy asked for."""


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


WRITTEN: frozenset[type] = frozenset(
    (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range, type(None))
)
"""The types of values that are written as they are in an error."""


def shown(value: object) -> str:
    """Return a value as it is written, if that is short and of one line; else its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    try:
        written = repr(value) if type(value) in WRITTEN else ""
    except ValueError:  # an integer of too many digits to be written
        written = ""
    return written if 0 < len(written) <= 60 and "\n" not in written else f"of type {type(value).__name__}"


ALIKE = 0.75
"""From this likeness on, as `difflib` measures it, a text is taken for a slip of a word."""
LONGEST_WORD = 60


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
