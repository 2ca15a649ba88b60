"""What can be seen of an object's state, and what copies of a processor share with it."""

import array
import copy
import dis
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from hashlib import blake2b
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Generator, Tensor, nn
from transformers import PreTrainedTokenizerBase

DEEPEST_CALLED = 6
"""How deep a processor is looked into for functions."""
LIBRARIES = ("builtins", "polydraft", "torch", "transformers", "numpy", "abc", "typing")
STORES = frozenset(("STORE_ATTR", "DELETE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "DELETE_GLOBAL"))
"""Operations by which a function keeps something for its next call."""
FIXED = (type(None), bool, int, float, complex, str, bytes, type, range, nn.Module, PreTrainedTokenizerBase, ModuleType)
Variable = tuple[Callable[[], Any], Callable[[Any], None]]


class Shared:
    """The shared variables of a processor, and the random numbers of Python and NumPy, as they are now."""

    def __init__(self, processor: object) -> None:
        self._saved = [(read, write, *_noted(read())) for read, write in _variables(processor)]
        self._random, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  the users' global state

    def put_back(self) -> bool:
        """Put everything back as it was; return whether a variable had changed."""
        random.setstate(self._random)
        np.random.set_state(self._numpy)  # noqa: NPY002
        changed = [one for one in self._saved if traces(one[0]()) != one[3]]
        for read, write, value, _ in changed:
            _restore(read(), value, write)
        return bool(changed)


def may_keep_state(processor: object) -> bool:
    """Tell whether a processor could keep something: it has fields that can change, or code that stores."""
    fields: Mapping[str, Any] = getattr(processor, "__dict__", None) or {}
    changeable = any(not _is_fixed(value) for value in fields.values())
    changeable |= isinstance(processor, FunctionType) and not _is_fixed(processor)
    return changeable or any(_stores(one.__code__) for one in _functions(processor) if one.__name__ != "__init__")


def _is_fixed(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_fixed(one) for one in cast(tuple[object, ...], value))
    if isinstance(value, partial):
        return all(map(_is_fixed, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, FunctionType):  # what it stores by itself is looked for in its code
        own = (*map(_contents, value.__closure__ or ()), *(value.__defaults__ or ()))
        return _of_library(value) or all(map(_is_fixed, own))
    return isinstance(value, FIXED) or isinstance(value, torch.Tensor)


def _stores(code: CodeType) -> bool:
    """Tell whether code, or code within it, stores into attributes or outer variables."""
    if any(one.opname in STORES and one.argval not in code.co_cellvars for one in dis.get_instructions(code)):
        return True
    return any(_stores(one) for one in code.co_consts if isinstance(one, CodeType))


def _variables(processor: object) -> Iterator[Variable]:
    for kind in type(processor).__mro__:
        if not _of_library(kind):
            for name, value in list(vars(kind).items()):
                if not name.startswith("__") and not callable(value) and not isinstance(value, property | staticmethod):
                    yield partial(getattr, kind, name), partial(setattr, kind, name)
    for function in _functions(processor):
        yield from _variables_of(function)


def _variables_of(function: FunctionType) -> Iterator[Variable]:
    for cell in function.__closure__ or ():
        yield partial(_contents, cell), partial(setattr, cell, "cell_contents")
    yield partial(getattr, function, "__defaults__"), partial(setattr, function, "__defaults__")
    yield partial(getattr, function, "__kwdefaults__"), partial(setattr, function, "__kwdefaults__")
    yield partial(getattr, function, "__dict__"), function.__dict__.update
    space = function.__globals__
    for name in function.__code__.co_names:
        if name in space and not callable(space[name]) and not isinstance(space[name], ModuleType):
            yield partial(space.get, name), partial(space.__setitem__, name)


def _functions(value: object, deepest: int = DEEPEST_CALLED, seen: set[int] | None = None) -> Iterator[FunctionType]:
    """Yield the functions of users that a processor consists of or refers to."""
    seen = set() if seen is None else seen
    if deepest == 0 or id(value) in seen or isinstance(value, FIXED):
        return
    seen.add(id(value))
    if isinstance(value, FunctionType):
        if _of_library(value):
            return
        yield value
        parts: list[object] = [_contents(cell) for cell in value.__closure__ or ()]
        parts += [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
    elif isinstance(value, MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, Mapping):
        parts = list(cast(Mapping[object, object], value).values())
    elif isinstance(value, list | tuple | set):
        parts = list(cast(list[object], value))
    else:
        kinds = [kind for kind in type(value).__mro__ if not _of_library(kind)]
        parts = [one for kind in kinds for one in vars(kind).values() if isinstance(one, FunctionType)]
        parts += list((getattr(value, "__dict__", None) or {}).values())
    for part in parts:
        yield from _functions(part, deepest - 1, seen)


def _of_library(maker: FunctionType | type) -> bool:
    """Tell whether a function or class is one of the libraries', which keep nothing in their variables."""
    return (maker.__module__ or "").split(".")[0] in LIBRARIES


def _noted(value: object) -> tuple[object, object]:
    """Return a copy of a value, or itself where there is none, and what can be seen of it."""
    try:
        return copy.deepcopy(value), traces(value)
    except Exception:  # noqa: BLE001  what cannot be copied cannot be put back
        return value, traces(value)


def _restore(now: Any, before: Any, write: Callable[[Any], None]) -> None:
    """Make a variable what it was, in place where others may hold the same object."""
    if isinstance(now, list) and isinstance(before, list):
        now[:] = before
    elif isinstance(now, dict | set) and type(now) is type(before):
        now.clear()
        now.update(before)
    elif getattr(now, "__dict__", None) is not None and type(now) is type(before) and not isinstance(now, FunctionType):
        vars(now).clear()
        vars(now).update(vars(before))
    else:
        write(before)


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
