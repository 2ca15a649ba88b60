"""The Python source corpus: what the running interpreter has on disk, under permissive licences.

The corpus needs no download: it is the standard library plus every installed package whose metadata names a
permissive licence. Files are deduplicated by line, so that vendored and copied modules count once, and split
*by file*, so that no held-out line comes from a file that was trained on.
"""

import hashlib
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import cast

PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation|Unlicense|CNRI|HPND|0BSD|Zlib)\b", re.IGNORECASE
)
RESTRICTED = re.compile(r"\b(A?GPL\w*|LGPL\w*|GNU|MPL|Mozilla|EUPL|Proprietary|SSPL)\b", re.IGNORECASE)
LARGEST_FILE_BYTES = 400_000
SHORTEST_SHARED_LINE = 16


@dataclass(frozen=True)
class SourceFile:
    """One Python file of the corpus: where it comes from, under which licence, and its text."""

    package: str
    licence: str
    name: str
    text: str


def licence_of(distribution: metadata.Distribution) -> str:
    """Return the licence that an installed distribution declares, or an empty string."""
    fields = cast(Message, distribution.metadata)
    declared = [fields.get("License-Expression") or "", (fields.get("License") or "").split("\n")[0]]
    classifiers = [line for line in fields.get_all("Classifier") or [] if line.startswith("License")]
    return " / ".join(part for part in [*declared, *classifiers] if part)


def is_permissive(licence: str) -> bool:
    """Tell whether a licence text names a permissive licence and no copyleft one."""
    return bool(PERMISSIVE.search(licence)) and not RESTRICTED.search(licence)


def standard_library() -> Iterator[SourceFile]:
    """Yield the files of the running interpreter's standard library (PSF licence)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if "site-packages" not in inside.parts and "lib2to3" not in inside.parts:
            yield from _read(path, "python", "PSF-2.0", str(inside))


def installed_packages() -> Iterator[SourceFile]:
    """Yield the files of the installed packages whose declared licence is permissive."""
    for distribution in sorted(metadata.distributions(), key=lambda one: one.metadata["Name"].lower()):
        licence = licence_of(distribution)
        if not is_permissive(licence):
            continue
        for file in sorted(distribution.files or [], key=str):
            if file.suffix == ".py":
                yield from _read(Path(str(file.locate())), distribution.metadata["Name"], licence, str(file))


def _read(path: Path, package: str, licence: str, name: str) -> Iterator[SourceFile]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    if 200 <= len(text) <= LARGEST_FILE_BYTES:
        yield SourceFile(package, licence, name, text)


def deduplicated(files: Iterable[SourceFile], most_shared: float = 0.5) -> Iterator[SourceFile]:
    """Drop the files of which more than `most_shared` of the long lines stand in files kept before."""
    seen: set[int] = set()
    for file in files:
        lines = {hash(line) for raw in file.text.splitlines() if len(line := raw.strip()) >= SHORTEST_SHARED_LINE}
        if lines and len(lines & seen) <= most_shared * len(lines):
            seen |= lines
            yield file


def capped(files: Iterable[SourceFile], most_bytes_per_package: int) -> Iterator[SourceFile]:
    """Stop taking files of a package once it has given its share, so that no one style dominates."""
    taken: Counter[str] = Counter()
    for file in files:
        taken[file.package] += len(file.text)
        if taken[file.package] <= most_bytes_per_package:
            yield file


def is_held_out(file: SourceFile, share: float = 0.02) -> bool:
    """Assign a file to the held-out split by a hash of its path: stable across runs and machines."""
    digest = hashlib.sha256(f"{file.package}/{file.name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def gather(most_bytes_per_package: int = 16_000_000) -> tuple[list[SourceFile], list[SourceFile]]:
    """Collect the corpus and return its (training, held-out) files in a fixed, shuffled order."""
    everything = sorted(
        [*standard_library(), *installed_packages()],
        key=lambda file: hashlib.sha256(f"order/{file.package}/{file.name}".encode()).digest(),
    )
    kept = list(capped(deduplicated(everything), most_bytes_per_package))
    return [file for file in kept if not is_held_out(file)], [file for file in kept if is_held_out(file)]
