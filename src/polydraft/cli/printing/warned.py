"""Warnings as the command line says things: a sentence on standard error, without a place in the source."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from polydraft.cli.printing.visible import on_one_line
from polydraft.errors import CUT


@contextmanager
def warnings_as_sentences(*, always: bool = True) -> Iterator[None]:
    """Write warnings to standard error as they come, one sentence each.

    Args:
        always: whether what goes wrong in a run is said however often it comes; else as Python's filters have it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("default", CUT, UserWarning)
        if always:
            warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = lambda message, *_, **__: sys.stderr.write(f"polydraft: {on_one_line(str(message))}\n")
        yield
