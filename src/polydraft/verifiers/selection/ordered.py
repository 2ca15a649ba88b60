"""Draft laws over tokens in an order: the containment of prefixes, and a simple rule for every run of tokens."""

from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]
Flags = NDArray[np.bool_]
FARTHEST = np.iinfo(np.int64).max
"""A place after all others."""


@runtime_checkable
class OrderedRows(Protocol):
    """The draft laws of some rows, on the host.

    A *block* is the run of tokens at places low..high - 1, one for each row. Given that all drafts lie below `high` and
    that some are in the block, its simple rule takes one of those. Divided by the token's draft probability, the
    probability that the rule takes a token must not increase along the block: `walk` relies on it.
    """

    @property
    def inside(self) -> Numbers:
        """Q of every prefix: Pr[all drafts are at the first j places], for j = 0..A."""
        ...

    @property
    def priority(self) -> Numbers:
        """The probability that each token is the draft at the highest place: differences of `inside`."""
        ...

    def kept(self, rows: Places) -> "OrderedRows":
        """Return the laws of some of the rows."""
        ...

    def taken(self, low: Places, high: Places) -> Numbers:
        """Return Q(first low places) + Pr[the rule takes a token of the block below place j] at j = low..high.

        Entries at other j have no meaning.
        """
        ...

    def picked(self, low: Places, high: Places, places: Places) -> Flags:
        """Return the drafts among which the rule chooses uniformly, of drafts at these places; -1 for absent ones."""
        ...


@runtime_checkable
class Ordered(Protocol):
    """The draft laws of many rows."""

    @property
    def containment(self) -> Numbers:
        """Q of every prefix of every row's order."""
        ...

    def rows(self) -> OrderedRows:
        """Return the rows with what their simple rules need."""
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


def entry(table: Numbers, place: Places) -> Numbers:
    """Return one entry of every row."""
    return table[counted(len(place)), place]


def within(low: Places, high: Places, places: Places) -> Flags:
    """Return which of the places are in the rows' blocks."""
    return (places >= low[:, None]) & (places < high[:, None])


def lowest(low: Places, high: Places, places: Places) -> Flags:
    """Return which draft is the lowest in the rows' blocks: one in each row."""
    first = np.where(within(low, high, places), places, FARTHEST).argmin(axis=1)
    return counted(places.shape[1]) == first[:, None]


def prefix_sums(mass: Numbers | Flags) -> Numbers:
    """Return the mass of the first j places of every row for j = 0..A."""
    sums = np.zeros((len(mass), mass.shape[1] + 1))
    mass.cumsum(axis=1, out=sums[:, 1:])
    return sums


def suffix_sums(mass: Numbers) -> Numbers:
    """Return the mass of all but the first j places for j = 0..A, added up from the end: small tails stay exact."""
    sums = np.zeros((len(mass), mass.shape[1] + 1))
    mass[:, ::-1].cumsum(axis=1, out=sums[:, -2::-1])
    return sums
