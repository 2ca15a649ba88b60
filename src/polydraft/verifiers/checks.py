"""Checks of what rules are given, and of the laws that rules from outside the package give."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polydraft.errors import InvalidParameter, InvalidProbabilities, VocabularyMismatch, shown
from polydraft.probs import check_probs
from polydraft.verifiers.outcome_law import DraftRows, Drafts, NodeVerifier, OutcomeLaw, Row, ScalableVerifier, Shares

ROUNDING = 1e-4
"""By so much the sum of a foreign rule's law may differ from one, in single precision over many tokens."""


def check_law(rule: NodeVerifier, law: object, drafts: Drafts, target_probs: Row) -> None:
    """Check the law that a foreign rule gave; the package's own are proved, and not looked at.

    Raises:
        InvalidProbabilities: it is no law.
    """
    if not is_foreign(rule):
        return
    if not isinstance(law, OutcomeLaw):
        raise InvalidProbabilities(f"The rule {rule.name!r} gives no law: its law is no OutcomeLaw, but {shown(law)}.")
    _check_shape(rule, "law.child", law.child, drafts)
    _check_shape(rule, "law.rest", law.rest, target_probs)
    _check_entries(rule, law.child, law.rest, drafts, target_probs)
    off = law.child.sum(dim=-1) + law.rest.sum(dim=-1) - 1
    far = off.abs() > ROUNDING  # a sum that is NaN was refused above
    total = float(1 + off[far & _is_law(target_probs)][:1].sum())
    _refuse(rule, target_probs, off.abs(), f"at a node the probabilities of its outcomes sum to {total:.6g}, not to 1")


def check_shares(rule: ScalableVerifier, shares: Shares, marginal: Row, drafts: Drafts, target_mass: Row) -> None:
    """Check the shares and the marginal that a foreign rule gave; the package's own are proved, and not looked at.

    Raises:
        InvalidProbabilities: they are none.
    """
    if not is_foreign(rule):
        return
    _check_shape(rule, "shares", shares, drafts)
    _check_shape(rule, "marginal", marginal, target_mass)
    _check_entries(rule, shares, marginal, drafts, target_mass)
    _refuse(rule, target_mass, shares.sum(dim=-1) - 1, "the shares of a node's drafts sum to more than 1")
    above = (marginal - target_mass).amax(dim=-1)
    _refuse(rule, target_mass, above, "the marginal of a token is more than its target mass")


def is_foreign(rule: NodeVerifier) -> bool:
    """Tell whether a rule's class is from outside the package, whose tests prove its own rules."""
    return type(rule).__module__.partition(".")[0] != __name__.partition(".")[0]


def _check_shape(rule: NodeVerifier, what: str, table: Tensor, like: Tensor) -> None:
    if table.shape != like.shape:
        raise InvalidProbabilities(
            f"The rule {rule.name!r} gives no law: its {what} is of shape {list(table.shape)}, not {list(like.shape)}."
        )


def _check_entries(rule: NodeVerifier, child: Tensor, rest: Tensor, drafts: Tensor, target: Tensor) -> None:
    """Check that no entry is NaN or negative, and that absent drafts have none."""
    whole = torch.cat([child, rest], dim=-1)
    _refuse(rule, target, (~whole.isfinite()).any(dim=-1), "a probability is NaN or infinite")
    _refuse(rule, target, -whole.amin(dim=-1), f"a probability is negative, {float(whole.min()):.3g}")
    absent = (child * (drafts < 0)).sum(dim=-1)
    _refuse(rule, target, absent, "a draft that is absent, -1, is accepted")


def _refuse(rule: NodeVerifier, target: Row, excess: Tensor, what: str) -> None:
    """Refuse a law where something exceeds rounding; where the target's own row is no law, no rule has one."""
    if bool(((excess > ROUNDING) & _is_law(target)).any()):
        raise InvalidProbabilities(
            f"The rule {rule.name!r} gives no law: {what}; polydraft.conformance.check_rule shows where it is wrong."
        )


def _is_law(target: Row) -> Bool[Tensor, "*b"]:
    return target.isfinite().all(dim=-1)


def check_rows(drafts: Drafts, draft_probs: DraftRows, target_probs: Float[Tensor, "*b W"]) -> None:
    """Check what a node rule is to be given: rows that are distributions on one set of atoms, and drafts among them.

    A draft row without any mass is right: its node has no drafts.

    Raises:
        InvalidParameter: a draft is no atom of the shortlist.
        InvalidProbabilities: an entry is NaN or negative, or a row does not sum to one.
        VocabularyMismatch: draft and target rows differ in length.
    """
    if draft_probs.shape[-1] != target_probs.shape[-1]:
        raise VocabularyMismatch(
            f"The draft rows have {draft_probs.shape[-1]} atoms and the target rows {target_probs.shape[-1]}; "
            "put both on one shortlist and its tail (to_atoms)."
        )
    check_probs(draft_probs[(draft_probs != 0).any(dim=-1)], "draft_probs")
    check_probs(target_probs, "target_probs")
    outside = drafts[(drafts < -1) | (drafts >= draft_probs.shape[-1] - 1)]
    if outside.numel():
        raise InvalidParameter(
            f"A draft is an atom from 0 to {draft_probs.shape[-1] - 2}, or -1 where it is absent, but one is "
            f"{int(outside[0])}."
        )
