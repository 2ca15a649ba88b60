"""Members: the rules of the table as instances, one for every scheme that they are made for."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import polydraft.catalogue.tables as tables
from polydraft.catalogue.lines import RuleLine, schemes_of

if TYPE_CHECKING:
    from polydraft.catalogue.lines import Rule
    from polydraft.schemes import Scheme
    from polydraft.verifiers import NodeVerifier, TreeVerifier


def every_scheme() -> "tuple[Scheme, ...]":
    """Return every way of drafting."""
    return schemes_of(tables.SCHEMES)


def rules_of(line: RuleLine) -> "list[Rule]":
    """Return a line's rule for each of its schemes, and its variants; a lossy rule for its usual scheme only.

    Schemes whose nodes are not independent are left out: a law at one node does not tell how they are drawn.
    """
    usual = line.usual
    known = [scheme for scheme in line.known if scheme.independent] if usual.lossless else [usual.scheme]
    return [*(line.of(scheme) for scheme in known), *line.variants]


def node_rules(lines: Sequence[RuleLine] | None = None) -> "tuple[NodeVerifier, ...]":
    """Return the node rules of some lines, or of all, with every scheme that can be proved at single nodes."""
    from polydraft.verifiers import NodeVerifier

    lines = tables.RULES if lines is None else lines
    every = (rule for line in lines if line.decides_at_nodes for rule in rules_of(line))
    return tuple(rule for rule in every if isinstance(rule, NodeVerifier))


def tree_rules(lines: Sequence[RuleLine] | None = None) -> "tuple[TreeVerifier, ...]":
    """Return the rules of some lines, or of all, as they verify trees: with the usual scheme and those `on_trees`."""
    lines = tables.RULES if lines is None else lines
    every = (line.of(scheme) for line in lines for scheme in line.proved_on_trees)
    return tuple(lifted for rule in every for lifted in _lifts(rule))


def _lifts(rule: "Rule") -> "Iterator[TreeVerifier]":
    from polydraft.verifiers import BottomUp, NodeVerifier, ScalableVerifier, TopDown

    if not isinstance(rule, NodeVerifier):
        yield rule
        return
    yield TopDown(rule)
    if isinstance(rule, ScalableVerifier) and rule.scheme.independent:
        yield BottomUp(rule)
