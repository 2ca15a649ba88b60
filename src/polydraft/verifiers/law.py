"""What a verification rule is: a deterministic law of the emitted token given the drafts.

Glossary. *Drafts*: the children of a node. *Accepted*: the draft that the node keeps. *Correction*: the token
emitted when no draft is kept. *Bonus*: the token emitted at a leaf. Correction and bonus are the same thing, the
outcome "rest" of a node's law.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.probs import Noise
from polydraft.schemes import Scheme
from polydraft.trees import Draft, Verdict


@dataclass(frozen=True, eq=False)
class OutcomeLaw:
    """The conditional law of the token emitted at a node, given the node's drafts.

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
    """A rule that decides, at one node, which draft to keep or what to emit instead."""

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
        draft_probs: Float[Tensor, "*b A"],
        target_probs: Float[Tensor, "*b A"],
    ) -> OutcomeLaw:
        """Return the outcome law. Rows are on K + 1 atoms, the tail last, where draft_probs is zero."""
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


def at_draft(row: Float[Tensor, "*b A"], draft: Int[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return the row's entry at each draft; an absent draft (-1) gives the entry of atom 0, to be masked."""
    return row.gather(-1, draft.clamp_min(0).unsqueeze(-1)).squeeze(-1)


def accept_ratio(target: Float[Tensor, "*b"], draft: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return min(1, target / draft); where the draft's probability is zero, one."""
    ones = torch.ones_like(draft)
    return torch.where(draft > 0, target / draft.where(draft > 0, ones), ones).clamp_max(1)
