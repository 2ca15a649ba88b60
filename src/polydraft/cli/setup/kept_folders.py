"""The folders in which files are kept between calls, and what they hold."""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from polydraft.fetched import DATA, PLACE, cache_folder
from polydraft.machine_code import kept_in

MACHINE_CODE = (".nbi", ".nbc")


@dataclass(frozen=True)
class KeptFolder:
    """A folder of files that are kept.

    Args:
        holds: what is kept there.
        variable: the environment variable that names another folder.
        path: the folder; empty if there is none that could be used.
        size: bytes of its files.
        files: how many these are.
        writable: whether files can be added.
        free: bytes that are free there; None if unknown.
    """

    holds: str
    variable: str
    path: str
    size: int = 0
    files: int = 0
    writable: bool = False
    free: int | None = None


FETCHED, COMPILED, HUB = "what was fetched and measured", "machine code", "models from the hub"


def kept_folders() -> tuple[KeptFolder, ...]:
    """Look at the folders; what is in them is counted and not read."""
    from huggingface_hub.constants import HF_HUB_CACHE

    fetched, hub = cache_folder(), Path(HF_HUB_CACHE)
    return (
        _looked_at(FETCHED, PLACE, fetched, files_in_tree(fetched)),
        _machine_code(),
        _looked_at(HUB, "HF_HUB_CACHE", hub, files_in_tree(hub)),
    )


def _machine_code() -> KeptFolder:
    """Look at the machine code: all of it lies in the package, or in folders beside each other."""
    folder, variable = kept_in(), "NUMBA_CACHE_DIR"
    if folder is None:
        return KeptFolder(COMPILED, variable, "")
    root = DATA.parent if folder.is_relative_to(DATA.parent) else folder.parent
    inside = (one for one in files_in_tree(root) if one.name.endswith(MACHINE_CODE))
    return _looked_at(COMPILED, variable, root, inside)


def files_in_tree(folder: Path) -> Iterable[os.DirEntry[str]]:
    """Yield the files below a folder, no links; what cannot be read is left out."""
    try:
        with os.scandir(folder) as entries:
            for one in entries:
                if one.is_dir(follow_symlinks=False):
                    yield from files_in_tree(Path(one.path))
                elif one.is_file(follow_symlinks=False):
                    yield one
    except OSError:
        return


def _looked_at(holds: str, variable: str, folder: Path, inside: Iterable[os.DirEntry[str]]) -> KeptFolder:
    sizes = [one.stat(follow_symlinks=False).st_size for one in inside]
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return KeptFolder(holds, variable, str(folder), sum(sizes), len(sizes), writable, shutil.disk_usage(there).free)
