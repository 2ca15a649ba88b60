"""What can be seen of an object's state, to be compared with what is seen later."""

import array
import pickle
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
from hashlib import blake2b
from types import CellType, FunctionType, MethodType, ModuleType
from typing import cast

import numpy as np
import torch
from torch import Generator, Tensor, nn
from transformers import PreTrainedTokenizerBase

DEEPEST = 8
"""How deep fields are looked into."""


def traces(value: object, deepest: int = DEEPEST) -> object:
    """Return what can be seen of a value's state, to be compared with what is seen later; models do not count."""
    if value is None or isinstance(value, bool | int | str | bytes | Enum):
        return value
    if isinstance(value, float | complex):
        return repr(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), _digest(value)
    if isinstance(value, Generator):
        return _digest(value.get_state())
    if isinstance(value, np.ndarray | bytearray | array.array):
        return type(value).__name__, bytes(value)
    if deepest == 0 or isinstance(value, nn.Module | PreTrainedTokenizerBase | ModuleType | type):
        return type(value).__qualname__
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value).items()
        return [(traces(name, deepest - 1), traces(one, deepest - 1)) for name, one in items]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [traces(one, deepest - 1) for one in cast(Iterable[object], value)]
    parts = [traces(one, deepest - 1) for one in _parts(value)]
    return type(value).__qualname__, parts, b"" if any(one is not None for one in parts) else _pickled(value)


def _parts(value: object) -> list[object]:
    """Return what a function or an object of any other class holds."""
    if isinstance(value, FunctionType):
        return [*map(_contents, value.__closure__ or ()), value.__defaults__, value.__dict__]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [getattr(value, "__dict__", None), *(getattr(value, name, None) for name in slots)]


def _pickled(value: object) -> bytes:
    """Return what an object without fields would be stored as, such as an iterator's place; nothing if it cannot be."""
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001  whatever its class says to that
        return b""


def _contents(cell: CellType) -> object:
    """Return what a closure's variable holds; nothing if it was not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _digest(tensor: Tensor) -> bytes:
    """Return a digest of a tensor's numbers."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
