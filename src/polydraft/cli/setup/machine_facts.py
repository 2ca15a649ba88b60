"""What this machine has for models, and what `polydraft generate` would use of it."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from polydraft.bench.environment import is_busy, load
from polydraft.engine.measured import VARIABLE
from polydraft.models.anatomy import can_pack, multiplies_short
from polydraft.models.checkpoints.placing import device_named, precision_named
from polydraft.models.memory import SHARE, free_bytes, most_copied
from polydraft.planning.plan import processor_name

QUOTA = Path("/sys/fs/cgroup/cpu.max")
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class MachineFacts:
    """What a machine has.

    Args:
        processor: what it is called.
        cpus: how many of them this process may use at a time.
        threads: how many torch uses.
        load: how many threads of all programs wanted to run in the last minute; None where unknown.
        busy: whether other programs disturb ours by that.
        free: bytes of memory that are free.
        vectors: the instructions that torch's kernels use; "DEFAULT" for none beyond the oldest.
        packed: the precisions of which weights are packed for oneDNN.
        gpus: the names of GPUs that torch sees.
        driver: whether NVIDIA's driver is loaded.
        torch: the version of torch, which names its kind of build.
        copied: bytes of weights up to which copies are made.
    """

    processor: str
    cpus: int
    threads: int
    load: float | None
    busy: bool
    free: int
    vectors: str
    packed: tuple[str, ...]
    gpus: tuple[str, ...]
    driver: bool
    torch: str
    copied: int


@dataclass(frozen=True)
class MachineChoice:
    """What a call of `polydraft generate` would use where no option says otherwise, and why."""

    what: str
    value: str
    why: str


def machine_facts() -> MachineFacts:
    """Look at this machine.

    Raises:
        InvalidParameter: an environment variable with a limit is no number.
    """
    gpus = tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count() * torch.cuda.is_available())))
    threads, wanted = torch.get_num_threads(), load()
    free = free_bytes(torch.device("cpu"))
    kinds = (torch.float32, torch.bfloat16)
    return MachineFacts(
        processor=processor_name(),
        cpus=usable_cpus(),
        threads=threads,
        load=wanted,
        busy=wanted is not None and is_busy(wanted, {"threads": threads, "accelerator": gpus}),
        free=free,
        vectors=torch.backends.cpu.get_cpu_capability(),
        packed=tuple(str(kind).removeprefix("torch.") for kind in kinds if can_pack(torch.empty(0, dtype=kind))),
        gpus=gpus,
        driver=DRIVER.exists(),
        torch=torch.__version__,
        copied=min(most_copied(), free // SHARE),
    )


def usable_cpus() -> int:
    """Return how many CPUs this process may use at a time: by its affinity, and by the quota of its container."""
    allowed = getattr(os, "sched_getaffinity", None)
    count = len(allowed(0)) if allowed else os.cpu_count() or 1
    try:
        quota, period = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):  # no such file, or "max"
        return count
    return max(1, min(count, math.ceil(quota / period)))


def choices(facts: MachineFacts) -> tuple[MachineChoice, ...]:
    """Return what `polydraft generate` would use, which depends on the model only where that is said."""
    device = device_named("auto")
    on_cpu = device.type == "cpu"
    own = precision_named("auto", device) == "auto"
    can = "multiplies" if multiplies_short() else "does not multiply"
    by_user = os.environ.get("OMP_NUM_THREADS")
    measures = os.environ.get(VARIABLE) != "no"
    precision = "bfloat16 where the checkpoint has it, else float32" if own else "float32"
    limit = f"copies of up to {facts.copied >> 20:,} MiB of weights"
    return (
        MachineChoice("device", str(device), "torch sees no GPU" if on_cpu else "torch sees a GPU"),
        MachineChoice(
            "precision",
            precision if on_cpu else "the checkpoint's own",
            f"the processor {can} bfloat16" if on_cpu else "on a GPU",
        ),
        MachineChoice(
            "kernels",
            f"packed weights in {' and '.join(facts.packed)}" if on_cpu and facts.packed else "torch's own",
            f"oneDNN, {facts.vectors}" if on_cpu else "weights are packed on CPUs alone",
        ),
        MachineChoice(
            "pass", f"fused, {limit}", "where it is known for a model's type (`polydraft models`), else its own"
        ),
        MachineChoice(
            "threads",
            str(facts.threads),
            f"OMP_NUM_THREADS={by_user}" if by_user else f"torch's choice for {facts.cpus} CPUs",
        ),
        MachineChoice(
            "trees",
            "fitted to the times of passes" if measures else "the same on every machine",
            "measured at a first call" if measures else f"{VARIABLE}=no",
        ),
    )
