"""What a verification rule is: a deterministic law of the emitted token given the drafts.

Glossary. *Drafts*: the children of a node. *Accepted*: the draft that the node keeps. *Correction*: the token
emitted when no draft is kept. *Bonus*: the token emitted at a leaf. Correction and bonus are the same thing, the
outcome "rest" of a node's law.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, VocabularyMismatch
from polydraft.probs import Noise, check_probs
from polydraft.schemes import MOST_DRAFTS, FewDrafts, Scheme
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.selection.ordered import Numbers, Places, integers, numbers, tensor


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
class HostVerifier(Protocol):
    """A node rule that works on the host, node by node. On a CPU only the nodes that a walk visits are computed."""

    def at_node(self, drafts: Places, draft_row: Numbers, target_mass: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shares of a node's drafts and the marginal of all atoms.

        Args:
            drafts: k atoms, -1 for absent ones; not all are absent.
            draft_row: A draft probabilities, or J rows of them under the `Product` scheme.
            target_mass: A target probabilities, of total at most one.
        """
        ...


@runtime_checkable
class HostLaw(Protocol):
    """A node rule on the host whose residual depends on the drafts; `TopDown` calls `law_at` instead of `at_node`."""

    def law_at(self, drafts: Places, draft_row: Numbers, target_mass: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shares of a node's drafts and, up to a factor, what is emitted if none is accepted."""
        ...


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


def on_host(rule: NodeVerifier) -> HostVerifier | None:
    """Return the rule if it works on the host node by node, else None.

    A derived rule may define another law and inherit `at_node` from its parent. This `at_node` is not used, since it
    belongs to the parent's law.
    """
    return rule if isinstance(rule, HostVerifier) and _is_its_own(type(rule)) else None


@lru_cache(maxsize=256)
def _is_its_own(kind: type) -> bool:
    """Tell whether the host's methods are defined where the last of the others is, or later."""
    places = {name: place for place, base in reversed(list(enumerate(kind.__mro__))) for name in vars(base)}
    last = min(places.get(name, len(kind.__mro__)) for name in ("law", "shares", "marginal"))
    return all(places.get(name, last) <= last for name in ("at_node", "law_at"))


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
    if total.device.type == "cpu" and total.numel() and float(total.min()) > 0:
        return OutcomeLaw(shares, left.div_(total).mul_(rejected))  # in this order: a tiny total must not overflow
    empty = total <= 0
    rest = left.div_(total.masked_fill(empty, 1)).mul_(rejected)
    return OutcomeLaw(shares, torch.where(empty, rejected * target_probs, rest))


def node_by_node(
    rule: HostVerifier,
    drafts: Int[Tensor, "*b k"],
    draft_probs: Float[Tensor, "*rows A"],
    target_mass: Float[Tensor, "*b A"],
) -> tuple[Float[Tensor, "*b k"], Float[Tensor, "*b A"]]:
    """Return shares and marginals of many nodes, like the target mass in type and device; zeros without drafts.

    Nodes that are alike, of which an enumeration of trees has many, are computed once.
    """
    masses = numbers(target_mass.reshape(-1, target_mass.shape[-1]))
    rows = numbers(draft_probs).reshape(len(masses), *draft_probs.shape[target_mass.dim() - 1 :])
    flat = integers(drafts.reshape(-1, drafts.shape[-1]))
    shares, marginal = np.zeros(flat.shape), np.zeros(masses.shape)
    known = dict[bytes, tuple[Numbers, Numbers]]()
    for number in np.flatnonzero((flat >= 0).any(axis=1)).tolist():
        node = flat[number], rows[number], masses[number]
        key = b"".join(part.tobytes() for part in node)
        if key not in known:
            known[key] = rule.at_node(*node)
        shares[number], marginal[number] = known[key]
    return tensor(shares).to(target_mass).view(drafts.shape), tensor(marginal).to(target_mass).view(target_mass.shape)


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


def summed_at_first(shares: Numbers, drafts: Places) -> Numbers:
    """Return what `onto_first_copies` does, for the drafts of one node on the host."""
    result, first = np.zeros(len(shares)), dict[int, int]()
    for place, token in enumerate(drafts.tolist()):
        if token >= 0:
            result[first.setdefault(token, place)] += shares[place]
    return result


def at_draft(row: Float[Tensor, "*b A"], draft: Int[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return the row's entry at each draft; an absent draft (-1) gives the entry of atom 0, to be masked."""
    return row.gather(-1, draft.clamp_min(0).unsqueeze(-1)).squeeze(-1)


def accept_ratio(target: Float[Tensor, "*b"], draft: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return min(1, target / draft); where the draft's probability is zero, one."""
    ones = torch.ones_like(draft)
    return torch.where(draft > 0, target / draft.where(draft > 0, ones), ones).clamp_max(1)
