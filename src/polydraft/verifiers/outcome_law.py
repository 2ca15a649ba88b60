"""What a verification rule is: a deterministic law of the emitted token given the drafts.

Glossary. *Drafts*: the children of a node. *Accepted*: the draft that the node keeps. *Correction*: the token
emitted when no draft is kept. *Bonus*: the token emitted at a leaf. Correction and bonus are the same thing, the
outcome "rest" of a node's law.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.probs import Noise
from polydraft.schemes import MOST_DRAFTS, Scheme, most_drafts_of
from polydraft.schemes.scheme import Counts, Drafts, Rate
from polydraft.trees import Draft, Verdict

Row = Float[Tensor, "*b A"]
"""A number for each atom of each node: target rows, a target mass, a marginal, draft rows where a node has one."""
DraftRows = Float[Tensor, "*rows A"]
"""The draft rows of nodes, one or several for each."""
Shares = Float[Tensor, "*b k"]
"""A number for each draft of each node."""


@dataclass(frozen=True, eq=False)
class OutcomeLaw:
    """The law of the token that a node emits, given the node's drafts.

    All entries are non-negative and child.sum(-1) + rest.sum(-1) = 1.

    Args:
        child: the probability of accepting draft i; 0 at absent drafts.
        rest: the sub-probability of emitting each atom with no draft accepted; the last atom is the tail.
    """

    child: Shares
    rest: Row

    def emitted(self, drafts: Drafts) -> Row:
        """Return the law of the emitted atom, whether it came as an accepted draft or not."""
        return self.rest.scatter_add(-1, drafts.clamp_min(0), self.child)


class VerificationRule(Protocol):
    """What every rule says of itself."""

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


@runtime_checkable
class NodeVerifier(VerificationRule, Protocol):
    """A rule that decides, at one node, which draft to keep or what to emit instead.

    Draft rows have the shape of the target's rows; under the `Product` scheme each node has one row per draft.

    A rule sees how many drafts are present, not how many were asked for. Nothing is lost by this: a scheme returns
    fewer drafts than asked for only when the draft row has no more tokens of positive probability, and then both
    numbers have the same law.
    """

    def law(self, drafts: Drafts, draft_probs: DraftRows, target_probs: Row) -> OutcomeLaw:
        """Return the outcome law. Rows have K + 1 atoms; the last is the tail, where draft_probs is zero.

        The rows are trusted, because the engine makes them by `to_probs`. `check_rows` checks rows from elsewhere.
        """
        ...

    def acceptance(self, draft_probs: DraftRows, target_probs: Row, counts: Counts) -> Rate:
        """Return the probability of accepting a draft, averaged over the drafts; computed, not sampled."""
        ...


@runtime_checkable
class ScalableVerifier(NodeVerifier, Protocol):
    """A rule that can verify a part of the target and knows its average acceptance; `BottomUp` lifts such rules.

    The target mass is a * target with 0 < a <= 1. The marginal of a token is the sum of its shares, averaged over the
    drafts. It is at most the token's target mass; the rest of the target mass is the residual.
    """

    def shares(self, drafts: Drafts, draft_probs: DraftRows, target_mass: Row) -> Shares:
        """Return the probability of accepting each draft, given the drafts; a repeated token has one positive share."""
        ...

    def marginal(self, draft_probs: DraftRows, target_mass: Row, counts: Counts) -> Row:
        """Return the probability of accepting each atom, averaged over `counts` drafts."""
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
        written, both = vars(cls), cls.divided
        if "divided" in written or both is SharesRule.divided or not {"shares", "marginal"} & written.keys():
            return

        def halves(self: ScalableVerifier, drafts: Tensor, rows: Tensor, mass: Tensor) -> tuple[Any, Any]:
            shares = self.shares(drafts, rows, mass) if "shares" in written else both(self, drafts, rows, mass)[0]
            return shares, self.marginal(rows, mass, present(drafts))

        setattr(cls, "divided", halves)  # noqa: B010  a derived rule's own half is honoured

    def divided(self: Any, drafts: Drafts, draft_probs: DraftRows, target_mass: Row) -> tuple[Shares, Row]:
        """Return the shares and the marginal."""
        return self.shares(drafts, draft_probs, target_mass), self.marginal(draft_probs, target_mass, present(drafts))

    def shares(self: Any, drafts: Drafts, draft_probs: DraftRows, target_mass: Row) -> Shares:
        """Return the probability of accepting each draft, given the drafts; for a repeated token at its first copy."""
        return self.divided(drafts, draft_probs, target_mass)[0]

    def law(self: ScalableVerifier, drafts: Drafts, draft_probs: DraftRows, target_probs: Row) -> OutcomeLaw:
        """Return the outcome law: the shares, and a residual that does not depend on the drafts."""
        return law_of_shares(*divided(self, drafts, draft_probs, target_probs), target_probs)

    def acceptance(self: ScalableVerifier, draft_probs: DraftRows, target_probs: Row, counts: Counts) -> Rate:
        """Return the probability of accepting a draft: the sum of the marginal."""
        return self.marginal(draft_probs, target_probs, counts).sum(dim=-1)


@runtime_checkable
class TreeVerifier(VerificationRule, Protocol):
    """A rule that decides which path of a token tree to keep and which token follows it."""

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep a path of the draft. `target_probs` are the target's rows at every node."""
        ...


@dataclass(frozen=True)
class Traits:
    """What a rule says of itself, by attributes of the same names.

    Args:
        best_alone: whether it keeps a lone drawn draft as often as draft and target rows overlap, which is best; False
            if it does not say.
        most_drafts: the most drafts at a node that it and its scheme are defined for; 4095 if neither names a number.
        node_rule: the node rule that it is made of; None if there is none.
        greedy_only: whether it is for temperature 0 alone, where it reads the softmax of the scores; False if it does
            not say.
    """

    best_alone: bool
    most_drafts: int
    node_rule: NodeVerifier | None
    greedy_only: bool = False


def traits(rule: VerificationRule) -> Traits:
    """Return what a rule says of itself."""
    most = min(getattr(rule, "most_drafts", MOST_DRAFTS - 1), most_drafts_of(rule.scheme))
    best_alone, greedy_only = getattr(rule, "best_alone", False), getattr(rule, "greedy_only", False)
    return Traits(best_alone, most, getattr(rule, "node_rule", None), greedy_only)


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


def require_greedy(rule: VerificationRule, temperature: float) -> None:
    """Check that a rule for temperature 0 alone meets no other.

    Raises:
        InvalidParameter: it does.
    """
    if temperature and traits(rule).greedy_only:
        raise InvalidParameter(
            f"The verifier {rule.name} is for temperature 0 alone, but the temperature is {temperature:g}: decode "
            "greedily, or take another verifier."
        )


def has_marginal(rule: NodeVerifier, drafts: int, tokens: int) -> bool:
    """Tell whether a rule's average over so many drafts of so many tokens can be computed.

    A rule whose average is a sum over the orders in which drafts may be rejected says by `follows(drafts, tokens)`
    whether these are too many.
    """
    follows = getattr(rule, "follows", None)
    return follows is None or follows(drafts, tokens)


Rule = TypeVar("Rule", bound=NodeVerifier)


class Lift(Generic[Rule]):
    """A rule for trees that is made of a node rule, and says of itself what that says."""

    rule: Rule
    direction: str

    @property
    def node_rule(self) -> NodeVerifier:
        """The node rule, whose rates at nodes are about those of the lift."""
        return self.rule

    @property
    def scheme(self) -> Scheme:
        """The node rule's scheme."""
        return self.rule.scheme

    @property
    def name(self) -> str:
        """The node rule's name."""
        return self.rule.name

    @property
    def lossless(self) -> bool:
        """Whether the node rule is lossless."""
        return self.rule.lossless

    @property
    def best_alone(self) -> bool:
        """Whether the node rule keeps a lone drawn draft as often as draft and target rows overlap."""
        return traits(self.rule).best_alone

    @property
    def most_drafts(self) -> int:
        """The most drafts at a node that the node rule and its scheme are defined for."""
        return traits(self.rule).most_drafts


def divided(rule: ScalableVerifier, drafts: Drafts, draft_probs: DraftRows, target_mass: Row) -> tuple[Shares, Row]:
    """Return a rule's shares and marginal, by one computation if it can."""
    divide = getattr(rule, "divided", None) or partial(SharesRule.divided, rule)
    return divide(drafts, draft_probs, target_mass)


def lone_draft(scheme: Scheme, drafts: Drafts, draft_probs: DraftRows, target_mass: Row) -> tuple[Shares, Row] | None:
    """Return shares and marginal of the best rule for one draft per node; None if there is room for more.

    Of a draft from the row the best coupling keeps min(mass, draft), and no other is as good; a draft that is certain
    is accepted as often as its mass. Every rule that comes to this with one draft may save its general computation.
    """
    if drafts.shape[-1] != 1:
        return None
    if not scheme.lone_draft_is_drawn:
        shares = at_draft(target_mass, drafts.squeeze(-1)).unsqueeze(-1) * (drafts >= 0)
        return shares, torch.zeros_like(target_mass).scatter_(-1, drafts.clamp_min(0), shares)
    row = draft_probs[..., 0, :] if scheme.several_rows else draft_probs
    shares = accepted_alone(target_mass, row, drafts.squeeze(-1)).unsqueeze(-1)
    return shares, torch.minimum(target_mass, row) * (drafts >= 0)


def law_of_shares(shares: Shares, marginal: Row, target_probs: Row) -> OutcomeLaw:
    """Complete accepted shares to an outcome law: what is rejected is emitted from norm(target - marginal).

    Exact, because the shares add up to the marginal on average and the residual does not depend on the drafts.
    """
    rejected = (1 - shares.sum(dim=-1, keepdim=True)).clamp_min(0)
    left = (target_probs - marginal).clamp_min_(0)
    total = left.sum(dim=-1, keepdim=True)
    empty = total <= 0
    rest = left.div_(total.masked_fill(empty, 1)).mul_(rejected)  # in this order: a tiny total must not overflow
    return OutcomeLaw(shares, torch.where(empty, rejected * target_probs, rest))


def present(drafts: Drafts) -> Counts:
    """Return the number of drafts at each node."""
    return (drafts >= 0).sum(dim=-1)


def first_copies(drafts: Drafts) -> Bool[Tensor, "*b k"]:
    """Tell which drafts are present and the first of their token."""
    repeated = torch.tril(drafts.unsqueeze(-1) == drafts.unsqueeze(-2), diagonal=-1).any(dim=-1)
    return (drafts >= 0) & ~repeated


def onto_first_copies(shares: Shares, drafts: Drafts) -> Shares:
    """Add the shares of a repeated token up at its first copy; absent drafts have none."""
    same = drafts.unsqueeze(-1) == drafts.unsqueeze(-2)
    total = (same * shares.unsqueeze(-2)).sum(dim=-1)
    return total.where(first_copies(drafts), torch.zeros_like(total))


def at_draft(row: Row, draft: Int[Tensor, "*b"]) -> Rate:
    """Return the row's entry at each draft; an absent draft (-1) gives the entry of atom 0, to be masked."""
    return row.gather(-1, draft.clamp_min(0).unsqueeze(-1)).squeeze(-1)


def accepted_alone(target_mass: Row, draft_row: Row, draft: Int[Tensor, "*b"]) -> Rate:
    """Return min(1, mass(x) / draft(x)), what the best rule for one draft accepts of it; zero where it is absent."""
    return accept_ratio(at_draft(target_mass, draft), at_draft(draft_row, draft)) * (draft >= 0)


def accept_ratio(target: Rate, draft: Rate) -> Rate:
    """Return min(1, target / draft); where the draft's probability is zero, one."""
    ones = torch.ones_like(draft)
    return torch.where(draft > 0, target / draft.where(draft > 0, ones), ones).clamp_max(1)
