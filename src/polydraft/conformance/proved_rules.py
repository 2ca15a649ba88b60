"""What the conformance matrix covers, which the catalogue tells: schemes, node rules and tree rules, as instances."""

from dataclasses import fields, is_dataclass
from typing import Protocol, runtime_checkable

from polydraft.catalogue import every_scheme, node_rules, tree_rules
from polydraft.schemes import Scheme
from polydraft.verifiers import OutcomeLaw, TreeVerifier
from polydraft.verifiers.outcome_law import DraftRows, Drafts, Lift, Row, VerificationRule

__all__ = ["NodeRule", "label", "node_rules", "schemes", "tree_rules"]


@runtime_checkable
class NodeRule(VerificationRule, Protocol):
    """What a node rule must have to be checked: less than a `NodeVerifier`, which can also state its acceptance."""

    def law(self, drafts: Drafts, draft_probs: DraftRows, target_probs: Row) -> OutcomeLaw:
        """Return the outcome law; see `NodeVerifier.law`."""
        ...


def schemes() -> tuple[Scheme, ...]:
    """Return the ways of drafting whose drafts can be listed node by node."""
    return tuple(scheme for scheme in every_scheme() if scheme.independent)


def label(rule: NodeRule | TreeVerifier) -> str:
    """Return a rule's name, with its lift and with every parameter but the scheme that is not at its default."""
    if isinstance(rule, Lift):
        return f"{label(rule.rule)}, {rule.direction}"
    if not is_dataclass(rule):
        return rule.name
    changed = [
        f"{one.name}={getattr(rule, one.name)}"
        for one in fields(rule)
        if one.name != "scheme" and getattr(rule, one.name) != one.default
    ]
    return f"{rule.name} ({', '.join(changed)})" if changed else rule.name
