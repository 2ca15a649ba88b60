"""The lifts: rules for trees that are made of a node rule, walked from the root or tried from the leaves."""

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.probs import Noise, normalised, sample, sent, to_atoms
from polydraft.schemes import require_independent
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.checks import check_law, check_shares
from polydraft.verifiers.outcome_law import (
    DraftRows,
    Drafts,
    Lift,
    NodeVerifier,
    OutcomeLaw,
    Rate,
    Row,
    ScalableVerifier,
    divided,
)
from polydraft.verifiers.trees.kept_path import PathLaw, emit, listed_atoms, settled, walk
from polydraft.verifiers.trees.trials import Division, FromLeaves, divided_by, first_success, trials


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
        _check_node_rule(self.rule, "TopDown")

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
        target = listed_atoms(draft, target_probs)
        draft_probs = torch.nn.functional.pad(draft.probs, (0, 1)).to(target.dtype)
        law = self.rule.law(draft.drafted_atoms(), draft_probs, target)
        children, rows = draft.tree.children, torch.arange(len(law.child), device=law.child.device).unsqueeze(-1)
        taken = torch.nn.functional.pad(draft.tree.valid.to(law.child.dtype), (0, 1))
        taken[rows, children.flatten(1)] = law.child.flatten(1)  # absent children, -1, are the extra last place
        taken[:, 0] = 1
        reached = taken[:, :-1].unsqueeze(-2).where(draft.tree.ancestors, 1).prod(dim=-1)
        rest = law.rest.sum(dim=-1)
        return PathLaw(reached * rest, normalised(law.rest, target))


@dataclass(frozen=True)
class BottomUp(FromLeaves, Lift[ScalableVerifier]):
    """Verify a whole path at once where `TopDown` verifies token by token, so that a rejection above can be made good.

    Rule: a node v with scale a (the root has 1) passes to its child c the share S(c | C) that the node rule accepts of
    c, given the drafts C, when the target mass is a * target; what the rule leaves on average, rho = a * target -
    E_C[S], is v's own. Children are tried in drafting order, c with scale S(c | C) / (1 - shares of those before it);
    if all fail, the path ends at v with probability |rho| / (|rho| + 1 - a) and a token of rho / |rho| is emitted. A
    leaf ends its path with probability a. Of a repeated token only the copy that the rule gives a share is tried.
    Scheme: the node rule's, if each node's drafts are drawn anew: what a node passes on is right on average only.
    Exactness: by induction a node succeeds with probability exactly a over the drafts below it, and then emits its
    children's shares on average E_C[S], its own rest rho, together a * target.
    Cost: the node rule's shares and marginal once per depth, for all nodes of the depth together.
    Acceptance: on a chain with speculative sampling this is block verification, optimal there; on a tree of depth
    one it is the node rule. Not proved never to fall below `TopDown` of the same rule, though it did in no case tried.
    Source: block verification, arXiv 2403.10444, on trees of any rule; with recursive rejection of independent drafts
    it is traversal verification, arXiv 2505.12398.

    Shares and marginals that a rule from outside the package gives for a text are checked.

    Raises:
        InvalidParameter: the rule has no shares and marginal.
        UnpairedScheme: the scheme's drafts depend on those of other nodes.
    """

    rule: ScalableVerifier
    direction = "bottom up"

    def __post_init__(self) -> None:
        _check_node_rule(self.rule, "BottomUp")
        if not isinstance(cast(object, self.rule), ScalableVerifier):
            kind = type(self.rule).__name__
            raise InvalidParameter(
                f"BottomUp lifts rules with shares and a marginal, which {kind} has not; use TopDown."
            )
        require_independent(self.rule.scheme, "BottomUp")

    @property
    def name(self) -> str:
        """The node rule's name and the lift's."""
        return f"{self.rule.name}, bottom up"

    def tried(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Toss the coins of the trees' nodes; what a rule from outside gives is checked."""
        checked = trials(draft, target_probs, partial(self.divide, checked=True))
        return first_success(checked, draft, target_probs, noise)

    def divide(
        self, drafts: Drafts, draft_probs: DraftRows, target_probs: Row, scale: Rate, *, checked: bool = False
    ) -> Division:
        """Divide the mass of nodes as the node rule does."""
        mass = scale.unsqueeze(-1) * target_probs
        both = divided(self.rule, drafts, draft_probs, mass)
        if checked:
            check_shares(self.rule, *both, drafts, mass)
        return divided_by(*both, mass, scale)


def _check_node_rule(rule: object, who: str) -> None:
    if isinstance(rule, type) or not isinstance(rule, NodeVerifier):
        raise InvalidParameter(f"{who} lifts node rules such as NaiveMatch(), but got {rule!r}.")


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
