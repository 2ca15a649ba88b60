"""Digests of what drafters know from outside a text, by which the text's random numbers are forked."""

from hashlib import blake2b


def digest_of(*parts: bytes) -> bytes:
    """Return a digest of 16 bytes of some strings of bytes, which tells where one ends."""
    found = blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()
