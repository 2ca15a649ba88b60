"""How much memory a batch needs for its keys and values, and how much there is."""

import os

import torch

from polydraft.errors import InvalidParameter
from polydraft.models.hugging_face import HuggingFaceModel

GIB = 1 << 30


def cache_bytes(model: HuggingFaceModel, capacity: int) -> int:
    """Return the bytes that one row's keys and values take: 2 x layers x heads x capacity x width x bytes each."""
    config = model.model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    return 2 * model.layers * kept * capacity * width * model.model.dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device; on a CPU, of the machine's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(models: list[HuggingFaceModel], batch: int, capacity: int) -> None:
    """Check that the caches of a batch fit into the free memory.

    Raises:
        InvalidParameter: they do not; the text says how much is needed, how much is free, and how many rows fit.
    """
    each = sum(cache_bytes(model, capacity) for model in models)
    free = min(free_bytes(model.device) for model in models)
    if each * batch > free:
        raise InvalidParameter(
            f"A batch of {batch} texts of up to {capacity} tokens needs {each * batch / GIB:.1f} GiB for keys and "
            f"values, but {free / GIB:.1f} GiB are free: {free // each} would fit."
        )
