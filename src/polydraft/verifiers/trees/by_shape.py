"""One rule for chains and another for all other trees."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from polydraft.errors import UnpairedScheme
from polydraft.probs import Noise
from polydraft.schemes import Scheme, TopThenSample
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.nodes.top_then_sample import TopThenSampleRule
from polydraft.verifiers.trees.block import BlockVerification
from polydraft.verifiers.trees.law import PathLaw, PathVerifier
from polydraft.verifiers.trees.top_down import TopDown


@dataclass(frozen=True)
class ByShape:
    """Verify chains by one rule and trees with branches by another.

    Where trees change from step to step, each is verified by what suits it: whole chains are kept longer, and at
    branches a rule of several drafts is needed.

    Scheme: that of both rules.
    Exactness: a tree's shape is fixed before its drafts are drawn, so each tree meets a rule that is exact for it.
    Cost and acceptance: those of the rule that is taken.
    Source: none; the rules' own.

    Raises:
        UnpairedScheme: the rules are of different schemes.
    """

    chain: PathVerifier = BlockVerification(TopThenSample())
    tree: PathVerifier = TopDown(TopThenSampleRule())

    def __post_init__(self) -> None:
        if self.chain.scheme != self.tree.scheme:
            one, other = (f"{rule.name} of {rule.scheme.name}" for rule in (self.chain, self.tree))
            raise UnpairedScheme(f"Both rules must verify the same drafts, but are {one} and {other}.")

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

    def rule_for(self, draft: Draft) -> PathVerifier:
        """Return the rule that verifies a draft."""
        return self.chain if draft.tree.topology.width == 1 else self.tree

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep the path that the rule for the trees' shape keeps."""
        return self.rule_for(draft).verify(draft, target_probs, noise)

    def path_law(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        return self.rule_for(draft).path_law(draft, target_probs)
