"""How likely the model itself holds emitted tokens: log-probabilities before processors, temperature and filters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.engine.block import Emission
from polydraft.errors import InvalidParameter, is_whole, shown
from polydraft.trees import Verdict

MOST = 1000


@dataclass(frozen=True)
class Logprob:
    """What the model holds of a place in the text.

    Args:
        token: the token that was emitted there.
        logprob: its log-probability.
        top: the likeliest tokens there with theirs, likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def with_logprobs(
    gains: Mapping[int, Emission], verdict: Verdict, logits: Float[Tensor, "b n V"], top: int
) -> dict[int, Emission]:
    """Return what rows gained with a `Logprob` for each token.

    Args:
        gains: what each row gained.
        verdict: what was kept of the trees.
        logits: the target's at every node.
        top: how many of the likeliest tokens are told beside.
    """
    return {
        row: replace(gained, logprobs=_of_row(gained.tokens, verdict, logits, row, top))
        for row, gained in gains.items()
    }


def checked_logprobs(value: object) -> int | None:
    """Return how many of the likeliest tokens are asked for, 0 for none but the emitted one; None for nothing at all.

    Raises:
        InvalidParameter: it is something else.
    """
    if value is None:
        return None
    if not is_whole(value) or not 0 <= int(str(value)) <= MOST:
        raise InvalidParameter(f"output_logprobs must be a number of tokens from 0 to {MOST}, but is {shown(value)}.")
    return int(str(value))


def _of_row(
    tokens: Sequence[int], verdict: Verdict, logits: Float[Tensor, "b n V"], row: int, top: int
) -> tuple[Logprob, ...]:
    nodes = [0, *verdict.path[row, : verdict.kept[row]].tolist()][: len(tokens)]
    rows = logits[row, nodes].double().log_softmax(dim=-1)
    own = rows.gather(-1, torch.tensor(tokens, device=rows.device).unsqueeze(-1)).squeeze(-1).tolist()
    values, ids = (found.tolist() for found in rows.topk(min(top, rows.shape[-1]), dim=-1))
    return tuple(
        Logprob(token, mine, tuple(zip(ids[place], values[place], strict=True)))
        for place, (token, mine) in enumerate(zip(tokens, own, strict=True))
    )
