"""Text from outside, made harmless: what would steer a terminal is shown as an escape."""

import re

STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, line separators, bidirectional overrides, halves of surrogate pairs."""


def visible(text: str) -> str:
    """Return a text with control characters written out, such as \\x1b; tabs and newlines stay.

    Every character is judged alone. So a sequence that begins in one piece of a text and ends in another is caught too.
    """
    return STEERING.sub(_written_out, text)


def on_one_line(text: str) -> str:
    """Return a text as `visible` does, tabs and newlines written out too: for names and messages."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
