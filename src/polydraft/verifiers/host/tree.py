"""One row of a batch of drafts on the host."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from polydraft.trees import Draft, Verdict
from polydraft.verifiers.selection.compiled import compiled
from polydraft.verifiers.selection.ordered import Flags, Numbers, Places, numbers


@dataclass(frozen=True, eq=False)
class HostTree:
    """A token tree with the laws of draft and target, as arrays.

    Args:
        children: each node's children in drafting order, padded with -1.
        valid: which nodes are there.
        places: each node's place in its parent's shortlist.
        shortlist: each node's tokens, -1 in empty places.
        whole: whether the shortlists of nodes with children are all tokens.
        probs: each node's draft probabilities, one row or several.
        target: the target's rows.
        uniforms: random numbers; the first is for a token off the shortlist.
    """

    children: Places
    valid: Flags
    places: Places
    shortlist: Places
    whole: bool
    probs: NDArray[np.floating]
    target: NDArray[np.floating]
    uniforms: Numbers

    @classmethod
    def each(
        cls, draft: Draft, target_probs: Float[Tensor, "b n V"], uniforms: Float[Tensor, "b u"]
    ) -> "list[HostTree]":
        """Read all rows of a batch."""
        tree = draft.tree
        tables = (tree.topology.children, tree.valid, draft.atoms, draft.shortlist)
        children, valid, places, shortlist = (table.numpy() for table in tables)
        probs, target, numbered = draft.probs.numpy(), target_probs.numpy(), numbers(uniforms)
        return [
            cls(children[i], valid[i], places[i], shortlist[i], draft.whole, probs[i], target[i], numbered[i])
            for i in range(len(numbered))
        ]

    def drafts(self, node: int) -> list[int]:
        """Return the valid children of a node."""
        return [child for child in self.children[node].tolist() if child >= 0 and self.valid[child]]

    def atoms(self, node: int) -> Numbers:
        """Return the target's row on a node's shortlist and its tail."""
        return atoms_of(self.target[node], self.shortlist[node], self.whole)

    def draft_row(self, node: int) -> Numbers:
        """Return a node's draft row, or its rows, with a tail of none."""
        probs = self.probs[node]
        padded = np.zeros((*probs.shape[:-1], probs.shape[-1] + 1))
        padded[..., :-1] = probs
        return padded

    def drawn(self, node: int, weights: Numbers, uniform: float) -> int:
        """Draw a token that ends a path: an atom by its weight, or by the target's row if there is no weight."""
        listed = self.shortlist[node]
        if weights[-1] > 0 and not (listed >= 0).any():
            return self._off_list(node)
        atom = drawn(weights if weights.sum() > 0 else self.atoms(node), uniform)
        return int(listed[atom]) if atom < len(listed) else self._off_list(node)

    def _off_list(self, node: int) -> int:
        """Draw the tail's token from the target's row off the shortlist; from all of it if rounding made the tail."""
        listed, row = self.shortlist[node], self.target[node].astype(np.float64)
        off_list = row.copy()
        off_list[listed[listed >= 0]] = 0
        return drawn(off_list if off_list.sum() > 0 else row, float(self.uniforms[0]))


@compiled
def atoms_of(row: NDArray[np.floating], tokens: Places, whole: bool) -> Numbers:
    """Return a row on a shortlist and its tail; `whole` lists are all tokens in order, or empty."""
    size, listed = len(tokens), 0.0
    mass = np.zeros(size + 1)
    all_in_order = whole and size > 0 and tokens[0] >= 0
    for place in range(size):
        token = place if all_in_order else tokens[place]
        if token >= 0:
            mass[place] = row[token]
            listed += mass[place]
    mass[size] = 0.0 if all_in_order else max(1 - listed, 0.0)
    return mass


@compiled
def drawn(weights: Numbers, uniform: float) -> int:
    """Return what `probs.sample` draws from one row of weights, not all zero."""
    total, sums, last = 0.0, 0.0, 0
    for place in range(len(weights)):
        total += weights[place]
    point = uniform * total
    for place in range(len(weights)):
        if weights[place] > 0:
            last = place  # rounding may leave the point at the very end
            sums += weights[place]
            if sums > point:
                break
    return last


def verdict_of(ends: list[tuple[list[int], int]], height: int) -> Verdict:
    """Join the rows' paths, without their roots, and the tokens that follow them."""
    paths = [path + [-1] * (height - len(path)) for path, _ in ends]
    return Verdict(
        torch.tensor(paths, dtype=torch.int64).view(len(ends), height),
        torch.tensor([len(path) for path, _ in ends]),
        torch.tensor([token for _, token in ends]),
    )
