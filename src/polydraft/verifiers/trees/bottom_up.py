"""The bottom-up lift: any scalable node rule, tried from the leaves of the tree to its root."""

from dataclasses import dataclass
from functools import partial

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import Noise
from polydraft.schemes import require_independent
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.checks import check_node_rule, check_scalable, check_shares
from polydraft.verifiers.lift import Lift
from polydraft.verifiers.outcome_law import ScalableVerifier, divided
from polydraft.verifiers.trees.trials import Division, FromLeaves, divided_by, first_success, trials


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
        check_node_rule(self.rule, "BottomUp")
        check_scalable(self.rule, "BottomUp")
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
        self,
        drafts: Int[Tensor, "b f k"],
        draft_probs: Float[Tensor, "*rows A"],
        target_probs: Float[Tensor, "b f A"],
        scale: Float[Tensor, "b f"],
        *,
        checked: bool = False,
    ) -> Division:
        """Divide the mass of nodes as the node rule does."""
        mass = scale.unsqueeze(-1) * target_probs
        both = divided(self.rule, drafts, draft_probs, mass)
        if checked:
            check_shares(self.rule, *both, drafts, mass)
        return divided_by(*both, mass, scale)
