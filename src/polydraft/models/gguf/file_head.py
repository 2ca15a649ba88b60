"""The head of a GGUF file, read without loading the weights: its architecture, its kinds of tensors, its length.

The layout is that of the GGUF specification, versions 2 and 3 (github.com/ggml-org/ggml, docs/gguf.md): magic, version,
the numbers of tensors and of fields, then fields, then tensors with their places behind the head. Every number in it
may be wrong, so that nothing is read, and nothing reserved, beyond the file's end.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from polydraft.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's kinds of numbers, in `struct`'s letters."""
TEXT, LIST = 8, 9
MOST_DIMENSIONS = 4
ALIGNMENT = 32


@dataclass(frozen=True)
class Contents:
    """What the head of a GGUF file says.

    Args:
        fields: its numbers and short texts by name; lists are left out.
        tensors: by name, the number of the kind, the entries, and the place of the first byte behind the head.
        start: the place of the first tensor in the file.
        size: the bytes of the file.
    """

    fields: Mapping[str, object]
    tensors: Mapping[str, tuple[int, int, int]]
    start: int
    size: int

    @property
    def architecture(self) -> str:
        """The word for the kind of model, such as llama."""
        return str(self.fields.get("general.architecture", ""))

    def end(self, layouts: Mapping[int, tuple[int, int]]) -> int:
        """Return the bytes that a whole file has, by the entries and the bytes per block of each kind of tensor."""
        ends = [0]
        for kind, entries, place in self.tensors.values():
            per_block, length = layouts[kind]
            ends.append(place + -(-entries // per_block) * length)
        return self.start + max(ends)


def read_contents(path: Path) -> Contents:
    """Read the head of a GGUF file.

    Raises:
        CheckpointError: the file cannot be read, is no GGUF file, or ends in its head.
    """
    try:
        with path.open("rb") as file:
            return _Head(file, path).read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


class _Head:
    """A place in the head of a file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = path.stat().st_size

    def read(self) -> Contents:
        """Read all of it."""
        magic = self.file.read(len(MAGIC))
        if magic != MAGIC:
            raise CheckpointError(f"{self.path} is no GGUF file: it begins with {magic!r}, not with {MAGIC!r}.")
        version = self._number("I")
        if version not in VERSIONS:
            raise CheckpointError(f"{self.path} is a GGUF file of version {version}; versions 2 and 3 can be read.")
        tensors, fields = self._number("Q"), self._number("Q")
        known = dict(self._field() for _ in range(fields))
        listed = dict(self._tensor() for _ in range(tensors))
        step = known.get("general.alignment", ALIGNMENT)
        step = step if isinstance(step, int) and step > 0 else ALIGNMENT
        start = -(-self.file.tell() // step) * step
        return Contents({name: one for name, one in known.items() if one is not None}, listed, start, self.size)

    def _field(self) -> tuple[str, object]:
        return self._text(), self._value(self._number("I"))

    def _tensor(self) -> tuple[str, tuple[int, int, int]]:
        name, dimensions, entries = self._text(), self._number("I"), 1
        if dimensions > MOST_DIMENSIONS:
            raise self._damaged()
        for _ in range(dimensions):
            entries *= self._number("Q")
        kind, place = self._number("I"), self._number("Q")
        return name, (kind, entries, place)

    def _value(self, kind: int) -> object:
        """Read a value; None for a list, which is passed over."""
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == TEXT:
            return self._text()
        if kind != LIST:
            raise self._damaged()
        inner, count = self._number("I"), self._number("Q")
        if inner in NUMBERS:
            self._pass(count * struct.calcsize(NUMBERS[inner]))
        elif inner == TEXT:
            for _ in range(count):
                self._pass(self._number("Q"))
        else:
            raise self._damaged()
        return None

    def _number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._bytes(struct.calcsize(letter)))[0]

    def _text(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8", "replace")

    def _bytes(self, count: int) -> bytes:
        found = self.file.read(count) if count <= self.size - self.file.tell() else b""
        if len(found) < count:
            raise self._damaged()
        return found

    def _pass(self, count: int) -> None:
        if count > self.size - self.file.tell():
            raise self._damaged()
        self.file.seek(count, 1)

    def _damaged(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is cut short or damaged: it has {self.size} bytes, and its head cannot be read to the end; "
            "fetch it again."
        )
