"""Processors of grammar libraries that cannot be copied as they are, but whose parts can: how to fork them.

They are known by the names of their classes, so that nothing of these libraries is imported.
"""

import copy
from collections.abc import Callable
from typing import Any


def fork_of_library(processor: object) -> Callable[[], Any] | None:
    """Return what forks a processor of a known library; None for others."""
    kind = type(processor)
    fork = _FORKS.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if fork is None else lambda: fork(processor)


def of_row_of_library(processor: Any, row: int) -> Any:
    """Return a known library's processor with the grammar of one row of the batch; others as they are."""
    if fork_of_library(processor) is None or len(processor.compiled_grammars) == 1:
        return processor
    own = copy.copy(processor)
    own.compiled_grammars = [processor.compiled_grammars[row]]
    return own


def _fork_xgrammar(processor: Any) -> Any:
    """Share the compiled grammars, which do not change, and fork the matchers, which do."""
    twin = copy.copy(processor)
    twin.matchers = [one.fork() for one in processor.matchers]
    twin.token_bitmask = None if processor.token_bitmask is None else processor.token_bitmask.clone()
    return twin


_FORKS: dict[str, Callable[[Any], Any]] = {"xgrammar.contrib.hf.LogitsProcessor": _fork_xgrammar}
