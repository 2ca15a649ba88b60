"""Which files are read: regular ones; a pipe or a device might never end, or never begin."""

import os
from errno import EINVAL
from pathlib import Path

from polydraft.options.places import odd_kind


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
