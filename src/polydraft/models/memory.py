"""How much memory is free on a device, and how much of it copies of weights may take."""

import os
from pathlib import Path

import torch

from polydraft.errors import InvalidParameter

MEMORY_INFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")
MOST_COPIED = 1 << 30
"""Of models with more bytes of weights no copies are made, unless a user says so."""
VARIABLE = "POLYDRAFT_COPIED_MIB"
"""The environment variable with another limit, in MiB."""
SHARE = 2
"""Copies may take one over this of the free memory."""


def affords_copies(size: int, device: torch.device) -> bool:
    """Tell whether weights of so many bytes may be copied, joined and packed, which takes as much memory again.

    Raises:
        InvalidParameter: the limit that a user has set is no number.
    """
    return size <= most_copied() and size <= free_bytes(device) // SHARE


def most_copied() -> int:
    """Return the bytes of weights up to which copies are made, where there is memory.

    Raises:
        InvalidParameter: the limit that a user has set is no number.
    """
    said = os.environ.get(VARIABLE)
    if said is not None and not said.isdecimal():
        raise InvalidParameter(f"{VARIABLE} must be a whole number of MiB, but is {said!r}.")
    return MOST_COPIED if said is None else int(said) << 20


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device; on a CPU, of the machine's or container's memory.

    What torch keeps on a GPU for later and what the system keeps of files is counted as free.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return min(_machine_bytes(), _container_bytes())


def _machine_bytes() -> int:
    """Return the machine's available memory; where the system does not say, all that it has."""
    available = _field(MEMORY_INFO, "MemAvailable:")
    if available is not None:
        return available * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_bytes() -> int:
    """Return what the container may still take, if it has a limit; else more than any machine has."""
    try:
        limit = (CONTAINER / "memory.max").read_text().strip()
        used = int((CONTAINER / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62
    return max(0, int(limit) - used + (_field(CONTAINER / "memory.stat", "file") or 0)) if limit.isdigit() else 1 << 62


def _field(path: Path, name: str) -> int | None:
    """Return the number after a name at the beginning of a line; None if there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)
