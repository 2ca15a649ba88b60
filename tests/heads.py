"""Small block heads with random weights, and what their path terms come to."""

from typing import Any

import torch

from polydraft.drafters.heads.block import BlockHead, BlockShape
from polydraft.drafters.heads.ends import HeadEnds
from polydraft.drafters.heads.lattice import BlockDrafter
from polydraft.drafters.heads.layers import Anatomy, Rotation
from polydraft.drafters.heads.paths import (
    Domino,
    GatedMarkov,
    Markov,
    Mixing,
    PathTerm,
    RecurrentMarkov,
    Selector,
)

WIDTH, VOCAB = 16, 24
TERMS = ("none", "markov", "gated", "recurrent", "domino", "mixing", "selector")


def path_term(name: str, vocab: int = VOCAB, width: int = WIDTH, rows: int | None = None) -> PathTerm:
    """Return a path term; all of its tables are random."""
    rows = rows or vocab
    term = {
        "none": PathTerm,
        "markov": lambda: Markov(vocab, rows, 6),
        "gated": lambda: GatedMarkov(vocab, rows, 6, width),
        "recurrent": lambda: RecurrentMarkov(vocab, rows, 6, width),
        "domino": lambda: Domino(width, rows, 10, 6, 1),
        "mixing": lambda: Mixing(width, 10, 6),
        "selector": lambda: Selector(vocab, rows, 6, width, 5),
    }[name]()
    return term


def block_head(
    term: str = "mixing",
    *,
    seed: int = 3,
    vocab: int = VOCAB,
    width: int = WIDTH,
    rows: int | None = None,
    confidence: bool = True,
    spread: float = 0.4,
    anatomy: dict[str, Any] | None = None,
    **changes: Any,
) -> BlockHead:
    """Return a head with random weights in double precision."""
    torch.manual_seed(seed)
    sizes = {"width": width, "inner": 24, "heads": 4, "groups": 2, "channels": 4, "normed": True}
    own = Anatomy(**{**sizes, "rotation": Rotation(100.0), **(anatomy or {})})
    shape = BlockShape(
        **{"anatomy": own, "layers": 2, "reads": (0, 1, 2), "target_width": width, "block": 4, "mask_id": 1, **changes}
    )
    path = path_term(term, vocab, width, rows)
    head = BlockHead(shape, path, path.size if confidence and path.size else None).double()
    with torch.no_grad():
        for weights in head.parameters():
            weights.add_(spread * torch.randn(weights.shape, dtype=weights.dtype))
    return head.eval().requires_grad_(False)


def block_drafter(term: str = "mixing", **changes: Any) -> BlockDrafter:
    """Return a drafter with random weights in double precision, whose ends are the target's."""
    return BlockDrafter(block_head(term, **changes), HeadEnds())
