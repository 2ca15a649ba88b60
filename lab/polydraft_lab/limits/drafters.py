"""What rules accept of a drafter's own drafts, made at every position of a text that the target writes alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.catalogue import every_scheme
from polydraft.drafters import Drafter, drafts_under
from polydraft.engine import stream
from polydraft.errors import InvalidParameter
from polydraft.probs import Noise, to_atoms
from polydraft.schemes import Scheme, most_drafts_of
from polydraft.trees import Draft, TreePolicy, Verdict, Widths
from polydraft.verifiers import NaiveMatch, TopDown, expected_accepted
from polydraft_lab.limits.branching import Accepted
from polydraft_lab.limits.cases import TreeCase

Rows = tuple[Float[Tensor, "m A"], Float[Tensor, "m A"]]
"""The draft's and the target's rows at some positions, on the same atoms: the draft's tokens and the tail."""


def schemes_under(drafter: Drafter) -> tuple[Scheme, ...]:
    """Return the ways of drawing by which a drafter can draft, each with one row at a node."""
    return tuple(one for one in every_scheme() if not one.several_rows and drafts_under(drafter, one))


@dataclass(frozen=True, eq=False)
class NotingVerifier:
    """A verifier that keeps no draft, and notes what rules would accept of it: the text is the target's alone.

    Args:
        scheme: how the drafts are drawn.
        rules: the rules for trees.
        positions: at how many positions to look.
        every: at every how many of them rules for trees are looked at.
        shortlist: how many tokens the noted rows have, the likeliest.
        accepted: what each rule accepts on average, summed over positions.
        rows: the rows at the roots of drafts; None where nothing was drafted.
    """

    scheme: Scheme
    rules: Sequence[TreeCase]
    positions: int
    every: int
    shortlist: int
    accepted: dict[str, float] = field(default_factory=dict)
    rows: list[Rows | None] = field(default_factory=list)
    name = "noting"
    lossless = True

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Look at the draft, and draw the next token from the target's row."""
        if len(self.rows) < self.positions:
            for case in self.rules if len(self.rows) % self.every == 0 else ():
                found = float(expected_accepted(case.verifier, draft, target_probs).sum())
                self.accepted[case.label] = self.accepted.get(case.label, 0.0) + found
            self.rows.append(self._at_root(draft, target_probs[:, 0]))
        nothing = Draft.nothing(draft.tree.tokens[:, 0])
        first = noise.again()  # by the same numbers whatever was drawn for drafts, as nothing of them is kept
        return TopDown(NaiveMatch(self.scheme)).verify(nothing, target_probs[:, :1], first)

    def _at_root(self, draft: Draft, target: Float[Tensor, "1 V"]) -> Rows | None:
        """Return the rows on the draft's likeliest tokens, in the draft's order, and the tail."""
        probs, tokens = draft.probs[:, 0].to(target.dtype), draft.shortlist[:, 0]
        if not float(probs.sum()):
            return None
        kept = probs.topk(min(self.shortlist, probs.shape[-1])).indices.sort().values
        probs, tokens = probs.gather(-1, kept), tokens.gather(-1, kept)
        room, probs = self.shortlist - probs.shape[-1], probs / probs.sum(dim=-1, keepdim=True)
        tokens = torch.nn.functional.pad(tokens, (0, room), value=-1)
        return torch.nn.functional.pad(probs, (0, room + 1)), to_atoms(target, tokens)


@dataclass(frozen=True, eq=False)
class DraftsOfText:
    """What was seen along one text.

    Args:
        rows: scheme -> the rows at every position at which something was drafted.
        trees: shape -> what the rules for trees accept, summed over positions.
        positions: how many tokens the text has.
    """

    rows: dict[str, Rows | None]
    trees: dict[str, Accepted]
    positions: int


@torch.no_grad()
def drafts_along(
    model: nn.Module,
    drafter: Drafter,
    ids: Int[Tensor, "1 t"],
    policies: Mapping[str, TreePolicy],
    rules: Sequence[TreeCase],
    sampling: Mapping[str, Any],
    bounds: tuple[int, int, int, int],
) -> DraftsOfText:
    """Let the target write one text, once for each scheme and tree, and a drafter draft at each of its positions.

    Since no draft is kept, the text is the same each time. The rows at the roots are those of drafts of one level.

    Args:
        model: the target.
        drafter: the drafter.
        ids: the prompt.
        policies: the trees, by their names.
        rules: the rules for trees.
        sampling: temperature and seed of the text.
        bounds: at how many positions to look; at every how many of them at trees, 0 for none; the most drafts of a
            root; and how many tokens its row has.

    Raises:
        InvalidParameter: the drafter failed.
    """
    positions, every, drafts, shortlist = bounds

    def noted(scheme: Scheme, own: Sequence[TreeCase], policy: TreePolicy) -> NotingVerifier:
        noting = NotingVerifier(scheme, own, positions, every or 1, shortlist)
        options = {**sampling, "max_new_tokens": positions + 1, "policy": policy}  # for the last none is drafted
        told = stream(model, ids, drafter=drafter, verifier=noting, **options).exhaust().statistics
        if told.fallback:
            raise InvalidParameter(f"The drafter {drafter.name} failed: {told.fallback}.")
        return noting

    rows, trees, seen = dict[str, Rows | None](), dict[str, Accepted](), 0
    for scheme in schemes_under(drafter):
        most = most_drafts_of(scheme)
        at_roots = noted(scheme, (), Widths((min(drafts, most),))).rows
        rows[scheme.name], seen = joined(at_roots), len(at_roots)
        for name, policy in policies.items() if every else ():
            own = [one for one in rules if one.verifier.scheme == scheme and one.fits(policy)]
            if own:
                trees.setdefault(name, {})[scheme.name] = noted(scheme, own, policy).accepted
    return DraftsOfText(rows, trees, seen)


def joined(rows: Sequence[Any]) -> Any:
    """Return rows in one piece; None where there are none."""
    there = [one for one in rows if one is not None]
    return (torch.cat([draft for draft, _ in there]), torch.cat([target for _, target in there])) if there else None
