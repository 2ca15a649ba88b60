"""What the conformance matrix covers: the schemes and rules of the catalogue, on a zoo of rows and random ones."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.catalogue import every_scheme, node_rules, tree_rules
from polydraft.probs import Noise, normalised
from polydraft.schemes import Scheme
from polydraft.verifiers import OutcomeLaw, TreeVerifier
from polydraft.verifiers.outcome_law import DraftRows, Drafts, Lift, Row, VerificationRule

__all__ = ["NodeRule", "label", "node_rules", "schemes", "tree_rules"]

ATOMS = 5
TAILS = (0.0, 0.3)
RANDOM = "random"


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


@dataclass(frozen=True, eq=False)
class Case:
    """A target row and a draft row on one shortlist, and the target's mass off the shortlist.

    Args:
        name: what is special about it.
        target: sums to 1 - tail.
        draft: sums to one.
        tail: the target's mass on all other tokens.
    """

    name: str
    target: Float[Tensor, " K"]
    draft: Float[Tensor, " K"]
    tail: float

    @property
    def target_atoms(self) -> Float[Tensor, " A"]:
        """The target with its tail atom."""
        return torch.cat([self.target, self.target.new_tensor([self.tail])])

    def draft_rows(self, scheme: Scheme) -> Float[Tensor, "*J K"]:
        """Return the draft row; where a node has several a second, different row comes with it."""
        if not scheme.several_rows:
            return self.draft
        return torch.stack([self.draft, (self.draft + self.draft.flip(-1)) / 2])

    def __str__(self) -> str:
        return f"{self.name}, tail {self.tail:g}" if self.tail else self.name


_ZOO: dict[str, tuple[Sequence[float], Sequence[float]]] = {
    "generic": ((0.4, 0.1, 0.2, 0.25, 0.05), (0.1, 0.3, 0.15, 0.25, 0.2)),
    "equal": ((0.2, 0.5, 0.3), (0.2, 0.5, 0.3)),
    "disjoint": ((0.5, 0.5, 0, 0), (0, 0, 0.3, 0.7)),
    "one-hot target": ((0, 1, 0, 0), (0.1, 0.2, 0.3, 0.4)),
    "one-hot draft": ((0.4, 0.3, 0.2, 0.1), (0, 0, 1, 0)),
    "one-hot, the same": ((0, 1, 0), (0, 1, 0)),
    "one-hot, another": ((0, 1, 0), (0, 0, 1)),
    "ties": ((0.25, 0.25, 0.25, 0.25), (0.3, 0.3, 0.2, 0.2)),
    "tied draft": ((0.1, 0.6, 0.2, 0.1), (0.25, 0.25, 0.25, 0.25)),
    "tied ratios": ((0.1, 0.2, 0.3, 0.4), (0.05, 0.1, 0.425, 0.425)),
    "zeros": ((0.5, 0, 0.5, 0), (0, 0.4, 0.6, 0)),
    "near-duplicates": ((0.2, 0.5, 0.3), (0.2 + 1e-13, 0.5 - 2e-13, 0.3 + 1e-13)),
    "long tail": ((0.9, 0.09, 0.009, 0.0009, 0.0001), (0.0001, 0.0009, 0.009, 0.09, 0.9)),
    "tiny draft": ((0.5, 0.25, 0.25), (1, 1e-30, 3e-30)),
    "tiny target": ((1, 1e-30, 3e-30), (0.5, 0.25, 0.25)),
    "duplicates bite": ((0.05, 0.25, 0.4, 0.3), (0.6, 0.2, 0.1, 0.1)),
}


def cases(random: int = 8, seed: int = 0) -> list[Case]:
    """Return the zoo and `random` seeded pairs of rows, each without a tail and with one.

    Every second random draft row is made half of the target row, so that drafts are right more often.
    """
    pairs = [(name, _row(target), _row(draft)) for name, (target, draft) in _ZOO.items()]
    uniforms = Noise.from_seed(seed, 1).uniform(max(random, 1), 2, ATOMS)[0, :random]
    mass = uniforms**3 + 0.01  # cubes: some tokens much likelier than others
    laws = normalised(mass, mass)
    for place, (target, other) in enumerate(laws):
        pairs.append((f"{RANDOM} {place}", target, (target + other) / 2 if place % 2 else other))
    return [Case(name, target * (1 - tail), draft, tail) for name, target, draft in pairs for tail in TAILS]


def _row(mass: Sequence[float]) -> Float[Tensor, " K"]:
    return torch.tensor([*mass, *[0.0] * (ATOMS - len(mass))], dtype=torch.float64)
