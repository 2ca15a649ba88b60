"""What `generate` returns, with Hugging Face's names and shapes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.engine.calls.past import Past
from polydraft.engine.emission import Block, Emission, Statistics
from polydraft.engine.target_law import TargetLaw
from polydraft.errors import InvalidParameter, is_whole, shown
from polydraft.probs import filtered_scores
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


Rows = tuple[Float[Tensor, "b V"], ...]


@dataclass(frozen=True, eq=False)
class GenerationOutput:
    """What `generate` returns; `out["sequences"]` and `out.sequences` are the same, as with Hugging Face's outputs.

    Args:
        sequences: prompts and new tokens; finished rows are filled with the padding id.
        statistics: counts, acceptance, times, and the processors and filters in force.
        finish: per row, why it ended: "eos", "stop", "length", or "context" where the model's context cut it short.
        scores: with output_scores, for each new token the scores that it was chosen by, after all processors and
            filters; zeros in rows that had ended. Else None.
        logits: with output_logits, likewise the target's own logits.
        logprobs: with output_logprobs, per row a `Logprob` for each new token. Else None.
        past: with keep_past, what the models know of the text, for a call whose prompt begins like it. Else None.
        verifier: the name of the rule that kept drafts.
        lossless: whether that rule keeps the model's law; False for a lossy one.
    """

    sequences: Int[Tensor, "b s"]
    statistics: Statistics
    finish: tuple[str, ...]
    scores: Rows | None = None
    logits: Rows | None = None
    past: Past | None = None
    logprobs: tuple[tuple[Logprob, ...], ...] | None = None
    verifier: str = field(kw_only=True)
    lossless: bool = field(kw_only=True)

    def __getitem__(self, name: str | int) -> Any:
        """Return a field by its name, or by its place among those that are there."""
        return self.to_tuple()[name] if isinstance(name, int) else dict(self.items())[name]

    def __contains__(self, name: object) -> bool:
        return name in dict(self.items())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> tuple[str, ...]:
        """Return the names of the fields that are there."""
        return tuple(name for name, _ in self.items())

    def items(self) -> tuple[tuple[str, Any], ...]:
        """Return the fields that are there by name."""
        found = ((one.name, getattr(self, one.name)) for one in fields(self))
        return tuple((name, value) for name, value in found if value is not None)

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the fields that are there."""
        return tuple(value for _, value in self.items())


def emitted_rows(block: Block, laws: tuple[TargetLaw, ...]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return, of every row that gained tokens, the logits and the final scores "s V" that each was chosen by."""
    found = dict[int, tuple[Tensor, Tensor]]()
    if block.logits is None or block.scores is None:
        return found
    for row, gained in block.rows.items():
        nodes = [0, *block.verdict.path[row].tolist()][: len(gained.tokens)]
        found[row] = block.logits[row, nodes], filtered_scores(block.scores[row, nodes], laws[row].params)
    return found


def scores_of(block: Block, laws: tuple[TargetLaw, ...]) -> dict[int, Tensor]:
    """Return, of every row that gained tokens, the final scores "s V" that each was chosen by."""
    return {row: scores for row, (_, scores) in emitted_rows(block, laws).items()}


def in_steps(rows: list[list[Float[Tensor, "_ V"]]]) -> Rows:
    """Return the rows' tensors, one after the other, as one tensor "b V" for each token of the longest row."""
    texts = [torch.cat(parts) if parts else None for parts in rows]
    longest = max((len(text) for text in texts if text is not None), default=0)
    like = next((text for text in texts if text is not None), None)
    if like is None:
        return ()
    result = like.new_zeros(longest, len(rows), like.shape[-1])
    for row, text in enumerate(texts):
        if text is not None:
            result[: len(text), row] = text
    return tuple(result)
