"""The words for verification rules and schemes, on the command line and wherever a rule may be named by text."""

from collections.abc import Callable

from polydraft.errors import InvalidParameter
from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Coupled,
    Given,
    Product,
    Scheme,
    SpecHub,
    TopK,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
)
from polydraft.verifiers.law import NodeVerifier, ScalableVerifier, TreeVerifier
from polydraft.verifiers.nodes.importance_weighted import ImportanceWeighted
from polydraft.verifiers.nodes.k_seq import KSeq
from polydraft.verifiers.nodes.lossy import Lenient, TopBeta, TypicalAcceptance
from polydraft.verifiers.nodes.naive import NaiveMatch
from polydraft.verifiers.nodes.optimal import Optimal
from polydraft.verifiers.nodes.race import Race
from polydraft.verifiers.nodes.recursive_iid import RecursiveRejection
from polydraft.verifiers.nodes.recursive_without_replacement import RecursiveRejectionWithoutReplacement
from polydraft.verifiers.nodes.spec_hub import SpecHubRule
from polydraft.verifiers.nodes.speculative import SpeculativeSampling
from polydraft.verifiers.nodes.top_then_sample import TopThenSampleRule
from polydraft.verifiers.trees.block import BlockVerification
from polydraft.verifiers.trees.bottom_up import BottomUp
from polydraft.verifiers.trees.shared_noise import SharedNoise
from polydraft.verifiers.trees.top_down import TopDown
from polydraft.verifiers.trees.traversal import TraversalVerification


def scheme_by_name(name: str) -> Scheme:
    """Return the scheme with a command-line name.

    Raises:
        InvalidParameter: the scheme is unknown.
    """
    if name not in _SCHEMES:
        raise InvalidParameter(f"There is no scheme {name!r}; choose from {', '.join(_SCHEMES)}.")
    return _SCHEMES[name]


def verifier_by_name(
    name: str, drafter: str, scheme: str | None = None, *, bottom_up: bool = False
) -> TreeVerifier | None:
    """Return the tree verifier with a command-line name; None for "auto".

    Args:
        name: the rule.
        drafter: the drafter's name, which decides the scheme of naive match.
        scheme: the name of the way of drafting, for rules that know several; None for the rule's own.
        bottom_up: lift the node rule with `BottomUp` instead of `TopDown`.

    Raises:
        InvalidParameter: the rule or scheme is unknown, or the rule cannot be had in this way.
        UnpairedScheme: the rule is not exact for the scheme.
    """
    if name == "auto":
        if scheme or bottom_up:
            raise InvalidParameter("--scheme and --bottom-up need a --verifier, not auto.")
        return None
    drawn = scheme_by_name(scheme) if scheme else None
    if name in _OF_ANY_SCHEME:
        rule = _OF_ANY_SCHEME[name](drawn or (Given() if drafter == "ngram" else _USUAL_SCHEMES[name]))
    elif name not in _OF_ONE_SCHEME:
        names = ", ".join(["auto", *_OF_ONE_SCHEME, *_OF_ANY_SCHEME])
        raise InvalidParameter(f"There is no verifier {name!r}; choose from {names}.")
    elif drawn:
        raise InvalidParameter(f"The verifier {name} has a scheme of its own; leave --scheme {scheme} out.")
    else:
        rule = _OF_ONE_SCHEME[name]()
    if not isinstance(rule, NodeVerifier):
        if bottom_up:
            raise InvalidParameter(f"The verifier {name} verifies whole trees already; leave --bottom-up out.")
        return rule
    if not bottom_up:
        return TopDown(rule)
    if not isinstance(rule, ScalableVerifier):
        raise InvalidParameter(f"The verifier {name} cannot be lifted bottom up: its average acceptance is not known.")
    return BottomUp(rule)


_SCHEMES: dict[str, Scheme] = {
    "iid": IID(),
    "without-replacement": WithoutReplacement(),
    "top-k": TopK(),
    "top-then-sample": TopThenSample(),
    "top-then-iid": TopThenIID(1),
    "conditional-poisson": ConditionalPoisson(),
    "spec-hub": SpecHub(),
    "product": Product(),
    "coupled": Coupled(),
    "given": Given(),
}
_OF_ONE_SCHEME: dict[str, Callable[[], NodeVerifier | TreeVerifier]] = {
    "speculative": SpeculativeSampling,
    "recursive": RecursiveRejection,
    "recursive-wo": RecursiveRejectionWithoutReplacement,
    "top-then-sample": TopThenSampleRule,
    "k-seq": KSeq,
    "spec-hub": SpecHubRule,
    "importance-weighted": ImportanceWeighted,
    "block": BlockVerification,
    "lenient": Lenient,
    "top-beta": TopBeta,
}
_OF_ANY_SCHEME: dict[str, Callable[[Scheme], NodeVerifier | TreeVerifier]] = {
    "naive": NaiveMatch,
    "optimal": Optimal,
    "race": Race,
    "traversal": TraversalVerification,
    "shared-noise": SharedNoise,
    "typical": TypicalAcceptance,
}
_USUAL_SCHEMES: dict[str, Scheme] = {
    "naive": TopK(),
    "optimal": WithoutReplacement(),
    "race": IID(),
    "traversal": WithoutReplacement(),
    "shared-noise": Coupled(),
    "typical": TopK(),
}
