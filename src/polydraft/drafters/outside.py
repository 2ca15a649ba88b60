"""Digests of what drafters know from outside a text, by which the text's random numbers are forked."""

from collections.abc import Iterable
from hashlib import blake2b

from polydraft.drafters.protocol import Drafter


def digest_of(*parts: bytes) -> bytes:
    """Return a digest of 16 bytes of some strings of bytes, which tells where one ends."""
    found = blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()


def known_outside(drafters: Iterable[Drafter], row: int) -> bytes:
    """Return the digest of what several drafters know of a row from outside; of a single one that knows, its own."""
    told = [digest for digest in (one.outside(row) for one in drafters) if digest]
    return digest_of(*told) if len(told) > 1 else b"".join(told)
