"""Loops over tokens as machine code."""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a function of arrays and numbers when it is first called.

    Divisions by zero give infinities, as in NumPy. The machine code is kept on disk where that can be written to. The
    compiler is not imported before it is needed: most programs call none of these functions.
    """
    own = inspect.unwrap(function)  # without what a type checker has put around it

    @cache
    def machine_code() -> Callable[..., Any]:
        from numba import njit

        try:
            return njit(own, cache=True, error_model="numpy", nogil=True)
        except RuntimeError:  # no place to keep it
            return njit(own, error_model="numpy", nogil=True)

    @wraps(own)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return machine_code()(*args, **kwargs)

    return call
