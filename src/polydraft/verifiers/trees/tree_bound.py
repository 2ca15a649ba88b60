"""A bound on what any exact rule keeps of a tree, at any vocabulary: the dual of the program of the tree, sampled."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.probs import to_atoms
from polydraft.schemes import Draws, Scheme, set_law_of
from polydraft.theory import inclusion
from polydraft.trees import Draft
from polydraft.verifiers.selection.rule import Numbers, Places, integers, numbers, tensor
from polydraft.verifiers.selection.value_curves import curves_of
from polydraft.verifiers.selection.valued_shares import STEPS, DraftLaws, Slopes, settled


@dataclass(frozen=True)
class PriceFamily:
    """How prices of texts follow from those of single nodes; any numbers bound.

    Args:
        factor: what the prices below the root are multiplied by.
        damping: the power to which what is taken of a draft is raised before it scales the target below it.
    """

    factor: float = 1.0
    damping: float = 1.0


FAMILIES = tuple(PriceFamily(factor, damping) for factor in (0.65, 0.8, 0.9, 1.0) for damping in (0.0, 0.5, 1.0))


def dual_values(
    draft: Draft, target_probs: Float[Tensor, "b n V"], scheme: Scheme, family: PriceFamily = PriceFamily()
) -> Float[Tensor, " b"]:
    """Return a number for each drawn tree whose mean over trees is at least what any exact rule keeps on average.

    For any prices l(y) >= 0 of texts, with the A of `theory.tree_optimum`,

        sum_y A(y)  <=  sum_c l(c) target(c)  +  E_T[max over paths from the root of the sum of w(v)],
        w(y) = 1 - l(y) + sum_c l(yc) target(c | y),

    because A(yc) <= A(y) target(c | y), and the flows of a tree from its root are a mixture of its paths. A price must
    follow from its text alone, not from the node where the text stands or from its siblings. Here prices behind a text
    are those of one node (`settled`), with the number of children and the curves that are usual at its depth, and with
    the target scaled by how often its last token is taken over how often it is drafted where children follow, damped.

    Where the shape has leaves above its last depth, they must have draft rows too (`Draft.probs`): the same texts may
    stand where children follow.

    Raises:
        InvalidParameter: no shape was planned, or such a leaf has no draft row.
    """
    shape = draft.planned
    if shape is None or shape.depth != draft.tree.topology.height:
        raise InvalidParameter("The bound needs trees whose whole shape was planned before they were drawn.")
    curves, parents = curves_of(shape), {*shape.parents}
    usual = [max(zip(level, nodes, strict=False)) for level, nodes in zip(shape.counts, shape.levels, strict=False)]
    slopes = [curves[[child for child, parent in enumerate(shape.parents) if parent == node]] for _, node in usual]
    inner = [
        sum(parent == node and child in parents for child, parent in enumerate(shape.parents)) for _, node in usual
    ]
    pricing = _Pricing(scheme, slopes, [max(1, count) for count in inner], family, {})
    target = to_atoms(target_probs, draft.shortlist)
    atoms = integers(draft.atoms.where(draft.tree.valid, -1))
    rows = zip(numbers(draft.probs), numbers(target), atoms, strict=True)
    return torch.tensor([pricing.of_tree(shape.parents, *row) for row in rows], dtype=torch.float64)


def cross_fitted(values: Float[Tensor, "f b"]) -> Float[Tensor, " b"]:
    """Return dual values by prices that were fitted on others.

    Each half is priced by the family whose mean is least on the other half, so that no choice follows from the values
    that it is judged by, and all of them count. Their mean is a bound. A single value is that of the last family.

    Args:
        values: those of trees, or their sums over texts, by every family of `FAMILIES`; what belongs to one text stands
            on one side of the middle.
    """
    half = values.shape[-1] // 2
    if not half:
        return values[-1]
    first, second = values[:, :half], values[:, half:]
    return torch.cat([first[second.mean(dim=-1).argmin()], second[first.mean(dim=-1).argmin()]])


@dataclass(frozen=True, eq=False)
class _Pricing:
    """The prices behind texts, by depth; those of rows that were seen before are kept."""

    scheme: Scheme
    slopes: list[Slopes]
    inner: list[int]
    family: PriceFamily
    known: dict[tuple[bytes, bytes, float, int], tuple[Numbers, Numbers]]

    def of_tree(self, parents: Sequence[int], draft: Numbers, target: Numbers, atoms: Places) -> float:
        """Return the dual value of one tree, whose nodes have these places in their parents' lists, or none, -1."""
        first, best = 0.0, 0.0
        at = list[
            tuple[int, float, Numbers, Numbers]
        ]()  # of each node: depth, path so far, prices and shares behind it
        for node, parent in enumerate(parents):
            depth, so_far, prices, shares = at[parent] if parent >= 0 else (-1, 0.0, target[0], target[0])
            there = parent < 0 or atoms[node] >= 0
            price, scale = (0.0, 1.0) if parent < 0 or not there else (prices[atoms[node]], shares[atoms[node]])
            behind, taken, comes = target[node], target[node], 0.0
            if there and depth + 1 < len(self.slopes):
                behind, taken = self.behind(draft[node], target[node], float(scale), depth + 1)
                comes = float(behind @ target[node])
            if parent < 0:
                first = comes
            else:
                so_far = so_far + 1 - float(price) + comes if there else -np.inf
                best = max(best, so_far)
            at.append((depth + 1, so_far, behind, taken))
        return first + best

    def behind(self, draft: Numbers, target: Numbers, scale: float, depth: int) -> tuple[Numbers, Numbers]:
        """Return the price of each atom behind a text, and what is taken of it over how often it is drafted."""
        key = draft.tobytes(), target.tobytes(), scale, depth
        if key not in self.known:
            self.known[key] = self._behind(draft, target, scale, depth)
        return self.known[key]

    def _behind(self, draft: Numbers, target: Numbers, scale: float, depth: int) -> tuple[Numbers, Numbers]:
        slopes = self.slopes[depth]
        rows = np.pad(draft.reshape(-1, draft.shape[-1]), ((0, 0), (0, 1)))
        if not (rows.sum(axis=-1) > 0).all():
            raise InvalidParameter(
                "The bound needs draft rows at all nodes above the last depth, also at leaves there; one has none."
            )
        rows, count = rows / rows.sum(axis=-1, keepdims=True), len(slopes)
        distinct = set_law_of(self.scheme).draws is Draws.SUCCESSIVE and count == 2
        drafted = DraftLaws(rows, np.zeros(len(rows), dtype=np.int64), np.arange(count) % len(rows), distinct)
        mass = scale**self.family.damping * target
        prices, taken = (table[0] for table in settled(drafted, slopes, mass[None]))
        own = tensor(rows if self.scheme.several_rows else rows[0])
        drawn = numbers(inclusion(self.scheme, own, torch.tensor(self.inner[depth])))
        share = np.minimum(taken, mass) / np.where(drawn > 0, drawn, 1.0)
        factor = 1.0 if depth == 0 else self.family.factor
        return prices * (factor / STEPS), share
