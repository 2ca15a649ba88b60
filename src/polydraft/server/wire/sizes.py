"""How much a body may hold: checked before its fields are, which takes time for each value."""

import re
from typing import Any

from polydraft.server.wire.error_answers import Refused, readable, told

MOST_VALUES = 100_000
"""Values of a body beside the tokens of prompts: fields, messages, parts, and what lists and objects of them hold."""
MOST_PROMPTS = 128
ROWS = ("prompt", "tokens")
"""Fields that may hold tokens: a row of them, or rows."""
HALF = re.compile("[\ud800-\udfff]")
STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)


def check_brackets(body: bytes) -> None:
    """Check that JSON has no more lists and objects than a request can need, before it is read.

    To make a million of them takes over a second, in which nothing else is done.

    Raises:
        Refused: it has more.
    """
    if _brackets(body) <= MOST_VALUES or _brackets(STRING.sub(b"", body)) <= MOST_VALUES:
        return
    said = f"The body has more than {MOST_VALUES:,} lists and objects, which no request needs."
    raise Refused(400, said, None, "body_too_long")


def _brackets(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def check_sizes(body: Any, most_tokens: int | None) -> None:
    """Check that a body is no larger than a request can need.

    Args:
        body: what the JSON says.
        most_tokens: tokens of a text; None as long as the model is not known.

    Raises:
        Refused: it is larger.
    """
    if not isinstance(body, dict):
        return
    if most_tokens is not None:
        for name in ROWS:
            _check_rows(name, body.get(name), most_tokens)
    left = MOST_VALUES
    for name, value in body.items():
        left -= _count(value, left)
        if left < 0:
            most = f"a body has at most {MOST_VALUES:,} values beside the tokens of a prompt"
            raise Refused(400, f"{readable(told(name))} is too much: {most}.", told(name), "body_too_long")


def _check_rows(name: str, value: Any, most: int) -> None:
    """Check the lengths of a row of tokens, or of the first rows that there may be.

    Raises:
        Refused: one is longer than a text.
    """
    if not isinstance(value, list):
        return
    rows = [value, *(one for one in value[:MOST_PROMPTS] if isinstance(one, list))]
    longest = max((len(row) for row in rows if len(row) > most and plain(row)), default=0)
    if longest:
        said = f"{name} has {longest} tokens, but a text has at most {most} here."
        raise Refused(400, said, name, "context_length_exceeded")


def _count(value: Any, most: int) -> int:
    """Return how many values a value is, or that there are more than so many; tokens side by side are one."""
    found, left = 0, [value]
    while left and found <= most:
        one = left.pop()
        found += 1
        if isinstance(one, dict):
            left.extend(one.values())
        elif isinstance(one, list):
            if len(one) > most:
                return len(one)
            left += () if plain(one) else one
    return found


def plain(values: list[Any]) -> bool:
    """Tell whether a list has whole numbers alone."""
    return {*map(type, values)} <= {int}


def is_half_text(value: object) -> bool:
    """Tell whether a text somewhere in a value cannot be written in UTF-8, for half of a surrogate pair."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            if not one.isascii() and HALF.search(one):
                return True
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list) and not plain(one):
            left += one
    return False
