"""Shares by value: a child with drafts below it gets more than a leaf does, and all nodes of a level share one unit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.probs import Noise, sample, sent
from polydraft.schemes import (
    IID,
    Draws,
    Given,
    Product,
    Scheme,
    TopK,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
    require_scheme,
    set_law_of,
)
from polydraft.trees import Draft, TreeShape, Verdict
from polydraft.verifiers.nodes.optimal import Optimal
from polydraft.verifiers.selection.ordered import certain_tokens
from polydraft.verifiers.selection.rule import Numbers, Places, integers, numbers, tensor
from polydraft.verifiers.selection.value_curves import Seen, ValueCurves, paths_of, slopes_of
from polydraft.verifiers.selection.valued_shares import PARTS, SMALLEST, STEPS, DraftLaws, Slopes, settled, shares_at
from polydraft.verifiers.trees.lifts import PathLaw, emit, listed_atoms, path_to
from polydraft.verifiers.trees.lifts import settled as settled_verdict

NOISE = 1e-14
"""A unit of which less is free is full."""
SCHEMES = (IID, WithoutReplacement, TopThenIID, TopThenSample, TopK, Given, Product)


@dataclass(frozen=True)
class Valued:
    """Give children shares by what their shares bring, kept drafts below included.

    Problem: each node v has a probability a(v), its *scale*, with which the path stands at v when the drafts down to
    v's level are known. Some of the next drafts are looked at together, all below one level where they are independent.
    They get shares x of the whole unit, which also the paths that ended elsewhere give up for them:

        maximise  E[sum_r x_r + h_r(x_r)],    sum_r x_r <= 1,    E[shares of token c below v] <= a(v) target_v(c),

    with h_r 0 for a leaf and a concave curve for a child with children, guessed from the shape below it (`curve`).
    Rule: prices of tokens solve it (`settled`). With G the sum of the shares and K its mean over these drafts, what v
    keeps for itself is (a(v) - v's part of K) (1 - G) / (1 - K), and every other scale is multiplied by
    (1 - G) / (1 - K). Behind v the mass that its children left is emitted.
    Where all children of one node are leaves, shares are those of `Optimal`. Successive drafts are looked at node by
    node where a node has several: those with children two by two, or the first apart where it has more below it than
    the others alike, then the leaves by `Optimal`, each group in what those before it leave. Both copies of a repeated
    token have shares, each with its own subtree, unless the target is certain of it.
    Scheme: independent drafts, also with certain ones before them or of several rows; successive ones; certain ones.
    Exactness: scales are right on average over the drafts that are looked at, whatever came before, so the path ends
    at v, or goes on below it, with a(v) on average and a text that follows the target. h_r may be any curve that was
    fixed with the shape before the first draft was drawn (`Draft.planned`); trees whose shape follows from their drafts
    are verified by `BottomUp(Optimal)`, of several rows by `BottomUp(Race)`.
    Cost: prices are found on the host, at most 80 sweeps over a level's tokens.
    Acceptance: that of `theory.tree_optimum` on one level and on chains; see docs/theory/optimum.md for trees.
    Source: our own.

    Args:
        scheme: how the drafts are drawn.
        curves: those of the trees that they were measured on; others have composed ones.

    Raises:
        UnpairedScheme: the scheme is another one.
    """

    scheme: Scheme = WithoutReplacement()
    curves: ValueCurves = ValueCurves()
    name = "valued"
    lossless = True
    best_alone = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, SCHEMES, "The rule of shares by value")

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Draw the node where the path ends, and what follows it."""
        verdict = settled_verdict(self, draft, target_probs, noise)
        if verdict:
            return verdict
        law, uniforms = self.path_law(draft, target_probs), sent(noise.uniform(3), target_probs.device)
        end, rows = sample(law.end, uniforms[:, 2]), torch.arange(len(target_probs), device=target_probs.device)
        atom = sample(law.rest[rows, end], uniforms[:, 1])
        next_token = emit(draft.shortlist, target_probs, end, atom, uniforms[:, 0])
        return Verdict(path_to(draft.tree, end), draft.tree.depth[rows, end], next_token)

    def path_law(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        walks = self._walks(draft, target_probs)
        end, rest = (np.stack([getattr(walk, name) for walk in walks]) for name in ("scale", "left"))
        return PathLaw(*(tensor(found).to(target_probs.device) for found in (end, rest)))

    def measured(self, shape: TreeShape | None, finished: Iterable[tuple[Draft, Float[Tensor, "b n V"]]]) -> "Valued":
        """Return the rule with curves that fit the trees of finished steps.

        A step's own tree must not be among them: a curve that follows what is drawn below it is biased.

        Args:
            shape: what was planned of them; None for trees that grow.
            finished: the trees, with the target's rows at their nodes.

        Raises:
            InvalidParameter: a tree was planned otherwise.
        """
        seen = chain.from_iterable(self._seen(shape, *step) for step in finished)
        return replace(self, curves=ValueCurves(shape=shape).after(seen))

    def _seen(self, shape: TreeShape | None, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> Iterator[Seen]:
        if draft.planned != shape:
            raise InvalidParameter(
                f"Curves are measured on trees of one plan, {shape}, but a tree has {draft.planned}."
            )
        parents, valid = integers(draft.tree.parents), integers(draft.tree.valid.long())
        for walk, above, there in zip(self._walks(draft, target_probs), parents, valid, strict=True):
            through, below = walk.scale.copy(), np.zeros(len(above))
            for node in range(len(above) - 1, 0, -1):
                through[above[node]] += through[node]
                below[above[node]] += through[node] + below[node]
            for node, path in enumerate(paths_of(tuple(map(int, above)))):
                if node and there[node]:
                    yield path, float(walk.shares[node]), float(below[node])

    def _walks(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> "list[_Walk]":
        """Look at all drafts of every row's tree."""
        table = listed_atoms(draft, target_probs).double()
        padded = torch.nn.functional.pad(draft.probs, (0, 1))
        given = zip(
            numbers(padded), numbers(table), integers(draft.drafted_atoms()), integers(draft.tree.children), strict=True
        )
        planned = draft.planned
        if planned is not None and planned.size < draft.tree.tokens.shape[-1]:
            planned = None  # something was put beside what was planned
        known = dict[tuple[bytes, ...], tuple[Numbers, Numbers]]()
        curves = self.curves if self.curves.shape == planned else ValueCurves(shape=planned)
        slopes = (slopes_of(curves, tuple(map(int, parents))) for parents in integers(draft.tree.parents))
        walks = [_Walk(self.scheme, own, *row, known) for own, row in zip(slopes, given, strict=True)]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
            for walk in walks:
                walk.go_down()
        return walks


@dataclass(frozen=True, eq=False)
class _Siblings:
    """Drafts of one node that are looked at together.

    Args:
        node: their parent.
        children: their nodes.
        atoms: their places in the node's list.
        rows: the node's draft row or rows, without what was drawn and looked at before.
    """

    node: int
    children: Places
    atoms: Places
    rows: Numbers


class _Walk:
    """The scales of one tree's nodes, their shares when they were looked at, and the law behind each, as far as that.

    Args:
        scheme: how the drafts were drawn.
        curves: the slopes of each node's share.
        draft: the draft rows "n *J A".
        target: the target rows "n A".
        atoms: the drafts' places in their node's list, "n k".
        children: their nodes, -1 where they are absent, "n k".
        known: shares that were computed for other trees.
    """

    def __init__(
        self,
        scheme: Scheme,
        curves: Slopes,
        draft: Numbers,
        target: Numbers,
        atoms: Places,
        children: Places,
        known: "dict[tuple[bytes, ...], tuple[Numbers, Numbers]]",
    ) -> None:
        self.scheme, self.curves, self.known = scheme, curves, known
        self.draft, self.atoms, self.children = draft, atoms, children
        self.left, self.scale = target.copy(), np.zeros(len(target))
        self.shares = self.scale.copy()
        self.scale[0] = 1

    def go_down(self) -> None:
        """Look at all drafts, level by level."""
        nodes = [0]
        while nodes:
            groups = [self._siblings(node) for node in nodes if self.scale[node] > 0]
            nodes = [int(child) for one in groups for child in one.children]
            together = [one for one in groups if len(one.children) and not self._is_apart(one)]
            if together:
                self._look_at(together)
            for one in filter(self._is_apart, groups):
                self._look_at_several(one)

    def _siblings(self, node: int) -> _Siblings:
        there = self.children[node] >= 0
        return _Siblings(node, self.children[node][there], self.atoms[node][there], self.draft[node])

    def _is_apart(self, one: _Siblings) -> bool:
        return len(one.children) > 1 and set_law_of(self.scheme).draws is Draws.SUCCESSIVE

    def _look_at_several(self, one: _Siblings) -> None:
        """Look at successive drafts, group by group.

        What a first draft has is held while leaves are looked at, since a share that varies is worth less below.
        """
        held = list[int]()
        while len(one.children):
            worth = self.curves[one.children].sum(axis=-1) - STEPS * PARTS
            size = _together(worth)
            self._look_at([_Siblings(one.node, one.children[:size], one.atoms[:size], one.rows)], held)
            if size == 1 and not worth[1:].any():
                held.extend(one.children[:1].tolist())
            rest = one.rows.copy()
            rest[one.atoms[:size]] = 0
            total = max(float(rest.sum()), SMALLEST)
            one = _Siblings(one.node, one.children[size:], one.atoms[size:], rest / total)

    def _look_at(self, together: list[_Siblings], held: Sequence[int] = ()) -> None:
        """Move scales to some drafts, and to their nodes' and all others what is left, but for those that are held."""
        nodes, kept = [one.node for one in together], self.scale[[*held]]
        free, mass = 1 - kept.sum(), self.scale[nodes, None] * self.left[nodes]
        if free < NOISE:
            return
        shares, accepted = (free * found for found in self._shared(together, mass / free))
        given, mean = shares.sum(), accepted.sum()
        rest = mass - accepted
        self.scale[nodes] = rest.sum(axis=-1)
        self.scale *= max(free - given, 0) / (free - mean) if mean < free else 0.0
        self.scale[[*held]] = kept
        children = np.concatenate([one.children for one in together])
        self.scale[children] = self.shares[children] = shares
        total = rest.sum(axis=-1, keepdims=True)
        self.left[nodes] = np.where(total > 0, rest / np.where(total > 0, total, 1), self.left[nodes])

    def _shared(self, together: list[_Siblings], mass: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shares of some drafts, node by node, and how often each atom of their nodes is accepted."""
        first, count = together[0], sum(len(one.children) for one in together)
        slopes = self.curves[np.concatenate([one.children for one in together])]
        if count == 1:
            return _alone(self.scheme, first, mass)
        alike = bool((slopes == slopes[0]).all())
        successive = set_law_of(self.scheme).draws is Draws.SUCCESSIVE
        if len(together) == 1 and not self.scheme.several_rows:
            if (alike and slopes[0, 0] == STEPS) or (successive and count > 2):
                shares, accepted = Optimal(self.scheme).at_node(first.rows, mass[0], count, first.atoms)
                return _onto_first(shares, first.atoms), accepted[None]
        drafted = _laws(self.scheme, together)
        drafted = replace(drafted, distinct=successive and len(together) == 1)
        key = tuple(table.tobytes() for table in (drafted.rows, slopes, mass))
        if key not in self.known:
            self.known[key] = settled(drafted, slopes, mass)
        prices, taken = self.known[key]
        accepted = np.minimum(taken, mass)
        at = np.repeat(np.arange(len(together)), [len(one.atoms) for one in together])
        atoms = np.concatenate([one.atoms for one in together])
        often = taken[at, atoms]
        shares = shares_at(prices[at, atoms], slopes) * accepted[at, atoms] / np.where(often > 0, often, 1)
        for place in np.flatnonzero((mass > 0).sum(axis=-1) == 1):
            # of a certain token the first copy is kept, as `certain_verdict` says
            own = np.flatnonzero(at == place)
            hit = own[mass[place, atoms[own]] > 0][:1]
            shares[hit], shares[np.setdiff1d(own, hit)] = shares[own].sum(), 0.0
        return shares, accepted


def _together(worth: Places) -> int:
    """Return how many successive drafts are looked at together, the first ones, given what is worth having below each.

    Two, where the second has more below it than those after it, or as much as the first; the first alone, where it has
    most; else all, by the optimal rule.
    """
    if len(worth) < 3 or worth[0] < worth.max() or not worth.any():
        return len(worth)
    return 2 if worth[1] == worth[0] or worth[1] > worth[2:].max() else 1


def _alone(scheme: Scheme, one: _Siblings, mass: Numbers) -> tuple[Numbers, Numbers]:
    """Return the share of one draft, the best for it alone, and how often each atom is accepted."""
    atom, row = int(one.atoms[0]), one.rows.reshape(-1, one.rows.shape[-1])[0]
    accepted = np.zeros_like(mass)
    if scheme.lone_draft_is_drawn:
        np.minimum(mass, row / row.sum(), out=accepted)
        chance = row[atom] / row.sum()
        return np.array([min(mass[0, atom] / chance, 1.0) if chance > 0 else 0.0]), accepted
    accepted[0, atom] = mass[0, atom]
    return mass[0, atom : atom + 1].copy(), accepted


def _onto_first(shares: Numbers, atoms: Places) -> Numbers:
    """Add the shares of a repeated token up at its first copy."""
    first = (atoms[:, None] == atoms).argmax(axis=-1)
    together = np.zeros_like(shares)
    np.add.at(together, first, shares)
    return together


def _laws(scheme: Scheme, together: list[_Siblings]) -> DraftLaws:
    """Return the laws of drafts: their row, without the tokens that are certain, which are the first drafts."""
    rows, nodes, kinds = list[Numbers](), list[int](), list[int]()
    for place, one in enumerate(together):
        count, start = len(one.atoms), len(rows)
        table = one.rows.reshape(-1, one.rows.shape[-1])
        certain = certain_tokens(scheme, table[0], count) if not scheme.several_rows else table[0] < 0
        fixed = int(certain.sum())
        rows.extend(np.eye(1, len(certain), atom)[0] for atom in one.atoms[:fixed].tolist())
        drawn = np.where(certain, 0.0, table)[: count - fixed]
        rows.extend(drawn / drawn.sum(axis=-1, keepdims=True))
        nodes.extend([place] * (len(rows) - start))
        kinds.extend([*range(start, start + fixed), *(start + fixed + i % len(drawn) for i in range(count - fixed))])
    return DraftLaws(np.stack(rows), np.array(nodes), np.array(kinds))
