"""One rule for trees that cannot branch and another for all others."""

from dataclasses import dataclass
from typing import cast

from jaxtyping import Float
from torch import Tensor

from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.probs import Noise
from polydraft.schemes import Scheme, TopThenSample
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.nodes.top_then_sample import TopThenSampleRule
from polydraft.verifiers.outcome_law import NodeVerifier
from polydraft.verifiers.traits import traits
from polydraft.verifiers.trees.block_verification import BlockVerification
from polydraft.verifiers.trees.path_law import PathLaw, PathVerifier
from polydraft.verifiers.trees.top_down import TopDown


@dataclass(frozen=True)
class ByShape:
    """Verify trees that could not have had a branch by one rule, and all others by another.

    Where trees change from step to step, each is verified by what suits it: whole chains are kept longer, and at
    branches a rule of several drafts is needed.

    Rule: `chain` where `Draft.most_children`, which the policy fixes before the first draft is drawn, is at most one;
    else `tree`, also where it is not known.
    Scheme: that of both rules.
    Exactness: the bound does not depend on the drafts of this step, so that each step has one rule, exact for all trees
    that it may come to; `tree` must be exact for chains too. The shape of the grown tree would not do: below a drawn
    token a dynamic policy may branch or not, so a rule chosen by the shape is chosen by the token (a total variation of
    .048 was found over three tokens).
    Cost and acceptance: those of the rule that is taken.
    Source: none; the rules' own.

    Raises:
        InvalidParameter: one is no rule for trees whose law is known.
        UnpairedScheme: the rules are of different schemes.
    """

    chain: PathVerifier = BlockVerification(TopThenSample())
    tree: PathVerifier = TopDown(TopThenSampleRule())

    def __post_init__(self) -> None:
        for rule in cast(tuple[object, ...], (self.chain, self.tree)):
            if isinstance(rule, type) or not isinstance(rule, PathVerifier):
                wanted = f"rules for trees with a path_law, such as TopDown(NaiveMatch()), not {rule!r}."
                raise InvalidParameter(f"ByShape takes {wanted}")
        if self.chain.scheme != self.tree.scheme:
            chain, tree = (f"{rule.name} of {rule.scheme.name}" for rule in (self.chain, self.tree))
            raise UnpairedScheme(f"Both rules must verify the same drafts, but are {chain} and {tree}.")

    @property
    def scheme(self) -> Scheme:
        """The rules' scheme."""
        return self.tree.scheme

    @property
    def name(self) -> str:
        """Both rules' names."""
        return f"{self.chain.name} on chains, {self.tree.name} on trees"

    @property
    def lossless(self) -> bool:
        """Whether both rules are lossless."""
        return self.chain.lossless and self.tree.lossless

    @property
    def best_alone(self) -> bool:
        """Whether the rule for chains keeps a lone drawn draft as often as draft and target rows overlap."""
        return traits(self.chain).best_alone

    @property
    def node_rule(self) -> NodeVerifier | None:
        """The node rule of the rule for trees, if that has one."""
        return traits(self.tree).node_rule

    def rule_for(self, draft: Draft) -> PathVerifier:
        """Return the rule that verifies a draft, by what was fixed before it was drawn."""
        return self.chain if draft.most_children is not None and draft.most_children <= 1 else self.tree

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep the path that the rule for these trees keeps."""
        return self.rule_for(draft).verify(draft, target_probs, noise)

    def path_law(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        return self.rule_for(draft).path_law(draft, target_probs)
