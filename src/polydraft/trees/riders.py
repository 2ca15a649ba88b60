"""What a drafter wants beside its tree in the target's pass: further tokens, or what first layers made of it."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Riders:
    """Tokens that a drafter wants scored with its tree, such as a lookahead window or mask tokens.

    They lie behind the tree's nodes in the pass, so that no node sees them; trees, verifiers and caches need not know
    of them. Every rider sees the committed text.

    Args:
        tokens: token ids. An id V + i, beyond the target's V tokens, names row i of the draft's `embeddings`.
        places: their places in the text, counted from the root's: 1 is where the root's children are.
        sees: which of the tree's n nodes (the root included), and which riders behind them, each rider sees; itself
            included.
        valid: False at padding.
    """

    tokens: Int[Tensor, "b r"]
    places: Int[Tensor, "b r"]
    sees: Bool[Tensor, "b r s"]
    valid: Bool[Tensor, "b r"]

    def of(self, rows: Int[Tensor, " b"]) -> "Riders":
        """Return those of some rows."""
        return Riders(self.tokens[rows], self.places[rows], self.sees[rows], self.valid[rows])


@dataclass(frozen=True, eq=False)
class Resume:
    """What the target's first layers made of a tree's nodes, root included; their keys lie in the target's cache.

    Args:
        layers: how many layers.
        states: their output.
    """

    layers: int
    states: Float[Tensor, "b n d"]
