"""GGUF files: what is in one, whether it is whole and of a readable kind, and how transformers is asked to read it."""

import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import transformers
from transformers import modeling_gguf_pytorch_utils

from polydraft.errors import CheckpointError, UnsupportedModel
from polydraft.extras import GGUF

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
        known = dict((self._text(), self._value(self._number("I"))) for _ in range(fields))
        listed = dict(self._tensor() for _ in range(tensors))
        step = known.get("general.alignment", ALIGNMENT)
        step = step if isinstance(step, int) and step > 0 else ALIGNMENT
        start = -(-self.file.tell() // step) * step
        return Contents({name: one for name, one in known.items() if one is not None}, listed, start, self.size)

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


UNQUANTISED = ("F32", "F16", "F64", "I8", "I16", "I32", "I64")


def check_gguf(path: Path) -> Contents:
    """Check that a GGUF file is whole, and of a kind that transformers reads.

    Raises:
        CheckpointError: it is no GGUF file, it is cut short, or it lacks layers.
        MissingExtra: the packages that read such files cannot be used.
        UnsupportedModel: its architecture is not read, or the quantisation of one of its tensors.
    """
    contents = read_contents(path)
    GGUF.check()
    constants, quants = import_module("gguf.constants"), import_module("gguf.quants")
    if not _is_known(contents.architecture):
        raise UnsupportedModel(
            f"{path} is a model of the architecture {contents.architecture!r}, which transformers does not read from "
            "GGUF files; take its folder of safetensors instead."
        )
    kinds = constants.GGMLQuantizationType
    sizes = {int(kind): size for kind, size in constants.GGML_QUANT_SIZES.items()}
    for name, (kind, _, _) in contents.tensors.items():
        if kind not in sizes or not (kinds(kind).name in UNQUANTISED or kinds(kind) in quants._type_traits):
            word = next((one.name for one in kinds if int(one) == kind), f"number {kind}")
            raise UnsupportedModel(
                f"{path} holds {name} in the quantisation {word}, which the installed gguf cannot "
                "read; take a file in another one, such as Q8_0 or Q4_K_M."
            )
    _check_layers(path, contents)
    whole = contents.end(sizes)
    if contents.size < whole:
        raise CheckpointError(f"{path} is cut short: it has {contents.size} bytes of {whole}; fetch it again.")
    return contents


def _check_layers(path: Path, contents: Contents) -> None:
    """Check that there are as many layers as the head says: transformers would look for the others for minutes."""
    said = contents.fields.get(f"{contents.architecture}.block_count")
    layers = {name.split(".")[1] for name in contents.tensors if name.startswith("blk.")}
    if isinstance(said, int) and layers and said != len(layers):
        raise CheckpointError(f"{path} is damaged: its head says {said} layers, but it holds {len(layers)}.")


def _is_known(architecture: str) -> bool:
    """Tell whether transformers reads an architecture, which files spell with and without hyphens."""
    known = {word.replace("_", "") for word in modeling_gguf_pytorch_utils.GGUF_SUPPORTED_ARCHITECTURES}
    return architecture.replace("-", "").replace("_", "") in known - {"general", "tokenizer"}


@contextmanager
def alone(folder: str, file: str) -> Iterator[str]:
    """Give a file's folder for a while: another one, with nothing else in it; the folder itself if no file is named.

    transformers reads a tokenizer.json, tokenizer_config.json, chat template or generation_config.json that lies beside
    the file, and takes it for the file's own.
    """
    if not file:
        yield folder
        return
    with TemporaryDirectory(prefix="polydraft-") as empty:
        whole, link = (Path(folder) / file).resolve(), Path(empty) / file
        try:
            link.symlink_to(whole)
        except OSError:  # not every system gives everybody links
            shutil.copyfile(whole, link)
        yield empty


def unpacked() -> dict[str, Any]:
    """Return the options by which weights are unpacked as they are loaded.

    Newer versions of transformers may leave them packed, for kernels that compute a little differently.
    """
    packing = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": packing(dequantize=True)} if packing else {}
