"""Draft laws over tokens in an order: the containment of prefixes, and a simple rule for every run of tokens."""

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]


@runtime_checkable
class OrderedRow(Protocol):
    """The draft law of one row, on the host.

    A *block* is the run of tokens at places low..high - 1. Given that all drafts lie below `high` and that some are in
    the block, its simple rule takes one of those. Divided by the token's draft probability, the probability that the
    rule takes a token must not increase along the block: `walk` relies on it.
    """

    @property
    def inside(self) -> Numbers:
        """Q of every prefix: Pr[all drafts are at the first j places], for j = 0..A."""
        ...

    def taken(self, low: int, high: int) -> Numbers:
        """Return Q(first low places) + Pr[the rule takes a token of the block below place j], for j = low..high."""
        ...

    def pick(self, low: int, high: int, places: list[int]) -> list[int]:
        """Return the drafts among which the rule chooses uniformly, of drafts at these places."""
        ...


@runtime_checkable
class Ordered(Protocol):
    """The draft laws of many rows."""

    @property
    def containment(self) -> Float[Tensor, "n C"]:
        """Q of every prefix of every row's order."""
        ...

    def row(self, index: int) -> OrderedRow:
        """Return one row on the host."""
        ...


def numbers(table: Tensor) -> Numbers:
    """Return a table of float64 numbers on the host."""
    return table.detach().to("cpu", torch.float64).numpy()


def running(values: Numbers) -> Numbers:
    """Return the sums of the first j values for j = 0..A."""
    sums = np.zeros(len(values) + 1)
    values.cumsum(out=sums[1:])
    return sums
