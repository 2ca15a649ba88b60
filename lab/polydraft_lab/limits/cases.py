"""Which schemes, rules and trees the limits are measured for: two tables, made from the catalogue."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.catalogue import RuleLine, SchemeLine, every_scheme, schemes_of, tables
from polydraft.schemes import Scheme, most_drafts_of
from polydraft.trees import GrowingPolicy, TreePolicy
from polydraft.verifiers import (
    FAMILIES,
    BottomUp,
    NodeVerifier,
    PathVerifier,
    ScalableVerifier,
    TopDown,
    TreeVerifier,
    has_marginal,
    most_drafts,
)

MANY = 64
NAIVE = "naive match"
"""The short name of naive match."""
UNDEFINED, TOO_DEAR = "n/a", ">>"
"""Signs in place of a number: the rule takes fewer drafts; there are too many orders of rejected drafts to follow."""
ANY_RULE = "any exact rule, at most"
"""The name of the bound on all exact rules, in tables of trees."""
LARGEST_VOCABULARY = 2**20


@dataclass(frozen=True)
class NodeCase:
    """A rule whose acceptance rate is computed beside its scheme's optimum.

    Args:
        label: the rule's short name in tables.
        rule: the rule, with the scheme that it verifies.
    """

    label: str
    rule: NodeVerifier

    @property
    def most(self) -> int:
        """The largest number of drafts that the rule and its scheme are defined for."""
        return min(MANY, most_drafts(self.rule))

    def gap_at(self, k: int, shortlist: int) -> str:
        """Return why there is no number for so many drafts, as the sign that tables show; empty if there is one."""
        if k > MANY:
            return TOO_DEAR
        if k > self.most:
            return UNDEFINED
        if not has_marginal(self.rule, k, min(shortlist, LARGEST_VOCABULARY)):
            return TOO_DEAR
        return ""

    @property
    def scheme(self) -> Scheme:
        """The rule's scheme."""
        return self.rule.scheme

    def acceptance(
        self, draft_probs: Float[Tensor, "*rows A"], target_probs: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        """Return the rule's acceptance rate.

        The optimal rule's `acceptance` is the optimum by its formula; to find what a rule really accepts, its marginals
        are added up.
        """
        if isinstance(self.rule, ScalableVerifier):
            return self.rule.marginal(draft_probs, target_probs, counts).sum(dim=-1)
        return self.rule.acceptance(draft_probs, target_probs, counts)


@dataclass(frozen=True)
class TreeCase:
    """A tree rule whose expected accepted length is computed on trees of some shapes.

    Args:
        label: the rule's short name in tables.
        verifier: the rule, with the scheme that the trees are drawn by.
        chain: whether it is for chains, one draft per node; other cases are for trees that branch.
    """

    label: str
    verifier: PathVerifier
    chain: bool = False

    def fits(self, policy: TreePolicy) -> bool:
        """Tell whether the case is for trees of a policy, and whether these can be drawn by the rule's scheme."""
        return self.chain == is_chain(policy) and policy.shape.max_children <= most_drafts_of(self.verifier.scheme)


def node_cases() -> tuple[NodeCase, ...]:
    """Return the lossless node rules of the catalogue, by scheme."""
    cases = [
        NodeCase(line.measured.label or rule.name, rule)
        for line in tables.RULES
        for rule in _made(line, line.measured.nodes)
        if isinstance(rule, NodeVerifier) and rule.lossless
    ]
    return tuple(sorted(cases, key=lambda case: _place(case.scheme)))


def tree_cases() -> tuple[TreeCase, ...]:
    """Return the lossless rules of the catalogue whose laws on trees are known: those for chains, then by scheme."""
    cases = [case for line in tables.RULES if line.lossless for case in (*_on_chains(line), *_on_trees(line))]
    return tuple(sorted(cases, key=lambda case: (not case.chain, _place(case.verifier.scheme))))


def _on_chains(line: RuleLine) -> Iterator[TreeCase]:
    rule = line.usual
    label = line.measured.chains or (rule.name if most_drafts(rule) == 1 else "")
    lifted = TopDown(rule) if isinstance(rule, NodeVerifier) else rule
    if label and isinstance(lifted, PathVerifier):
        yield TreeCase(label, lifted, chain=True)


def _on_trees(line: RuleLine) -> Iterator[TreeCase]:
    usual, measured = line.usual, line.measured
    short = measured.short or measured.label or usual.name
    for rule in _made(line, measured.trees) if most_drafts(usual) > 1 else ():
        if isinstance(rule, NodeVerifier):
            yield TreeCase(f"top-down {short}", TopDown(rule))
        elif isinstance(rule, PathVerifier):
            yield TreeCase(short, rule)
    for rule in _made(line, measured.bottom_up):
        if isinstance(rule, ScalableVerifier):
            yield TreeCase(f"bottom-up {short}", BottomUp(rule))


def _made(line: RuleLine, schemes: tuple[SchemeLine | Scheme, ...] | None) -> list[NodeVerifier | TreeVerifier]:
    """Return a line's rule for these schemes; None is the usual one."""
    return [line.of(scheme) for scheme in (line.known[:1] if schemes is None else schemes_of(schemes))]


def _place(scheme: Scheme) -> int:
    """Return a scheme's place in the catalogue; one that is not there comes last."""
    every = every_scheme()
    return every.index(scheme) if scheme in every else len(every)


TREE_SHAPES = ("chain:4", "2,2,1", "4,2,1")


def is_chain(policy: TreePolicy) -> bool:
    """Tell whether every node of the policy's trees has at most one child."""
    return policy.shape.max_children <= 1


def bounds_on(policy: TreePolicy, scheme: Scheme) -> tuple[str, ...]:
    """Return the names of the bounds on any exact rule on a policy's trees, one for each family of prices, if any."""
    planned = scheme.independent and scheme.lone_draft_is_drawn and not policy.stops
    priced = planned and not scheme.several_rows and not isinstance(policy, GrowingPolicy)
    return tuple(f"{ANY_RULE} ({one.factor:g}, {one.damping:g})" for one in FAMILIES) if priced else ()
