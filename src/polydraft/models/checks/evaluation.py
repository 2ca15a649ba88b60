"""Passes in evaluation mode over models that stay in the mode that they are in."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

from torch import nn

TRAINING = attrgetter("training")


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode for a while; each goes back to its own mode, also after an error.

    The flags are set one by one and not by `train`, which some layers override to merge or freeze weights.
    """
    if not any(map(TRAINING, modules)):
        yield
        return
    changed = [one for one in modules if one.training]
    try:
        for one in changed:
            one.training = False
        yield
    finally:
        for one in changed:
            one.training = True
