"""The bytes of a single token, also where they are no character by themselves."""

import re
from functools import cache
from typing import Any

from polydraft.models.text.stream_decoder import BROKEN, text_of

PRINTABLE = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))
"""Bytes that byte-level vocabularies write as themselves; the others are written from U+0100 on, in order."""


def bytes_of(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of a token: of its text, or, if that is broken, those that the vocabulary says.

    Byte-level vocabularies (GPT-2's) write every byte as a letter, and others have tokens such as `<0xE2>` for single
    bytes. Of other tokenizers the bytes of a broken text are not known, and are those of U+FFFD.

    Args:
        tokenizer: the model's.
        token: the token.
    """
    text = text_of(tokenizer, [token], False)
    name = tokenizer.convert_ids_to_tokens(token) if BROKEN in text else None
    if not isinstance(name, str):
        return text.encode("utf-8", "replace")
    alone = re.fullmatch("<0x([0-9A-F]{2})>", name)
    if alone:
        return bytes([int(alone[1], 16)])
    letters = _letters()
    if all(letter in letters for letter in name):
        return bytes(letters[letter] for letter in name)
    return text.encode("utf-8", "replace")


@cache
def _letters() -> dict[str, int]:
    own = [byte for some in PRINTABLE for byte in some]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
