"""What a verifier accepts: rates by depth, number of children and rank, from nodes that generations passed through."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.probs import Noise, to_atoms
from polydraft.trees import Acceptance, Chain, Draft, TreePolicy, Verdict, Widths
from polydraft.verifiers import NodeVerifier, TreeVerifier, traits

OBSERVED: tuple[TreePolicy, ...] = (Widths((3, 2, 1, 1)), Chain(4))
"""The trees that are watched; the second for verifiers of one draft per node."""
DRAWS = 4
"""How many sets of drafts are drawn at each node; one is enough if they are deterministic."""
OF_ALL_DEPTHS = 100.0
"""How many nodes' worth the average over all depths counts for at each depth."""
OF_NOTHING = 1.0
"""How many nodes' worth of rejections are added to what was seen, so that a few lucky nodes do not count for much."""


@dataclass(frozen=True, eq=False)
class Visit:
    """A node with drafts that the accepted path came to.

    Args:
        depth: its depth.
        children: how many drafts it had.
        rank: the place of the accepted one among them; -1 if none was.
        draft_probs: its draft row.
        target_probs: its target row, on the same atoms and the tail.
    """

    depth: int
    children: int
    rank: int
    draft_probs: Float[Tensor, "*J K"]
    target_probs: Float[Tensor, " A"]


class RecordingVerifier:
    """A tree verifier that leaves its last draft, target rows and verdict in `seen`."""

    def __init__(self, verifier: TreeVerifier) -> None:
        self.verifier = verifier
        self.scheme = verifier.scheme
        self.name = verifier.name
        self.lossless = verifier.lossless
        self.greedy_only = traits(verifier).greedy_only
        self.seen: tuple[Draft, Tensor, Verdict] | None = None

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Verify, and remember."""
        verdict = self.verifier.verify(draft, target_probs, noise)
        self.seen = draft, target_probs, verdict
        return verdict

    @property
    def depth(self) -> int:
        """The depth of the last tree."""
        return 0 if self.seen is None else self.seen[0].tree.topology.height

    def visits(self) -> list[Visit]:
        """Return the nodes with drafts on the accepted path of the only row, the root first."""
        if self.seen is None:
            return []
        draft, target_probs, verdict = self.seen
        path = verdict.path[0, : int(verdict.length[0])].tolist()
        ranks = [int(draft.tree.topology.rank[0, node]) for node in path]
        visits: list[Visit] = []
        for depth, (node, rank) in enumerate(zip([0, *path], [*ranks, -1], strict=True)):
            children = int((draft.tree.children[0, node] >= 0).sum())
            if children:
                target = to_atoms(target_probs[0, node], draft.shortlist[0, node])
                visits.append(Visit(depth, children, rank, draft.probs[0, node], target))
        return visits


@dataclass(frozen=True, eq=False)
class Tally:
    """Sums over nodes, by depth D, number of children and rank.

    Args:
        nodes: how many nodes of a depth are counted as having k + 1 children.
        accepted: how many of them accepted the child of a rank.
    """

    nodes: Float[Tensor, "D k"]
    accepted: Float[Tensor, "D k k"]

    def rates(self) -> Acceptance:
        """Return the rates of each depth, drawn towards the average over all depths, and that a little towards zero.

        Where no node of any depth was counted as having k children there are no rates.
        """
        overall = self.accepted.sum(dim=0) / (self.nodes.sum(dim=0) + OF_NOTHING).unsqueeze(-1)
        drawn = (self.accepted + OF_ALL_DEPTHS * overall) / (self.nodes + OF_ALL_DEPTHS).unsqueeze(-1)
        possible = (self.nodes.sum(dim=0) > 0).tolist()
        return Acceptance(
            tuple(
                tuple(tuple(row[: k + 1]) if possible[k] else () for k, row in enumerate(rows))
                for rows in drawn.tolist()
            )
        )


def tally(verifier: TreeVerifier, found: list[Visit], most: int, seed: int = 0) -> Tally:
    """Count what was accepted at the visited nodes, for up to `most` children.

    The rates of a node rule are computed, not counted: at every visited node new drafts are drawn for each number of
    children, and the rule tells how likely it is to accept each. Under `BottomUp` these are the rule's own rates, not
    those of the lift, which accepts about as much; under `ByShape` those of the rule for trees, also where a chain is
    verified by another that accepts more. Any other verifier is counted, and a child is taken to be accepted
    as often whatever siblings come after it, which holds for rules that try the children in turn.
    """
    rule = traits(verifier).node_rule
    depths = max((visit.depth for visit in found), default=0) + 1
    result = Tally(torch.zeros(depths, most).double(), torch.zeros(depths, most, most).double())
    if rule and found:
        _compute(result, rule, found, most, seed)
    elif not rule:
        _count(result, found, most)
    return result


def _compute(result: Tally, rule: NodeVerifier, found: list[Visit], most: int, seed: int) -> None:
    draws = 1 if rule.scheme.deterministic else DRAWS
    depth = torch.tensor([visit.depth for visit in found] * draws)
    draft = torch.stack([visit.draft_probs.cpu() for visit in found] * draws)
    target = torch.stack([visit.target_probs.cpu() for visit in found] * draws)
    uniforms = Noise.from_seed(seed, 1).uniform(len(depth), max(most, draft.shape[-1]))[0]
    for children in range(1, most + 1):
        counts = torch.full_like(depth, children)
        try:
            drafts = rule.scheme.sample(draft, counts, uniforms, children)
            law = rule.law(drafts, torch.nn.functional.pad(draft, (0, 1)).to(target.dtype), target)
        except (InvalidParameter, UnpairedScheme):  # a rule or scheme of fewer children
            break
        result.accepted[:, children - 1, :children].index_add_(0, depth, law.child.double() / draws)
        result.nodes[:, children - 1].index_add_(0, depth, torch.full_like(depth, 1, dtype=torch.float64) / draws)


def _count(result: Tally, found: list[Visit], most: int) -> None:
    for visit in found:
        for children in range(1, min(visit.children, most) + 1):
            result.nodes[visit.depth, children - 1] += 1
            if 0 <= visit.rank < children:
                result.accepted[visit.depth, children - 1, visit.rank] += 1
