"""Shares by value: from the leaves up, a child with drafts below it gets more of its node than a leaf does."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.probs import Noise, normalised, without
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
from polydraft.verifiers.outcome_law import DraftRows, Drafts, Rate, Row, at_draft, divided, lone_draft, present
from polydraft.verifiers.selection.ordered import certain_tokens
from polydraft.verifiers.selection.rule import Numbers, Places, node_by_node
from polydraft.verifiers.selection.value_curves import slopes_of
from polydraft.verifiers.selection.valued_shares import STEPS, Slopes, settled, shares_at
from polydraft.verifiers.trees.lifts import Division, FromLeaves, PathLaw, divided_by, first_success, share_of, trials

SCHEMES = (IID, WithoutReplacement, TopThenIID, TopThenSample, TopK, Given, Product)


@dataclass(frozen=True)
class Valued(FromLeaves):
    """Give children shares by what their shares bring, kept drafts below included.

    Rule: the lift from the leaves up (`BottomUp`), with shares x_r of a node's drafted children r that maximise

        E[sum_r x_r + h_r(x_r)],    sum_r x_r <= 1,    E[shares of a token] <= scale * target(token),

    where h_r is 0 for a leaf and a concave curve for a child with children, guessed from the shape below it (`curve`).
    Prices of tokens solve it (`settled`). Where no child has children, and where the shapes below three or more are
    alike, shares are those of `Optimal`. Without replacement and
    with three children or more, the first child is tried against its own row as in `TraversalVerification` if it alone
    has children, and the others after it by `Optimal` on the row without it. Both copies of a repeated token have
    shares, each with its own subtree, unless the target is certain of it.
    Scheme: independent drafts, also with certain ones before them or of several rows; successive ones; certain ones.
    Exactness: as `BottomUp`, for any curves: shares depend on the node's row, its drafts, its scale and the shape that
    was planned before the first draft was drawn (`Draft.planned`), never on what was drawn below. Trees whose shape
    follows from their drafts are divided as by `Optimal`.
    Cost: prices node by node on the host, at most 40 sweeps over K tokens.
    Acceptance: that of `theory.tree_optimum` on one level and on chains; see docs/theory/optimum.md for trees.
    Source: our own.

    Raises:
        UnpairedScheme: the scheme is another one.
    """

    scheme: Scheme = WithoutReplacement()
    name = "valued"
    lossless = True
    best_alone = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, SCHEMES, "The rule of shares by value")

    def tried(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Toss the coins of the trees' nodes."""
        tables, kinds = _kinds_of(draft)
        return first_success(
            trials(draft, target_probs, partial(self.divide, tables=tables), kinds), draft, target_probs, noise
        )

    def path_law(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        tables, kinds = _kinds_of(draft)
        found = trials(draft, target_probs, partial(self.divide, tables=tables), kinds)
        return found.law(draft.tree.topology.post_order)

    def divide(
        self,
        drafts: Drafts,
        draft_probs: DraftRows,
        target_probs: Row,
        scale: Rate,
        kinds: Int[Tensor, "*b"],
        *,
        tables: tuple[Slopes, ...],
    ) -> Division:
        """Divide the mass of nodes, those of one kind together."""
        parts = Division(torch.zeros_like(drafts, dtype=scale.dtype), torch.zeros_like(target_probs), scale.clone())
        for kind, table in enumerate(tables):
            own: Bool[Tensor, "*b"] = kinds == kind
            found = self._divided(table, drafts[own], draft_probs[own], target_probs[own], scale[own])
            for whole, part in zip(parts, found, strict=True):
                whole[own] = part
        return parts

    def _divided(
        self, slopes: Slopes, drafts: Drafts, draft_probs: DraftRows, target_probs: Row, scale: Rate
    ) -> Division:
        mass, width = scale.unsqueeze(-1) * target_probs, drafts.shape[-1]
        successive = set_law_of(self.scheme).draws is Draws.SUCCESSIVE
        alone = lone_draft(self.scheme, drafts, draft_probs, mass)
        if alone:
            return divided_by(*alone, mass, scale)
        alike = bool((slopes[:width] == slopes[0]).all())
        if not self.scheme.several_rows and alike and (slopes[0, 0] == STEPS or width > 2):
            return divided_by(*divided(Optimal(self.scheme), drafts, draft_probs, mass), mass, scale)
        if successive and width > 2:
            return self._first_apart(slopes, drafts, draft_probs, mass, scale)
        rule = partial(self._at_node, slopes)
        return divided_by(*node_by_node(rule, draft_probs, mass, present(drafts), drafts), mass, scale)

    def _first_apart(self, slopes: Slopes, drafts: Drafts, law: Row, mass: Row, scale: Rate) -> Division:
        """Try the first draft against its own row; if it fails, the others have what its failure leaves."""
        if slopes[0].sum() < slopes[1:].sum(axis=-1).max():
            return divided_by(*divided(Optimal(self.scheme), drafts, law, mass), mass, scale)
        first = drafts[..., 0]
        there = (first >= 0).unsqueeze(-1)
        share = share_of(at_draft(mass, first), at_draft(law, first)).unsqueeze(-1) * there
        left = (mass - law).clamp_min(0)
        failed = left.sum(dim=-1) + 1 - scale
        mass = torch.where(there, share_of(left, failed.unsqueeze(-1)), mass)
        scale = torch.where(there.squeeze(-1), mass.sum(dim=-1), scale)
        others = normalised(without(law, first.unsqueeze(-1)), law)
        part = self._divided(slopes[1:], drafts[..., 1:], others, mass, torch.ones_like(scale))
        return Division(torch.cat([share, part.children], dim=-1), part.rest, scale)

    def _at_node(
        self, slopes: Slopes, row: Numbers, mass: Numbers, count: int, drafts: Places
    ) -> tuple[Numbers, Numbers]:
        """Return the shares of a node's drafts and how often each atom is accepted on average."""
        drawn, parts = drafts[:count], slopes[:count]
        successive = set_law_of(self.scheme).draws is Draws.SUCCESSIVE
        prices, taken = settled(self._laws(row, drawn), parts, mass, distinct=successive and count > 1)
        accepted, shares = np.minimum(taken, mass), np.zeros(len(drafts))
        kept = accepted[drawn] / np.where(taken[drawn] > 0, taken[drawn], 1.0)
        shares[:count] = shares_at(prices, parts, drawn) * kept
        if np.count_nonzero(mass) == 1:  # of a certain token the first copy is kept, as `certain_verdict` says
            own = int((mass[drawn] > 0).argmax())
            shares[own], shares[own + 1 :] = shares.sum(), 0.0
        return shares, accepted

    def _laws(self, row: Numbers, drawn: Places) -> Numbers:
        """Return the law of each draft: its row, without the tokens that are certain, which are the first drafts."""
        count = len(drawn)
        if self.scheme.several_rows:
            rows = row[np.arange(count) % len(row)]
        else:
            certain = certain_tokens(self.scheme, row, count)
            rows = np.where(certain, 0.0, row)[None].repeat(count, axis=0)
            first = int(certain.sum())
            rows[:first] = 0.0
            rows[np.arange(first), drawn[:first]] = 1.0
        return rows / rows.sum(axis=-1, keepdims=True)


def _kinds_of(draft: Draft) -> tuple[tuple[Slopes, ...], Int[Tensor, " n"]]:
    """Return the tables of slopes that nodes of the planned shape have, and each node's; those of leaves if unknown."""
    nodes, shape = draft.tree.tokens.shape[-1], draft.planned
    if shape is None or shape.size < nodes:
        shape = TreeShape(())
    tables, kinds = slopes_of(shape, max(draft.tree.topology.width, shape.max_children))
    number = torch.tensor((*kinds, *(0,) * nodes)[:nodes], device=draft.tree.tokens.device)
    return tables, number
