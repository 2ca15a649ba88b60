"""The door to llguidance: it is imported when a grammar is made, and what it says becomes one sentence."""

import re
from importlib import import_module
from typing import Any

from polydraft.extras import GRAMMAR

REASON = re.compile(r"^\s*error: (.*)$", re.MULTILINE)
LONGEST = 200
"""How many characters of what llguidance says are passed on: it lists whole grammars and vocabularies."""


def llguidance() -> Any:
    """Return the package.

    Raises:
        MissingExtra: it cannot be used.
    """
    GRAMMAR.check()
    return import_module("llguidance")


def cleaned(said: str) -> str:
    """Return what llguidance says as the end of a sentence: its reason alone, in a line, no control characters."""
    text = said.split("<state>")[0]
    reasons = REASON.findall(text)
    lines = reasons or [line for line in text.splitlines() if line.strip()] or ["no reason is given"]
    line = "".join(letter if letter.isprintable() else " " for letter in lines[0])
    line = " ".join(line.split()).rstrip(". ")
    return line if len(line) <= LONGEST else f"{line[:LONGEST].rstrip()} ..."


def is_dead_end(matcher: Any) -> bool:
    """Tell whether a matcher has failed because no token goes on from where it is, and not by a limit."""
    return str(matcher.get_error()).startswith("NoExtension")
