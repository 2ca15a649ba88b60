"""Block verification: the optimal rule for a chain of drafts, and a rule that takes it for trees without a branch."""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from polydraft.errors import InvalidDraft, InvalidParameter, UnpairedScheme
from polydraft.machine_code import compiled
from polydraft.probs import Noise
from polydraft.schemes import IID, Scheme, TopThenSample, require_drawn
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.nodes.speculative import SpeculativeSampling
from polydraft.verifiers.nodes.top_then_sample import TopThenSampleRule
from polydraft.verifiers.outcome_law import DraftRows, Drafts, NodeVerifier, Rate, Row, divided, traits
from polydraft.verifiers.selection.rule import Flags, Numbers, Places
from polydraft.verifiers.trees.lifts import Division, FromLeaves, PathLaw, PathVerifier, TopDown, divided_by, verdict_of

Rows = NDArray[np.floating]


@dataclass(frozen=True)
class BlockVerification(FromLeaves):
    """Accept the longest beginning of a chain x_1 ... x_L whose trial succeeds, tried from its end.

    Rule: with a_0 = 1 and a_i = min(1, a_{i-1} target(x_i) / draft(x_i)), the first i drafts are kept with probability
    Z_i / (Z_i + 1 - a_i), where Z_i = sum_x (a_i target(x) - draft(x))+ with the rows after x_i; all L with probability
    a_L. After i drafts the next token is drawn from norm((a_i target - draft)+), after L from the target.
    Scheme: any of which one draft per node is an independent draw from the node's row, the first where it has several.
    Exactness: theorem 1 of the source.
    Cost: O(K) per node.
    Acceptance: the mean length is the largest that any rule reaches on a chain (theorem 2 of the source).
    Source: arXiv 2403.10444, algorithm 2.

    Raises:
        UnpairedScheme: the scheme's single drafts are certain, or not independent; or a node has more than one draft.
    """

    scheme: Scheme = IID()
    name = "block verification"
    most_drafts = 1
    lossless = True
    best_alone = True

    def __post_init__(self) -> None:
        require_drawn(self.scheme, "Block verification")

    def tried(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep the longest beginning that succeeds.

        Raises:
            InvalidDraft: on a CPU, a list names a token that the target has not, or tables do not fit the tree.
        """
        if target_probs.device.type == "cpu":
            return by_rows(draft, target_probs, noise)
        return super().tried(draft, target_probs, noise)

    def divide(self, drafts: Drafts, draft_probs: DraftRows, target_probs: Row, scale: Rate) -> Division:
        """Divide the mass as speculative sampling does: on a chain, its lift from the leaves up is this rule."""
        mass = scale.unsqueeze(-1) * target_probs
        row = draft_probs if draft_probs.dim() == mass.dim() else draft_probs[..., 0, :]
        return divided_by(*divided(SpeculativeSampling(), drafts, row, mass), mass, scale)


@dataclass(frozen=True)
class ByShape:
    """Verify trees that could not have had a branch by one rule, and all others by another.

    Where trees change from step to step, each is verified by what suits it: whole chains are kept longer, and at
    branches a rule of several drafts is needed.

    Rule: `chain` where `Draft.most_children`, which the policy fixes before the first draft is drawn, is at most one;
    else `tree`, also where it is not known.
    Scheme: that of both rules.
    Exactness: the bound does not depend on the drafts of this step, so that each step has one rule, exact for all trees
    that it may come to; `tree` must be exact for chains too. The shape of the grown tree would not do: below a drawn
    token a dynamic policy may branch or not, so a rule chosen by the shape is chosen by the token (a total variation of
    .048 was found over three tokens).
    Cost and acceptance: those of the rule that is taken.
    Source: none; the rules' own.

    Raises:
        InvalidParameter: one is no rule for trees whose law is known.
        UnpairedScheme: the rules are of different schemes.
    """

    chain: PathVerifier = BlockVerification(TopThenSample())
    tree: PathVerifier = TopDown(TopThenSampleRule())

    def __post_init__(self) -> None:
        for rule in cast(tuple[object, ...], (self.chain, self.tree)):
            if isinstance(rule, type) or not isinstance(rule, PathVerifier):
                wanted = f"rules for trees with a path_law, such as TopDown(NaiveMatch()), not {rule!r}."
                raise InvalidParameter(f"ByShape takes {wanted}")
        if self.chain.scheme != self.tree.scheme:
            chain, tree = (f"{rule.name} of {rule.scheme.name}" for rule in (self.chain, self.tree))
            raise UnpairedScheme(f"Both rules must verify the same drafts, but are {chain} and {tree}.")

    @property
    def scheme(self) -> Scheme:
        """The rules' scheme."""
        return self.tree.scheme

    @property
    def name(self) -> str:
        """Both rules' names."""
        return f"{self.chain.name} on chains, {self.tree.name} on trees"

    @property
    def lossless(self) -> bool:
        """Whether both rules are lossless."""
        return self.chain.lossless and self.tree.lossless

    @property
    def best_alone(self) -> bool:
        """Whether the rule for chains keeps a lone drawn draft as often as draft and target rows overlap."""
        return traits(self.chain).best_alone

    @property
    def node_rule(self) -> NodeVerifier | None:
        """The node rule of the rule for trees, if that has one."""
        return traits(self.tree).node_rule

    def rule_for(self, draft: Draft) -> PathVerifier:
        """Return the rule that verifies a draft, by what was fixed before it was drawn."""
        return self.chain if draft.most_children is not None and draft.most_children <= 1 else self.tree

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep the path that the rule for these trees keeps."""
        return self.rule_for(draft).verify(draft, target_probs, noise)

    def path_law(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        return self.rule_for(draft).path_law(draft, target_probs)


def by_rows(draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
    """Return the verdict of `first_success` for a chain on a CPU, with the same numbers to the same ends.

    Nodes are read from the end of the chain until one succeeds, each by the list that its draft was drawn from. That
    takes a fifth of the time of `trials` with 8,192 tokens (docs/log.md). Nothing is drafted below the deepest node, so
    its list is not read.

    Raises:
        InvalidDraft: a list names a token that the target has not, or tables are of other sizes than the tree.
    """
    rows = draft.probs if draft.probs.dim() == 3 else draft.probs[:, :, 0]
    _check_places(draft, rows, target_probs)
    uniforms = noise.uniform(target_probs.shape[1] + 2).cpu().numpy()
    places = draft.atoms[:, 1:].clamp_min(0)
    tables = (places, draft.tree.valid[:, 1:], draft.shortlist, *map(_readable, (rows, target_probs)))
    each = zip(*(table.numpy() for table in tables), uniforms, strict=True)
    ends = [_ended(*row, whole=draft.whole) for row in each]
    return verdict_of([([*range(1, length + 1)], token) for length, token in ends], places.shape[1])


def _check_places(draft: Draft, rows: Float[Tensor, "b n K"], target_probs: Float[Tensor, "b n V"]) -> None:
    """Check what machine code does not: that all places are inside their tables."""
    nodes, listed, tokens = draft.tree.tokens.shape, draft.shortlist, target_probs.shape[-1]
    if not nodes == draft.atoms.shape == listed.shape[:2] == rows.shape[:2] == target_probs.shape[:2]:
        raise InvalidDraft(f"A draft of {nodes[1]} nodes has lists, rows or target rows for another number of nodes.")
    cut = draft.whole and listed.shape[-1] != tokens
    if cut or rows.shape != listed.shape or int(draft.atoms.max()) >= listed.shape[-1]:
        raise InvalidDraft("A draft's rows or places do not fit its lists of tokens.")
    if not draft.whole:
        low, high = int(listed.numpy().min()), int(listed.numpy().max())
        if low < -1 or high >= tokens:
            raise InvalidDraft(f"A draft lists tokens from {low} to {high}, and the target has {tokens}.")


def _readable(rows: Tensor) -> Tensor:
    """Return rows of numbers that machine code reads: half precision becomes single."""
    return rows.detach() if rows.dtype in (torch.float32, torch.float64) else rows.detach().float()


def _ended(
    places: Places, there: Flags, listed: Places, draft: Rows, target: Rows, uniforms: Numbers, *, whole: bool
) -> tuple[int, int]:
    """Return the longest beginning whose trial succeeds, and the token that follows; arguments as for `_longest`."""
    length, left = _longest(places, there, listed, draft, target, uniforms[2:], whole)
    if length == len(places):
        return length, _place(target[length], uniforms[0])
    place = _place(left, uniforms[1])
    if place < listed.shape[1]:
        return length, int(listed[length, place])
    others = target[length].copy()
    others[listed[length][listed[length] >= 0]] = 0
    return length, _place(others if others.any() else target[length], uniforms[0])  # others may be a rounding error


@compiled
def _place(weights: Rows, uniform: float) -> int:
    """Draw a place in proportion to its weight, as `sample` does."""
    total, below = 0.0, 0.0
    for weight in weights:
        total += weight
    point = min(total * uniform, np.nextafter(total, 0))
    for place, weight in enumerate(weights):
        below += weight
        if below > point:
            return place
    return len(weights) - 1


@compiled
def _longest(
    places: Places, there: Flags, listed: Places, draft: Rows, target: Rows, coins: Numbers, whole: bool
) -> tuple[int, Numbers]:
    """Return the longest beginning whose trial succeeds, and the mass left of each listed token, then of all others.

    Of the whole chain no mass is returned: nothing was drafted below it.

    Args:
        places: where the tokens of the chain stand in their lists, one to a node below the root.
        there: which of them are drafted.
        listed: the tokens of the nodes' lists; -1 in empty places.
        draft: the rows at the nodes, in the order of their lists.
        target: the rows at the nodes.
        coins: a uniform number for each trial.
        whole: whether the lists are all tokens in the order of their ids.
    """
    size, most, scale = len(places), listed.shape[1], np.ones(len(places) + 1)
    for i in range(size):
        drawn, token = np.float64(draft[i, places[i]]), places[i] if whole else listed[i, places[i]]
        kept = min(scale[i] * target[i, token] / drawn, 1.0) if drawn > 0 else 1.0
        scale[i + 1] = kept if there[i] else 0.0
    mass, left = np.zeros(most + 1), np.empty(most + 1)
    if coins[size] < scale[size]:
        return size, mass
    for length in range(size - 1, -1, -1):  # in loops: what NumPy says of whole rows takes seconds to compile
        known, total = 0.0, 0.0
        for place in range(most):
            token = place if whole else listed[length, place]
            mass[place] = target[length, token] if token >= 0 else 0.0
            known += mass[place]
        mass[most] = 0.0 if whole else max(1 - known, 0.0)
        for place in range(most + 1):
            left[place] = scale[length] * mass[place]
            if there[length] and place < most:
                left[place] = max(left[place] - draft[length, place], 0.0)
            total += left[place]
        if not length or coins[length] * (total + 1 - scale[length]) < total:
            return length, left if total > 0 else mass  # for rounding
    return 0, mass
