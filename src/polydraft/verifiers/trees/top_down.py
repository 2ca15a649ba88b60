"""The top-down lift: any node rule, walked from the root of the tree."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import Noise, normalised, sample, sent, to_atoms
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.checks import check_law, check_node_rule
from polydraft.verifiers.lift import Lift
from polydraft.verifiers.outcome_law import NodeVerifier, OutcomeLaw
from polydraft.verifiers.trees.path_law import PathLaw
from polydraft.verifiers.trees.walk import emit, listed_atoms, settled, walk


@dataclass(frozen=True)
class TopDown(Lift[NodeVerifier]):
    """Apply a node rule at the root, go to the accepted child, and so on until no draft is accepted.

    All random numbers are drawn up front, one per node. The laws of visited nodes alone are computed, those of all rows
    together at each depth. A leaf has no drafts, so its outcome is a draw from the target: the bonus token.

    Exactness: each emitted token follows the target's law given those before it, because the node's rule is exact.
    Source: SpecInfer, arXiv 2305.09781, algorithm 2.

    The laws that a rule from outside the package gives for a text are checked: a wrong one is an error at its step.

    Raises:
        InvalidParameter: what is lifted is no node rule.
    """

    rule: NodeVerifier
    direction = "top down"

    def __post_init__(self) -> None:
        check_node_rule(self.rule, "TopDown")

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep the path that the node rule accepts from the root down."""
        verdict = settled(self.rule, draft, target_probs, noise)
        if verdict:
            return verdict
        uniforms = sent(noise.uniform(draft.tree.tokens.shape[-1] + 1), target_probs.device)
        drafts = draft.drafted_atoms()

        def decide(rows: Tensor, nodes: Tensor, _: int) -> tuple[Tensor, Tensor]:
            target = to_atoms(target_probs[rows, nodes], draft.shortlist[rows, nodes])
            draft_probs = torch.nn.functional.pad(draft.probs[rows, nodes], (0, 1)).to(target.dtype)
            law = self.rule.law(drafts[rows, nodes], draft_probs, target)
            check_law(self.rule, law, drafts[rows, nodes], target)
            return _decided(law, uniforms[rows, nodes + 1])

        path, last, atom = walk(draft.tree, decide)
        next_token = emit(draft.shortlist, target_probs, last, atom, uniforms[:, 0])
        return Verdict(path, (path >= 0).sum(dim=-1), next_token)

    def path_law(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        nodes = draft.tree.tokens.shape[-1]
        target = listed_atoms(draft, target_probs, nodes)
        draft_probs = torch.nn.functional.pad(draft.probs, (0, 1)).to(target.dtype)
        law = self.rule.law(draft.drafted_atoms(), draft_probs, target)
        children, rows = draft.tree.children, torch.arange(len(law.child), device=law.child.device).unsqueeze(-1)
        taken = torch.nn.functional.pad(draft.tree.valid.to(law.child.dtype), (0, 1))
        taken[rows, children.flatten(1)] = law.child.flatten(1)  # absent children, -1, are the extra last place
        taken[:, 0] = 1
        reached = taken[:, :-1].unsqueeze(-2).where(draft.tree.ancestors, 1).prod(dim=-1)
        rest = law.rest.sum(dim=-1)
        return PathLaw(reached * rest, normalised(law.rest, target))


def _decided(law: OutcomeLaw, uniforms: Float[Tensor, " g"]) -> tuple[Int[Tensor, " g"], Int[Tensor, " g"]]:
    """Draw which draft is accepted, -1 for none, and which atom is emitted if none is.

    Uniform given that none is: one number decides both.
    """
    sums = law.child.double().cumsum(dim=-1)
    accepted, rest = torch.nn.functional.pad(sums, (1, 0))[..., -1], law.rest.sum(dim=-1).double()
    total = accepted + rest
    point = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    outcome = (point.unsqueeze(-1) >= sums).sum(dim=-1)
    left = ((point - accepted) / rest.where(rest > 0, 1.0)).clamp(0, 1)
    return outcome.where(outcome < sums.shape[-1], -1), sample(law.rest, left)
