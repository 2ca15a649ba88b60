"""What rules say of themselves beside their law; a rule that says nothing has the usual answer."""

from dataclasses import dataclass

from polydraft.errors import UnpairedScheme
from polydraft.schemes import MOST_DRAFTS, most_drafts_of
from polydraft.verifiers.outcome_law import NodeVerifier, VerificationRule


@dataclass(frozen=True)
class Traits:
    """What a rule says of itself, by attributes of the same names.

    Args:
        best_alone: whether it keeps a lone drawn draft as often as draft and target rows overlap, which is best; False
            if it does not say.
        most_drafts: the most drafts at a node that it and its scheme are defined for; 4095 if neither names a number.
        node_rule: the node rule that it is made of; None if there is none.
    """

    best_alone: bool
    most_drafts: int
    node_rule: NodeVerifier | None


def traits(rule: VerificationRule) -> Traits:
    """Return what a rule says of itself."""
    most = min(getattr(rule, "most_drafts", MOST_DRAFTS - 1), most_drafts_of(rule.scheme))
    return Traits(getattr(rule, "best_alone", False), most, getattr(rule, "node_rule", None))


def most_drafts(rule: VerificationRule) -> int:
    """Return the most drafts at a node that a rule and its scheme are defined for; 4095 where any number will do."""
    return traits(rule).most_drafts


def require_few(rule: VerificationRule, drafts: int) -> None:
    """Check that a rule and its scheme are defined for so many drafts at a node.

    Raises:
        UnpairedScheme: they are for fewer.
    """
    if drafts > 1 and drafts > (most := most_drafts(rule)):
        few, narrow = ("one draft", "a chain") if most == 1 else (f"at most {most} drafts", f"at most {most} children")
        name = rule.name[:1].upper() + rule.name[1:]
        raise UnpairedScheme(
            f"{name} verifies {few} per node, but the tree has {drafts}; use {narrow}, or a rule of more drafts."
        )


def has_marginal(rule: NodeVerifier, drafts: int, tokens: int) -> bool:
    """Tell whether a rule's average over so many drafts of so many tokens can be computed.

    A rule whose average is a sum over the orders in which drafts may be rejected says by `follows(drafts, tokens)`
    whether these are too many.
    """
    follows = getattr(rule, "follows", None)
    return follows is None or follows(drafts, tokens)
