"""What a rule for trees takes from the node rule that it lifts."""

from typing import Generic, TypeVar

from polydraft.schemes import Scheme
from polydraft.verifiers.outcome_law import NodeVerifier
from polydraft.verifiers.traits import traits

Rule = TypeVar("Rule", bound=NodeVerifier)


class Lift(Generic[Rule]):
    """A rule for trees that is made of a node rule, and says of itself what that says."""

    rule: Rule
    direction: str

    @property
    def node_rule(self) -> NodeVerifier:
        """The node rule, whose rates at nodes are about those of the lift."""
        return self.rule

    @property
    def scheme(self) -> Scheme:
        """The node rule's scheme."""
        return self.rule.scheme

    @property
    def name(self) -> str:
        """The node rule's name."""
        return self.rule.name

    @property
    def lossless(self) -> bool:
        """Whether the node rule is lossless."""
        return self.rule.lossless

    @property
    def best_alone(self) -> bool:
        """Whether the node rule keeps a lone drawn draft as often as draft and target rows overlap."""
        return traits(self.rule).best_alone

    @property
    def most_drafts(self) -> int:
        """The most drafts at a node that the node rule and its scheme are defined for."""
        return traits(self.rule).most_drafts
