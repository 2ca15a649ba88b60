"""Which sub-layers of a model matter least to a token: a dynamic programme over them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

Through = Callable[[int, Float[Tensor, "c d"]], Float[Tensor, "c d"]]


@dataclass(frozen=True, eq=False)
class SkipTable:
    """The best set of sub-layers to skip for every amount of work that is saved.

    Args:
        sets: by the units of work saved, which sub-layers are skipped; None where no set saves so many.
        nearness: the cosine of what comes out to what comes out of all sub-layers; -inf where there is no set.
        states: what comes out.
    """

    sets: tuple[tuple[int, ...] | None, ...]
    nearness: Float[Tensor, "c"]
    states: Float[Tensor, "c d"]


def skip_table(
    first: Float[Tensor, "d"] | Float[Tensor, "1 d"], costs: Sequence[int], most: int, through: Through
) -> SkipTable:
    """Find for every number of saved units up to `most` which sub-layers to skip.

    Problem: f_k are the sub-layers, c_k >= 1 their costs in whole units, x_k = f_k(x_(k-1)) what the model makes of a
    token. Cell g(k, j) holds a state behind the first k sub-layers of which some are skipped that cost j together:

        g(k, j) = argmax over h in {f_k(g(k - 1, j)), g(k - 1, j - c_k)} of cos(h, x_k),   g(k, 0) = x_k.

    All cells go through a sub-layer in one pass. The cell keeps one state, so the sets are the best ones where what
    comes later does not change which of two states is nearer, and a good guess otherwise. Of equal ones the state that
    skips nothing more is kept.

    Source: Chen et al., arXiv 2505.24196 (CLaSp), with costs of 1 and whole layers, section 3; attention and inner
    layers apart, with costs of their own, are those of Cha et al., arXiv 2602.20217 (KnapSpec).

    Args:
        first: what enters the first sub-layer.
        costs: the sub-layers' costs.
        most: the most units to save.
        through: runs a sub-layer, given its number, over states.
    """
    states = first.reshape(1, -1).repeat(most + 1, 1)
    there = torch.arange(most + 1, device=states.device) == 0
    came = list[list[bool]]()
    for number, cost in enumerate(costs):
        run = through(number, states)
        skipped, reached = pad(states, (0, 0, cost, 0))[: most + 1], pad(there, (cost, 0))[: most + 1]
        kept_near, skipped_near = (cosine_similarity(one.double(), run[:1].double()) for one in (run, skipped))
        takes = reached & (~there | (skipped_near > kept_near))
        states, there = skipped.where(takes.unsqueeze(-1), run), there | reached
        came.append(takes.tolist())
    nearness = cosine_similarity(states.double(), states[:1].double()).masked_fill(~there, -torch.inf)
    reachable = there.tolist()
    sets = tuple(_followed(came, costs, saved) if reachable[saved] else None for saved in range(most + 1))
    return SkipTable(sets, nearness, states)


def _followed(came: Sequence[Sequence[bool]], costs: Sequence[int], saved: int) -> tuple[int, ...]:
    """Return the sub-layers that were skipped on the way to a cell behind the last one."""
    skipped = list[int]()
    for number in reversed(range(len(costs))):
        if came[number][saved]:
            skipped.append(number)
            saved -= costs[number]
    return tuple(reversed(skipped))


def tokens_per_work(overlap: float, draft: float, scoring: float, length: int) -> float:
    """Return the expected tokens of a step per unit of work, for a chain of drafts.

    With the overlap a at every depth a step of g drafts yields (1 - a^(g + 1)) / (1 - a) tokens (Leviathan et al.,
    arXiv 2211.17192, equation 1).

    Args:
        overlap: a.
        draft: the work of a draft.
        scoring: the work of the pass that scores the chain.
        length: g.
    """
    return sum(overlap**depth for depth in range(length + 1)) / (length * draft + scoring)
