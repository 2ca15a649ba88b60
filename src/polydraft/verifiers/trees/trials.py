"""Verification from the leaves up: every node has a trial, and the path ends at the first that succeeds.

Rules of this kind give each node v a *scale* a: with this probability, averaged over the drafts below it, the path
shall end at v or below. The root has scale 1. A rule splits the target mass a * target of a node among its children,
whose scales follow, and a *rest* that v emits itself. All this is fixed before any coin is tossed, so one sweep down
the tree knows every scale. Then the nodes are tried, children before their parent and siblings in drafting order, and
v succeeds with probability |rest| / (|rest| + 1 - a).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import Noise, normalised, sample, sent
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.outcome_law import DraftRows, Drafts, Rate, Row, Shares, TreeVerifier, require_few, traits
from polydraft.verifiers.trees.kept_path import PathLaw, emit, listed_atoms, path_to, settled


class Division(NamedTuple):
    """How the target mass of some nodes is divided.

    Args:
        children: the scale of each child when its trials begin, earlier siblings having failed.
        rest: the mass that is left for the node itself, to be emitted.
        scale: the node's scale when its own trial begins.
    """

    children: Shares
    rest: Row
    scale: Rate


Divide = Callable[[Drafts, DraftRows, Row, Rate], Division]
"""Divides the mass of nodes, given drafts, draft rows, target rows and scales."""


class _DividesTrees(TreeVerifier, Protocol):
    def divide(self, drafts: Drafts, draft_probs: DraftRows, target_probs: Row, scale: Rate) -> Division: ...

    def tried(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict: ...


class FromLeaves:
    """A rule that verifies from the leaves up; it derives from this and writes `divide`."""

    def verify(self: _DividesTrees, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep the path to the first node that succeeds, from the leaves up.

        Raises:
            UnpairedScheme: a node has more drafts than the rule is for.
        """
        verdict = settled(traits(self).node_rule or self, draft, target_probs, noise)
        return verdict or self.tried(draft, target_probs, noise)

    def tried(self: _DividesTrees, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Toss the coins of a tree that has drafts and a target that has a choice."""
        return first_success(trials(draft, target_probs, self.divide), draft, target_probs, noise)

    def path_law(self: _DividesTrees, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        require_few(traits(self).node_rule or self, draft.tree.topology.width)
        return trials(draft, target_probs, self.divide).law(draft.tree.topology.post_order)


def divided_by(shares: Shares, marginal: Row, mass: Row, scale: Rate) -> Division:
    """Divide mass as a node rule does: each child gets its share, and the node what the marginal leaves."""
    left = (1 - shares.cumsum(dim=-1) + shares).clamp_min(0)
    return Division(share_of(shares, left), (mass - marginal).clamp_min(0), scale)


@dataclass(frozen=True, eq=False)
class Trials:
    """All nodes' trials.

    Args:
        success: the probability that each node's trial succeeds; 1 at the root, which comes last.
        rest: the mass that is left for the node itself.
        atoms: the target's law, which is emitted where rounding left no mass.
    """

    success: Float[Tensor, "b n"]
    rest: Float[Tensor, "b n A"]
    atoms: Float[Tensor, "b n A"]

    def law(self, order: Int[Tensor, "b n"]) -> PathLaw:
        """Return the law of the first success when the nodes are tried in this order."""
        in_order = torch.zeros_like(self.success).scatter(-1, order, self.success)
        failed_before = torch.nn.functional.pad((1 - in_order).cumprod(dim=-1)[:, :-1], (1, 0), value=1.0)
        return PathLaw((failed_before * in_order).gather(-1, order), normalised(self.rest, self.atoms))


def trials(draft: Draft, target_probs: Float[Tensor, "b n V"], divide: Divide) -> Trials:
    """Sweep down the trees, level by level, and return every node's trial; float64."""
    tree, rows = draft.tree, torch.arange(len(target_probs), device=target_probs.device).unsqueeze(-1)
    atoms = listed_atoms(draft, target_probs).double()
    probs = torch.nn.functional.pad(draft.probs, (0, 1)).double()
    drafts, children, spare = draft.drafted_atoms(), tree.children, tree.tokens.shape[-1]
    scales = atoms.new_zeros(len(atoms), spare + 1)  # the last place takes what absent nodes are given
    scales[:, 0] = 1
    success, rest = torch.zeros_like(scales), torch.nn.functional.pad(atoms, (0, 0, 0, 1))
    for nodes, width in tree.topology.levels:
        here, place = nodes.clamp_min(0), nodes.where(nodes >= 0, spare)
        scale = scales.gather(-1, place)
        if width == 0:
            success = success.scatter(-1, place, scale)
            continue
        part = divide(drafts[rows, here, :width], probs[rows, here], atoms[rows, here], scale)
        below = children[rows, here, :width]
        below = below.where((below >= 0) & (nodes >= 0).unsqueeze(-1), spare)
        scales = scales.scatter(-1, below.flatten(1), part.children.flatten(1))
        left = part.rest.sum(dim=-1)
        success = success.scatter(-1, place, share_of(left, left + 1 - part.scale))
        rest[rows, place] = part.rest
    success[:, 0] = 1  # a failure there is a rounding error
    return Trials(success[:, :-1], rest[:, :-1], atoms)


def first_success(tried: Trials, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
    """Toss every node's coin and keep the path to the first that succeeds."""
    tree = draft.tree
    uniforms = sent(noise.uniform(tree.tokens.shape[-1] + 2), target_probs.device)
    failed = uniforms[:, 2:] >= tried.success
    end = (tree.topology.post_order + failed * tree.tokens.shape[-1]).argmin(dim=-1)
    rows = torch.arange(len(end), device=end.device)
    atom = sample(normalised(tried.rest[rows, end], tried.atoms[rows, end]), uniforms[:, 1])
    next_token = emit(draft.shortlist, target_probs, end, atom, uniforms[:, 0])
    return Verdict(path_to(tree, end), tree.depth[rows, end], next_token)


def share_of(part: Float[Tensor, "*#b"], whole: Float[Tensor, "*#b"]) -> Float[Tensor, "*#b"]:
    """Return part / whole, at most one; zero where the whole is zero."""
    return torch.where(whole > 0, part / whole.where(whole > 0, 1), 0).clamp_max(1)
