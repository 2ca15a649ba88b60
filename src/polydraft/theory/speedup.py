"""What an acceptance rate is worth: tokens per target call, time and operations saved, and the best draft length."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.errors import InvalidParameter, is_whole, require_number
from polydraft.probs import overlap

LONGEST = 4096
"""Longer chains are never drafted."""


def divergence(draft_probs: Float[Tensor, "*b V"], target_probs: Float[Tensor, "*b V"]) -> Float[Tensor, "*b"]:
    """Return D_LK(target, draft) = sum |target - mean| with mean = (target + draft) / 2: the total variation.

    One draft is accepted with probability 1 - D_LK = sum min(target, draft).
    Source: Leviathan et al., arXiv 2211.17192, definition 3.2, lemma 3.3, theorem 3.5.
    """
    return (target_probs - (target_probs + draft_probs) / 2).abs().sum(dim=-1)


def lenient_acceptance(
    draft_probs: Float[Tensor, "*b V"], target_probs: Float[Tensor, "*b V"], lenience: float
) -> Float[Tensor, "*b"]:
    """Return sum min(target / lenience, draft), the acceptance rate of one draft under a lenient rule.

    Lossy: for lenience below one the output no longer follows the target.
    Source: Leviathan et al., arXiv 2211.17192, appendix A.5.

    Raises:
        InvalidParameter: lenience is not in (0, 1].
    """
    require_number("lenience", lenience, "in (0, 1]", lambda value: 0 < value <= 1)
    return overlap(target_probs / lenience, draft_probs)


def tokens_per_call(acceptance: float, length: int) -> float:
    """Return (1 - a^(g + 1)) / (1 - a), the mean tokens per target call of a chain of g drafts.

    Each draft is accepted with probability a, independently, until the first rejection; one token more comes from the
    target. Summed as 1 + a + ... + a^g, which is g + 1 at a = 1.
    Source: Leviathan et al., arXiv 2211.17192, equation 1.

    Raises:
        InvalidParameter: the acceptance is not in [0, 1], or the length is negative.
    """
    _require_share(acceptance)
    _require_length("length", length)
    return sum(acceptance**drafts for drafts in range(length + 1))


def time_factor(acceptance: float, length: int, cost: float) -> float:
    """Return by how much a chain shortens the time: tokens_per_call / (length * cost + 1).

    `cost` is the time of one draft over the time of one target call; a target call is taken to cost the same whatever
    it scores. Source: Leviathan et al., arXiv 2211.17192, theorem 3.8.

    Raises:
        InvalidParameter: an argument is outside its range.
    """
    _require_cost(cost)
    return tokens_per_call(acceptance, length) / (length * cost + 1)


def operations_factor(acceptance: float, length: int, cost: float) -> float:
    """Return by how much a chain multiplies the operations: (length * cost + length + 1) / tokens_per_call.

    `cost` is the operations of one draft over those of one target token.
    Source: Leviathan et al., arXiv 2211.17192, theorem 3.11.

    Raises:
        InvalidParameter: an argument is outside its range.
    """
    _require_cost(cost)
    tokens = tokens_per_call(acceptance, length)
    return (length * cost + length + 1) / tokens


def can_gain(acceptance: float, cost: float) -> bool:
    """Tell whether some chain saves time: if and only if the acceptance is larger than the cost of a draft.

    Source: Leviathan et al., arXiv 2211.17192, corollary 3.9.

    Raises:
        InvalidParameter: an argument is outside its range.
    """
    _require_share(acceptance)
    _require_cost(cost)
    return acceptance > cost


def least_gain(acceptance: float, cost: float) -> float:
    """Return (1 + a) / (1 + c), the time factor of one draft, which the best chain reaches at least where it can gain.

    Source: Leviathan et al., arXiv 2211.17192, corollary 3.9.

    Raises:
        InvalidParameter: an argument is outside its range.
    """
    return time_factor(acceptance, 1, cost)


def best_length(acceptance: float, cost: float, longest: int = 64) -> int:
    """Return the length up to `longest` with the largest time factor, the shorter of equals; 0 is no drafting.

    Raises:
        InvalidParameter: an argument is outside its range.
    """
    _require_length("longest", longest)
    return max(range(longest + 1), key=lambda length: time_factor(acceptance, length, cost))


def expected_accepted_length(parents: Sequence[int], branching: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """Return the mean number of accepted drafts of a token tree: the sum of all nodes' chances of being reached.

    `branching` is each node's probability of being accepted once its parent is (for the root, node 0, it is not
    used); a node is reached with the product along its path. No verification is sampled.

    Args:
        parents: the parent of each node, smaller than the node itself; -1 for the root.
        branching: the branching probability of every node, the siblings' together at most one.

    Raises:
        InvalidParameter: the parents are no tree in this order, or not one for each branching probability.
    """
    if len(parents) != branching.shape[-1]:
        raise InvalidParameter(f"There are {len(parents)} parents, but {branching.shape[-1]} branching probabilities.")
    reached: list[Tensor] = [torch.ones_like(branching[..., 0])] if parents else []
    for node, parent in enumerate(parents):
        if not is_whole(parent) or (parent != -1 if node == 0 else not 0 <= parent < node):
            raise InvalidParameter(
                f"Node {node} has parent {parent!r}; the root's is -1, all others' come before them."
            )
        if node:
            reached.append(reached[parent] * branching[..., node])
    return torch.stack(reached, dim=-1).sum(dim=-1) - 1 if reached else branching.sum(dim=-1)


def block_efficiency(parents: Sequence[int], branching: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """Return the mean number of tokens per target call of a token tree: the accepted drafts and the next token.

    Raises:
        InvalidParameter: the parents are no tree in this order, or not one for each branching probability.
    """
    return 1 + expected_accepted_length(parents, branching)


def _require_share(acceptance: float) -> None:
    require_number("acceptance", acceptance, "in [0, 1]", lambda value: 0 <= value <= 1)


def _require_cost(cost: float) -> None:
    require_number("cost", cost, ">= 0", lambda value: 0 <= value < float("inf"))


def _require_length(name: str, value: int) -> None:
    if not is_whole(value) or value < 0:
        raise InvalidParameter(f"{name} must be an integer >= 0, but is {value!r}.")
    if value >= LONGEST:
        raise InvalidParameter(f"{name} must be below {LONGEST}, but is {value}.")
