"""From token ids to text as it comes, and from names on the command line to schemes and verifiers."""

from collections.abc import Callable

from polydraft import verifiers as rules
from polydraft.errors import InvalidParameter
from polydraft.models import Pair
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
from polydraft.verifiers import NodeVerifier, ScalableVerifier, TreeVerifier


class StreamDecoder:
    """Decode tokens one by one; bytes of an unfinished character wait for the rest of it.

    Text is decoded in a window that starts before the last printed token, because a token's text can depend on the
    one before it.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.ids: list[int] = []
        self.start = 0
        self.printed = 0

    def add(self, token: int) -> str:
        """Return the text that is complete with this token; may be empty."""
        self.ids.append(token)
        before = self.decode(self.ids[self.start : self.printed])
        now = self.decode(self.ids[self.start :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self.start, self.printed = self.printed, len(self.ids)
        return now[len(before) :]

    def rest(self) -> str:
        """Return what is left at the end of the text, complete or not."""
        before = self.decode(self.ids[self.start : self.printed])
        return self.decode(self.ids[self.start :])[len(before) :]


def text_of(pair: Pair) -> Callable[[list[int]], str]:
    """Return the function that turns token ids into text without special tokens."""
    return lambda ids: str(pair.tokenizer.decode(ids, skip_special_tokens=True))


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
        return rules.TopDown(rule)
    if not isinstance(rule, ScalableVerifier):
        raise InvalidParameter(f"The verifier {name} cannot be lifted bottom up: its average acceptance is not known.")
    return rules.BottomUp(rule)


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
    "speculative": rules.SpeculativeSampling,
    "recursive": rules.RecursiveRejection,
    "recursive-wo": rules.RecursiveRejectionWithoutReplacement,
    "top-then-sample": rules.TopThenSampleRule,
    "k-seq": rules.KSeq,
    "spec-hub": rules.SpecHubRule,
    "importance-weighted": rules.ImportanceWeighted,
    "block": rules.BlockVerification,
    "lenient": rules.Lenient,
    "top-beta": rules.TopBeta,
}
_OF_ANY_SCHEME: dict[str, Callable[[Scheme], NodeVerifier | TreeVerifier]] = {
    "naive": rules.NaiveMatch,
    "optimal": rules.Optimal,
    "race": rules.Race,
    "traversal": rules.TraversalVerification,
    "shared-noise": rules.SharedNoise,
    "typical": rules.TypicalAcceptance,
}
_USUAL_SCHEMES: dict[str, Scheme] = {
    "naive": TopK(),
    "optimal": WithoutReplacement(),
    "race": IID(),
    "traversal": WithoutReplacement(),
    "shared-noise": Coupled(),
    "typical": TopK(),
}
