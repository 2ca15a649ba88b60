"""Block verification of chains from whole rows on the host."""

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from polydraft.probs import Noise
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.host.tree import verdict_of
from polydraft.verifiers.selection.compiled import compiled
from polydraft.verifiers.selection.ordered import Flags, Numbers, Places, numbers

Rows = NDArray[np.floating]


def by_block_at(draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
    """Return the verdict of `trees.block.by_block`, row after row, from the end of the chain.

    Where the whole chain is kept no row but the last is read.
    """
    probs = draft.probs if draft.probs.dim() == 3 else draft.probs[:, :, 0]
    uniforms, places = numbers(noise.uniform(target_probs.shape[1] + 2)), draft.atoms[:, 1:].clamp_min(0)
    tables = (places, draft.tree.valid[:, 1:], probs, target_probs)
    rows = zip(*(table.numpy() for table in tables), uniforms, strict=True)
    ends = [_longest(*row) for row in rows]
    return verdict_of([([*range(1, length + 1)], token) for length, token in ends], places.shape[1])


@compiled
def _longest(places: Places, there: Flags, draft: Rows, target: Rows, uniforms: Numbers) -> tuple[int, int]:
    """Return the longest beginning whose trial succeeds, and the token that follows.

    Args:
        places: the tokens of the chain, one to a node below the root.
        there: which of them are drafted.
        draft, target: the rows at the nodes.
        uniforms: for a token after the whole chain, for one after part of it, and for the trials.
    """
    size, vocab = len(places), target.shape[1]
    scale, weights = np.ones(size + 1), np.empty(vocab)
    for i in range(size):
        drawn = np.float64(draft[i, places[i]])
        ratio = target[i, places[i]] / drawn if there[i] and drawn > 0 else 0.0
        scale[i + 1] = min(scale[i] * ratio, 1.0)
    whole = size == 0 or uniforms[2 + size] < scale[size]
    length, left = size if whole else size - 1, 0.0
    while not whole and length >= 0:
        left = 0.0
        for token in range(vocab):
            mass = scale[length] * target[length, token] - (draft[length, token] if there[length] else 0.0)
            weights[token] = mass if mass > 0 else 0.0
            left += weights[token]
        wanted = left + 1 - scale[length]
        if length == 0 or uniforms[2 + length] < (min(left / wanted, 1.0) if wanted > 0 else 0.0):
            break
        length -= 1
    total, uniform = left, uniforms[0] if whole else uniforms[1]
    if total <= 0:  # after the whole chain, or where rounding left nothing
        total = 0.0
        for token in range(vocab):
            weights[token] = target[length, token]
            total += weights[token]
    point, sums, last = uniform * total, 0.0, 0
    for token in range(vocab):
        if weights[token] > 0:
            last = token  # rounding may leave the point at the very end
            sums += weights[token]
            if sums > point:
                break
    return length, last
