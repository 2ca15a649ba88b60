"""Loops over tokens as machine code, and a clock that stands still while it is made."""

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

COMPILING = "Compiling machine code once, which takes some seconds ..."
"""What users are told while they wait for it."""
_AWAY = threading.local()
_TOLD: list[Callable[[], object]] = []


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a function of arrays and numbers when it is first called.

    Divisions by zero give infinities, as in NumPy. The machine code is kept on disk where that can be written to, so
    that other processes load it. The compiler is not imported before it is needed: most programs call none of these
    functions. What a signal's handler raises in machine code, such as KeyboardInterrupt, is raised as it is. Compiled
    functions of one file may call each other.
    """
    own = inspect.unwrap(function)  # without what a type checker has put around it

    @cache
    def machine_code() -> Callable[..., Any]:
        with standstill():
            return _made(own)

    @wraps(own)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return machine_code()(*args, **kwargs)
        except SystemError as error:  # what Python makes of an exception beside a result
            raise error.__cause__ or error from None

    vars(call)["machine_code"] = machine_code
    return call


def _made(own: FunctionType) -> Any:
    """Return the function with what makes its machine code, for each combination of types once."""
    njit = import_module("numba").njit
    called = {name: getattr(own.__globals__.get(name), "machine_code", None) for name in own.__code__.co_names}
    names = own.__globals__ | {name: code() for name, code in called.items() if code}
    alone = wraps(own)(FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__))
    try:
        made = njit(alone, cache=True, error_model="numpy", nogil=True)
    except RuntimeError:  # no place to keep it
        made = njit(alone, error_model="numpy", nogil=True)
    made.compile = partial(_compile, made, made.compile)
    return made


def kept_in() -> Path | None:
    """Return the folder where this file's machine code would be kept, as other files' is; None if nowhere can be."""
    try:
        return Path(import_module("numba").njit(clock, cache=True)._cache.cache_path)
    except RuntimeError:
        return None


def _compile(made: Any, compile: Callable[[Any], Any], signature: Any) -> Any:
    """Make or load the machine code for some types, while the clock stands still.

    A file on disk may be broken, or, by two processes that wrote at once, hold the machine code for other types. Then
    all that is kept of this function is forgotten and made anew.
    """
    from numba.core.caching import NullCache
    from numba.core.event import install_listener

    with standstill(), install_listener("numba:compile", _listener()):
        for _ in range(2):
            try:
                entry = compile(signature)
                if signature in made.overloads:
                    return entry
            except SystemError:  # not of a file: see `compiled`
                raise
            except Exception:  # noqa: BLE001  nobody lists what a broken file raises; a lasting error comes below
                pass
            with suppress(Exception):
                made._cache.flush()
        made._cache = NullCache()
        return compile(signature)


@cache
def _listener() -> Any:
    """Return what numba tells before it compiles."""
    from numba.core.event import Listener

    class Telling(Listener):
        def on_start(self, event: object) -> None:
            """Tell whoever wants to know, once."""
            while _TOLD:
                _TOLD.pop()()

        def on_end(self, event: object) -> None:
            """Do nothing: who waits sees the end."""

    return Telling()


@contextmanager
def told_first(tell: Callable[[], object]) -> Iterator[None]:
    """Call a function before the first machine code is made inside: that takes seconds, loading it does not."""
    _TOLD.append(tell)
    try:
        yield
    finally:
        with suppress(ValueError):  # it was told
            _TOLD.remove(tell)


def clock() -> float:
    """Return seconds as `time.perf_counter` does, less those that this thread has spent inside `standstill`."""
    return time.perf_counter() - getattr(_AWAY, "seconds", 0.0)


@contextmanager
def standstill() -> Iterator[None]:
    """Let this thread's `clock` stand still inside: for what is done once, and is no part of decoding."""
    begin = clock()
    try:
        yield
    finally:
        _AWAY.seconds = time.perf_counter() - begin
