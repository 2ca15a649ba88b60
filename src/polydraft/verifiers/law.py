"""What a verification rule is: a deterministic law of the emitted token given the drafts.

Glossary. *Drafts*: the children of a node. *Accepted*: the draft that the node keeps. *Correction*: the token
emitted when no draft is kept. *Bonus*: the token emitted at a leaf. Correction and bonus are the same thing, the
outcome "rest" of a node's law.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, InvalidProbabilities, UnpairedScheme, VocabularyMismatch, shown
from polydraft.probs import Noise, check_probs
from polydraft.schemes import MOST_DRAFTS, FewDrafts, Scheme
from polydraft.trees import Draft, Verdict

ROUNDING = 1e-4
"""By so much the sum of a foreign rule's law may differ from one, in single precision over many tokens."""


@dataclass(frozen=True, eq=False)
class OutcomeLaw:
    """The law of the token that a node emits, given the node's drafts.

    All entries are non-negative and child.sum(-1) + rest.sum(-1) = 1.

    Args:
        child: the probability of accepting draft i; 0 at absent drafts.
        rest: the sub-probability of emitting each atom with no draft accepted; the last atom is the tail.
    """

    child: Float[Tensor, "*b k"]
    rest: Float[Tensor, "*b A"]

    def emitted(self, drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b A"]:
        """Return the law of the emitted atom, whether it came as an accepted draft or not."""
        return self.rest.scatter_add(-1, drafts.clamp_min(0), self.child)


@runtime_checkable
class NodeVerifier(Protocol):
    """A rule that decides, at one node, which draft to keep or what to emit instead.

    Draft rows have the shape of the target's rows; under the `Product` scheme each node has one row per draft.

    A rule sees how many drafts are present, not how many were asked for. Nothing is lost by this: a scheme returns
    fewer drafts than asked for only when the draft row has no more tokens of positive probability, and then both
    numbers have the same law.
    """

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
        """Return the outcome law. Rows have K + 1 atoms; the last is the tail, where draft_probs is zero.

        The rows are trusted, because the engine makes them by `to_probs`. `check_rows` checks rows from elsewhere.
        """
        ...

    def acceptance(
        self, draft_probs: Float[Tensor, "*rows A"], target_probs: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b"]:
        """Return the probability of accepting a draft, averaged over the drafts; computed, not sampled."""
        ...


@runtime_checkable
class ScalableVerifier(NodeVerifier, Protocol):
    """A rule that can verify a part of the target and knows its average acceptance; `BottomUp` lifts such rules.

    The target mass is a * target with 0 < a <= 1. The marginal of a token is the sum of its shares, averaged over the
    drafts. It is at most the token's target mass; the rest of the target mass is the residual.
    """

    def shares(
        self,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*rows A"],
        target_mass: Float[Tensor, "*b A"],
    ) -> Float[Tensor, "*b k"]:
        """Return the probability of accepting each draft, given the drafts; a repeated token has one positive share."""
        ...

    def marginal(
        self, draft_probs: Float[Tensor, "*rows A"], target_mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
    ) -> Float[Tensor, "*b A"]:
        """Return the probability of accepting each atom, averaged over `counts` drafts."""
        ...


@runtime_checkable
class FindsBoth(Protocol):
    """A scalable rule that finds shares and marginal by one computation."""

    def divided(
        self, drafts: Int[Tensor, "*b k"], draft_probs: Float[Tensor, "*rows A"], target_mass: Float[Tensor, "*b A"]
    ) -> tuple[Float[Tensor, "*b k"], Float[Tensor, "*b A"]]:
        """Return shares and marginal."""
        ...


@runtime_checkable
class SumsOrders(Protocol):
    """A rule whose marginal is a sum over the orders in which drafts may be rejected, which may be too many."""

    def follows(self, drafts: int, tokens: int) -> bool:
        """Tell whether it can follow all orders of so many drafts of so many tokens."""
        ...


@runtime_checkable
class OfNodes(Protocol):
    """A rule for trees that is made of a node rule."""

    @property
    def node_rule(self) -> NodeVerifier | None:
        """The node rule; None if it has none after all."""
        ...


@runtime_checkable
class BestAlone(Protocol):
    """A rule that says whether it keeps a lone drawn draft as often as draft and target rows overlap, which is best."""

    @property
    def best_alone(self) -> bool:
        """Whether it does."""
        ...


class SharesRule:
    """What follows from the shares and the marginal of a scalable rule, which derives from this.

    A rule writes `shares` and `marginal`; or `marginal` and `divided`, where one computation gives both. What it can
    say more simply by itself, it overrides. Most such rules are speculative sampling where there is one draft
    (`best_alone`).
    """

    best_alone = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        if "divided" in own or not issubclass(cls, FindsBoth) or not {"shares", "marginal"} & own.keys():
            return
        both: Any = cls.divided  # pyright: ignore  the protocol was asked for

        def halves(self: ScalableVerifier, drafts: Tensor, rows: Tensor, mass: Tensor) -> tuple[Any, Any]:
            shares = self.shares(drafts, rows, mass) if "shares" in own else both(self, drafts, rows, mass)[0]
            return shares, self.marginal(rows, mass, present(drafts))

        setattr(cls, "divided", halves)  # noqa: B010  a derived rule's own half is honoured

    def law(
        self: ScalableVerifier,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*rows A"],
        target_probs: Float[Tensor, "*b A"],
    ) -> OutcomeLaw:
        """Return the outcome law: the shares, and a residual that does not depend on the drafts."""
        return law_of_shares(*divided(self, drafts, draft_probs, target_probs), target_probs)

    def shares(
        self: FindsBoth,
        drafts: Int[Tensor, "*b k"],
        draft_probs: Float[Tensor, "*rows A"],
        target_mass: Float[Tensor, "*b A"],
    ) -> Float[Tensor, "*b k"]:
        """Return the probability of accepting each draft, given the drafts; for a repeated token at its first copy."""
        return self.divided(drafts, draft_probs, target_mass)[0]

    def acceptance(
        self: ScalableVerifier,
        draft_probs: Float[Tensor, "*rows A"],
        target_probs: Float[Tensor, "*b A"],
        counts: Int[Tensor, "*b"],
    ) -> Float[Tensor, "*b"]:
        """Return the probability of accepting a draft: the sum of the marginal."""
        return self.marginal(draft_probs, target_probs, counts).sum(dim=-1)


@runtime_checkable
class TreeVerifier(Protocol):
    """A rule that decides which path of a token tree to keep and which token follows it."""

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
        """Whether the emitted tokens follow the target's law exactly."""
        ...

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep a path of the draft. `target_probs` are the target's rows at every node."""
        ...


def most_drafts(rule: NodeVerifier | TreeVerifier) -> int:
    """Return the most drafts at a node that a rule and its scheme are defined for; 4095 where any number will do."""
    return min(part.most_drafts if isinstance(part, FewDrafts) else MOST_DRAFTS - 1 for part in (rule, rule.scheme))


def require_few(rule: NodeVerifier | TreeVerifier, drafts: int) -> None:
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


def divided(
    rule: ScalableVerifier,
    drafts: Int[Tensor, "*b k"],
    draft_probs: Float[Tensor, "*rows A"],
    target_mass: Float[Tensor, "*b A"],
) -> tuple[Float[Tensor, "*b k"], Float[Tensor, "*b A"]]:
    """Return a rule's shares and marginal, by one computation if it can."""
    if isinstance(rule, FindsBoth):
        return rule.divided(drafts, draft_probs, target_mass)
    return rule.shares(drafts, draft_probs, target_mass), rule.marginal(draft_probs, target_mass, present(drafts))


def check_law(
    rule: NodeVerifier, law: object, drafts: Int[Tensor, "*b k"], target_probs: Float[Tensor, "*b A"]
) -> None:
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


def check_shares(
    rule: ScalableVerifier,
    shares: Float[Tensor, "*b k"],
    marginal: Float[Tensor, "*b A"],
    drafts: Int[Tensor, "*b k"],
    target_mass: Float[Tensor, "*b A"],
) -> None:
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


def _check_shape(rule: NodeVerifier, what: str, found: Tensor, like: Tensor) -> None:
    if found.shape != like.shape:
        raise InvalidProbabilities(
            f"The rule {rule.name!r} gives no law: its {what} is of shape {list(found.shape)}, not {list(like.shape)}."
        )


def _check_entries(rule: NodeVerifier, child: Tensor, rest: Tensor, drafts: Tensor, target: Tensor) -> None:
    """Check that no entry is NaN or negative, and that absent drafts have none."""
    whole = torch.cat([child, rest], dim=-1)
    _refuse(rule, target, (~whole.isfinite()).any(dim=-1), "a probability is NaN or infinite")
    _refuse(rule, target, -whole.amin(dim=-1), f"a probability is negative, {float(whole.min()):.3g}")
    absent = (child * (drafts < 0)).sum(dim=-1)
    _refuse(rule, target, absent, "a draft that is absent, -1, is accepted")


def _refuse(rule: NodeVerifier, target: Float[Tensor, "*b A"], excess: Tensor, what: str) -> None:
    """Refuse a law where something exceeds rounding; where the target's own row is no law, no rule has one."""
    if bool(((excess > ROUNDING) & _is_law(target)).any()):
        raise InvalidProbabilities(
            f"The rule {rule.name!r} gives no law: {what}; polydraft.conformance.check_rule shows where it is wrong."
        )


def _is_law(target: Float[Tensor, "*b A"]) -> Bool[Tensor, "*b"]:
    return target.isfinite().all(dim=-1)


def check_rule(rule: object, who: str) -> None:
    """Check that a value is a node rule, and not the class of one.

    Raises:
        InvalidParameter: it is none.
    """
    if isinstance(rule, type) or not isinstance(rule, NodeVerifier):
        raise InvalidParameter(f"{who} lifts node rules such as NaiveMatch(), but got {rule!r}.")


def check_scalable(rule: object, who: str) -> None:
    """Check that a node rule can verify a fraction of the target.

    Raises:
        InvalidParameter: it cannot.
    """
    if not isinstance(rule, ScalableVerifier):
        raise InvalidParameter(
            f"{who} lifts rules with shares and a marginal, which {type(rule).__name__} has not; use TopDown."
        )


def check_rows(
    drafts: Int[Tensor, "*b k"], draft_probs: Float[Tensor, "*rows A"], target_probs: Float[Tensor, "*b W"]
) -> None:
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


def law_of_shares(
    shares: Float[Tensor, "*b k"], marginal: Float[Tensor, "*b A"], target_probs: Float[Tensor, "*b A"]
) -> OutcomeLaw:
    """Complete accepted shares to an outcome law: what is rejected is emitted from norm(target - marginal).

    Exact, because the shares add up to the marginal on average and the residual does not depend on the drafts.
    """
    rejected = (1 - shares.sum(dim=-1, keepdim=True)).clamp_min(0)
    left = (target_probs - marginal).clamp_min_(0)
    total = left.sum(dim=-1, keepdim=True)
    empty = total <= 0
    rest = left.div_(total.masked_fill(empty, 1)).mul_(rejected)  # in this order: a tiny total must not overflow
    return OutcomeLaw(shares, torch.where(empty, rejected * target_probs, rest))


def present(drafts: Int[Tensor, "*b k"]) -> Int[Tensor, "*b"]:
    """Return the number of drafts at each node."""
    return (drafts >= 0).sum(dim=-1)


def first_copies(drafts: Int[Tensor, "*b k"]) -> Bool[Tensor, "*b k"]:
    """Tell which drafts are present and the first of their token."""
    repeated = torch.tril(drafts.unsqueeze(-1) == drafts.unsqueeze(-2), diagonal=-1).any(dim=-1)
    return (drafts >= 0) & ~repeated


def onto_first_copies(shares: Float[Tensor, "*b k"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
    """Add the shares of a repeated token up at its first copy; absent drafts have none."""
    same = drafts.unsqueeze(-1) == drafts.unsqueeze(-2)
    total = (same * shares.unsqueeze(-2)).sum(dim=-1)
    return total.where(first_copies(drafts), torch.zeros_like(total))


def at_draft(row: Float[Tensor, "*b A"], draft: Int[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return the row's entry at each draft; an absent draft (-1) gives the entry of atom 0, to be masked."""
    return row.gather(-1, draft.clamp_min(0).unsqueeze(-1)).squeeze(-1)


def accept_ratio(target: Float[Tensor, "*b"], draft: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return min(1, target / draft); where the draft's probability is zero, one."""
    ones = torch.ones_like(draft)
    return torch.where(draft > 0, target / draft.where(draft > 0, ones), ones).clamp_max(1)
