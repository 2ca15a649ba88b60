"""What would fail or be slow on a machine, told from what was seen, with what to do."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polydraft.cli.setup.installed import ExtraState, PackageState
from polydraft.cli.setup.kept_folders import COMPILED, FETCHED, HUB, KeptFolder

if TYPE_CHECKING:
    from polydraft.cli.setup.machine_facts import MachineFacts

FAILS, SLOW = "fails", "slow"
NEARLY_FULL = 1 << 30
"""Bytes of a disk that are soon full, and of copies of weights that are few."""


@dataclass(frozen=True)
class Finding:
    """What would fail or be slow, by its level, and what to do, in a sentence."""

    level: str
    sentence: str


def of_packages(packages: Iterable[PackageState], extras: Iterable[ExtraState]) -> Iterator[Finding]:
    """Yield a finding for each package that is needed and cannot be used; a missing extra is none."""
    for one in (*packages, *extras):
        if one.problem:
            yield Finding(FAILS, one.problem)


def of_machine(facts: "MachineFacts") -> Iterator[Finding]:
    """Yield what makes passes slow: threads, other programs, memory, kernels, a GPU that is not used."""
    if facts.driver and not facts.gpus:
        yield Finding(
            SLOW,
            f"A driver for NVIDIA's GPUs is loaded, but torch {facts.torch} sees no GPU: install a CUDA build of torch "
            "that the driver is new enough for, and look at CUDA_VISIBLE_DEVICES.",
        )
    if facts.threads > facts.cpus:
        yield Finding(
            SLOW,
            f"torch uses {facts.threads} threads, and this process may use {facts.cpus} CPUs at a time: set "
            f"OMP_NUM_THREADS={facts.cpus}.",
        )
    if "OMP_NUM_THREADS" in os.environ and facts.threads < facts.cpus and not facts.gpus:
        yield Finding(
            SLOW,
            f"OMP_NUM_THREADS lets torch use {facts.threads} of {facts.cpus} CPUs: set it to {facts.cpus}, unless "
            "other programs need them.",
        )
    if facts.busy:
        yield Finding(
            SLOW,
            f"Other programs keep this machine busy ({facts.load} threads wanted to run in the last minute): wait "
            "for them to end before you measure.",
        )
    if facts.vectors == "DEFAULT":
        yield Finding(
            SLOW, "torch's kernels use none of the processor's wide instructions: run on a processor with AVX2 or SVE."
        )
    if "float32" not in facts.packed and not facts.gpus:
        yield Finding(SLOW, "This build of torch has no oneDNN, for which weights are packed: install another build.")
    if facts.copied < NEARLY_FULL and not facts.gpus:
        yield Finding(
            SLOW,
            f"Weights of more than {facts.copied >> 20:,} MiB are not joined and packed, and {facts.free >> 20:,} MiB "
            "of memory are free: end other programs, or set POLYDRAFT_COPIED_MIB if it is lower.",
        )


def of_folders(folders: Iterable[KeptFolder]) -> Iterator[Finding]:
    """Yield what cannot be kept, and folders on disks that are nearly full."""
    lost = {
        FETCHED: (FAILS, "nothing can be fetched, and every process measures passes anew"),
        COMPILED: (SLOW, "every process compiles loops anew, for seconds"),
        HUB: (FAILS, "no model can be brought from the hub"),
    }
    for one in folders:
        level, effect = lost[one.holds]
        where = f"{one.path} cannot be written" if one.path else "No folder for machine code can be written"
        if not one.writable:
            yield Finding(level, f"{where}, so that {effect}: set {one.variable} to a folder that can.")
        elif one.free is not None and one.free < NEARLY_FULL:
            yield Finding(
                FAILS,
                f"Only {one.free >> 20:,} MiB are free on the disk of {one.path} ({one.holds}): free some, or set "
                f"{one.variable} to a folder on another disk.",
            )


def of_variables() -> Iterator[Finding]:
    """Yield what environment variables switch off."""
    if os.environ.get("POLYDRAFT_MEASURE") == "no":
        yield Finding(SLOW, "POLYDRAFT_MEASURE=no leaves default trees unfitted to this machine: unset it.")
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        yield Finding(SLOW, "NUMBA_DISABLE_JIT lets Python run loops that are machine code otherwise: unset it.")
