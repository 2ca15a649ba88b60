"""Names of devices and precisions: where a model lies, and what numbers it has."""

import torch

from polydraft.errors import CheckpointError, hint
from polydraft.models.anatomy import multiplies_short

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def device_named(name: object) -> torch.device:
    """Return the device that a name means, as of `load`.

    Raises:
        CheckpointError: there is none of that name here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    refused = CheckpointError(f"There is no device {name!r} here; use cpu, or cuda or cuda:1 on a machine with GPUs.")
    if not isinstance(name, str | torch.device):
        raise refused
    try:
        asked = torch.device(name)
        device = torch.empty(0, device=asked).device
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without the device's kind
        raise refused from error
    if device.type == "meta" or (device.type == "cpu" and asked.index):  # torch takes any number for the CPU
        raise refused
    return device


def precision_named(name: object, device: torch.device) -> torch.dtype | str:
    """Return the precision that a name means on a device, as of `load`; "auto" for the checkpoint's own.

    Raises:
        CheckpointError: there is none of that name.
    """
    if name == "auto":
        return "auto" if device.type == "cuda" or multiplies_short() else torch.float32
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or dtype not in PRECISIONS:
        meant = hint(name, ("auto", "float32", "bfloat16", "float16", "float64"))
        raise CheckpointError(f"There is no dtype {name!r}{meant}; use auto, float32, bfloat16, float16 or float64.")
    return dtype
