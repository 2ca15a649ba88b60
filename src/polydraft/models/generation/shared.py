"""What copies of a processor share with it: variables of its class, of its functions and of their modules.

A copy has fields of its own, but a counter in a class, in a closure or in a module is the same for all copies. A trial
of copies would change it. So such variables are noted before, and put back after.
"""

import copy
import dis
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from polydraft.models.generation.traces import traces

DEEPEST = 6
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


def _functions(value: object, deepest: int = DEEPEST, seen: set[int] | None = None) -> Iterator[FunctionType]:
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


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


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
