"""Which trees `bench lattice` draws, and which rules verify them: all that the catalogue has for their scheme."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from polydraft.catalogue import RuleLine, tables
from polydraft.drafters import Drafter
from polydraft.drafters.model import LISTED
from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Scheme,
    SpecHub,
    TopK,
    TopThenSample,
    WithoutReplacement,
    most_drafts_of,
)
from polydraft.trees import BestFirst, Chain, ExpectedAcceptance, Fixed, TreePolicy, TreeShape
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    NodeVerifier,
    Optimal,
    PathVerifier,
    ScalableVerifier,
    TopDown,
    has_marginal,
    most_drafts,
)

LONG = 5
"""Drafts of a branch where there are drafts for several."""


@dataclass(frozen=True)
class LatticeGroup:
    """Trees of one kind, which all rules of their scheme verify.

    Args:
        shape: what the trees are.
        scheme: how drafts are drawn.
        make: makes the trees of so many drafts, under the scheme.
        whole: whether drafts come from whole rows; from `LISTED` tokens of each where False, as in all groups but one,
            so that trees are compared on equal rows.
    """

    shape: str
    scheme: Scheme
    make: Callable[[int, Scheme], TreePolicy]
    whole: bool = False

    @property
    def name(self) -> str:
        """The trees and their scheme."""
        return self.shape if self.make in (_chain, _wide) else f"{self.shape}, {self.scheme.name}"

    def policy(self, drafts: int) -> TreePolicy:
        """Return the trees of so many drafts."""
        return self.make(drafts, self.scheme)

    def drafter(self, head: Any) -> Drafter:
        """Return a head that draws from as many tokens as the group asks for; it is a dataclass, as all heads are."""
        return head if self.whole else replace(head, shortlist_size=LISTED)

    def rules(self, drafts: int) -> dict[str, PathVerifier]:
        """Return the rules for these trees by name; the last decides while all are asked."""
        width = self.policy(drafts).shape.max_children
        if width == 1:
            return dict(_of_chains(self.scheme))
        if self.scheme.deterministic:  # a certain draft can be kept no more often than the target writes it
            return dict([*_of_trees(self.scheme, width)][:1])
        found = dict(_of_trees(self.scheme, width))
        last = f"{Optimal.name}, bottom up"
        return {name: rule for name, rule in found.items() if name != last} | {last: BottomUp(Optimal(self.scheme))}


def _of_chains(scheme: Scheme) -> Iterator[tuple[str, PathVerifier]]:
    """Yield the rules that the catalogue measures on chains; others come to the same where a node has one draft."""
    for line, rule in _made(scheme):
        if line.measured.chains:
            yield rule.name, TopDown(rule) if isinstance(rule, NodeVerifier) else rule
    yield BlockVerification.name, BlockVerification(scheme)


def _of_trees(scheme: Scheme, width: int) -> Iterator[tuple[str, PathVerifier]]:
    """Yield all rules for a scheme and so many drafts at a node, node rules in both lifts where they can."""
    for line, rule in _made(scheme):
        name = line.measured.label or rule.name
        if most_drafts(rule) < width:
            continue
        if not isinstance(rule, NodeVerifier):
            yield name, rule
            continue
        yield f"{rule.name}, top down", TopDown(rule)
        if isinstance(rule, ScalableVerifier) and has_marginal(rule, width, LISTED):
            yield f"{rule.name}, bottom up", BottomUp(rule)


def _made(scheme: Scheme) -> Iterator[tuple[RuleLine, NodeVerifier | PathVerifier]]:
    """Yield the lossless rules of a scheme whose law given the drafts is known."""
    for line in tables.RULES:
        if line.lossless and scheme in line.known:
            rule = line.of(scheme)
            if isinstance(rule, NodeVerifier | PathVerifier):
                yield line, rule


def _chain(drafts: int, scheme: Scheme) -> TreePolicy:
    return Chain(drafts)


def _wide(drafts: int, scheme: Scheme) -> TreePolicy:
    return BestFirst(drafts, depth=min(drafts, 8), children=4, beam=16)


def _expected(drafts: int, scheme: Scheme) -> TreePolicy:
    return ExpectedAcceptance(drafts, depth=min(drafts, 8), children=4, beam=16, least=0.0)


def branches(drafts: int, scheme: Scheme) -> TreePolicy:
    """Return chains that begin at the root and are equally long but for one draft, with so many drafts in all.

    There are as many as let them be `LONG`, but two at least, and no more than the scheme can draw.
    """
    count = min(max(2, round(drafts / LONG)), drafts, most_drafts_of(scheme))
    long, more = divmod(drafts, count)
    levels = [(count,), *[(1,) * count] * (long - 1), *([(1,) * more] if more else [])]
    return Fixed(TreeShape(tuple(levels)))


GROUPS = (
    LatticeGroup("chain, whole rows", IID(), _chain, whole=True),
    LatticeGroup("chain", IID(), _chain),
    LatticeGroup("best first, top tokens", TopK(), _wide),
    LatticeGroup("expected acceptance", WithoutReplacement(), _expected),
    *(
        LatticeGroup("branches", scheme, branches)
        for scheme in (IID(), WithoutReplacement(), ConditionalPoisson(), TopThenSample(), SpecHub())
    ),
)
"""Chains, also from whole rows, as they are drafted by default; JetSpec's way: the likeliest paths, kept where a sample
of the target's meets them; and drawn trees: where most is expected to be accepted, as the confidence head says before a
node's children are drawn, and chains side by side."""
