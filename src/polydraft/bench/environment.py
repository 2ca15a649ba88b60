"""What a measurement was made on: models, versions, machine, memory and how busy it was."""

import os
import platform
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn

from polydraft.drafters import Drafter, owned_networks
from polydraft.machine_code import clock
from polydraft.planning.plan import processor_name

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
BUSY = 1.5


@dataclass(frozen=True)
class RayActor:
    """An actor of a Ray cluster that measured.

    Args:
        actor: the beginning of its id.
        processor: its node's, or its GPU.
        cores: its node's.
    """

    actor: str
    processor: str
    cores: int | None


def actors_in_words(places: Iterable[RayActor | None]) -> str:
    """Say how many actors of a cluster measured, on which processors; empty where none did."""
    found = Counter(one.processor for one in {*places} if one is not None)
    if not found:
        return ""
    by_processor = ", ".join(f"{count} on {name}" for name, count in sorted(found.items()))
    actors = f"{found.total()} actor{'s' * (found.total() != 1)}"
    return f"{actors} of a Ray cluster measured: {by_processor}."


def described(model: nn.Module | Drafter) -> dict[str, object]:
    """Return a model's or a head's size, precision and device, and a number that tells its weights from others."""
    networks = owned_networks(model) if isinstance(model, Drafter) else (model,)
    weights = [one for network in networks for one in network.parameters()]
    if not weights:  # as of a drafter that has only tokens of its target
        return {"parameters": 0, "dtype": "none", "device": "none", "weights": "none"}
    mark = 0
    for one in weights:
        mark = crc32(one.detach().flatten()[:256].double().cpu().numpy().tobytes(), mark)
    return {
        "parameters": sum(one.numel() for one in weights),
        "dtype": str(weights[0].dtype).removeprefix("torch."),
        "device": weights[0].device.type,
        "weights": f"{mark:08x}",
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that the results depend on."""
    return {"polydraft": version("polydraft"), "torch": torch.__version__}


def machine(device: torch.device) -> dict[str, object]:
    """Return the processor, its cores, torch's threads and, on a GPU, its name."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "system": platform.system(),
    }


def cluster_machine(device: str, threads: int) -> dict[str, object]:
    """Return the same of whatever nodes of a Ray cluster measure; which did is told with what they measured."""
    accelerator = "GPUs of a Ray cluster" if device == "cuda" else None
    names = {"processor": "nodes of a Ray cluster", "system": platform.system()}
    return {**names, "cores": None, "threads": threads, "accelerator": accelerator}


def load() -> float | None:
    """Return how many threads of all programs wanted to run in the last minute, on average; None where unknown."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def now(device: torch.device) -> float:
    """Return the seconds of `clock` once a GPU has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()


def is_busy(load: float, place: dict[str, Any]) -> bool:
    """Tell whether other programs disturb times: half as many more threads want to run than are ours, on a CPU."""
    return load > BUSY * place["threads"] and not place["accelerator"]


def reset_peak_memory(device: torch.device) -> None:
    """Forget the largest amount of memory used so far, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        try:
            CLEAR.write_text(RESET_PEAK)
        except OSError:
            return


def peak_memory(device: torch.device) -> float | None:
    """Return the largest amount of memory used since the reset, in MiB; None where the system does not tell.

    On a GPU these are torch's tensors there; on a CPU it is all of the process that lies in memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), None)
