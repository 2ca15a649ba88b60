"""Block verification: the optimal rule for a chain of drafts."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from polydraft.errors import InvalidDraft
from polydraft.machine_code import compiled
from polydraft.probs import Noise
from polydraft.schemes import IID, Scheme, require_drawn
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.nodes.speculative import SpeculativeSampling
from polydraft.verifiers.outcome_law import divided
from polydraft.verifiers.selection.ordered import Flags, Numbers, Places, numbers
from polydraft.verifiers.trees.trials import Division, FromLeaves, divided_by
from polydraft.verifiers.trees.walk import verdict_of

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

    def divide(
        self,
        drafts: Int[Tensor, "b f 1"],
        draft_probs: Float[Tensor, "*rows A"],
        target_probs: Float[Tensor, "b f A"],
        scale: Float[Tensor, "b f"],
    ) -> Division:
        """Divide the mass as speculative sampling does: on a chain, its lift from the leaves up is this rule."""
        mass = scale.unsqueeze(-1) * target_probs
        row = draft_probs if draft_probs.dim() == mass.dim() else draft_probs[..., 0, :]
        return divided_by(*divided(SpeculativeSampling(), drafts, row, mass), mass, scale)


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
    uniforms, places = numbers(noise.uniform(target_probs.shape[1] + 2)), draft.atoms[:, 1:].clamp_min(0)
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
