"""Everything that the conformance matrix covers: schemes, node rules and tree rules, as instances."""

from dataclasses import fields, is_dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Given,
    Product,
    Scheme,
    SpecHub,
    TopK,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
)
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    ByShape,
    ImportanceWeighted,
    KSeq,
    Lenient,
    NaiveMatch,
    Optimal,
    OutcomeLaw,
    Race,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    ScalableVerifier,
    SharedNoise,
    SpecHubRule,
    SpeculativeSampling,
    TopBeta,
    TopDown,
    TopThenSampleRule,
    TraversalVerification,
    TreeVerifier,
    TypicalAcceptance,
)


@runtime_checkable
class NodeRule(Protocol):
    """What a node rule must have to be checked: less than a `NodeVerifier`, which can also state its acceptance."""

    @property
    def scheme(self) -> Scheme:
        """The way of drafting that the rule is exact for."""
        ...

    @property
    def name(self) -> str:
        """The rule's name in tables."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether the emitted token follows the target's law exactly."""
        ...

    def law(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*rows A"],
        target_probs: Float[Tensor, "*b A"],
    ) -> OutcomeLaw:
        """Return the outcome law; see `NodeVerifier.law`."""
        ...


SCHEMES: tuple[Scheme, ...] = (
    IID(),
    WithoutReplacement(),
    TopThenSample(),
    TopThenIID(1),
    ConditionalPoisson(),
    SpecHub(),
    Product(),
    TopK(),
    Given(),
)

LIFTED: tuple[ScalableVerifier, ...] = (
    RecursiveRejection(),
    KSeq(),
    ImportanceWeighted(),
    TopThenSampleRule(),
    SpecHubRule(),
    Optimal(IID()),
    Optimal(WithoutReplacement()),
    Race(TopThenSample()),
)

NODE_RULES: tuple[NodeRule, ...] = (
    *(NaiveMatch(scheme) for scheme in SCHEMES),
    SpeculativeSampling(),
    RecursiveRejectionWithoutReplacement(),
    *LIFTED,
    ImportanceWeighted(free=None, alphabet=None),
    ImportanceWeighted(Product()),
    *(Optimal(scheme) for scheme in SCHEMES if scheme not in (IID(), WithoutReplacement(), Product())),
    *(
        Race(scheme)
        for scheme in SCHEMES
        if scheme not in (TopThenSample(), WithoutReplacement(), ConditionalPoisson())
    ),
    TypicalAcceptance(),
    TopBeta(),
    Lenient(),
)

TREE_RULES: tuple[TreeVerifier, ...] = (
    TopDown(NaiveMatch(TopK())),
    TopDown(SpeculativeSampling()),
    BottomUp(SpeculativeSampling()),
    BlockVerification(),
    ByShape(),
    TopDown(RecursiveRejectionWithoutReplacement()),
    *(lift(rule) for rule in LIFTED for lift in (TopDown, BottomUp)),
    TraversalVerification(IID()),
    TraversalVerification(WithoutReplacement()),
    SharedNoise(),
    SharedNoise(Given()),
    TopDown(TypicalAcceptance()),
)


def label(rule: NodeRule | TreeVerifier) -> str:
    """Return a rule's name, with its lift and with every parameter but the scheme that is not at its default."""
    if isinstance(rule, (TopDown, BottomUp)):
        return f"{label(rule.rule)}, {'top down' if isinstance(rule, TopDown) else 'bottom up'}"
    if not is_dataclass(rule):
        return rule.name
    changed = [
        f"{one.name}={getattr(rule, one.name)}"
        for one in fields(rule)
        if one.name != "scheme" and getattr(rule, one.name) != one.default
    ]
    return f"{rule.name} ({', '.join(changed)})" if changed else rule.name
