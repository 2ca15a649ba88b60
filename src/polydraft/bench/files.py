"""Which files are read: regular ones; a pipe or a device might never end, or never begin."""

import os
import stat
from errno import EINVAL
from pathlib import Path

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def odd_kind(path: Path) -> str:
    """Return what a path is, if it is no regular file: "a pipe"; empty if it is one, or if nothing is there.

    Raises:
        OSError: the path cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return "" if stat.S_ISREG(mode) else KINDS.get(stat.S_IFMT(mode), "no file")


def check_regular(path: Path) -> None:
    """Check before a file is opened that reading it will end.

    Raises:
        OSError: the path is something else, or cannot be looked at.
    """
    kind = odd_kind(path)
    if kind:
        raise OSError(EINVAL, f"it is {kind}, not a regular file")


def home_expanded(path: str | Path) -> Path:
    """Return a path with ~ replaced by the home folder; as it is where there is no such user, unlike `expanduser`."""
    return Path(os.path.expanduser(path))
