"""A node's draft law over tokens in an order: Q of its prefixes, and a simple rule for every run of tokens."""

from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]
Flags = NDArray[np.bool_]


ROUNDING = 2.0**-48
"""What a mass of one may seem to lack for rounding."""
EVERY, FIRST, LOWEST = range(3)
"""Which drafts of a block a simple rule takes: one at random, the first in drafting order, or that of lowest place."""


@runtime_checkable
class OrderedRow(Protocol):
    """The draft law of a node, its tokens in an order, on the host.

    A *block* is the run of tokens at places low..high - 1. Given that all drafts lie below `high` and that some are in
    the block, its simple rule takes one of those. Divided by the token's draft probability, the probability that the
    rule takes a token must not increase along the block: `walk` relies on it.
    """

    @property
    def inside(self) -> Numbers:
        """Q of every prefix: Pr[all drafts are at the first j places], for j = 0..A."""
        ...

    def taken(self, low: int, high: int) -> Numbers:
        """Return Q(first low places) + Pr[the rule takes a token of the block below place j] at j = low..high.

        Entries at other j have no meaning.
        """
        ...

    def choice(self, low: int, high: int) -> int:
        """Return which of the drafts in the block the rule takes: `EVERY`, `FIRST` or `LOWEST`."""
        ...


def numbers(table: Tensor) -> Numbers:
    """Return a table of float64 numbers on the host."""
    return table.detach().to("cpu", torch.float64).numpy()


def integers(table: Tensor) -> Places:
    """Return a table of integers on the host."""
    return table.detach().cpu().numpy()


def tensor(table: Numbers | Places) -> Tensor:
    """Return a table of the host as a tensor that shares its memory."""
    return torch.from_numpy(table)  # pyright: ignore  not typed in torch


@lru_cache(maxsize=1024)
def counted(number: int) -> Places:
    """Return 0..number - 1, not to be written to."""
    places: Places = np.arange(number, dtype=np.int64)
    places.flags.writeable = False
    return places


def suffix_sums(mass: Numbers) -> Numbers:
    """Return the mass of all but the first j places for j = 0..A, added up from the end: small tails stay exact."""
    sums = np.zeros(len(mass) + 1)
    mass[::-1].cumsum(out=sums[-2::-1])
    return sums
