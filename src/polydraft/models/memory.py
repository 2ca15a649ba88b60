"""How much memory a batch needs for its keys and values, and how much there is."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from polydraft.errors import InvalidParameter
from polydraft.models.hugging_face import HuggingFaceModel
from polydraft.models.language_model import LanguageModel

GIB = 1 << 30
MEMORY_INFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")


def module_of(model: LanguageModel) -> nn.Module | None:
    """Return the module that a model runs; None if it is none of Hugging Face's, so that nothing is known of it.

    What wraps a model names its `module`.
    """
    return model.model if isinstance(model, HuggingFaceModel) else getattr(model, "module", None)


def weight_bytes(model: LanguageModel) -> int:
    """Return the bytes of a model's weights; 0 if nothing is known of them."""
    module = module_of(model)
    return 0 if module is None else sum(one.numel() * one.element_size() for one in module.parameters())


def cache_bytes(model: HuggingFaceModel, capacity: int) -> int:
    """Return the bytes of one row: those of all keys and values in `capacity` slots, and those of states.

    What a decoder keeps of an encoder's states depends on these, and is not counted.
    """
    found = model.kept
    if found.numbers or found.remembered:
        return found.numbers * capacity * model.model.dtype.itemsize + found.remembered
    config = model.model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    return 2 * model.layers * kept * capacity * width * model.model.dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device; on a CPU, of the machine's or container's memory.

    What torch keeps on a GPU for later and what the system keeps of files is counted as free.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return min(_machine_bytes(), _container_bytes())


def check_memory(models: Sequence[LanguageModel], batch: int, capacity: int) -> None:
    """Check that the caches of a batch fit into the free memory, as far as the models' caches are known.

    Raises:
        InvalidParameter: they do not; the text says how much is needed, how much is free, and how many rows fit.
    """
    known = [model for model in models if isinstance(model, HuggingFaceModel)]
    each = sum(cache_bytes(model, capacity) for model in known)
    free = min((free_bytes(model.device) for model in known), default=0)
    if each * batch > free:
        fit = free // each
        raise InvalidParameter(
            f"A batch of {batch} texts of up to {capacity} tokens needs {each * batch / GIB:.1f} GiB for keys and "
            f"values, but {free / GIB:.1f} GiB are free: "
            + (f"{fit} would fit." if fit else "not even one fits; ask for fewer new tokens.")
        )


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
