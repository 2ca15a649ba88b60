"""The nodes about to get children, and the call that gives them their draft rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import TargetMismatch, UnpairedScheme, VocabularyMismatch


@dataclass(frozen=True, eq=False)
class Frontier:
    """The nodes of one depth, about to get children.

    Args:
        nodes: their numbers among the nodes that were ever proposed for, the root being 0. With a static shape these
            are their numbers in the tree as well; with a growing policy `Draft.scored` tells which became which.
        tokens: their token ids.
        depth: their depth; 0 is the root's.
        ancestors: for each, which of the first `nodes.stop` nodes it descends from, itself included.
    """

    nodes: range
    tokens: Int[Tensor, "b f"]
    depth: int
    ancestors: Bool[Tensor, "b f n"]

    def lent(self) -> "Frontier":
        """Return a copy for somebody who may write to it."""
        return replace(self, tokens=self.tokens.clone(), ancestors=self.ancestors.clone())


Propose = Callable[[Frontier], tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]]
"""Gives each frontier node its shortlist of K token ids and their draft probabilities; J rows each for `Product`."""

Overlap = Callable[[Frontier], Float[Tensor, "b f"]]
"""Estimates the overlap of the nodes' rows with the target's, for rows that were proposed just now."""

MENDABLE = (UnpairedScheme, VocabularyMismatch, TargetMismatch)
"""Errors of pairing, which a user has to mend: they are raised wherever they occur."""
