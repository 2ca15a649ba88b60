"""Confidence stopping: draft on below a token only if the draft was sure enough of it."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.trees.growing.bounds import require_share
from polydraft.trees.growing.growth import Drawn, GrowingPolicy, Opened
from polydraft.trees.growing.stopping.confidence import Confidence, TokenProbability
from polydraft.trees.policy import Widths
from polydraft.trees.shape import TreeShape


@dataclass(frozen=True)
class Confident(GrowingPolicy):
    """Widths per depth, but no children below a draft whose confidence is under the threshold.

    The doubtful draft itself stays in the tree and is verified with the row it was drawn from. So its own token may
    decide whether it has children: it is above them, and they are not drawn yet. (Throwing the doubtful draft away
    instead, as BiLD does, would be pruning after sampling.) A node that is not opened costs no draft pass; where no row
    of the batch goes on, drafting ends.

    Args:
        widths: children per depth; ones for a chain.
        threshold: the least confidence to go on with, in 0 to 1.
        confidence: what to compare with it.

    Raises:
        InvalidParameter: widths that are none, a threshold outside 0 to 1, or a confidence that is none.
    """

    widths: tuple[int, ...]
    threshold: float = 0.4
    confidence: Confidence = TokenProbability()

    def __post_init__(self) -> None:
        _ = Widths(self.widths)
        require_share("threshold", self.threshold)
        _require_confidence(self.confidence)

    @property
    def shape(self) -> TreeShape:
        """The tree of a draft that is always sure."""
        return Widths(self.widths).shape

    @property
    def stops(self) -> bool:
        """Growth ends where the draft is not sure anywhere."""
        return self.threshold > 0

    def widest(self, depth: int) -> int:
        """Return the width of the tree of a draft that is always sure."""
        return len(self.shape.levels[depth])

    def opened(self, drawn: Drawn) -> Bool[Tensor, "b c"]:
        """Choose the nodes that the draft is sure of."""
        return self.confidence.of(drawn) >= self.threshold

    def counts(self, opened: Opened) -> Int[Tensor, "b f"]:
        """Give every open node the width of its depth."""
        return torch.full_like(opened.there, self.widths[opened.depth], dtype=torch.int64)


def _require_confidence(value: object) -> None:
    if isinstance(value, type) or not isinstance(value, Confidence):
        raise InvalidParameter(f"confidence must be one such as TokenProbability(), but is {value!r}.")
