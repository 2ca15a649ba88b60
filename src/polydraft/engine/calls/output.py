"""What `generate` returns, with Hugging Face's names and shapes."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.engine.block import Block, Statistics
from polydraft.engine.calls.logprobs import Logprob
from polydraft.engine.calls.past import Past
from polydraft.engine.target_law import TargetLaw
from polydraft.probs import filtered_scores

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
