"""Rules that decide node by node on the host, in loops of machine code, and the door to its arrays."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polydraft.schemes import Scheme
from polydraft.verifiers.outcome_law import (
    Counts,
    DraftRows,
    Drafts,
    Row,
    Shares,
    SharesRule,
    lone_draft,
    onto_first_copies,
    present,
)

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]
Flags = NDArray[np.bool_]

NO_DRAFTS: Places = np.zeros((1, 0), dtype=np.int64)
AtNode = Callable[[Numbers, Numbers, int, Places], tuple[Numbers, Numbers]]
"""Returns the shares of a node's drafts and the marginal of all atoms; the arguments are those of `at_node`."""


class SelectionRule(SharesRule):
    """A rule that selects one of a node's drafts, then accepts it as often as the target mass bears.

    A rule writes `at_node` and derives from this. A lone draft is not selected: it is verified as speculative sampling
    does, or as naive match where it is certain.
    """

    scheme: Scheme

    def at_node(self, row: Numbers, mass: Numbers, count: int, drafts: Places) -> tuple[Numbers, Numbers]:
        """Return the shares of a node's drafts, those of a token's copies apart, and the marginal of all atoms.

        Args:
            row: the draft row over all atoms, or the rows where the scheme has several.
            mass: the target mass.
            count: the number of drafts, at least one.
            drafts: the drafts, -1 where they are absent; none at all where shares are not wanted.
        """
        raise NotImplementedError

    def divided(self, drafts: Drafts, draft_probs: DraftRows, target_mass: Row) -> tuple[Shares, Row]:
        """Return the shares of all nodes, for a repeated token at its first copy, and the marginal."""
        alone = lone_draft(self.scheme, drafts, draft_probs, target_mass)
        if alone:
            return alone
        shares, marginal = node_by_node(self.at_node, draft_probs, target_mass, present(drafts), drafts)
        return onto_first_copies(shares, drafts), marginal

    def marginal(self, draft_probs: DraftRows, target_mass: Row, counts: Counts) -> Row:
        """Return the probability of accepting each atom, averaged over the drafts."""
        return node_by_node(self.at_node, draft_probs, target_mass, counts)[1]


def node_by_node(
    at_node: AtNode, draft_probs: DraftRows, target_mass: Row, counts: Counts, drafts: Drafts | None = None
) -> tuple[Shares, Row]:
    """Return shares and marginals of many nodes, like the target mass in type and device; zeros without drafts.

    Nodes that are alike, of which an enumeration of trees has many, are computed once.
    """
    masses = numbers(target_mass.reshape(-1, target_mass.shape[-1]))
    rows = numbers(draft_probs).reshape(len(masses), *draft_probs.shape[target_mass.dim() - 1 :])
    number = integers(counts.flatten())
    places = NO_DRAFTS.repeat(len(masses), 0) if drafts is None else integers(drafts.reshape(-1, drafts.shape[-1]))
    shares, marginal = np.zeros(places.shape), np.zeros(masses.shape)
    known = dict[tuple[bytes, ...], tuple[Numbers, Numbers]]()
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        for i in np.flatnonzero(number > 0).tolist():
            key = tuple(table[i].tobytes() for table in (rows, masses, number, places))
            if key not in known:
                known[key] = at_node(rows[i], masses[i], int(number[i]), places[i])
            shares[i], marginal[i] = known[key]

    def given_back(table: Numbers) -> Tensor:
        return tensor(table).to(target_mass).view(*target_mass.shape[:-1], table.shape[-1])

    return given_back(shares), given_back(marginal)


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
